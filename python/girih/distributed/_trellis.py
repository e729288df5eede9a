"""Trellis of a sequence that is cut over the ranks of a process group."""

from torch import Tensor

from girih import ops
from girih.distributed.by_heads import by_shares
from girih.ops import TrellisState


def trellis(
    q, k, v, a, gamma, g=None, *, group=None, bounds=None, chunk, phi="ln_silu", f="ln_silu", state
) -> tuple[Tensor, TrellisState]:
    """:func:`girih.ops.trellis` of a sequence that is cut over the ranks of a group.

    An all-to-all gives a rank all tokens of its heads, or of its rows of the batch. If the number of ranks
    divides neither, the ranks pass states on, and a rank starts when it has that of the rank before it.

    q, k, v, a, gamma, g: this rank's piece. group, bounds, state: as in :func:`gla`.
    """
    options = {"chunk": chunk, "phi": phi, "f": f}
    return by_shares(
        "trellis",
        ops.trellis,
        group,
        (q, k, v, a, gamma, g),
        heads=k.shape[2],
        bounds=bounds,
        state=state,
        kind=TrellisState,
        starts=("k", "v"),
        low=4,
        options=options,
    )
