"""The operators, as functions. All differentiate, compile under ``torch.compile`` and run on CPU and CUDA.

Letters: ``B`` batch, ``T`` tokens, ``H`` heads, ``D`` key width, ``V`` value width, ``M`` slots, ``N``
sequences (``B``, or the number of packed sequences). Gates are logs, at most 0. A positive gate makes the
memory grow; it raises no error, because a check would wait for the device. The number of heads of ``q`` may
be a multiple of that of the other tensors. States are fp32 (fp64 for fp64 inputs); ``state=None`` is the
start of a sequence. ``cu_seqlens [N + 1]`` (int32 or int64, on the device) packs ``N`` sequences into ``B ==
1``; ``[B, 2]`` has the start and the end of the one sequence of each row. Tokens outside belong to no
sequence: they do not change the state and their ``o`` is 0. Bounds in ``cu_seqlens`` that decrease or exceed
the tokens, and a state's ``position`` outside of its chunk, raise an error on the CPU. On CUDA a check would
wait for the device, so they are clamped: no access is out of bounds, and the result is unspecified.
``X_step`` reads one token (``T == 1``), writes the state's tensors in place and returns only ``o``; it has no
gradient. A wrong argument raises ``ValueError``, which names the argument. ``explain("gsa", q, k, v, ...)``
returns the path of a call.
"""

from girih.ops._cat_attention import cat_attention
from girih.ops._delta_product import DeltaProductState, delta_product, delta_product_step
from girih.ops._describe import Explanation, describe, explain, words
from girih.ops._gated_rms_norm import gated_rms_norm
from girih.ops._gla import GLAState, gla, gla_step
from girih.ops._gsa import GSAState, gsa, gsa_step
from girih.ops._lattice import LatticeState, lattice, lattice_step
from girih.ops._short_conv import ShortConvState, short_conv, short_conv_step
from girih.ops._trellis import TrellisState, trellis, trellis_step
from girih.ops._ttt import TTTState, ttt, ttt_step

__all__ = [
    "DeltaProductState",
    "Explanation",
    "GLAState",
    "GSAState",
    "LatticeState",
    "ShortConvState",
    "TTTState",
    "TrellisState",
    "cat_attention",
    "delta_product",
    "delta_product_step",
    "describe",
    "explain",
    "gated_rms_norm",
    "gla",
    "gla_step",
    "gsa",
    "gsa_step",
    "lattice",
    "lattice_step",
    "short_conv",
    "short_conv_step",
    "trellis",
    "trellis_step",
    "ttt",
    "ttt_step",
    "words",
]
