"""Pieces of a sequence, one for each rank of a process group, in the order of the ranks."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from girih.nn.functional.fused import autocast_dtype


@dataclasses.dataclass(frozen=True, eq=False)
class Pieces:
    """How the tokens of a batch are cut over the ranks of a group. :meth:`cut` makes it.

    Rank r has the tokens from ``sum(lengths[:r])`` on, of every row. A row of packed sequences may be cut
    anywhere.

    group: the process group.
    lengths: the tokens of every rank's piece.
    whole: the bounds of all packed sequences, ``[N + 1]``; None: rows are sequences.
    cu_seqlens: the bounds of the parts of sequences in this rank's piece, ``[n + 1]``; None: rows are
        sequences.
    begins: ``[R]`` bool, packed rows only: piece r starts with the first token of a sequence.
    cuts: ``[R]`` bool, packed rows only: a sequence begins within piece r, or with it.
    chunk_cuts: those that layers have made, by `ChunkCut.of_layer`.
    """

    group: dist.ProcessGroup
    lengths: tuple[int, ...]
    whole: Tensor | None = None
    cu_seqlens: Tensor | None = None
    begins: Tensor | None = None
    cuts: Tensor | None = None
    chunk_cuts: dict = dataclasses.field(default_factory=dict, repr=False)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return len(self.lengths)

    @property
    def start(self) -> int:
        """The index of this rank's first token."""
        return sum(self.lengths[: self.rank])

    @torch.compiler.disable  # a compiler may drop or reorder communication, differently on each rank
    def advance(
        self, name: str, *data: Tensor | None, state: Any, cu_seqlens: Tensor | None, **options: Any
    ) -> tuple[Tensor, Any]:
        """Calls `girih.distributed.<name>` on this rank's piece, for a layer. cu_seqlens: ``[n + 1]``, which
        the pieces have themselves, or the bounds of valid tokens ``[B, 2]``."""
        from girih import distributed

        bounds = cu_seqlens if cu_seqlens is not None and cu_seqlens.dim() == 2 else None
        if name in ("gla", "gsa", "delta_product"):  # layers of cut sequences keep no state
            options["final_state"] = False
        return getattr(distributed, name)(*data, group=self, bounds=bounds, state=state, **options)

    @torch.compiler.disable
    def tokens_before(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """The tokens of each sequence of this piece that earlier pieces have, ``[n]`` or ``[B]`` int64.
        cu_seqlens: as in :meth:`advance`."""
        if self.whole is not None and self.cu_seqlens is not None:
            before = torch.zeros(self.cu_seqlens.shape[0] - 1, dtype=torch.long, device=x.device)
            starts = self.whole[:-1]
            before[0] = self.start - starts[starts <= self.start].max()
            return before
        if cu_seqlens is None:
            return torch.full((x.shape[0],), self.start, device=x.device)
        (bounds,) = gather(self, [cu_seqlens])
        return (bounds[..., 1] - bounds[..., 0])[: self.rank].sum(0).long()

    @classmethod
    def cut(
        cls,
        group: "dist.ProcessGroup | DeviceMesh | None",
        length: int,
        cu_seqlens: Tensor | None = None,
        *,
        lengths: tuple[int, ...] | None = None,
    ) -> "Pieces":
        """The pieces of a batch.

        group: a process group, a mesh of one dimension, or None for the default group.
        length: the tokens of this rank's piece.
        cu_seqlens: the bounds of all packed sequences, in tokens of the whole row, ``[N + 1]``; the same on
            every rank.
        lengths: the tokens of every piece, where the caller knows them; otherwise the ranks exchange them.

        Raises ValueError if cu_seqlens does not go from 0 to the tokens of all pieces.
        """
        group = group_of(group)
        if lengths is None:
            found: list = [None] * dist.get_world_size(group)
            dist.all_gather_object(found, length, group=group)
            lengths = tuple(found)
        if cu_seqlens is None:
            return cls(group, lengths)
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds[-1] != sum(lengths) or bounds != sorted(bounds):
            raise ValueError(
                f"cu_seqlens is {bounds} but should rise from 0 to {sum(lengths)}, the tokens of all pieces"
            )
        starts = [sum(lengths[:r]) for r in range(len(lengths))]
        firsts = set(bounds[:-1])
        begins = [n > 0 and start in firsts for start, n in zip(starts, lengths, strict=True)]
        cuts = [any(start <= b < start + n for b in firsts) for start, n in zip(starts, lengths, strict=True)]
        rank = dist.get_rank(group)
        start, end = starts[rank], starts[rank] + lengths[rank]
        inner = [b - start for b in sorted(firsts) if start < b < end]
        device = cu_seqlens.device
        return cls(
            group,
            lengths,
            cu_seqlens,
            torch.tensor([0, *inner, end - start], dtype=cu_seqlens.dtype, device=device),
            torch.tensor(begins, device=device),
            torch.tensor(cuts, device=device),
        )


def group_of(group: "dist.ProcessGroup | DeviceMesh | None") -> dist.ProcessGroup:
    """The process group of a mesh of one dimension; None: the default group."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"mesh has {group.ndim} dimensions but should have 1, as mesh['cp'] has")
        return group.get_group()
    if group is None and not dist.is_initialized():
        raise ValueError("group is None but should be a process group: torch.distributed is not initialised")
    return dist.group.WORLD if group is None else group


def pieces_of(
    group: "dist.ProcessGroup | DeviceMesh | Pieces | None", x: Tensor, bounds: Tensor | None = None
) -> Pieces:
    """The pieces of a call with the tokens of x ``[B, T, ...]``; bounds: of valid tokens ``[B, 2]``."""
    if bounds is not None and (tuple(bounds.shape) != (x.shape[0], 2)):
        raise ValueError(
            f"bounds has shape {list(bounds.shape)} but should have [{x.shape[0]}, 2], for every row"
        )
    if bounds is not None and isinstance(group, Pieces) and group.cu_seqlens is not None:
        raise ValueError("bounds should be None for packed rows")
    if not isinstance(group, Pieces):
        return Pieces.cut(group, x.shape[1])
    if x.shape[1] != group.lengths[group.rank]:
        raise ValueError(
            f"this rank has {x.shape[1]} tokens but should have {group.lengths[group.rank]}, as the pieces "
            "say"
        )
    return group


def gather(pieces: Pieces, tensors: list[Tensor]) -> list[Tensor]:
    """The tensors of all ranks, each ``[R, ...]``, by one all-gather. The tensors have one dtype, and the
    same shapes on every rank."""
    flat = torch.cat([x.reshape(-1) for x in tensors])
    found = flat.new_empty(pieces.size * flat.numel())
    dist.all_gather_into_tensor(found, flat, group=pieces.group)
    parts = found.view(pieces.size, -1).split([x.numel() for x in tensors], dim=1)
    return [part.reshape(pieces.size, *x.shape) for part, x in zip(parts, tensors, strict=True)]


def cast_for_autocast(inputs: Sequence[Tensor | None], low: int = 3) -> tuple[Tensor | None, ...]:
    """The inputs in the dtypes in which the operators compute under autocast: the first `low` of them (q, k,
    v, targets) in that of autocast, the others in fp32."""
    assert inputs[0] is not None
    dtype = autocast_dtype(inputs[0])
    if dtype is None:
        return tuple(inputs)
    return tuple(
        None if x is None else x.to(dtype if i < low else torch.float32) for i, x in enumerate(inputs)
    )


def valid_tokens(bounds: Tensor, tokens: int) -> Tensor:
    """bounds ``[..., B, 2]`` -> ``[..., B, tokens]`` bool."""
    token = torch.arange(tokens, device=bounds.device)
    return (token >= bounds[..., :1]) & (token < bounds[..., 1:])


def all_valid_tokens(bounds: Tensor, pieces: Pieces) -> Tensor:
    """The valid tokens of all pieces, ``[B, sum of lengths]``."""
    (found,) = gather(pieces, [bounds])
    return torch.cat([valid_tokens(b, n) for b, n in zip(found.unbind(0), pieces.lengths, strict=True)], 1)
