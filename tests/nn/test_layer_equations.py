"""Each layer against its equations. The Python layers and the C++ layers could share a mistake; these tests
would show the mistake.

The recurrences are those of tests/support/recurrences.py, which also test the operators. The rest of each
layer is written here a second time, from the docstrings and the papers. The eps of every norm is 1: a small
eps would hide the scale of the input.
"""

import math

import pytest
import recurrences as by_token
import torch
import torch.nn.functional as F
from girih.nn import (
    HGRN2,
    Attention,
    CompressAttend,
    DeltaProduct,
    GatedDeltaProduct,
    GatedLinearAttention,
    GatedSlotAttention,
    Lattice,
    Mamba2,
    MixAttention,
    Raven,
    RMSNorm,
    ShortConv,
    SwiGLU,
    Trellis,
    TTTLinear,
)

HIDDEN, T, CHUNK, EPS = 12, 11, 4, 1.0


def draw_layer(layer):
    """The layer in float64 with random parameters, and a random input."""
    torch.manual_seed(0)
    layer.double()
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn_like(p) * (0.5 if p.dim() > 1 else 0.8))
    return layer, torch.randn(2, T, HIDDEN, dtype=torch.double)


def check(layer, x, y):
    torch.testing.assert_close(layer(x)[0], y, atol=1e-9, rtol=1e-9)


def rms(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def conv(x, weight):
    """silu of a causal convolution. The last weight multiplies the newest token."""
    if weight is None:
        return F.silu(x)
    W = weight.shape[1]
    rows = [sum(weight[:, W - 1 - back] * x[:, t - back] for back in range(W) if t >= back) for t in range(T)]
    return F.silu(torch.stack(rows, 1))


def heads(x, count):
    return x.reshape(*x.shape[:-1], count, -1)


def decay(gate, x):
    """Mamba-2: dt = log(1 + e^(x W + b)), g = -e^A dt."""
    dt = (1 + (x @ gate.proj.weight.T + gate.dt_bias).exp()).log()
    return -gate.A_log.exp() * dt, dt


def gated_out(layer, o, x, act, normalized=True):
    y = rms(o, layer.norm.weight) if normalized else o
    y = y * act(heads(x @ layer.g_proj.weight.T, o.shape[2]))
    return y.flatten(-2) @ layer.o_proj.weight.T


@pytest.mark.parametrize("feature", ["softmax", "relu2"])
@pytest.mark.parametrize("conv_size", [0, 3])
@pytest.mark.parametrize("kind", ["gsa", "abc", "data-independent"])
def test_gated_slot_attention(kind, conv_size, feature):
    H, HQ, D, M = 2, 4, 3, 5
    layer, x = draw_layer(
        GatedSlotAttention(
            HIDDEN,
            HQ,
            num_kv_heads=H,
            head_dim=D,
            num_slots=M,
            gated=kind != "abc",
            data_dependent_decay=kind != "data-independent",
            conv_size=conv_size,
            feature=feature,
            norm_eps=EPS,
        )
    )
    q, k, v = conv(x @ layer.qkv_proj.weight.T, layer.conv.weight).split((HQ * D, H * D, H * D), -1)
    if kind == "data-independent":
        f = layer.decay_logits.expand(2, T, H, M)
    else:
        f = heads(x @ layer.f_proj.weight.T, H)
    s, g = (f, None) if kind == "abc" else (None, torch.log(1 / (1 + (-f).exp())) / 8)
    o, _ = by_token.gsa(heads(q, HQ), heads(k, H), heads(v, H), s, g, scale=1.0, feature=feature)
    check(layer, x, rms(F.silu(o).flatten(-2), layer.norm.weight) @ layer.o_proj.weight.T)


@pytest.mark.parametrize("expand_k, expand_v", [(1, 1), (0.5, 1.5)])
@pytest.mark.parametrize("conv_size", [0, 4])
@pytest.mark.parametrize("gate", ["none", "fixed", "scalar", "vector"])
def test_linear_attention_and_its_decays(gate, conv_size, expand_k, expand_v):
    H, HQ, D = 2, 4, 4
    layer, x = draw_layer(
        GatedLinearAttention(
            HIDDEN,
            HQ,
            num_kv_heads=H,
            head_dim=D,
            expand_k=expand_k,
            expand_v=expand_v,
            gate=gate,
            conv_size=conv_size,
            norm_eps=EPS,
        )
    )
    K, V = int(D * expand_k), int(D * expand_v)
    qkv = x @ layer.qkv_proj.weight.T
    qkv = conv(qkv, layer.conv.weight) if conv_size else qkv
    q, k, v = (heads(p, n) for p, n in zip(qkv.split((HQ * K, H * K, H * V), -1), (HQ, H, H), strict=True))
    g, skip = None, 0
    if gate == "none":
        q, k = (torch.where(p > 0, p + 1, p.exp()) for p in (q, k))
    elif gate == "fixed":
        g = torch.tensor([math.log(31 / 32), math.log(63 / 64)], dtype=torch.double).expand(2, T, H)
    elif gate == "scalar":
        g, dt = decay(layer.decay, x)
        skip = torch.stack([v[:, :, head // 2] * layer.skip[head] for head in range(HQ)], 2)
        v = v * dt[..., None]
    else:
        low = x @ layer.decay[0].weight.T
        f = low @ layer.decay[1].weight.T + layer.decay[1].bias
        g = heads(torch.log(1 / (1 + (-f).exp())) / 16, H)
    o, _ = by_token.gla(q, k, v, g, scale=K**-0.5)
    check(layer, x, gated_out(layer, o + skip, x, F.silu))


def test_retnet():
    H, HQ, D, theta = 2, 4, 4, 100.0
    layer, x = draw_layer(
        GatedLinearAttention(
            HIDDEN,
            HQ,
            num_kv_heads=H,
            head_dim=D,
            expand_v=2,
            gate="fixed",
            rotary=True,
            rope_theta=theta,
            norm_eps=EPS,
        )
    )
    q, k, v = (x @ layer.qkv_proj.weight.T).split((HQ * D, H * D, 2 * H * D), -1)
    q, k = (rotate(heads(p, n), range(T), theta) for p, n in ((q, HQ), (k, H)))
    v = heads(v, H)
    rows = []  # o_t = sum_s gamma^(t - s) (q_t . k_s) v_s / sqrt(D)
    for t in range(T):
        head_outputs = []
        for head in range(HQ):
            memory = head * H // HQ
            gamma = 1 - 2.0 ** (-5 - memory)
            weights = [gamma ** (t - s) * (q[:, t, head] * k[:, s, memory]).sum(-1) for s in range(t + 1)]
            head_outputs.append(sum(w[:, None] * v[:, s, memory] for s, w in enumerate(weights)) / D**0.5)
        rows.append(torch.stack(head_outputs, 1))
    check(layer, x, gated_out(layer, torch.stack(rows, 1), x, F.silu))


def gated_delta_product(layer, x, H, G, n, K, V):
    """Megatron's layer, by the definition: a state for each head, token by token and update by update."""
    rows = x @ layer.in_proj.weight.T
    z, vkq, b, a = rows.split([H * V, n * H * V + (n + 1) * G * K, n * H, H], -1)
    vkq = conv(vkq, layer.conv.weight)
    v, k, q = vkq.split([n * H * V, n * G * K, G * K], -1)
    v, k, q = v.unflatten(-1, (n, H, V)), k.unflatten(-1, (n, G, K)), q.unflatten(-1, (G, K))
    q, k = (p / (p.square().sum(-1, keepdim=True) + 1e-6).sqrt() for p in (q, k))
    beta = (1 / (1 + (-b).exp())).unflatten(-1, (n, H))
    forget = (-layer.A_log.exp() * (1 + (a + layer.dt_bias).exp()).log()).exp()
    outputs = []
    for row in range(x.shape[0]):
        for h in range(H):
            S, group = torch.zeros(K, V, dtype=x.dtype), h // (H // G)
            for t in range(x.shape[1]):
                S = forget[row, t, h] * S
                for j in range(n):
                    key = k[row, t, j, group]
                    S = S + beta[row, t, j, h] * torch.outer(key, v[row, t, j, h] - key @ S)
                outputs.append(q[row, t, group] @ S / K**0.5)
    o = torch.stack(outputs).view(x.shape[0], H, x.shape[1], V).transpose(1, 2).flatten(2)
    gated = heads(o * F.silu(z), G)
    y = rms(gated, 1.0).flatten(2) * layer.norm.weight
    return y @ layer.o_proj.weight.T


@pytest.mark.parametrize("n, groups, conv_size", [(3, 2, 4), (1, 1, 4), (2, 4, 0)])
def test_gated_delta_product(n, groups, conv_size):
    """Outputs, and gradients of every parameter and of the input."""
    sizes = {"n": n, "num_groups": groups, "head_dim": 3, "state_size": 5}
    layer, x = draw_layer(GatedDeltaProduct(HIDDEN, 4, conv_size=conv_size, norm_eps=EPS, **sizes))
    x.requires_grad_()
    y = gated_delta_product(layer, x, 4, groups, n, 5, 3)
    check(layer, x, y)
    tensors = [x, *layer.parameters()]
    weights = torch.randn_like(y)
    want = torch.autograd.grad((y * weights).sum(), tensors)
    found = torch.autograd.grad((layer(x)[0] * weights).sum(), tensors)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"topk": 5, "num_kv_heads": 2, "expand_k": 2, "expand_v": 3},
        {"slot_decay": True, "router_score": "softmax", "gate_logit_normalizer": 2.0},
        {"router_bias": True, "router_mlp": True},
        {"output_gate": True, "num_kv_heads": 2, "router_bias": True, "router_score": "softmax"},
    ],
    ids=str,
)
def test_raven(options):
    HQ, H, M, D = 4, options.get("num_kv_heads", 4), 5, 3
    topk = options.get("topk", 2)
    layer, x = draw_layer(
        Raven(HIDDEN, HQ, num_slots=M, head_dim=D, norm_eps=EPS, **({"topk": topk} | options))
    )
    if options.get("router_bias"):
        layer.r_bias.normal_()
    q = rms(heads(F.silu(x @ layer.q_proj.weight.T), HQ), layer.q_norm.weight)
    k = rms(heads(F.silu(x @ layer.k_proj.weight.T), H), layer.k_norm.weight)
    v = heads(F.silu(x @ layer.v_proj.weight.T), H)
    if options.get("router_mlp"):
        first, _, second = layer.r_proj
        logits = F.gelu(x @ first.weight.T + first.bias) @ second.weight.T
    else:
        logits = x @ layer.r_proj.weight.T
    logits = heads(logits, H)
    is_softmax = options.get("router_score") == "softmax"
    r = logits.exp() / logits.exp().sum(-1, keepdim=True) if is_softmax else 1 / (1 + (-logits).exp())
    ranked = r + layer.r_bias if options.get("router_bias") else r
    kept = (ranked[..., None, :] > ranked[..., None]).sum(-1) < topk  # fewer than topk slots rank before
    w = torch.where(kept, r, 0)
    w = w if is_softmax else w / w.sum(-1, keepdim=True)
    if options.get("slot_decay"):
        g = -w * (1 + (-heads(x @ layer.f_proj.weight.T, H)).exp()).log() / 2.0
    else:
        g = (
            -w
            * (layer.A_log.exp() * (1 + (x @ layer.a_proj.weight.T + layer.dt_bias).exp()).log())[..., None]
        )
    o, _ = by_token.gsa(q, k, v, 1 - g.exp(), g, scale=1.0)
    if options.get("output_gate"):
        y = rms(F.silu(o), layer.o_norm.weight) * F.silu(heads(x @ layer.o_gate_proj.weight.T, HQ))
        y = y.flatten(2)
    else:
        y = rms(F.silu(o).flatten(2), layer.g_norm.weight)
    torch.testing.assert_close(layer(x)[0], y @ layer.o_proj.weight.T, atol=1e-8, rtol=1e-7)


@pytest.mark.parametrize("bound", [0.0, 0.6])
@pytest.mark.parametrize("expand_k, expand_v", [(1, 1), (0.5, 1.5)])
def test_hgrn2(bound, expand_k, expand_v):
    H, D = 3, 4
    layer, x = draw_layer(
        HGRN2(
            HIDDEN,
            H,
            head_dim=D,
            expand_k=expand_k,
            expand_v=expand_v,
            lower_bound=bound,
            norm_eps=EPS,
        )
    )
    K, V = int(D * expand_k), int(D * expand_v)
    q, f, v = (heads(p, H) for p in (x @ layer.qfv_proj.weight.T).split((H * K, H * K, H * V), -1))
    f = bound + (1 - bound) / (1 + (-f).exp())
    S, rows = torch.zeros(2, H, K, V, dtype=torch.double), []
    for t in range(T):
        S = f[:, t, :, :, None] * S + (1 - f[:, t])[..., None] * v[:, t, :, None]
        rows.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t] * q[:, t].sigmoid()))
    o = torch.stack(rows, 1).flatten(-2)
    check(layer, x, rms(o, layer.norm.weight) @ layer.o_proj.weight.T)


@pytest.mark.parametrize("options", [{}, {"expand_v": 1.5, "state_size": 7, "conv_size": 3}], ids=str)
def test_mamba2(options):
    D, N = 3, options.get("state_size", 128)
    H = int(2 * options.get("expand_v", 2))
    layer, u = draw_layer(Mamba2(HIDDEN, 2, head_dim=D, norm_eps=EPS, **options))
    projected = u @ layer.in_proj.weight.T
    W = layer.conv.weight.shape[1]
    padded = F.pad(projected, (0, 0, W - 1, 0))
    mixed = sum(padded[:, j : j + T] * layer.conv.weight[:, j] for j in range(W)) + layer.conv.bias
    x, B, C = F.silu(mixed).split((H * D, N, N), -1)
    x = heads(x, H)
    dt = (1 + (u @ layer.dt_proj.weight.T + layer.dt_bias).exp()).log()
    S, rows = torch.zeros(2, H, D, N, dtype=torch.double), []
    for t in range(T):
        decay = (-layer.A_log.exp() * dt[:, t]).exp()
        update = torch.einsum("bhp,bn->bhpn", x[:, t] * dt[:, t, :, None], B[:, t])
        S = decay[:, :, None, None] * S + update
        rows.append(torch.einsum("bhpn,bn->bhp", S, C[:, t]) + layer.skip[:, None] * x[:, t])
    z = u @ layer.z_proj.weight.T
    y = rms(torch.stack(rows, 1).flatten(-2) * z * z.sigmoid(), layer.norm.weight)
    check(layer, u, y @ layer.o_proj.weight.T)


@pytest.mark.parametrize(
    "options",
    [
        {"n": 1},
        {"n": 1, "gated": True},
        {"n": 3, "gated": True, "allow_neg_eigval": True},
        {"n": 2, "between_chunks": "gelu", "chunk": CHUNK},
        {"n": 2, "conv_size": 0},
        {"n": 1, "gated": True, "expand_v": 2},
        {"n": 2, "expand_k": 2, "expand_v": 3, "between_chunks": "tanh", "chunk": CHUNK},
    ],
    ids=str,
)
def test_delta_product(options):
    n, H, HQ, D = options["n"], 2, 4, 3
    layer, x = draw_layer(DeltaProduct(HIDDEN, HQ, num_kv_heads=H, head_dim=D, norm_eps=EPS, **options))
    K, V = D * options.get("expand_k", 1), D * options.get("expand_v", 1)
    q, k, v = conv(x @ layer.qkv_proj.weight.T, layer.conv.weight).split((HQ * K, n * H * K, n * H * V), -1)
    beta = 1 / (1 + (-(x @ layer.beta_proj.weight.T)).exp())
    beta = 2 * beta if options.get("allow_neg_eigval") else beta
    # the n steps of a token, in order
    steps = [x.unflatten(-1, (n, H, -1)).flatten(1, 2) for x in (k, v, beta)]
    q, k = (p / (p.square().sum(-1, keepdim=True) + 1e-6).sqrt() for p in (heads(q, HQ), steps[0]))
    g = decay(layer.decay, x)[0] if options.get("gated") else None
    o, _ = by_token.delta_product(
        q,
        k,
        steps[1],
        steps[2][..., 0],
        g,
        n=n,
        scale=K**-0.5,
        chunk=options.get("chunk"),
        between_chunks=options.get("between_chunks"),
    )
    check(layer, x, gated_out(layer, o, x, F.silu))


def unit(x, dim=-1):
    return x / x.square().sum(dim, keepdim=True).sqrt()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gated": False, "phi": "l2_silu", "f": "softmax"},
        {"shared_qk": True, "normalize_kv": False},
        {"post_norm": False, "phi": "layer_norm", "value_read": "phi"},
    ],
    ids=str,
)
def test_trellis(options):
    H, D, M = 3, 4, 5
    gated, phi, f = options.get("gated", True), options.get("phi", "ln_silu"), options.get("f", "ln_silu")
    layer, x = draw_layer(Trellis(HIDDEN, H, head_dim=D, num_slots=M, chunk=CHUNK, norm_eps=EPS, **options))
    if "shared_qk" in options:  # one projection, two convolutions
        q = k = x @ layer.qk_proj.weight.T
    else:
        q, k = x @ layer.q_proj.weight.T, x @ layer.k_proj.weight.T
    q, k = heads(conv(q, layer.q_conv.weight), H), heads(conv(k, layer.k_conv.weight), H)
    v = heads(x @ layer.v_proj.weight.T, H)
    if options.get("normalize_kv", True):
        k, v = unit(k), unit(v)
    gamma = 1 / (1 + (-(x @ layer.gamma_proj.weight.T + layer.gamma_proj.bias)).exp())
    o, _ = by_token.trellis(
        q,
        k,
        v,
        heads(x @ layer.a_proj.weight.T, H),
        gamma,
        decay(layer.decay, x)[0] if gated else None,
        chunk=CHUNK,
        phi=phi,
        f=f,
        state=(layer.key_memory, layer.value_memory),
    )
    if "value_read" in options:  # by the layer norm
        o = o - o.mean(-1, keepdim=True)
        o = o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    check(layer, x, gated_out(layer, o, x, F.gelu, normalized=options.get("post_norm", True)))


@pytest.mark.parametrize("conv_size", [0, 3])
def test_ttt(conv_size):
    """f(x) = x + w * LayerNorm(A x) + b learns f(k) = v. The layer norm uses the eps of the operator."""
    H, D = 3, 4
    layer, x = draw_layer(TTTLinear(HIDDEN, H, head_dim=D, chunk=CHUNK, conv_size=conv_size, norm_eps=EPS))
    q, k = (
        unit(heads(conv(x @ proj.weight.T, filters.weight), H))
        for proj, filters in ((layer.q_proj, layer.q_conv), (layer.k_proj, layer.k_conv))
    )
    v = heads(x @ layer.v_proj.weight.T, H)
    gamma = 1 / (1 + (-(x @ layer.gamma_proj.weight.T + layer.gamma_proj.bias)).exp())
    w, b = layer.inner_weight, layer.inner_bias
    o, _ = by_token.ttt(
        q, k, v - k - b, gamma, None, w, chunk=CHUNK, phi="layer_norm", f="layer_norm", state=layer.memory
    )
    check(layer, x, gated_out(layer, q + w * o + b, x, F.gelu))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("objective", ["decode", "encode", "similarity"])
@pytest.mark.parametrize(
    "options",
    [{}, {"post_norm": True}, {"chunk": 1, "normalize": False}, {"chunk": 1, "shrinkage": 0.05}],
    ids=str,
)
def test_lattice(objective, gated, options):
    H, D, M = 3, 4, 5
    rule = {"chunk": CHUNK, "objective": objective} | options
    normalized = rule.pop("post_norm", False)
    layer, x = draw_layer(
        Lattice(HIDDEN, H, head_dim=D, num_slots=M, gated=gated, norm_eps=EPS, **rule, post_norm=normalized)
    )
    qk = x @ layer.qk_proj.weight.T
    q, k = conv(qk, layer.q_conv.weight), conv(qk, layer.k_conv.weight)
    v = heads(x @ layer.v_proj.weight.T, H)
    gamma = 1 / (1 + (-(x @ layer.gamma_proj.weight.T + layer.gamma_proj.bias)).exp())
    o, _ = by_token.lattice(
        heads(q, H),
        heads(k, H),
        unit(v) if objective == "encode" else v,
        gamma,
        decay(layer.decay, x)[0] if gated else None,
        # The columns have length one.
        state=unit(layer.memory, -2) if rule.get("normalize", True) else layer.memory,
        **rule,
    )
    check(layer, x, gated_out(layer, o, x, F.gelu, normalized=normalized))


def rotate(x, position, theta):
    """Rotary embedding: the pair (x_i, x_{i + D/2}), as a complex number, rotated by position *
    theta^(-2i/D)."""
    half = x.shape[-1] // 2
    rate = torch.tensor([theta ** (-2 * i / x.shape[-1]) for i in range(half)], dtype=torch.double)
    angle = torch.tensor(position, dtype=torch.double)[:, None, None] * rate
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag), -1)


def softmax_attention(layer, x, position, visible_rows):
    """Attention row by row: row t attends to visible_rows(t), query head i reads key head i // group."""
    HQ, H = layer.heads[:2]
    D = layer.head_dim
    q, k, v = (x @ layer.qkv_proj.weight.T).split((HQ * D, H * D, H * D), -1)
    q, k = (rotate(heads(p, n), position, layer.rope_theta) for p, n in ((q, HQ), (k, H)))
    v = heads(v, H)
    k, v = (torch.stack([p[:, :, i * H // HQ] for i in range(HQ)], 2) for p in (k, v))
    rows = []
    for t in range(x.shape[1]):
        p = (torch.einsum("bhd,bshd->bhs", q[:, t], k[:, visible_rows(t)]) / D**0.5).softmax(-1)
        rows.append(torch.einsum("bhs,bshd->bhd", p, v[:, visible_rows(t)]))
    return torch.stack(rows, 1).flatten(-2) @ layer.o_proj.weight.T


@pytest.mark.parametrize("causal", [True, False])
def test_attention(causal):
    layer, x = draw_layer(Attention(HIDDEN, 4, num_kv_heads=2, head_dim=6, rope_theta=100.0, causal=causal))
    check(layer, x, softmax_attention(layer, x, range(T), lambda t: list(range(t + 1 if causal else T))))


@pytest.mark.parametrize("window", [1, 4, T])
def test_attention_sees_a_window(window):
    layer, x = draw_layer(Attention(HIDDEN, 4, num_kv_heads=2, head_dim=6, window=window))
    check(
        layer, x, softmax_attention(layer, x, range(T), lambda t: list(range(max(0, t - window + 1), t + 1)))
    )


@pytest.mark.parametrize("running", [False, True])
def test_compress_attend(running):
    layer, x = draw_layer(
        CompressAttend(HIDDEN, 4, num_kv_heads=2, head_dim=4, chunk=CHUNK, running_positions=running)
    )
    rows, position, token_rows, header_rows = [], [], [], []
    for k in range(-(-T // CHUNK)):
        past = x[:, (k - 1) * CHUNK : k * CHUNK].flatten(1)
        header = layer.header.expand(2, -1) if k == 0 else past @ layer.compress.weight.T
        header_rows.append(len(rows))
        for r, row in enumerate([header, *x[:, k * CHUNK : (k + 1) * CHUNK].unbind(1)]):
            token_rows += [len(rows)] * (r > 0)
            position.append(r + (k if running else 0))
            rows.append(row)

    def visible_rows(t):
        own = max(at for at in header_rows if at <= t)
        return [at for at in header_rows if at < own] + list(range(own, t + 1))

    y = softmax_attention(layer.attention, torch.stack(rows, 1), position, visible_rows)
    check(layer, x, y[:, token_rows])


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("learned", [False, True])
def test_mixture(learned, cross):
    base, mixer = Attention(HIDDEN, 2), DeltaProduct(HIDDEN, 2)
    layer, x = draw_layer(MixAttention(base, mixer, weight=0.25, learned=learned, cross=cross))
    m = 1 / (1 + (-layer.logit).exp()) if learned else 0.25
    a, b = (1 - m) * base(x)[0], m * mixer(x)[0]
    check(layer, x, a + b + (a * b if cross else 0))


def test_short_conv():
    layer, x = draw_layer(ShortConv(HIDDEN, 3, activation=None, bias=True))
    padded = F.pad(x, (0, 0, 2, 0))
    y = sum(padded[:, j : j + T] * layer.weight[:, j] for j in range(3)) + layer.bias
    check(layer, x, y)


def test_norm_and_feed_forward():
    norm, x = draw_layer(RMSNorm(HIDDEN, EPS))
    torch.testing.assert_close(norm(x), rms(x, norm.weight))
    mlp, x = draw_layer(SwiGLU(HIDDEN, 20))
    gate, up = x @ mlp.gate_proj.weight.T, x @ mlp.up_proj.weight.T
    torch.testing.assert_close(mlp(x), (gate * gate.sigmoid() * up) @ mlp.down_proj.weight.T)
