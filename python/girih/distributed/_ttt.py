"""TTT of a sequence that is cut over the ranks of a process group."""

from torch import Tensor

from girih import ops
from girih.distributed.by_heads import by_shares
from girih.distributed.pieces import pieces_of
from girih.ops import TTTState


def ttt(
    q,
    k,
    a,
    gamma,
    g=None,
    phi_weight=None,
    *,
    group=None,
    bounds=None,
    chunk,
    phi="layer_norm",
    f="identity",
    state,
) -> tuple[Tensor, TTTState]:
    """:func:`girih.ops.ttt` of a sequence that is cut over the ranks of a group, as :func:`trellis`."""
    pieces = pieces_of(group, q, bounds)
    heads = k.shape[2]

    def operator(q, k, a, gamma, g, *, state, cu_seqlens, **options):
        weight = phi_weight
        if weight is not None and k.shape[2] != heads:
            weight = weight.chunk(pieces.size)[pieces.rank]
        return ops.ttt(q, k, a, gamma, g, weight, state=state, cu_seqlens=cu_seqlens, **options)

    options = {"chunk": chunk, "phi": phi, "f": f}
    return by_shares(
        "ttt",
        operator,
        pieces,
        (q, k, a, gamma, g),
        heads=heads,
        bounds=bounds,
        state=state,
        kind=TTTState,
        starts=("k",),
        weights=(phi_weight,),
        options=options,
    )
