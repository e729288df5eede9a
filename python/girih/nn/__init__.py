"""Layers: `layer(x, attention_mask=None, state=None, use_cache=False, cu_seqlens=None) -> (y, state)`.

x and y are `[B, T, hidden_size]`. attention_mask `[B, T]` is 0 at masked tokens, which change no state and no
other token. `state` is the state that an earlier call with `use_cache=True` returned. A call of
one token with `use_cache=True`, without mask, cu_seqlens and gradient, writes `state` in place. `cu_seqlens
[N + 1]` packs N sequences into B = 1. A layer also accepts the arguments of transformers' attention modules
and can replace one.

`girih.nn.layers` has the modules, `girih.nn.functional` has functions that several layers use. `girih.nn`
does not import `girih.models`.
"""

# Modules by their public names, such as girih.nn.loss.
from girih.nn.functional import fused as fused
from girih.nn.functional import linears as linears
from girih.nn.functional import loss as loss
from girih.nn.functional import step as step
from girih.nn.functional.rotary import rotary
from girih.nn.functional.state import LayerState, map_state
from girih.nn.layers import swiglu as swiglu
from girih.nn.layers.attention import Attention, AttentionState
from girih.nn.layers.block import Block
from girih.nn.layers.chunk_attention import ChunkAttention, ChunkRows
from girih.nn.layers.compress_attend import CompressAttend, CompressAttendState
from girih.nn.layers.decay import DecayGate
from girih.nn.layers.delta_product import DeltaProduct
from girih.nn.layers.gated_delta_product import GatedDeltaProduct
from girih.nn.layers.gated_linear_attention import GatedLinearAttention
from girih.nn.layers.gated_slot_attention import GatedSlotAttention
from girih.nn.layers.hgrn2 import HGRN2
from girih.nn.layers.lattice import Lattice
from girih.nn.layers.layer import GateLinear, Layer, decay_parameter_names
from girih.nn.layers.mamba2 import Mamba2
from girih.nn.layers.mix_attention import MemoryAsGate, MixAttention, MixState, mix_weight
from girih.nn.layers.mixers import MIXERS
from girih.nn.layers.norm import GatedInputRMSNorm, GatedRMSNorm, RMSNorm
from girih.nn.layers.raven import Raven
from girih.nn.layers.short_conv import ShortConv
from girih.nn.layers.swiglu import SwiGLU
from girih.nn.layers.trellis import Trellis
from girih.nn.layers.ttt import TTTLinear

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
    "GatedDeltaProduct",
    "GatedInputRMSNorm",
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
    "Raven",
    "ShortConv",
    "SwiGLU",
    "TTTLinear",
    "Trellis",
    "decay_parameter_names",
    "map_state",
    "mix_weight",
    "rotary",
]
