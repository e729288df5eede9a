"""trellis, ttt and lattice, whose chunks are part of the model, in PyTorch at the inputs' dtype: the
reference for a kernel's accuracy, as rounded_formula.py. `in_scores` and `in_updates` select the factor of a
product that is multiplied by the weights, which determines where roundings happen.
"""

from functools import partial
from itertools import pairwise

import torch
from girih.ops import LatticeState, TrellisState, TTTState
from recurrences import phis
from rounded_formula import map_sequences, wide


def trellis(
    q,
    k,
    v,
    a,
    gamma,
    g=None,
    *,
    chunk,
    phi="ln_silu",
    f="ln_silu",
    state,
    cu_seqlens=None,
    in_scores=True,
    in_updates=True,
):
    """Every sequence has its own chunk boundaries, so sequences are computed one by one."""
    options = {"chunk": chunk, "phi": phi, "f": f, "in_scores": in_scores, "in_updates": in_updates}
    if len(state) == 2:
        A1, A2 = state
        state = TrellisState(A1, A1, A2, A2, torch.zeros(len(A1), dtype=torch.int64, device=q.device))
    if chunk == 1:  # every token starts a chunk, so the first memory is the memory
        state = state._replace(first_k=state.k, first_v=state.v)
    if cu_seqlens is not None:
        return map_sequences(trellis, q, k, v, a, gamma, g, state=state, cu_seqlens=cu_seqlens, **options)
    T = q.shape[1]
    outs, states = [], []
    for i, position in enumerate(state.position.tolist()):
        memories = [x[i : i + 1] for x in state[:4]]
        ends = [0, *range(chunk - position, T, chunk), T] if T else [0]
        sequence_outs = [q.new_zeros(1, 0, q.shape[2], v.shape[-1])]
        for lo, hi in pairwise(ends):
            part = [None if x is None else x[i : i + 1, lo:hi] for x in (q, k, v, a, gamma, g)]
            o, memories = trellis_chunk(
                *part, phi, f, *memories, (position + hi) % chunk == 0, in_scores, in_updates
            )
            sequence_outs.append(o)
        outs.append(torch.cat(sequence_outs, 1))
        states.append([*memories, ((state.position[i] + T) % chunk)[None]])
    first_k, memory_k, first_v, memory_v, position = (torch.cat(x) for x in zip(*states, strict=True))
    return torch.cat(outs), TrellisState(first_k, memory_k, first_v, memory_v, position)


def ttt(
    q,
    k,
    a,
    gamma,
    g=None,
    phi_weight=None,
    *,
    chunk,
    phi="layer_norm",
    f="identity",
    state,
    cu_seqlens=None,
    in_scores=True,
    in_updates=True,
):
    """The key memory of trellis; its read is the output."""
    options = {"chunk": chunk, "phi": phi, "f": f, "in_scores": in_scores, "in_updates": in_updates}
    if not isinstance(state, tuple):
        state = TTTState(state, state, torch.zeros(len(state), dtype=torch.int64, device=q.device))
    if chunk == 1:
        state = state._replace(first_k=state.k)
    if cu_seqlens is not None:
        ttt_with_weight = partial(ttt, phi_weight=phi_weight)
        return map_sequences(
            ttt_with_weight, q, k, a, gamma, g, state=state, cu_seqlens=cu_seqlens, **options
        )
    T = q.shape[1]
    outs, states = [], []
    for i, position in enumerate(state.position.tolist()):
        memories = [x[i : i + 1] for x in state[:2]]
        ends = [0, *range(chunk - position, T, chunk), T] if T else [0]
        sequence_outs = [q.new_zeros(1, 0, q.shape[2], a.shape[-1])]
        for lo, hi in pairwise(ends):
            q_, k_, a_, gamma_, g_ = [None if x is None else x[i : i + 1, lo:hi] for x in (q, k, a, gamma, g)]
            o, memories = trellis_chunk(
                *(q_, k_, None, a_, gamma_, g_, phi, f, *memories, None, None),
                *((position + hi) % chunk == 0, in_scores, in_updates, phi_weight),
            )
            sequence_outs.append(o)
        outs.append(torch.cat(sequence_outs, 1))
        states.append([*memories, ((state.position[i] + T) % chunk)[None]])
    first_k, memory_k, position = (torch.cat(x) for x in zip(*states, strict=True))
    return torch.cat(outs), TTTState(first_k, memory_k, position)


def trellis_chunk(
    q,
    k,
    v,
    a,
    gamma,
    g,
    phi,
    f,
    first_k,
    memory_k,
    first_v,
    memory_v,
    complete,
    in_scores,
    in_updates,
    phi_weight=None,
):
    """The tokens of one chunk: o, and the memories after the chunk. First memories are unchanged if the chunk
    is not complete. Without v only the key memory is updated, and its read is o."""
    dtype, H = q.dtype, k.shape[2]
    gamma = gamma.to(memory_k.dtype)
    g = torch.zeros_like(gamma) if g is None else g.to(memory_k.dtype)
    L = g.cumsum(1)
    C = L.shape[1]
    below = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()[..., None]
    between = torch.where(below, L[:, :, None] - L[:, None], -torch.inf).exp()  # [B, t, i, H]
    weights = (between * gamma[:, None] if in_scores else between).permute(0, 3, 1, 2)
    from_start, to_end = L.exp()[..., None], (gamma * (g.flip(1).cumsum(1).flip(1) - g).exp())[..., None]
    image, vjp = phis[phi]

    def update(x, first):
        z = wide(torch.einsum("bthx,bhmx->bthm", x, first.to(dtype)))
        w = 1.0 if phi_weight is None else phi_weight.to(z.dtype)
        return vjp(z, w * (w * image(z) - wide(a)))

    def apply_scores(x, y, values):
        scores = (wide(torch.einsum("bthx,bihx->bhti", x, y)) * weights).to(dtype)
        weighed = values if in_scores else values * gamma[..., None]
        return wide(torch.einsum("bhti,bihm->bthm", scores, weighed.to(dtype)))

    u_k = update(k, first_k)
    u_v = None if v is None else update(v, first_v)
    reads = []
    for j in range(q.shape[2] // H):
        own = q[:, :, j :: q.shape[2] // H]
        y = from_start * wide(torch.einsum("bthd,bhmd->bthm", own, memory_k.to(dtype)))
        r = phis[f][0](y - apply_scores(own, k, u_k)).to(dtype)
        if v is None:
            reads.append(r)
            continue
        o = from_start * wide(torch.einsum("bthm,bhmv->bthv", r, memory_v.to(dtype)))
        reads.append(o - apply_scores(r, u_v.to(dtype), v))
    after = []
    updates = [(u_k, k, memory_k)] + ([] if v is None else [(u_v, v, memory_v)])
    for u, x, memory in updates:
        rows, columns = (u * to_end, x) if in_updates else (u, x * to_end)
        step = wide(torch.einsum("bthm,bthx->bhmx", rows.to(dtype), columns.to(dtype)))
        after.append(memory * L[:, -1].exp()[..., None, None] - step)
    o = torch.stack(reads, 3).flatten(2, 3).to(dtype)
    firsts = after if complete else [first_k, first_v]
    return o, [x for pair in zip(firsts, after, strict=False) for x in pair]


def lattice(
    q,
    k,
    v,
    gamma,
    g=None,
    *,
    chunk,
    objective="decode",
    state,
    cu_seqlens=None,
    in_scores=True,
    in_updates=True,
):
    """With unit columns. Every sequence has its own chunk boundaries, so sequences are computed one by
    one."""
    options = {"chunk": chunk, "objective": objective, "in_scores": in_scores, "in_updates": in_updates}
    if not isinstance(state, tuple):
        zeros = torch.zeros_like(state)
        position = torch.zeros(len(state), dtype=torch.int64, device=q.device)
        state = LatticeState(state, zeros, None if g is None else zeros[..., 0, 0], position)
    if cu_seqlens is not None:
        return map_sequences(lattice, q, k, v, gamma, g, state=state, cu_seqlens=cu_seqlens, **options)
    T = q.shape[1]
    outs, states = [], []
    state = state._replace(first=on_sphere(state.first))
    for i, position in enumerate(state.position.tolist()):
        S, step, decay = (None if x is None else x[i : i + 1] for x in state[:3])
        ends = [0, *range(chunk - position, T, chunk), T] if T else [0]
        sequence_outs = [q.new_zeros(1, 0, q.shape[2], v.shape[-1])]
        for lo, hi in pairwise(ends):
            part = [None if x is None else x[i : i + 1, lo:hi] for x in (q, k, v, gamma, g)]
            complete = (position + hi) % chunk == 0
            o, S, step, decay = lattice_chunk(
                *part, objective, S, step, decay, complete, in_scores, in_updates
            )
            sequence_outs.append(o)
        outs.append(torch.cat(sequence_outs, 1))
        states.append([S, step, decay, ((state.position[i] + T) % chunk)[None]])
    S, step, decay, position = (None if x[0] is None else torch.cat(x) for x in zip(*states, strict=True))
    return torch.cat(outs), LatticeState(S, step, decay, position)


def on_sphere(S):
    """Returns S; the gradient of the columns is projected to their tangent spaces."""
    s = S.detach()
    d = S - s
    return s + (d - s * (s * d).sum(-2, keepdim=True))


def lattice_chunk(q, k, v, gamma, g, objective, S, step, decay, complete, in_scores, in_updates):
    """The tokens of one chunk: o, then S, Delta and L after the chunk."""
    dtype, H = q.dtype, k.shape[2]
    gamma = gamma.to(S.dtype)
    gated = g is not None
    g = g.to(S.dtype) if gated else torch.zeros_like(gamma)
    before = decay if gated and decay is not None else torch.zeros_like(gamma[:, 0])
    L = g.cumsum(1)
    C = L.shape[1]
    below = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()[..., None]
    E = torch.where(below, L[:, :, None] - L[:, None], -torch.inf).exp().permute(0, 3, 1, 2)  # [B, H, t, j]
    from_start = L.exp()[..., None]
    m = (L + before[:, None]).clamp_min(-30).exp()[..., None]

    def product(pattern, *factors):
        return wide(torch.einsum(pattern, *(x.to(dtype) for x in factors)))

    if objective == "decode":
        h, c = product("bthm,bhdm->bthd", k, S) - wide(v), wide(k)
    elif objective == "encode":
        h = wide(v)
        c = product("bthd,bhdm->bthm", v, S) - wide(k)
    else:
        h, c = -wide(v), wide(k)
    W = -gamma[..., None] * c
    a = product("bthd,bhdm->bthm", h, S)

    def weighted_sum(weights, x):
        return torch.einsum("bhtj,bjhm->bthm", weights, x)

    Wa = W * a
    sigma = weighted_sum(E, Wa)
    G = product("bthd,bjhd->bhtj", h, h) * torch.ones_like(E).tril(-1)
    if in_scores:
        N = product("bhtj,bjhm->bthm", G * E, W)
    else:
        N = weighted_sum(wide(G.to(dtype)) * E, wide(W.to(dtype)))
    N = N + from_start * product("bthd,bhdm->bthm", h, step)
    own = W.square() * wide(h.to(dtype)).square().sum(-1, keepdim=True)
    delta = from_start.square() * step.square().sum(-2)[:, None]
    r = weighted_sum(E.square(), own.detach()) + delta.detach()
    n = weighted_sum(E.square(), own - Wa.square() + 2 * W * (N - a * (sigma - Wa))) + delta
    kappa, eps = (256, 2.0**-53) if dtype == torch.float64 else (4, torch.finfo(dtype).eps / 2)
    floor = r * (kappa * eps) ** 2
    n = torch.where(n < floor, floor, n)
    inverse = (m.square() + n).rsqrt()
    reads = []
    for j in range(q.shape[2] // H):
        own_q = wide(q[:, :, j :: q.shape[2] // H]) * inverse
        o = product("bthm,bhdm->bthd", own_q * (m - sigma), S)
        scores = product("bthm,bjhm->bhtj", own_q, W) * E
        reads.append(
            o + product("bhtj,bjhd->bthd", scores, h) + product("bthm,bhdm->bthd", own_q * from_start, step)
        )
    o = torch.stack(reads, 3).flatten(2, 3).to(dtype)
    to_end = E[:, :, -1].transpose(1, 2)[..., None]
    steps = product("bthd,bthm->bhdm", *((h, W * to_end) if in_updates else (h * to_end, W)))
    end, last = L[:, -1, :, None, None].exp(), sigma[:, -1, :, None]
    accumulated = end * step + steps
    if not complete:
        return o, S, accumulated - S * last, before + L[:, -1] if gated else None
    X = accumulated + S * (m[:, -1, :, None] - last)
    length = X.norm(dim=-2, keepdim=True)
    S = torch.where(length == 0, S, X / length.masked_fill(length == 0, 1))
    return o, S, torch.zeros_like(step), torch.zeros_like(before) if gated else None
