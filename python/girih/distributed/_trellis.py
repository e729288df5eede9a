"""Trellis of a sequence that is cut over the ranks of a process group."""

from torch import Tensor

from girih import ops
from girih.distributed.by_heads import by_shares
from girih.ops import TrellisState


def trellis(
    q, k, v, a, gamma, g=None, *, group=None, bounds=None, chunk, phi="ln_silu", f="ln_silu", state
) -> tuple[Tensor, TrellisState]:
    """:func:`girih.ops.trellis` of a sequence that is cut over the ranks of a group.

    q, k, v, a, gamma, g: this rank's piece. group, bounds, state: as in :func:`gla`. The ranks must divide
        the heads or the rows.
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
        options=options,
    )
