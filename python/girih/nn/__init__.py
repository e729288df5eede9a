"""Layers: `layer(x, attention_mask=None, state=None, use_cache=False, cu_seqlens=None) -> (y, state)`.

x and y are `[B, T, hidden_size]`. attention_mask `[B, T]` is 0 at tokens that do nothing. `state` is what an
earlier call with `use_cache=True` returned; with `use_cache=True` again, one token without mask or gradient
writes it in place. `cu_seqlens [N + 1]` packs N sequences into B = 1. A layer also takes the call that
attention modules of transformers get, so it can stand in such a model as one.
"""

from girih.nn.attention import Attention, AttentionState
from girih.nn.block import Block
from girih.nn.chunk_attention import ChunkAttention, ChunkRows
from girih.nn.compress_attend import CompressAttend, CompressAttendState
from girih.nn.decay import DecayGate
from girih.nn.delta_product import DeltaProduct
from girih.nn.gated_linear_attention import GatedLinearAttention
from girih.nn.gated_slot_attention import GatedSlotAttention
from girih.nn.hgrn2 import HGRN2
from girih.nn.lattice import Lattice
from girih.nn.layer import GateLinear, Layer, decay_parameter_names
from girih.nn.mamba2 import Mamba2
from girih.nn.mix_attention import MemoryAsGate, MixAttention, MixState, mix_weight
from girih.nn.mixers import MIXERS
from girih.nn.norm import GatedRMSNorm, RMSNorm
from girih.nn.rotary import rotary
from girih.nn.short_conv import ShortConv
from girih.nn.state import LayerState, map_state
from girih.nn.swiglu import SwiGLU
from girih.nn.trellis import Trellis
from girih.nn.ttt import TTTLinear

__all__ = [
    "HGRN2",
    "MIXERS",
    "Attention",
    "AttentionState",
    "Block",
    "ChunkAttention",
    "ChunkRows",
    "CompressAttend",
    "CompressAttendState",
    "DecayGate",
    "DeltaProduct",
    "GateLinear",
    "GatedLinearAttention",
    "GatedRMSNorm",
    "GatedSlotAttention",
    "Lattice",
    "Layer",
    "LayerState",
    "Mamba2",
    "MemoryAsGate",
    "MixAttention",
    "MixState",
    "RMSNorm",
    "ShortConv",
    "SwiGLU",
    "TTTLinear",
    "Trellis",
    "decay_parameter_names",
    "map_state",
    "mix_weight",
    "rotary",
]
