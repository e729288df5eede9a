"""The reference recurrences, token by token, in plain torch: slow and obvious, without chunk algebra.

Names, argument order, shapes and options are the same as in `girih.ops`. Each function returns `(o, state)`
with the fields of the state in order, None where absent (`cat_attention` returns o). The caller loops over
packed sequences. Query head i reads memory head i // (HQ / H); memories may share heads of keys and queries.
All functions are differentiable by autograd.
"""

import math

import torch
import torch.nn.functional as F

EPS = 1e-6


def group_queries(q, heads):
    """[B, T, HQ, D] -> [B, T, H, HQ / H, D]."""
    return q.unflatten(2, (heads, q.shape[2] // heads))


def repeat_heads(x, heads):
    """Repeats heads: x [B, T, shared, D] -> [B, T, heads, D]."""
    return x if x.shape[2] >= heads else x.repeat_interleave(heads // x.shape[2], 2)


def join(rows, like):
    """One row [B, H, G, V] per token -> [B, T, H * G, V]; `like` [B, 0, H, G, V] is the result for T = 0."""
    if rows:
        return torch.stack(rows, 1).flatten(2, 3)
    return like.flatten(2, 3)


def broadcast_flag(flag):
    """Broadcasts a flag [N] against states [N, H, ., .]."""
    return flag[:, None, None, None]


# Section 1: gated slot attention

features = {
    "softmax": lambda x: x.softmax(-1),
    "none": lambda x: x,
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x) ** 2,
}


def abc_gate(z, s):
    """z_t = logaddexp(z_{t-1}, s_t), the gate z_{t-1} - z_t, the weight e^{s_t - z_t}.

    z = -inf is a start without tokens, with gate 0. s = -inf is a masked token.
    """
    nothing = (z == -math.inf) & (s == -math.inf)
    z_new = torch.logaddexp(z.masked_fill(nothing, 0.0), s).masked_fill(nothing, -math.inf)
    g = (z - z_new).masked_fill(z == -math.inf, 0.0)
    return z_new, g, (s - z_new).masked_fill(nothing, -math.inf).exp()


def gsa(q, k, v, s=None, g=None, *, scale=None, feature="softmax", state=None):
    B, T, H, D = k.shape
    V, M = v.shape[-1], (g if s is None else s).shape[-1]
    scale = D**-0.5 if scale is None else scale
    Hk, Hv, z = state or (k.new_zeros(B, H, D, M), k.new_zeros(B, H, M, V), k.new_full((B, H, M), -math.inf))
    q, rows = group_queries(q, H), []
    for t in range(T):
        if g is None:
            z, g_t, s_t = abc_gate(z, s[:, t])
        else:
            g_t = g[:, t]
            s_t = -torch.expm1(g_t) if s is None else s[:, t]
        decay = g_t.exp()
        Hk = Hk * decay[..., None, :] + k[:, t, :, :, None] * s_t[..., None, :]
        Hv = decay[..., :, None] * Hv + s_t[..., :, None] * v[:, t, :, None, :]
        p = features[feature](scale * torch.einsum("bhdm,bhqd->bhqm", Hk, q[:, t]))
        rows.append(torch.einsum("bhmv,bhqm->bhqv", Hv, p))
    o = join(rows, q.new_zeros(B, 0, *q.shape[2:4], V))
    return o, (Hk, Hv, z if g is None else None)


def gla(q, k, v, g=None, *, scale=None, state=None):
    """S_t = Diag(e^{g_t}) S_{t-1} + k_t v_t^T, o_t = scale S_t^T q_t; a gate per head or per key channel."""
    H, V = v.shape[2:]
    q, k = repeat_heads(q, H), repeat_heads(k, H)
    B, T, H, D = k.shape
    scale = D**-0.5 if scale is None else scale
    S = state[0] if state else k.new_zeros(B, H, D, V)
    if g is None:
        g = k.new_zeros(B, T, H)
    if g.dim() == 3:
        g = g[..., None].expand(B, T, H, D)
    q, rows = group_queries(q, H), []
    for t in range(T):
        S = g[:, t, :, :, None].exp() * S + k[:, t, :, :, None] * v[:, t, :, None, :]
        rows.append(scale * torch.einsum("bhdv,bhqd->bhqv", S, q[:, t]))
    return join(rows, q.new_zeros(B, 0, *q.shape[2:4], V)), (S,)


# Section 2: DeltaProduct

between = {"gelu": F.gelu, "tanh": torch.tanh}


def l2_rows(x):
    return x / (x.square().sum(-1, keepdim=True) + EPS).sqrt()


def delta_product(
    q, k, v, beta, g=None, *, n=1, scale=None, l2norm_qk=False, chunk=None, between_chunks=None, state=None
):
    H, V = v.shape[2:]
    q, k = repeat_heads(q, H), repeat_heads(k, H)
    B, T, D = k.shape[0], q.shape[1], k.shape[3]
    scale = D**-0.5 if scale is None else scale
    S, position = state or (k.new_zeros(B, H, D, V), None)
    if between_chunks and position is None:
        position = torch.zeros(B, dtype=torch.int64, device=q.device)
    if l2norm_qk:
        q, k = l2_rows(q), l2_rows(k)
    if beta.dim() == 3:
        beta = beta[..., None]
    b, w = beta * k, beta * v
    q, rows = group_queries(q, H), []
    for t in range(T):
        if g is not None:
            S = g[:, t, :, None, None].exp() * S
        for r in range(t * n, t * n + n):
            old = torch.einsum("bhdv,bhd->bhv", S, b[:, r])
            S = S + k[:, r, :, :, None] * (w[:, r] - old)[:, :, None, :]
        rows.append(scale * torch.einsum("bhdv,bhqd->bhqv", S, q[:, t]))
        if between_chunks:
            position = (position + 1) % chunk
            S = torch.where(broadcast_flag(position == 0), between[between_chunks](S), S)
    return join(rows, q.new_zeros(B, 0, *q.shape[2:4], V)), (S, position)


# Section 3: Trellis


def silu_slope(z):
    s = z.sigmoid()
    return s * (1 + z * (1 - s))


def l2norm(z):
    return z / (z.square().sum(-1, keepdim=True) + EPS).sqrt()


def l2norm_vjp(z, w):
    phi = l2norm(z)
    return (w - phi * (phi * w).sum(-1, keepdim=True)) / (z.square().sum(-1, keepdim=True) + EPS).sqrt()


def layer_norm(z):
    centred = z - z.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt()


def layer_norm_vjp(z, w):
    phi = layer_norm(z)
    r = ((z - z.mean(-1, keepdim=True)).square().mean(-1, keepdim=True) + EPS).sqrt()
    return (w - w.mean(-1, keepdim=True) - phi * (phi * w).mean(-1, keepdim=True)) / r


def softmax_vjp(z, w):
    p = z.softmax(-1)
    return p * (w - (p * w).sum(-1, keepdim=True))


# name: (phi(z), J_phi(z)^T w)
phis = {
    "identity": (lambda z: z, lambda z, w: w),
    "silu": (F.silu, lambda z, w: silu_slope(z) * w),
    "l2norm": (l2norm, l2norm_vjp),
    "layer_norm": (layer_norm, layer_norm_vjp),
    "l2_silu": (lambda z: l2norm(F.silu(z)), lambda z, w: silu_slope(z) * l2norm_vjp(F.silu(z), w)),
    "ln_silu": (lambda z: layer_norm(F.silu(z)), lambda z, w: silu_slope(z) * layer_norm_vjp(F.silu(z), w)),
    "softmax": (lambda z: z.softmax(-1), softmax_vjp),
}


def trellis(q, k, v, a, gamma, g=None, *, chunk, phi="ln_silu", f="ln_silu", state):
    """`state`: five fields, or the first memories `(A1 [(N,) H, M, D], A2 [(N,) H, M, V])`."""
    B, T, H = gamma.shape
    if len(state) == 2:
        A1, A2 = (A.expand(B, *A.shape[-3:]) for A in state)
        first1, first2, position = A1, A2, torch.zeros(B, dtype=torch.int64, device=q.device)
    else:
        first1, A1, first2, A2, position = state
    forward, vjp = phis[phi]
    q, rows = group_queries(q, H), []
    for t in range(T):
        begins = broadcast_flag(position == 0)
        first1, first2 = torch.where(begins, A1, first1), torch.where(begins, A2, first2)
        decay = 1.0 if g is None else g[:, t, :, None, None].exp()
        step = gamma[:, t, :, None, None]

        def update(A, first, x, decay=decay, step=step, t=t):
            z = torch.einsum("bhmx,bhx->bhm", first, x)
            u = vjp(z, forward(z) - a[:, t])
            return decay * A - step * u[..., :, None] * x[..., None, :]

        A1, A2 = update(A1, first1, k[:, t]), update(A2, first2, v[:, t])
        r = phis[f][0](torch.einsum("bhmd,bhqd->bhqm", A1, q[:, t]))
        rows.append(torch.einsum("bhmv,bhqm->bhqv", A2, r))
        position = (position + 1) % chunk
    begins = broadcast_flag(position == 0)
    first1, first2 = torch.where(begins, A1, first1), torch.where(begins, A2, first2)
    return join(rows, q.new_zeros(B, 0, *q.shape[2:4], v.shape[-1])), (first1, A1, first2, A2, position)


def ttt(q, k, a, gamma, g=None, phi_weight=None, *, chunk, phi="layer_norm", f="identity", state):
    """Section 3b. `state`: three fields, or the first memory `A [(N,) H, M, D]`."""
    B, T, H = gamma.shape
    if isinstance(state, torch.Tensor):
        A = state.expand(B, *state.shape[-3:])
        first, position = A, torch.zeros(B, dtype=torch.int64, device=q.device)
    else:
        first, A, position = state
    w = a.new_ones(a.shape[2:]) if phi_weight is None else phi_weight
    forward, vjp = phis[phi]
    q, rows = group_queries(q, H), []
    for t in range(T):
        first = torch.where(broadcast_flag(position == 0), A, first)
        z = torch.einsum("bhmd,bhd->bhm", first, k[:, t])
        u = vjp(z, w * (w * forward(z) - a[:, t]))
        decay = 1.0 if g is None else g[:, t, :, None, None].exp()
        A = decay * A - gamma[:, t, :, None, None] * u[..., :, None] * k[:, t, :, None, :]
        rows.append(phis[f][0](torch.einsum("bhmd,bhqd->bhqm", A, q[:, t])))
        position = (position + 1) % chunk
    first = torch.where(broadcast_flag(position == 0), A, first)
    return join(rows, q.new_zeros(B, 0, *q.shape[2:4], a.shape[-1])), (first, A, position)


# Section 4: Lattice


def unit_columns(X):
    return X / X.square().sum(-2, keepdim=True).sqrt()


def lattice(q, k, v, gamma, g=None, *, chunk, objective="decode", normalize=True, shrinkage=0.0, state):
    """The tangent-space form: X_t = e^{g_t} X_{t-1} + d_t with explicit d_t [D, M]; the read columns are X /
    |X|.

    `state`: four fields, or the first memory `S [(N,) H, D, M]`.
    """
    B, T, H = gamma.shape
    D = v.shape[-1]
    if isinstance(state, torch.Tensor):
        S = state.expand(B, *state.shape[-3:])
        X, L = S, k.new_zeros(B, H)
        position = torch.zeros(B, dtype=torch.int64, device=q.device)
    else:
        S, step, L, position = state
        L = k.new_zeros(B, H) if L is None else L
        X = L[..., None, None].exp() * S + step
    q, rows = group_queries(q, H), []
    for t in range(T):
        k_t, v_t, gamma_t = k[:, t], v[:, t], gamma[:, t, :, None]
        g_t = k.new_zeros(B, H) if g is None else g[:, t]
        length = S.square().sum(-2).sqrt()
        columns = S if normalize else S / length[..., None, :]
        if objective == "decode":
            h, c = torch.einsum("bhdm,bhm->bhd", columns, k_t) - v_t, k_t
        elif objective == "encode":
            h, c = v_t, torch.einsum("bhdm,bhd->bhm", columns, v_t) - k_t
        else:
            h, c = -v_t, k_t
        projection = torch.einsum("bhdm,bhd->bhm", columns, h)
        square = columns.square().sum(-2)
        tangent = h[..., :, None] - columns * (projection / square)[..., None, :]
        d = -(gamma_t * c)[..., None, :] * tangent
        if not normalize:
            d = d / length[..., None, :]
        X, L = g_t[..., None, None].exp() * X + d, L + g_t
        if shrinkage:
            X = X.sign() * (X.abs() - shrinkage * gamma_t[..., None]).clamp(min=0)
            is_zero = (X == 0).all(-2, keepdim=True)
            X = torch.where(is_zero, S, X)
        read = unit_columns(X) if normalize else X
        rows.append(torch.einsum("bhdm,bhqm->bhqd", read, q[:, t]))
        position = (position + 1) % chunk
        ends = broadcast_flag(position == 0)
        S = torch.where(ends, read, S)
        X, L = torch.where(ends, S, X), L.masked_fill(ends[..., 0, 0], 0.0)
    o = join(rows, q.new_zeros(B, 0, *q.shape[2:4], D))
    return o, (S, X - L[..., None, None].exp() * S, None if g is None else L, position)


# Section 6: the short convolution


def short_conv(x, weight, bias=None, *, activation=None, state=None):
    B, T, channels = x.shape
    W = weight.shape[1]
    window = torch.cat([state[0] if state else x.new_zeros(B, W - 1, channels), x], 1)
    rows = []
    for t in range(T):
        y = sum(weight[:, j] * window[:, t + j] for j in range(W))
        y = y if bias is None else y + bias
        rows.append(F.silu(y) if activation == "silu" else y)
    return torch.stack(rows, 1) if rows else torch.zeros_like(x), (window[:, T:],)


# The gated norm after a mixer, token by token


def gated_rms_norm(x, weight, gate=None, *, activation="silu", eps=1e-6):
    act = {"silu": F.silu, "gelu": F.gelu, "sigmoid": torch.sigmoid}[activation]
    rows = []
    for t in range(x.shape[1]):
        y = x[:, t] / (x[:, t].square().mean(-1, keepdim=True) + eps).sqrt() * weight
        rows.append(y if gate is None else y * act(gate[:, t]))
    return torch.stack(rows, 1) if rows else torch.zeros_like(x)


# Section 5: CAT


def cat_attention(q, k, v, *, chunk, scale=None):
    """Row t of chunk c reads the headers (rows 0) of chunks 0..c and the rows of chunk c up to t."""
    B, T, H, D = k.shape
    scale = D**-0.5 if scale is None else scale
    q, rows = group_queries(q, H), []
    for t in range(T):
        first = t // chunk * chunk
        visible = [*range(0, first, chunk), *range(first, t + 1)]
        p = (scale * torch.einsum("bshd,bhqd->bhqs", k[:, visible], q[:, t])).softmax(-1)
        rows.append(torch.einsum("bshv,bhqs->bhqv", v[:, visible], p))
    return join(rows, q.new_zeros(B, 0, *q.shape[2:4], v.shape[-1]))
