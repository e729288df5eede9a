"""Lattice of a sequence that is cut over the ranks of a process group."""

from torch import Tensor

from girih import ops
from girih.distributed.by_heads import by_shares
from girih.ops import LatticeState


def lattice(
    q,
    k,
    v,
    gamma,
    g=None,
    *,
    group=None,
    bounds=None,
    chunk,
    objective="decode",
    normalize=True,
    shrinkage=0.0,
    state,
) -> tuple[Tensor, LatticeState]:
    """:func:`girih.ops.lattice` of a sequence that is cut over the ranks of a group, as :func:`trellis`."""
    options = {"chunk": chunk, "objective": objective, "normalize": normalize, "shrinkage": shrinkage}
    return by_shares(
        "lattice",
        ops.lattice,
        group,
        (q, k, v, gamma, g),
        heads=k.shape[2],
        bounds=bounds,
        state=state,
        kind=LatticeState,
        starts=("first",),
        options=options,
    )
