"""Operators whose pieces cannot be joined (trellis, lattice, ttt, delta_product with between_chunks): an
all-to-all gives every rank the whole sequence of its share of the heads, or of the rows where the ranks do
not divide the heads. Where they divide neither, states are passed from rank to rank (`passing`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from girih import ops
from girih.distributed.passing import pass_states
from girih.distributed.pieces import Pieces, all_valid_tokens, gather, pieces_of
from girih.nn.functional.masking import sort_valid_first
from girih.ops import DeltaProductState


class ToShares(torch.autograd.Function):
    """Tensors by tokens, ``[B, T_r rows, H, ...]``, to shares of dimension `dim` (2: heads, 0: rows of the
    batch): each rank gets all tokens of its share. rows: rows of each tensor for one token."""

    @staticmethod
    def forward(ctx, pieces: Pieces, dim: int, rows: tuple[int, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = pieces, dim, rows
        return tuple(exchange_to_shares(list(tensors), pieces, dim, rows))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        pieces, dim, rows = ctx.call
        return None, None, None, *exchange_to_tokens(list(grads), pieces, dim, rows)


class ToTokens(torch.autograd.Function):
    """(o, state of this rank's share) -> (o by tokens, the whole state). One node, so that the ranks
    communicate in the same order in backward. The gradients of a state are summed over the ranks."""

    @staticmethod
    def forward(ctx, pieces: Pieces, dim: int, o: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        ctx.call = pieces, dim
        (o,) = exchange_to_tokens([o], pieces, dim, (1,))
        return o, *(torch.cat(x.unbind(0), 1 if dim == 2 else 0) for x in gather_all(pieces, state))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, *grads: Tensor):
        pieces, dim = ctx.call
        (do,) = exchange_to_shares([grad], pieces, dim, (1,))
        found = []
        for x in grads:
            x = x.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(x, group=pieces.group)
            found.append(x.chunk(pieces.size, 1 if dim == 2 else 0)[pieces.rank])
        return None, None, do, *found


class AllGather(torch.autograd.Function):
    """Tensors ``[...] -> [R, ...]``; backward sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx, pieces: Pieces, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.pieces = pieces
        return tuple(gather_all(pieces, tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        found = []
        for x in grads:
            total = x.new_empty(x.shape[1:])
            dist.reduce_scatter_tensor(total.view(-1), x.contiguous().view(-1), group=ctx.pieces.group)
            found.append(total)
        return None, *found


def gather_all(pieces: Pieces, tensors: Sequence[Tensor]) -> list[Tensor]:
    """`gather` for tensors of several dtypes: one all-gather for each."""
    result: list[Tensor | None] = [None] * len(tensors)
    for dtype in dict.fromkeys(x.dtype for x in tensors):
        places = [i for i, x in enumerate(tensors) if x.dtype == dtype]
        for i, x in zip(places, gather(pieces, [tensors[i] for i in places]), strict=True):
            result[i] = x
    return result


def gather_rows(tensors: list[Tensor], pieces: Pieces, counts: tuple[int, ...]) -> list[Tensor]:
    """``[B, n_r, ...] -> [B, sum n_r, ...]``: the rows of all ranks."""
    most = max(counts)
    padded = [F.pad(x, (0, 0) * (x.dim() - 2) + (0, most - x.shape[1])) for x in tensors]
    found = AllGather.apply(pieces, *padded)
    return [torch.cat([part[:, :n] for part, n in zip(x.unbind(0), counts, strict=True)], 1) for x in found]


def exchange(parts: list[list[Tensor]], shapes: list[list[list[int]]], pieces: Pieces) -> list[list[Tensor]]:
    """parts[i][j]: what this rank sends of tensor i to rank j; shapes[i][j]: what it gets of tensor i from
    rank j. One all-to-all for each dtype."""
    result: list[list[Tensor]] = [[] for _ in parts]
    for dtype in dict.fromkeys(part[0].dtype for part in parts):
        places = [i for i, part in enumerate(parts) if part[0].dtype == dtype]
        flat = torch.cat([parts[i][j].reshape(-1) for j in range(pieces.size) for i in places])
        sizes = [[torch.Size(shapes[i][j]).numel() for i in places] for j in range(pieces.size)]
        found = flat.new_empty(sum(map(sum, sizes)))
        sent = [sum(parts[i][j].numel() for i in places) for j in range(pieces.size)]
        dist.all_to_all_single(found, flat, [sum(x) for x in sizes], sent, group=pieces.group)
        received = iter(found.split([n for x in sizes for n in x]))
        for j in range(pieces.size):
            for i in places:
                result[i].append(next(received).reshape(shapes[i][j]))
    return result


def exchange_to_shares(tensors: list[Tensor], pieces: Pieces, dim: int, rows: Sequence[int]) -> list[Tensor]:
    def shape(x: Tensor, n: int) -> list[int]:
        size = [x.shape[0], n, *x.shape[2:]]
        size[dim] //= pieces.size
        return size

    shapes = [[shape(x, n * m) for n in pieces.lengths] for x, m in zip(tensors, rows, strict=True)]
    found = exchange([list(x.chunk(pieces.size, dim)) for x in tensors], shapes, pieces)
    return [torch.cat(parts, 1) for parts in found]


def exchange_to_tokens(tensors: list[Tensor], pieces: Pieces, dim: int, rows: Sequence[int]) -> list[Tensor]:
    own = pieces.lengths[pieces.rank]
    shapes = [[[x.shape[0], own * m, *x.shape[2:]]] * pieces.size for x, m in zip(tensors, rows, strict=True)]
    parts = [list(x.split([n * m for n in pieces.lengths], 1)) for x, m in zip(tensors, rows, strict=True)]
    return [torch.cat(found, dim) for found in exchange(parts, shapes, pieces)]


def take(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x ``[B, T, ...]`` by index ``[B, T]``."""
    return x.take_along_dim(index.view(*index.shape, *[1] * (x.dim() - 2)), 1)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[2] >= heads else x.repeat_interleave(heads // x.shape[2], 2)


def by_shares(
    name: str,
    operator: Callable[..., tuple[Tensor, Any]],
    group: Any,
    data: Sequence[Tensor | None],
    *,
    heads: int,
    state: Any,
    kind: type,
    starts: Sequence[str] = (),
    options: dict[str, Any],
    bounds: Tensor | None = None,
    rows: Sequence[int] | None = None,
    weights: Sequence[Tensor | None] = (),
    low: int = 3,
) -> tuple[Tensor, Any]:
    """Calls an operator with all tokens of this rank's share of the heads, or of the rows of the batch. Where
    the ranks divide neither, the state is passed from rank to rank (`passing`).

    heads: those of the memories. data: ``[B, T rows, heads, ...]``. state: a named tuple of this kind or
    tensors ``[H, ...]`` and ``[N, H, ...]``, the same on every rank; so is the state that is returned.
    starts: the fields of `kind` of first memories. weights ``[H, M]`` follow the data of an operator. low:
    how many tensors of data autocast casts.
    """
    assert data[0] is not None
    pieces = pieces_of(group, data[0], bounds)
    R, rank, batch = pieces.size, pieces.rank, data[0].shape[0]
    if heads % R and batch % R:
        every = [None if x is None else repeat_heads(x, heads) for x in data]
        names = {"heads": heads, "low": low, "state": state, "starts": starts}
        return pass_states(name, kind, pieces, (*every, *weights), **names, bounds=bounds, options=options)
    dim = 0 if heads % R else 2
    rows = [1] * len(data) if rows is None else rows
    places = [i for i, x in enumerate(data) if x is not None]
    sent = [data[i] if dim == 0 else repeat_heads(data[i], heads) for i in places]
    shares: list[Tensor | None] = [None] * len(data)
    for i, x in zip(places, ToShares.apply(pieces, dim, tuple(rows[i] for i in places), *sent), strict=True):
        shares[i] = x
    cu_seqlens, inverse = pieces.whole, None
    if bounds is not None:  # padding of earlier pieces goes behind the valid tokens of later ones
        valid = all_valid_tokens(bounds, pieces)
        order, inverse, count = sort_valid_first(valid if dim == 2 else valid.chunk(R)[rank])
        cu_seqlens = torch.stack((torch.zeros_like(count), count), 1)
        for i in places:
            index = (order[..., None] * rows[i] + torch.arange(rows[i], device=order.device)).flatten(1)
            shares[i] = take(shares[i], index)

    def own(x: Tensor | None) -> Tensor | None:
        """This rank's share of a state."""
        if x is None:
            return None
        if x.dim() == 1:  # position [N]
            return x if dim == 2 else x.chunk(R)[rank]
        if dim == 2:
            return x.chunk(R, x.dim() - 3 if x.dim() > 2 else 1)[rank]
        return x if x.dim() == 3 else x.chunk(R)[rank]  # [H, ...]: of all rows

    share = state
    if isinstance(state, Tensor):
        share = own(state)
    elif state is not None:
        parts = [own(x) for x in state]
        share = type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)
    o, after = operator(*shares, state=share, cu_seqlens=cu_seqlens, **options)
    o = o if inverse is None else take(o, inverse)
    floats = [i for i, x in enumerate(after) if x is not None and x.is_floating_point()]
    o, *found = ToTokens.apply(pieces, dim, o, *(after[i] for i in floats))
    parts = list(after)
    for i, x in zip(floats, found, strict=True):
        parts[i] = x
    if dim == 0:  # positions of all rows
        parts = [
            x if x is None or x.dim() > 1 else torch.cat(gather(pieces, [x])[0].unbind(0)) for x in parts
        ]
    return o, type(after)(*parts)


def delta_product_between_chunks(
    q, k, v, beta, g, *, group, bounds, state: DeltaProductState | None, n: int, **options
) -> tuple[Tensor, DeltaProductState]:
    return by_shares(
        "delta_product",
        ops.delta_product,
        group,
        (q, k, v, beta, g),
        heads=v.shape[2],
        state=state,
        kind=DeltaProductState,
        bounds=bounds,
        options={"n": n, **options},
        rows=(1, n, n, n, 1),
    )
