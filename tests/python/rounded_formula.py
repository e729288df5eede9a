"""gsa and gla in chunks, in plain PyTorch at the inputs' dtype: what a kernel's accuracy is measured by.

Products take and give the inputs' dtype (PyTorch adds up in fp32); gates, decays, softmax and states are fp32
(fp64 for fp64). Signatures are those of `girih.ops`; `cu_seqlens` is read on the host.
"""

from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from girih.ops import GLAState, GSAState

CHUNKS = 64, 48  # tokens; one chunking's largest error is chance, its mean is not

FEATURES = {
    "softmax": lambda x: x.softmax(-1),
    "none": lambda x: x,
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def wide(x):
    """In fp32, fp64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Decay:
    """Of a chunk's gates g [B, C, H, M]: e^sums from the start to every token, to the end, in between."""

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
    """S_t = S_{t-1} Diag(e^{g_t}) + k_t w_t^T: S_t^T q_t in fp32 [B, C, H, M], and S after the chunk."""
    dtype = q.dtype
    near = (w[:, None] * decay.between).to(dtype)  # [B, t, i, H, M]
    scores = torch.einsum("bthd,bihd->bhti", q, k)
    far = wide(torch.einsum("bthd,bhdm->bthm", q, S.to(dtype))) * decay.from_start
    read = far + wide(torch.einsum("bhti,btihm->bthm", scores, near))
    added = torch.einsum("bihd,bihm->bhdm", k, (w * decay.to_end).to(dtype))
    return read, S * decay.all[:, :, None] + wide(added)


def read_values(p, w, v, decay, S):
    """S_t = Diag(e^{g_t}) S_{t-1} + w_t v_t^T: S_t^T p_t [B, C, H, V], and S after the chunk. p is fp32."""
    dtype = v.dtype
    near = (w[:, None] * decay.between).to(dtype)
    scores = torch.einsum("bthm,btihm->bhti", p.to(dtype), near)
    far = torch.einsum("bthm,bhmv->bthv", (p * decay.from_start).to(dtype), S.to(dtype))
    added = torch.einsum("bihm,bihv->bhmv", (w * decay.to_end).to(dtype), v)
    o = wide(far) + wide(torch.einsum("bhti,bihv->bthv", scores, v))
    return o, S * decay.all[..., None] + wide(added)


def abc_gates(s, z):
    """ABC's logits -> write weights, gates, z after the last token (None: no token before)."""
    running = s.logcumsumexp(1)
    if z is not None:
        running = torch.logaddexp(z[:, None], running)
    before = torch.cat([running[:, :1] if z is None else z[:, None], running[:, :-1]], 1)
    return (s - running).exp(), before - running, running[:, -1]


def per_sequence(operator, q, *data, state, cu_seqlens, **options):
    """`operator` on every sequence of a packed batch; tokens of no sequence give 0."""
    bounds = cu_seqlens.tolist()
    rows, states, last = [], [], 0
    for i, (lo, hi) in enumerate(pairwise(bounds)):
        alone = [None if x is None else x[:, lo:hi] for x in data]
        own = None if state is None else type(state)(*(None if x is None else x[i : i + 1] for x in state))
        o, after = operator(q[:, lo:hi], *alone, state=own, **options)
        rows += [o.new_zeros(1, lo - last, *o.shape[2:]), o]
        states.append(after)
        last = hi
    rows.append(rows[0].new_zeros(1, q.shape[1] - last, *rows[0].shape[2:]))
    parts = (None if part[0] is None else torch.cat(part) for part in zip(*states, strict=True))
    return torch.cat(rows, 1), type(states[0])(*parts)


def in_chunks(chunk):
    """gsa and gla in chunks of so many tokens."""
    return SimpleNamespace(gsa=partial(gsa, chunk=chunk), gla=partial(gla, chunk=chunk))


def gsa(
    q, k, v, s=None, g=None, *, scale=None, feature="softmax", state=None, cu_seqlens=None, chunk=CHUNKS[0]
):
    if cu_seqlens is not None:
        options = {"scale": scale, "feature": feature, "chunk": chunk}
        return per_sequence(gsa, q, k, v, s, g, state=state, cu_seqlens=cu_seqlens, **options)
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
        # a query head's group reads the same memory: the chunk's rows of all of them, state from the first
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
        return per_sequence(gla, q, k, v, g, state=state, cu_seqlens=cu_seqlens, scale=scale, chunk=chunk)
    B, T, H, D = k.shape
    V = v.shape[-1]
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
