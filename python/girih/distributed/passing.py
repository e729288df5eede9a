"""States passed from rank to rank, for operators whose pieces cannot be joined (`by_heads`), where the ranks
divide neither the heads nor the rows of a batch.

A rank gets the state before its piece from the rank before it, calls the operator, and sends the state after
it. Backward goes the other way with the gradients of states. The state is passed in groups of heads and rows,
as many as ranks where there are as many heads and rows, so that the ranks work on different groups at the
same time.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from girih.distributed.pieces import Pieces, cast_for_autocast
from girih.nn.functional.fused import autocast_device
from girih.ops._state import expand_memory

State = tuple[Tensor | None, ...]


@dataclasses.dataclass(frozen=True)
class Group:
    """Some rows of the batch and some heads of the memories."""

    rows: slice
    heads: slice

    def of_data(self, x: Tensor | None, heads: int) -> Tensor | None:
        """x ``[B, T, n heads, ...]``, or a weight ``[heads, M]``; `heads`: all of the memories."""
        if x is None:
            return None
        if x.dim() == 2:
            return x[self.heads]
        n = x.shape[2] // heads
        return x[self.rows, :, self.heads.start * n : self.heads.stop * n]

    def of_state(self, x: Tensor | None) -> Tensor | None:
        """x ``[N, H, ...]``, or a position ``[N]``."""
        if x is None:
            return None
        return x[self.rows] if x.dim() == 1 else x[self.rows, self.heads]


def make_groups(rows: int, heads: int, ranks: int, packed: bool) -> list[Group]:
    """Groups of heads, and of rows where there are more ranks than heads. A packed row is not divided."""
    parts = 1 if packed else min(rows, -(-ranks // min(heads, ranks)))
    return [
        Group(slice(None) if packed else row, head)
        for row in split(rows, parts)
        for head in split(heads, min(heads, ranks))
    ]


def split(count: int, parts: int) -> list[slice]:
    bounds = [count * i // parts for i in range(parts + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]


@dataclasses.dataclass(frozen=True)
class Call:
    """name: of the operator. heads: of the memories. cu_seqlens: as the operator has them."""

    name: str
    pieces: Pieces
    heads: int
    groups: list[Group]
    cu_seqlens: Tensor | None
    options: dict[str, Any]

    def bounds(self, group: Group) -> Tensor | None:
        packed = self.cu_seqlens is not None and self.cu_seqlens.dim() == 1
        return self.cu_seqlens if self.cu_seqlens is None or packed else self.cu_seqlens[group.rows]

    def forward(self, group: Group, inputs: State, state: State, save: bool) -> tuple[Any, ...]:
        operator = getattr(torch.ops.girih, f"{self.name}_forward")
        data = (group.of_data(x, self.heads) for x in inputs)
        return operator(*data, *state, self.bounds(group), save=save, **self.options)

    def backward(
        self, group: Group, do: Tensor, after: State, inputs: State, state: State, saved: State
    ) -> tuple[Any, ...]:
        operator = getattr(torch.ops.girih, f"{self.name}_backward")
        data = (group.of_data(x, self.heads) for x in inputs)
        do = group.of_data(do, self.heads)
        return operator(do, *after, *data, *state, self.bounds(group), *saved, **self.options)

    def state_like(self, inputs: State, state: State) -> State:
        """The shapes and dtypes of the state after the piece, on the device "meta"."""

        def meta(x: Tensor | None) -> Tensor | None:
            return None if x is None else torch.empty_like(x, device="meta")

        operator = getattr(torch.ops.girih, f"{self.name}_forward")
        every = (meta(x) for x in (*inputs, *state, self.cu_seqlens))
        return tuple(operator(*every, save=False, **self.options)[1 : 1 + len(state)])


def flatten(state: State) -> Tensor:
    """The tensors of a state in one. Positions, below 64, are exact in its dtype."""
    present = [x for x in state if x is not None]
    dtype = next(x.dtype for x in present if x.is_floating_point())
    return torch.cat([x.reshape(-1).to(dtype) for x in present])


def unflatten(flat: Tensor, like: State) -> State:
    sizes = [0 if x is None else x.numel() for x in like]
    return tuple(
        None if x is None else part.view(x.shape).to(x.dtype)
        for part, x in zip(flat.split(sizes), like, strict=True)
    )


def floats(state: State) -> State:
    """The parts of a state that have a gradient."""
    return tuple(None if x is None or not x.is_floating_point() else x for x in state)


class Line:
    """Sends and receives the states of groups along the ranks; step: 1 to later ranks, -1 to earlier ones."""

    def __init__(self, pieces: Pieces, step: int):
        self.group, self.sent = pieces.group, []
        before, after = pieces.rank - step, pieces.rank + step
        self.source = before if 0 <= before < pieces.size else None
        self.target = after if 0 <= after < pieces.size else None

    def receive(self, like: State, device: torch.device) -> State:
        size = sum(x.numel() for x in like if x is not None)
        dtype = next(x.dtype for x in like if x is not None and x.is_floating_point())
        flat = torch.empty(size, dtype=dtype, device=device)
        dist.recv(flat, group=self.group, group_src=self.source)
        return unflatten(flat, like)

    def send(self, state: State) -> None:
        flat = flatten(state)
        # The tensor is kept until it has been sent.
        self.sent.append((dist.isend(flat, group=self.group, group_dst=self.target), flat))

    def wait(self) -> None:
        for work, _ in self.sent:
            work.wait()


class PassStates(torch.autograd.Function):
    """(o, *state): the outputs of a piece and the state after the last piece, on every rank."""

    @staticmethod
    def forward(ctx, call: Call, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs, given = tensors[:count], tensors[count:]
        pieces, device, save = call.pieces, inputs[0].device, any(ctx.needs_input_grad)
        like, line = call.state_like(inputs, given), Line(pieces, 1)
        ctx.call, ctx.like, ctx.counts, kept = call, like, [count, len(given)], [*inputs]
        outputs, ends = [], []
        for group in call.groups:
            parts = tuple(group.of_state(x) for x in like)
            start = tuple(group.of_state(x) for x in given)
            if line.source is not None:
                start = line.receive(parts, device)
            o, *rest = call.forward(group, inputs, start, save)
            end, saved = tuple(rest[: len(given)]), rest[len(given) :]
            if line.target is not None:
                line.send(end)
            outputs.append(o)
            ends.append(end)
            kept += [*start, *saved]
            ctx.counts.append(len(saved))
        line.wait()
        ctx.save_for_backward(*kept)
        o = outputs[0].new_empty(inputs[0].shape[0], *outputs[0].shape[1:2], *output_heads(call, outputs))
        state = tuple(None if x is None else torch.empty_like(x, device=device) for x in like)
        for group, part, end in zip(call.groups, outputs, ends, strict=True):
            group.of_data(o, call.heads).copy_(part)
            flat = flatten(end)
            dist.broadcast(flat, group=pieces.group, group_src=pieces.size - 1)
            for x, y in zip(state, unflatten(flat, tuple(group.of_state(x) for x in like)), strict=True):
                if x is not None:
                    group.of_state(x).copy_(y)
        ctx.mark_non_differentiable(*(x for x in state if x is not None and not x.is_floating_point()))
        return o, *state

    @staticmethod
    @once_differentiable
    def backward(ctx, do: Tensor, *dstate: Tensor | None) -> tuple[Tensor | None, ...]:
        call, tensors, (count, states, *saves) = ctx.call, list(ctx.saved_tensors), ctx.counts
        inputs, tensors = tuple(tensors[:count]), tensors[count:]
        pieces, like, line = call.pieces, floats(ctx.like), Line(call.pieces, -1)
        # The loss of the whole is the sum of the losses of the ranks.
        last = tuple(None if x is None else d for x, d in zip(like, dstate, strict=True))
        total = flatten(last)
        dist.all_reduce(total, group=pieces.group)
        last = unflatten(total, like)
        dinputs = tuple(None if x is None else torch.zeros_like(x) for x in inputs)
        dgiven = tuple(None if x is None else torch.zeros_like(d) for x, d in zip(like, last, strict=True))
        for group, number in zip(call.groups, saves, strict=True):
            start, saved = tuple(tensors[:states]), tensors[states : states + number]
            del tensors[: states + number]
            parts = tuple(group.of_state(x) for x in like)
            after = tuple(group.of_state(x) for x in last)
            if line.source is not None:
                after = line.receive(parts, do.device)
            grads = call.backward(group, do, after, inputs, start, saved)
            before = grads[count : count + states]
            if line.target is not None:
                line.send(tuple(None if x is None else g for x, g in zip(parts, before, strict=True)))
            else:
                for x, g in zip(dgiven, before, strict=True):
                    if x is not None and g is not None:
                        group.of_state(x).copy_(g)
            for x, g in zip(dinputs, grads[:count], strict=True):
                if x is not None:
                    group.of_data(x, call.heads).add_(g)  # rows share a weight
        line.wait()
        wanted = ctx.needs_input_grad[2 + count :]
        return None, None, *dinputs, *(x if w else None for x, w in zip(dgiven, wanted, strict=True))


def output_heads(call: Call, outputs: list[Tensor]) -> tuple[int, ...]:
    """The heads and the channels of o."""
    group, o = call.groups[0], outputs[0]
    return o.shape[2] // (group.heads.stop - group.heads.start) * call.heads, *o.shape[3:]


def start_state(kind: type, state: Any, starts: Sequence[str], x: Tensor, pieces: Pieces) -> State:
    """The tensors of a state, of its first memories ``[H, ...]`` or ``[N, H, ...]``, or of None. starts: the
    fields of the first memories."""
    if state is None or hasattr(state, "_fields"):
        return (None,) * len(kind._fields) if state is None else tuple(state)
    memories = (state,) if isinstance(state, Tensor) else state
    found = {
        name: expand_memory(memory, x, pieces.whole) for name, memory in zip(starts, memories, strict=True)
    }
    return tuple(found.get(name) for name in kind._fields)


def pass_states(
    name: str,
    kind: type,
    pieces: Pieces,
    inputs: Sequence[Tensor | None],
    *,
    heads: int,
    low: int,
    state: Any,
    starts: Sequence[str],
    bounds: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, Any]:
    """Calls an operator with the state that the rank before has sent.

    kind: of the state. inputs: ``[B, T rows, n heads, ...]``, and weights ``[heads, M]``. low: how many of
    them are q, k, v and targets. starts: the fields of `kind` of the first memories.
    """
    x, cu_seqlens = inputs[0], bounds
    if pieces.whole is not None:  # every rank has all sequences, most of them empty
        cu_seqlens = (pieces.whole - pieces.start).clamp(0, pieces.lengths[pieces.rank])
    given = start_state(kind, state, starts, x, pieces)
    groups = make_groups(x.shape[0], heads, pieces.size, pieces.whole is not None)
    call = Call(name, pieces, heads, groups, cu_seqlens, options)
    inputs = cast_for_autocast(inputs, low)
    with torch.autocast(autocast_device(x), enabled=False):
        o, *after = PassStates.apply(call, len(inputs), *inputs, *given)
    return o, kind(*after)
