"""fla's functions as recurrences: fla's names of arguments, the recurrences of `recurrences.py`, autograd.

Each function returns `(o, state)`, the state always, in fla's layout.
"""

import recurrences
import torch
import torch.nn.functional as F


def by_sequence(run, tensors, state, cu_seqlens, n=None):
    """`run(tensors, state)` for each sequence. n: rows of a tensor for each token, by name, where not 1."""
    if cu_seqlens is None:
        return run(tensors, state)
    results = []
    for i, (start, end) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
        rows = {name: (n or {}).get(name, 1) for name in tensors}
        part = {
            name: None if x is None else x[:, start * rows[name] : end * rows[name]]
            for name, x in tensors.items()
        }
        results.append(run(part, None if state is None else tuple(x[i : i + 1] for x in state)))
    states = zip(*(state for _, state in results), strict=True)
    return torch.cat([o for o, _ in results], 1), tuple(torch.cat(parts) for parts in states)


def swapped(state, state_v_first):
    return None if state is None else (state.mT if state_v_first else state,)


def gsa(q, k, v, s, g=None, scale=None, initial_state=None, cu_seqlens=None, **hints):
    def run(x, state):
        s, g = x.pop("s"), x.pop("g")
        if g is None:  # the logits of this call, normalized
            z = s.logcumsumexp(1)
            g = torch.cat((z[:, :1], z[:, :-1]), 1) - z
            s = (s - z).exp()
        o, (k, v, _) = recurrences.gsa(**x, s=s, g=g, scale=scale, state=state and (*state, None))
        return o, (k, v)

    return by_sequence(run, {"q": q, "k": k, "v": v, "s": s, "g": g}, initial_state, cu_seqlens)


def gla(
    q,
    k,
    v,
    g=None,
    gk=None,
    g_gamma=None,
    scale=None,
    initial_state=None,
    state_v_first=False,
    transpose_state_layout=False,
    cu_seqlens=None,
    **hints,
):
    state_v_first = state_v_first or transpose_state_layout
    g = gk if g is None else g
    g = g if g_gamma is None else g_gamma.expand(*q.shape[:3])
    tensors = {"q": q, "k": k, "v": v, "g": g}

    def run(x, state):
        return recurrences.gla(**x, scale=scale, state=state)

    o, (state,) = by_sequence(run, tensors, swapped(initial_state, state_v_first), cu_seqlens)
    return o, state.mT if state_v_first else state


def delta_rule(
    q,
    k,
    v,
    beta=None,
    g=None,
    scale=None,
    initial_state=None,
    use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    use_gate_in_kernel=False,
    A_log=None,
    dt_bias=None,
    state_v_first=False,
    transpose_state_layout=False,
    cu_seqlens=None,
    num_householder=1,
    **hints,
):
    state_v_first = state_v_first or transpose_state_layout
    beta = torch.ones_like(v[..., 0]) if beta is None else beta
    if use_beta_sigmoid_in_kernel:
        beta = (2 if allow_neg_eigval else 1) * beta.sigmoid()
    if use_gate_in_kernel:
        g = -A_log.exp() * F.softplus(g if dt_bias is None else g + dt_bias)
    n = num_householder
    options = {"n": n, "scale": scale, "l2norm_qk": use_qk_l2norm_in_kernel}

    def run(x, state):
        o, (S, _) = recurrences.delta_product(**x, **options, state=state and (*state, None))
        return o, (S,)

    tensors = {"q": q, "k": k, "v": v, "beta": beta, "g": g}
    rows = {"k": n, "v": n, "beta": n}
    o, (state,) = by_sequence(run, tensors, swapped(initial_state, state_v_first), cu_seqlens, rows)
    return o, state.mT if state_v_first else state


def causal_conv1d(
    x, weight, bias=None, residual=None, initial_state=None, activation=None, cu_seqlens=None, **hints
):
    shape, (channels, W) = x.shape, weight.shape
    x = x.reshape(*x.shape[:2], channels)

    def run(tensors, state):
        x = tensors["x"]
        before = x.new_zeros(x.shape[0], channels, W) if state is None else state[0]
        window = torch.cat([before, x.mT], -1)
        rows = []
        for t in range(x.shape[1]):
            y = (window[..., t + 1 : t + 1 + W] * weight).sum(-1)
            y = y if bias is None else y + bias
            rows.append(y if activation is None else F.silu(y))
        return torch.stack(rows, 1) if rows else torch.zeros_like(x), (window[..., -W:],)

    state = None if initial_state is None else (initial_state,)
    y, (state,) = by_sequence(run, {"x": x}, state, cu_seqlens)
    y = y.reshape(shape)
    return y if residual is None else y + residual, state


def rms_norm_gated(x, g, weight, bias=None, activation="swish", eps=1e-6, **absent):
    activation = "silu" if activation == "swish" else activation
    weight = x.new_ones(x.shape[-1]) if weight is None else weight
    return recurrences.gated_rms_norm(x, weight, g, activation=activation, eps=eps), None


REFERENCES = {
    "chunk_gsa": gsa,
    "fused_recurrent_gsa": gsa,
    "chunk_gla": gla,
    "fused_recurrent_gla": gla,
    "chunk_simple_gla": gla,
    "fused_recurrent_simple_gla": gla,
    "fused_chunk_simple_gla": gla,
    "parallel_simple_gla": gla,
    "chunk_delta_rule": delta_rule,
    "fused_recurrent_delta_rule": delta_rule,
    "chunk_gated_delta_rule": delta_rule,
    "chunk_gdn": delta_rule,
    "fused_recurrent_gated_delta_rule": delta_rule,
    "fused_recurrent_gdn": delta_rule,
    "chunk_gated_delta_product": delta_rule,
    "causal_conv1d": causal_conv1d,
    "rms_norm_gated": rms_norm_gated,
}


# Inputs

B, T, H, K, V, M, D, W = 2, 70, 2, 4, 3, 5, 6, 4
LENGTHS = (1, 0, 5, 64)  # of packed sequences


def draw(function, *, packed=False, resumed=False, dtype=torch.float64, device="cpu", seed=0, **sizes):
    """Arguments of a function, by name. sizes: HQ query heads of gsa, HV value heads, n rows a token; heads
    of causal_conv1d's channels."""
    generator = torch.Generator().manual_seed(seed)
    HQ, HV, n = sizes.get("HQ", H), sizes.get("HV", H), sizes.get("n", 1)
    rows, N = (1, len(LENGTHS)) if packed else (B, B)

    def randn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def unit(*shape):
        return F.normalize(randn(*shape), dim=-1)

    arguments, options = {}, {}
    if function == "causal_conv1d":
        heads = sizes.get("heads")
        x = (rows, T, D) if heads is None else (rows, T, heads, D // heads)
        arguments = {"x": randn(*x), "weight": randn(D, W)}
        state = randn(N, D, W)
    elif function == "rms_norm_gated":
        arguments = {"x": randn(rows, T, D), "g": randn(rows, T, D), "weight": randn(D)}
        options = {"bias": None}
    elif "gsa" in function:
        arguments = {"q": randn(rows, T, HQ, K), "k": randn(rows, T, H, K), "v": randn(rows, T, H, V)}
        arguments |= {"s": randn(rows, T, H, M).sigmoid(), "g": F.logsigmoid(randn(rows, T, H, M))}
        state = randn(N, H, K, M), randn(N, H, M, V)
    elif "gla" in function:
        arguments = {"q": randn(rows, T, H, K), "k": randn(rows, T, H, K), "v": randn(rows, T, H, V)}
        is_simple = "simple" in function
        gates = {} if is_simple else {"gk" if function.startswith("fused") else "g": (rows, T, H, K)}
        gates = {"g": (rows, T, H)} if is_simple else gates
        arguments |= {name: F.logsigmoid(randn(*shape)) for name, shape in gates.items()}
        state = randn(N, H, K, V)
    else:
        arguments = {"q": unit(rows, T, H, K), "k": unit(rows, T * n, H, K), "v": randn(rows, T * n, HV, V)}
        arguments |= {"beta": randn(rows, T * n, HV).sigmoid()}
        if "gated" in function or "gdn" in function:
            arguments |= {"g": F.logsigmoid(randn(rows, T, HV))}
        options = {"num_householder": n} if function == "chunk_gated_delta_product" else {}
        state = randn(N, HV, K, V)
    if resumed:
        arguments["initial_state"] = state
    arguments = {name: as_leaves(x, dtype, device) for name, x in arguments.items()}
    if packed:
        bounds = torch.tensor((0, *LENGTHS)).cumsum(0)
        options["cu_seqlens"] = bounds.to(device)
    return arguments | options


def as_leaves(x, dtype, device):
    if isinstance(x, tuple):
        return tuple(as_leaves(part, dtype, device) for part in x)
    return x.to(device, dtype).requires_grad_()
