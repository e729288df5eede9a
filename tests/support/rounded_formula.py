"""gsa, gla and delta_product in chunks, in PyTorch at the inputs' dtype: the reference for a kernel's
accuracy.

Operands and results of products have the inputs' dtype (PyTorch accumulates in fp32); gates, decays, softmax
and states are fp32 (fp64 for fp64). Signatures are the same as in `girih.ops`; `cu_seqlens` is read on the
host.
"""

from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from girih.ops import DeltaProductState, GLAState, GSAState
from recurrences import repeat_heads

CHUNKS = 64, 48  # tokens; two lengths, because the largest error of one chunk length is random

FEATURES = {
    "softmax": lambda x: x.softmax(-1),
    "none": lambda x: x,
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def wide(x):
    """At least fp32: fp64 is unchanged."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Decay:
    """Decays of a chunk with gates g [B, C, H, M]: e^sum from the start to a token, to the end, and between
    tokens."""

    def __init__(self, g):
        C = g.shape[1]
        later = torch.ones(C, C, dtype=torch.bool, device=g.device).tril(-1)[..., None, None]  # t > i
        between = torch.where(later, g[:, :, None], 0.0).cumsum(1)  # sum of g over i < j <= t
        from_self = torch.ones(C, C, dtype=torch.bool, device=g.device).tril()[..., None, None]
        self.between = between.masked_fill(~from_self, -torch.inf).exp()  # [B, t, i, H, M]
        self.from_start = g.cumsum(1).exp()
        self.to_end = between[:, -1].exp()
        self.all = g.sum(1).exp()


def read_slots(q, k, w, decay, S):
    """S_t = S_{t-1} Diag(e^{g_t}) + k_t w_t^T: returns S_t^T q_t in fp32 [B, C, H, M], and S after the
    chunk."""
    dtype = q.dtype
    near = (w[:, None] * decay.between).to(dtype)  # [B, t, i, H, M]
    scores = torch.einsum("bthd,bihd->bhti", q, k)
    far = wide(torch.einsum("bthd,bhdm->bthm", q, S.to(dtype))) * decay.from_start
    read = far + wide(torch.einsum("bhti,btihm->bthm", scores, near))
    added = torch.einsum("bihd,bihm->bhdm", k, (w * decay.to_end).to(dtype))
    return read, S * decay.all[:, :, None] + wide(added)


def read_values(p, w, v, decay, S):
    """S_t = Diag(e^{g_t}) S_{t-1} + w_t v_t^T: returns S_t^T p_t [B, C, H, V], and S after the chunk. p is
    fp32."""
    dtype = v.dtype
    near = (w[:, None] * decay.between).to(dtype)
    scores = torch.einsum("bthm,btihm->bhti", p.to(dtype), near)
    far = torch.einsum("bthm,bhmv->bthv", (p * decay.from_start).to(dtype), S.to(dtype))
    added = torch.einsum("bihm,bihv->bhmv", (w * decay.to_end).to(dtype), v)
    o = wide(far) + wide(torch.einsum("bhti,bihv->bthv", scores, v))
    return o, S * decay.all[..., None] + wide(added)


def abc_gates(s, z):
    """ABC's logits -> write weights, gates, z after the last token. z is None without earlier tokens."""
    running = s.logcumsumexp(1)
    if z is not None:
        running = torch.logaddexp(z[:, None], running)
    before = torch.cat([running[:, :1] if z is None else z[:, None], running[:, :-1]], 1)
    return (s - running).exp(), before - running, running[:, -1]


def map_sequences(operator, q, *data, state, cu_seqlens, rows_of=None, **options):
    """Calls `operator` on every sequence of a packed batch; tokens outside all sequences give 0. `rows_of`:
    rows per token of each tensor of `data`, 1 by default."""
    bounds = cu_seqlens.tolist()
    rows_per_tensor, outs, states, last = rows_of or [1] * len(data), [], [], 0
    for i, (lo, hi) in enumerate(pairwise(bounds)):
        alone = [
            None if x is None else x[:, lo * n : hi * n] for x, n in zip(data, rows_per_tensor, strict=True)
        ]
        own = None if state is None else type(state)(*(None if x is None else x[i : i + 1] for x in state))
        o, after = operator(q[:, lo:hi], *alone, state=own, **options)
        outs += [o.new_zeros(1, lo - last, *o.shape[2:]), o]
        states.append(after)
        last = hi
    outs.append(outs[0].new_zeros(1, q.shape[1] - last, *outs[0].shape[2:]))
    parts = (None if part[0] is None else torch.cat(part) for part in zip(*states, strict=True))
    return torch.cat(outs, 1), type(states[0])(*parts)


def in_chunks(chunk):
    """gsa and gla with chunks of this many tokens, delta_product with chunks of this many rows."""
    return SimpleNamespace(
        gsa=partial(gsa, chunk=chunk),
        gla=partial(gla, chunk=chunk),
        delta_product=partial(delta_product, rows=chunk),
    )


def gsa(
    q, k, v, s=None, g=None, *, scale=None, feature="softmax", state=None, cu_seqlens=None, chunk=CHUNKS[0]
):
    if cu_seqlens is not None:
        options = {"scale": scale, "feature": feature, "chunk": chunk}
        return map_sequences(gsa, q, k, v, s, g, state=state, cu_seqlens=cu_seqlens, **options)
    B, T, H, D = k.shape
    V, M = v.shape[-1], (g if s is None else s).shape[-1]
    scale = D**-0.5 if scale is None else scale
    z = None if state is None else state.z
    zeros = wide(q.new_zeros(()))
    Hk, Hv = state[:2] if state else (zeros.expand(B, H, D, M), zeros.expand(B, H, M, V))
    if g is None:
        if T == 0:
            z = zeros.expand(B, H, M) - torch.inf if z is None else z
            w = g = s.to(zeros.dtype)
        else:
            w, g, z = abc_gates(s.to(zeros.dtype), z)
    else:
        g = g.to(zeros.dtype)
        w = -g.expm1() if s is None else s.to(zeros.dtype)
    groups = q.shape[2] // H
    rows = [q.new_zeros(B, 0, q.shape[2], V)]
    for a in range(0, T, chunk):
        part = slice(a, a + chunk)
        decay = Decay(g[:, part])
        # The heads of a query group read the same memory, so all give the same state after the chunk.
        reads = []
        for j in range(groups):
            own_q = q[:, part, j::groups]
            logits, next_k = read_slots(own_q, k[:, part], w[:, part], decay, Hk)
            o, next_v = read_values(FEATURES[feature](scale * logits), w[:, part], v[:, part], decay, Hv)
            reads.append(o)
        Hk, Hv = next_k, next_v
        rows.append(torch.stack(reads, 3).flatten(2, 3).to(q.dtype))
    return torch.cat(rows, 1), GSAState(Hk, Hv, z)


def gla(q, k, v, g=None, *, scale=None, state=None, cu_seqlens=None, chunk=CHUNKS[0]):
    if cu_seqlens is not None:
        return map_sequences(gla, q, k, v, g, state=state, cu_seqlens=cu_seqlens, scale=scale, chunk=chunk)
    H, V = v.shape[2:]
    q, k = repeat_heads(q, H), repeat_heads(k, H)
    B, T, _, D = k.shape
    scale = D**-0.5 if scale is None else scale
    zeros = wide(q.new_zeros(()))
    S = state.s if state else zeros.expand(B, H, D, V)
    g = zeros.expand(B, T, H) if g is None else g.to(zeros.dtype)
    g = g[..., None].expand(B, T, H, D) if g.dim() == 3 else g
    groups = q.shape[2] // H
    rows = [q.new_zeros(B, 0, q.shape[2], V)]
    for a in range(0, T, chunk):
        part = slice(a, a + chunk)
        decay = Decay(g[:, part])
        reads = []
        for j in range(groups):
            o, after = read_values(wide(q[:, part, j::groups]), wide(k[:, part]), v[:, part], decay, S)
            reads.append(scale * o)
        S = after
        rows.append(torch.stack(reads, 3).flatten(2, 3).to(q.dtype))
    return torch.cat(rows, 1), GLAState(S)


BETWEEN = {"gelu": F.gelu, "tanh": torch.tanh}


def unit(x):
    x = wide(x)
    return x * (x.square().sum(-1, True) + 1e-6).rsqrt()


def delta_product(
    q,
    k,
    v,
    beta,
    g=None,
    *,
    n=1,
    scale=None,
    l2norm_qk=False,
    chunk=None,
    between_chunks=None,
    state=None,
    cu_seqlens=None,
    rows=CHUNKS[0],
):
    """`rows`: chunk length of the formula in rows; `chunk` is the operator's option for `between_chunks`."""
    options = {"n": n, "scale": scale, "l2norm_qk": l2norm_qk, "rows": rows}
    if cu_seqlens is not None:
        options |= {"chunk": chunk, "between_chunks": between_chunks}
        sequence_options = {"state": state, "cu_seqlens": cu_seqlens, "rows_of": [n, n, n, 1]}
        return map_sequences(delta_product, q, k, v, beta, g, **sequence_options, **options)
    q, k = repeat_heads(q, v.shape[2]), repeat_heads(k, v.shape[2])
    if between_chunks:
        options |= {"chunk": chunk, "phi": BETWEEN[between_chunks], "state": state}
        return delta_by_chunks(q, k, v, beta, g, **options)
    (B, T), (H, D), V = q.shape[:2], k.shape[2:], v.shape[-1]
    dtype = q.dtype
    scale = D**-0.5 if scale is None else scale
    zeros = wide(q.new_zeros(()))
    S = state.s if state else zeros.expand(B, H, D, V)
    g = zeros.expand(B, T, H) if g is None else g.to(zeros.dtype)
    beta = beta.to(zeros.dtype)
    if l2norm_qk:
        q, k = unit(q).to(dtype), unit(k).to(dtype)
    b = k
    if beta.dim() == 3:
        beta, factor = beta[..., None], beta
    else:
        b, factor = (beta * wide(k)).to(dtype), zeros.expand(beta.shape[:3]) + 1
    groups, C = q.shape[2] // H, max(rows // n, 1)
    outs = [q.new_zeros(B, 0, q.shape[2], V)]
    for a in range(0, T, C):
        tokens, steps = slice(a, a + C), slice(a * n, (a + C) * n)
        K, B_, W = k[:, steps], b[:, steps], beta[:, steps] * wide(v[:, steps])
        factor_here = factor[:, steps, :, None]
        per_row = torch.arange(K.shape[1], device=q.device) // n  # a row's token
        L = g[:, tokens].cumsum(1)
        # Sums of g over tokens i < t <= j are computed from g: differences of L lose precision.
        later = torch.arange(L.shape[1], device=q.device) > per_row[:, None]
        to_token = torch.where(later[..., None], g[:, None, tokens], 0.0).cumsum(2)  # [B, row, token, H]
        to_row = to_token[:, :, per_row].transpose(1, 2)  # [B, r, r', H]: from row r' to row r
        order = torch.ones(len(per_row), len(per_row), dtype=torch.bool, device=q.device)
        # T = I + tril(B K^T e^{L_r - L_r'}, -1)
        scores = wide(torch.einsum("brhd,bihd->brih", B_, K)) * factor_here[:, :, None, :, 0]
        strict = order.tril(-1)[..., None]
        A = scores * to_row.masked_fill(~strict, -torch.inf).exp()
        eye = torch.eye(len(per_row), dtype=zeros.dtype, device=q.device)
        inverse = torch.linalg.solve_triangular(
            eye + A.permute(0, 3, 1, 2), eye, upper=False, unitriangular=True
        )
        # U = T^-1 (W - e^L B S)
        low_S = S.to(dtype)
        read = wide(torch.einsum("brhd,bhdv->brhv", B_, low_S)) * L[:, per_row, :, None].exp()
        Z = (W - factor_here * read).to(dtype)
        U = torch.einsum("bhri,bihv->brhv", inverse.to(dtype), Z)
        # O = scale (e^L Q S + (Q K^T e^{L_t - L_r}) U)
        visible = torch.arange(L.shape[1], device=q.device)[:, None] >= per_row
        decay = to_token.transpose(1, 2).masked_fill(~visible[..., None], -torch.inf).exp()  # [B, t, r, H]
        reads = []
        for j in range(groups):
            own_q = q[:, tokens, j::groups]
            far = wide(torch.einsum("bthd,bhdv->bthv", own_q, low_S)) * L[..., None].exp()
            weights = (wide(torch.einsum("bthd,brhd->btrh", own_q, K)) * decay).to(dtype)
            reads.append(scale * (far + wide(torch.einsum("btrh,brhv->bthv", weights, U))))
        outs.append(torch.stack(reads, 3).flatten(2, 3).to(dtype))
        # S <- e^{L_C} S + (K e^{L_C - L})^T U
        to_end = to_token[:, :, -1].exp()[..., None]
        update = torch.einsum("brhd,brhv->bhdv", K, (wide(U) * to_end).to(dtype))
        S = S * L[:, -1].exp()[..., None, None] + wide(update)
    return torch.cat(outs, 1), DeltaProductState(S, None)


def delta_by_chunks(q, k, v, beta, g, *, n, chunk, phi, state, **options):
    """Applies `phi` to S at the end of each chunk of a sequence."""
    (B, T), (H, D), V = q.shape[:2], k.shape[2:], v.shape[-1]
    if state is None:
        zeros = wide(q.new_zeros(()))
        state = DeltaProductState(
            zeros.expand(B, H, D, V), torch.zeros(B, dtype=torch.int64, device=q.device)
        )
    outs, last = [], []
    for i, position in enumerate(state.position.tolist()):
        S, sequence_outs = state.s[i : i + 1], [q.new_zeros(1, 0, q.shape[2], V)]
        ends = [0, *range(chunk - position, T, chunk), T] if T else [0]
        for lo, hi in pairwise(ends):
            part = [
                None if x is None else x[i : i + 1, lo * r : hi * r]
                for x, r in ((q, 1), (k, n), (v, n), (beta, n), (g, 1))
            ]
            o, (S, _) = delta_product(*part, n=n, state=DeltaProductState(S, None), **options)
            sequence_outs.append(o)
            if (position + hi) % chunk == 0:
                S = phi(S)
        outs.append(torch.cat(sequence_outs, 1))
        last.append(S)
    return torch.cat(outs), DeltaProductState(torch.cat(last), (state.position + T) % chunk)
