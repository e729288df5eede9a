"""gla, gsa and delta_product of a sequence that is cut over the ranks of a process group.

Each rank makes a summary of its piece: the state after the piece where it starts from zero, and the
transition, by which the piece changes a state. One all-gather of the summaries gives every rank the state
before its piece,

    S_in(r+1) = Tr_r S_in(r) + S_loc(r),

from which the ordinary operator runs. Backward is alike: each rank makes dS_loc(r), the gradient of the state
before its piece from its own outputs. After one all-gather,

    dS_out(r-1) = Tr_r^T dS_out(r) + dS_loc(r),

the operator's backward runs with the gradient of the state after the piece. Summaries carry no gradient.

The first rank has the state before its piece without the summaries, so it runs the operator once, and once in
backward where no state was given. So does the last rank where the state after it is not wanted.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from girih.distributed.by_heads import delta_product_between_chunks
from girih.distributed.pieces import Pieces, cast_for_autocast, gather, pieces_of
from girih.nn.functional.fused import autocast_device, autocast_dtype
from girih.ops import DeltaProductState, GLAState, GSAState
from girih.ops._delta_product import _steps_per_token
from girih.ops._state import unpack_state

MAX_WIDTH = 256  # of values in the CUDA kernels of delta_product
State = tuple[Tensor | None, ...]
Inputs = tuple[Tensor | None, ...]


class Rule:
    """What the scan of an operator needs. A summary is a tuple of tensors: the state that a piece leaves
    behind where it starts from zero, then its transition."""

    name: str
    states: int  # tensors of a state
    unread: int  # first tensors of a summary that join_backward does not read
    reads_states = False  # whether join_backward reads the states before and after a piece

    def summarise(
        self, inputs: Inputs, cu_seqlens: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        """The summary of the last sequence of a piece (rows: of every row)."""
        raise NotImplementedError

    def join(self, state: State, summary: State) -> State:
        """The state after a piece with this summary."""
        raise NotImplementedError

    def join_backward(self, state: State, after: State, summary: State, gradient: State) -> State:
        """The gradient of `state` from that of `after` = join(state, summary)."""
        raise NotImplementedError

    def forward(
        self, inputs: Inputs, state: State, cu_seqlens: Tensor | None, options: dict[str, Any], save: bool
    ):
        operator = getattr(torch.ops.girih, f"{self.name}_forward")
        return operator(*inputs, *state, cu_seqlens, save=save, **options)

    def backward(
        self,
        grad: Tensor,
        dstate: State,
        inputs: Inputs,
        state: State,
        cu_seqlens: Tensor | None,
        saved,
        options,
    ):
        operator = getattr(torch.ops.girih, f"{self.name}_backward")
        return operator(grad, *dstate, *inputs, *state, cu_seqlens, *saved, **options)


def is_packed(cu_seqlens: Tensor | None) -> bool:
    """Whether these are bounds of packed sequences, ``[n + 1]``, and not of each row, ``[B, 2]``."""
    return cu_seqlens is not None and cu_seqlens.dim() == 1


def last(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The states of a piece's last sequence; of every row where rows are not packed."""
    return x[-1:] if is_packed(cu_seqlens) else x


def sum_of_gates(g: Tensor, cu_seqlens: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``[B, T, H, ...] -> [B, H, ...]``, in the dtype of the state. For packed rows it is right where the
    piece has one sequence; otherwise its transition is not read."""
    if cu_seqlens is not None and not is_packed(cu_seqlens):
        token = torch.arange(g.shape[1], device=g.device)
        inside = (token >= cu_seqlens[:, :1]) & (token < cu_seqlens[:, 1:])
        g = g.masked_fill(~inside.view(*inside.shape, *[1] * (g.dim() - 2)), 0.0)
    return g.sum(1, dtype=dtype)


class GLARule(Rule):
    name, states, unread = "gla", 1, 1

    def summarise(self, inputs, cu_seqlens, options):
        q, k, v, g = inputs
        _, s, *_ = self.forward((q[:, :, :1], k, v, g), (None,), cu_seqlens, options, False)
        s = last(s, cu_seqlens)
        return (s,) if g is None else (s, sum_of_gates(g, cu_seqlens, s.dtype).exp())

    def decay(self, s: Tensor, decay: tuple[Tensor, ...]) -> Tensor:
        for x in decay:  # one, or none without gates
            s = s * (x[..., None, None] if x.dim() == s.dim() - 2 else x[..., None])
        return s

    def join(self, state, summary):
        s, *decay = summary
        return (s + self.decay(state[0], decay),)

    def join_backward(self, state, after, summary, gradient):
        return (self.decay(gradient[0], summary[1:]),)


class GSARule(Rule):
    """With g: the transition is the decay of the slots."""

    name, states, unread = "gsa", 3, 2

    def summarise(self, inputs, cu_seqlens, options):
        q, k, v, s, g = inputs
        H = k.shape[2]
        _, mk, mv, *_ = self.forward((q[:, :, :H], k, v, s, g), (None,) * 3, cu_seqlens, options, False)
        decay = sum_of_gates(g, cu_seqlens, mk.dtype).exp()
        return last(mk, cu_seqlens), last(mv, cu_seqlens), decay

    def decay(self, k: Tensor, v: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
        return k * decay[..., None, :], v * decay[..., None]

    def join(self, state, summary):
        k, v, decay = summary
        old_k, old_v = self.decay(state[0], state[1], decay)
        return k + old_k, v + old_v, None

    def join_backward(self, state, after, summary, gradient):
        return *self.decay(gradient[0], gradient[1], summary[2]), None


class ABCRule(GSARule):
    """Without g: weights are normalised by z, the logarithm of the sum of e^logit. A piece's own memories and
    z are its summary."""

    unread, reads_states = 0, True

    def summarise(self, inputs, cu_seqlens, options):
        q, k, v, s, g = inputs
        H = k.shape[2]
        _, mk, mv, z, *_ = self.forward((q[:, :, :H], k, v, s, g), (None,) * 3, cu_seqlens, options, False)
        return tuple(last(x, cu_seqlens) for x in (mk, mv, z))

    def weights(self, state, summary) -> tuple[Tensor, Tensor, Tensor]:
        """z after the piece, and the weights of the memories before it and of its own."""
        old, own = state[2], summary[2]
        z = torch.logaddexp(old, own)
        empty = z == -torch.inf
        safe = z.masked_fill(empty, 0.0)
        return z, (old - safe).exp().masked_fill(empty, 0.0), (own - safe).exp().masked_fill(empty, 0.0)

    def join(self, state, summary):
        z, old, own = self.weights(state, summary)
        old_k, old_v = self.decay(state[0], state[1], old)
        own_k, own_v = self.decay(summary[0], summary[1], own)
        return old_k + own_k, old_v + own_v, z

    def join_backward(self, state, after, summary, gradient):
        _, p, _ = self.weights(state, summary)
        dk, dv, dz = gradient
        changes = ((state[0] - after[0]) * dk).sum(-2) + ((state[1] - after[1]) * dv).sum(-1)
        return *self.decay(dk, dv, p), p * (dz + changes)


class DeltaProductRule(Rule):
    name, states, unread = "delta_product", 2, 1

    def summarise(self, inputs, cu_seqlens, options):
        q, k, v, beta, g = inputs
        D, V, H = k.shape[-1], v.shape[-1], v.shape[2]
        sequences = cu_seqlens.shape[0] - 1 if is_packed(cu_seqlens) else q.shape[0]
        dtype = torch.promote_types(q.dtype, torch.float32)
        identity = torch.eye(D, dtype=dtype, device=q.device).expand(sequences, H, D, D)
        q = q[:, :, :1]

        def final(v: Tensor, state: Tensor | None) -> Tensor:
            return last(
                self.forward((q, k, v, beta, g), (state, None), cu_seqlens, options, False)[1], cu_seqlens
            )

        zeros = v.new_zeros(*v.shape[:-1], D)
        # A beta per channel needs values of D channels.
        if beta.dim() == 4 or D + V > MAX_WIDTH:
            return final(v, None), final(zeros, identity)
        both = final(
            torch.cat([v, zeros], dim=-1),
            torch.cat([identity.new_zeros(sequences, H, D, V), identity], dim=-1),
        )
        return both[..., :V].contiguous(), both[..., V:].contiguous()

    def join(self, state, summary):
        s, transition = summary
        return s + transition @ state[0], None

    def join_backward(self, state, after, summary, gradient):
        return summary[1].mT @ gradient[0], None


def zeros_like(rule: Rule, summary: tuple[Tensor, ...]) -> State:
    """The state before the first token, of the shapes of a summary ``[R, ...]``."""
    state: list[Tensor | None] = [torch.zeros_like(x[0]) for x in summary[: rule.states]]
    if isinstance(rule, ABCRule):
        state[2] = torch.full_like(summary[2][0], -torch.inf)
    elif isinstance(rule, GSARule):
        state[2] = None
    elif isinstance(rule, DeltaProductRule):
        state[1] = None
    return tuple(state)


def choose(condition: Tensor, a: State, b: State) -> State:
    """a where the condition (one bool) holds, else b."""
    return tuple(
        None if x is None or y is None else torch.where(condition, x, y) for x, y in zip(a, b, strict=True)
    )


def spread(x: Tensor | None, cu_seqlens: Tensor | None, row: int, empty: float = 0.0) -> Tensor | None:
    """A state of one sequence as that of all parts of the piece: at the first (row 0) or at the last (row
    -1)."""
    if x is None or not is_packed(cu_seqlens):
        return x
    rest = cu_seqlens.shape[0] - 2
    padding = x.new_full((rest, *x.shape[1:]), empty)
    return torch.cat([x, padding] if row == 0 else [padding, x])


def summary_like(
    rule: Rule, inputs: Inputs, cu_seqlens: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, ...]:
    """Zeros of the shapes of a summary, which is computed on the device "meta"."""

    def meta(x: Tensor | None) -> Tensor | None:
        return None if x is None else torch.empty_like(x, device="meta")

    like = rule.summarise(tuple(meta(x) for x in inputs), meta(cu_seqlens), options)
    return tuple(torch.zeros_like(x, device=inputs[0].device) for x in like)


class Scan(torch.autograd.Function):
    """(o, *state) of a rank's piece; `state` is the state after the last piece, on every rank, None if it is
    not wanted (`final_state`). Packed rows have no state."""

    @staticmethod
    def forward(
        ctx,
        rule: Rule,
        pieces: Pieces,
        cu_seqlens: Tensor | None,
        final_state: bool,
        options: dict[str, Any],
        inputs_count: int,
        *tensors: Tensor | None,
    ):
        inputs, given = tensors[:inputs_count], tensors[inputs_count:]
        save, done = any(ctx.needs_input_grad), None
        if pieces.rank == 0 and given[0] is None:
            done = rule.forward(inputs, (None,) * rule.states, cu_seqlens, options, save)
            ends = [last(x, cu_seqlens) for x in done[1 : 1 + rule.states] if x is not None]
            # Its transition is not read: the state before the piece is zero.
            summary = (*ends, *summary_like(rule, inputs, cu_seqlens, options)[len(ends) :])
        elif pieces.rank == pieces.size - 1 and not final_state:
            summary = summary_like(rule, inputs, cu_seqlens, options)
        else:
            summary = rule.summarise(inputs, cu_seqlens, options)
        gathered = gather(pieces, list(summary))
        state = zeros_like(rule, gathered) if given[0] is None else given
        zero = zeros_like(rule, gathered)
        before = []
        for r in range(pieces.size):
            if pieces.begins is not None:
                state = choose(pieces.begins[r], zero, state)
            before.append(state)
            summary = tuple(x[r] for x in gathered)
            state = rule.join(state, summary)
            if pieces.cuts is not None:
                state = choose(pieces.cuts[r], own_state(rule, summary), state)
        start = tuple(
            spread(x, cu_seqlens, 0, -torch.inf if isinstance(rule, ABCRule) and i == 2 else 0.0)
            for i, x in enumerate(before[pieces.rank])
        )
        o, *rest = rule.forward(inputs, start, cu_seqlens, options, save) if done is None else done
        saved = rest[rule.states :]
        ctx.rule, ctx.pieces, ctx.cu_seqlens = rule, pieces, cu_seqlens
        ctx.options, ctx.inputs_count = options, inputs_count
        ctx.has_given, ctx.final_state = given[0] is not None, final_state
        kept = [x for one in (*before, state) for x in one] if rule.reads_states else []
        gathered = gathered[rule.unread :]
        ctx.counts = (len(start), len(saved), len(gathered))
        ctx.save_for_backward(*inputs, *start, *saved, *gathered, *kept)
        ctx.set_materialize_grads(False)
        return o, *(state if final_state else (None,) * rule.states)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_o: Tensor | None, *grad_state: Tensor | None):
        rule, pieces, options = ctx.rule, ctx.pieces, ctx.options
        tensors = list(ctx.saved_tensors)

        def take(count):
            taken = tuple(tensors[:count])
            del tensors[:count]
            return taken

        inputs = take(ctx.inputs_count)
        starts, saves, summaries = ctx.counts
        start, saved, gathered = take(starts), take(saves), take(summaries)
        cu_seqlens, none = ctx.cu_seqlens, (None,) * rule.states
        before = [take(rule.states) if rule.reads_states else none for _ in range(pieces.size + 1)]
        zero = tuple(None if x is None else torch.zeros_like(last(x, cu_seqlens)) for x in start)

        def backward(gradient: State):
            found = rule.backward(grad_o, gradient, inputs, start, cu_seqlens, saved, options)
            return found[: len(inputs)], found[len(inputs) : len(inputs) + rule.states]

        is_last = pieces.rank == pieces.size - 1 and not ctx.final_state
        is_read = pieces.rank > 0 or ctx.has_given  # the gradient of the state before the piece
        dinputs, first = backward(none) if is_last or (is_read and grad_o is not None) else (None, none)
        local = [
            torch.zeros_like(z) if x is None else x[:1] if is_packed(cu_seqlens) else x
            for x, z in zip(first, zero, strict=True)
            if z is not None
        ]
        outer = [
            torch.zeros_like(z) if x is None else x
            for x, z in zip(grad_state, zero, strict=True)
            if z is not None and ctx.final_state
        ]
        found = gather(pieces, [*local, *outer])
        present = [i for i, z in enumerate(zero) if z is not None]
        dlocal, douter = found[: len(present)], found[len(present) :]

        def full(parts: list[Tensor]) -> State:
            result: list[Tensor | None] = [None] * rule.states
            for i, x in zip(present, parts, strict=True):
                result[i] = x
            return tuple(result)

        # The loss of the whole is the sum of the losses of the ranks.
        gradient = full([x.sum(0) for x in douter]) if ctx.final_state else zero
        after: State = none
        for r in reversed(range(pieces.size)):
            if r == pieces.rank:
                after = gradient
            summary = (None,) * rule.unread + tuple(x[r] for x in gathered)
            gradient = rule.join_backward(before[r], before[r + 1], summary, gradient)
            if pieces.cuts is not None:
                gradient = choose(pieces.cuts[r], zero, gradient)
            own = full([x[r] for x in dlocal])
            gradient = tuple(None if x is None else x + y for x, y in zip(gradient, own, strict=True))
            if pieces.begins is not None:
                gradient = choose(pieces.begins[r], zero, gradient)
        if not is_last:
            dinputs, _ = backward(tuple(spread(x, cu_seqlens, -1) for x in after))
        # The state is the same tensor on every rank: rank 0 has its gradient, the others 0.
        dgiven = none
        if ctx.has_given:
            dgiven = gradient if pieces.rank == 0 else zero
        return None, None, None, None, None, None, *dinputs, *dgiven


def own_state(rule: Rule, summary: tuple[Tensor, ...]) -> State:
    state: list[Tensor | None] = list(summary[: rule.states])
    if isinstance(rule, DeltaProductRule):
        state = [summary[0], None]
    elif isinstance(rule, GSARule) and not isinstance(rule, ABCRule):
        state = [summary[0], summary[1], None]
    return tuple(state)


def run(
    rule: Rule,
    group,
    bounds: Tensor | None,
    final_state: bool,
    inputs: Inputs,
    state: State,
    options: dict[str, Any],
) -> tuple[Tensor, State]:
    assert inputs[0] is not None
    pieces = pieces_of(group, inputs[0], bounds)
    packed = pieces.cu_seqlens is not None
    if packed and any(x is not None for x in state):
        raise ValueError(f"girih.distributed.{rule.name}: state should be None for packed rows that are cut")
    cu_seqlens = pieces.cu_seqlens if packed else bounds
    if autocast_dtype(inputs[0]) is not None:
        state = tuple(None if x is None else x.float() for x in state)
    inputs = cast_for_autocast(inputs)
    with torch.autocast(autocast_device(inputs[0]), enabled=False):
        wanted = final_state and not packed
        o, *after = Scan.apply(rule, pieces, cu_seqlens, wanted, options, len(inputs), *inputs, *state)
    return o, tuple(after)


def gla(
    q,
    k,
    v,
    g=None,
    *,
    group=None,
    bounds=None,
    final_state=True,
    scale=None,
    state: GLAState | None = None,
) -> tuple[Tensor, GLAState | None]:
    """:func:`girih.ops.gla` of a sequence that is cut over the ranks of a group.

    q, k, v, g: this rank's piece.
    group: a process group, a mesh of one dimension, None (the default group), or :class:`Pieces`.
    bounds: ``[B, 2]``, the first and last + 1 valid token of every row of this piece; the others are padding.
    state: the state before the whole sequence, the same on every rank.
    final_state: False: the state after the sequence is not wanted. The last rank then runs the operator once,
        and ranks send half as much in backward.

    Returns this rank's piece of o, and on every rank the state after the whole sequence, None for packed
    rows and without final_state.

    Gradients are those of the sum of the losses of all ranks. That of `state` is on rank 0; the others have
    0.
    """
    o, after = run(
        GLARule(),
        group,
        bounds,
        final_state,
        (q, k, v, g),
        unpack_state("gla", GLAState, state),
        {"scale": scale},
    )
    return o, None if after[0] is None else GLAState(*after)


def gsa(
    q,
    k,
    v,
    s=None,
    g=None,
    *,
    group=None,
    bounds=None,
    final_state=True,
    scale=None,
    feature="softmax",
    state: GSAState | None = None,
) -> tuple[Tensor, GSAState | None]:
    """:func:`girih.ops.gsa` of a sequence that is cut over the ranks of a group, as :func:`gla`."""
    rule = ABCRule() if g is None else GSARule()
    options = {"scale": scale, "feature": feature}
    before = unpack_state("gsa", GSAState, state)
    o, after = run(rule, group, bounds, final_state, (q, k, v, s, g), before, options)
    return o, None if after[0] is None else GSAState(*after)


def delta_product(
    q,
    k,
    v,
    beta,
    g=None,
    *,
    group=None,
    bounds=None,
    final_state=True,
    n=None,
    scale=None,
    l2norm_qk=False,
    chunk=None,
    between_chunks=None,
    state: DeltaProductState | None = None,
) -> tuple[Tensor, DeltaProductState | None]:
    """:func:`girih.ops.delta_product` of a sequence that is cut over the ranks of a group, as :func:`gla`;
    with `between_chunks` as :func:`trellis`."""
    options = {"n": _steps_per_token(q, k, n), "scale": scale, "l2norm_qk": l2norm_qk}
    if between_chunks is not None:
        options |= {"chunk": chunk, "between_chunks": between_chunks}
        o, end = delta_product_between_chunks(
            q, k, v, beta, g, group=group, bounds=bounds, state=state, **options
        )
        return o, end if final_state else None
    if chunk is not None:
        raise ValueError(
            f"girih.distributed.delta_product: chunk is {chunk} but should be None without between_chunks: "
            "it cannot change the result"
        )
    given = unpack_state("delta_product", DeltaProductState, state)
    o, after = run(DeltaProductRule(), group, bounds, final_state, (q, k, v, beta, g), given, options)
    return o, None if after[0] is None else DeltaProductState(*after)
