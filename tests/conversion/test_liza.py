"""The linear path of LiZA, compared with its equations token by token."""

import itertools
import math

import girih
import pytest
import torch
import torch.nn.functional as F
from converted import IDS, base_model
from girih.conversion import Injection, LinearPath, liza
from girih.conversion.liza import PATHS, elu_plus_one
from girih.conversion.projections import Projections
from girih.conversion.rows import silu_normalize
from girih.models import GirihConfig, GirihForCausalLM
from girih.nn import MixState, map_state
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HEADS, KV_HEADS, D, T = 4, 2, 6, 11
SIZES = Projections(("q_proj", "k_proj", "v_proj"), "o_proj", None, 32, HEADS, KV_HEADS, D)


def path_of(**options):
    torch.manual_seed(0)
    spec = Injection(**options)
    path = PATHS[spec.mixer](SIZES, spec).double()
    with torch.no_grad():
        for weight in path.parameters():
            weight.normal_()
    return path


def inputs(tokens=T, rows=2):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, tokens, (HEADS + 2 * KV_HEADS) * D, dtype=torch.float64, generator=generator)


def qkv(x):
    return x.split([HEADS * D, KV_HEADS * D, KV_HEADS * D], -1)


def reference_path(path, x, spec):
    """One row x `[T, channels]`, by Furfaro 2025, eq. 4, 5, 6, 16, 22, 23, 24."""
    raw = x.view(len(x), -1, D)

    def unit(column, s):  # eq. 4
        if s < 0:
            return torch.zeros(D, dtype=x.dtype)
        y = raw[s, column] * torch.sigmoid(raw[s, column])
        return y / y.norm()

    def mean(column, t):  # eq. 5
        if spec.pool == "past":
            return sum(raw[s, column] for s in range(t + 1)) / (t + 1)
        return sum(raw[s, column] for s in range(max(t - 2, 0), t + 1)) / 3

    def virtual(column, t, m):  # eq. 22, 23
        differences = [(-1) ** k * math.comb(m, k) * unit(column, t - k) for k in range(m + 1)]
        derivative = sum(differences) / 2**m
        angle, y = 2 * math.pi * m / spec.n, unit(column, t)
        cos, sin = math.cos(angle), math.sin(angle)
        turn = torch.tensor([[cos, -sin], [sin, cos]], dtype=x.dtype)
        rotary = torch.cat([turn @ y[i : i + 2] for i in range(0, D, 2)])
        if spec.virtual_tokens == "both":
            return (derivative + rotary) / 2
        return derivative if spec.virtual_tokens == "derivative" else rotary

    outputs = []
    for head in range(HEADS):
        memory = head // (HEADS // KV_HEADS)
        columns = {"k": HEADS + memory, "v": HEADS + KV_HEADS + memory}
        S = torch.zeros(D, D, dtype=x.dtype)
        for t in range(len(x)):
            beta = math.prod(torch.sigmoid(mean(columns[letter], t)) for letter in spec.gate)
            for m in range(spec.n):  # eq. 16
                k, v = virtual(columns["k"], t, m), virtual(columns["v"], t, m)
                if spec.gate_per == "head":
                    beta = beta.mean().expand(D)
                S = S + torch.outer(k, beta * v - S.T @ (beta * k))
            o = S.T @ unit(head, t)
            outputs.append(o / (o.square().mean() + spec.norm_eps).sqrt() * path.norm.weight)  # eq. 6
            if spec.between_chunks and (t + 1) % spec.chunk == 0:  # eq. 24
                S = S.tanh() if spec.between_chunks == "tanh" else torch.nn.functional.gelu(S)
    return torch.stack(outputs).view(HEADS, len(x), D).transpose(0, 1).flatten(1)


LINEAR = {"mixer": "linear_attention"}


@torch.no_grad()
def test_linear_attention_is_a_mean_of_values():
    """Furfaro 2025, Algorithm 1, and eq. 3 with beta = 1, as one matrix of weights for each head."""
    path, x = path_of(**LINEAR), inputs()
    assert list(path.parameters()) == []
    y, _ = path(qkv(x))
    rows = x.unflatten(-1, (-1, D)).transpose(1, 2)
    phi = torch.nn.functional.elu(rows) + 1
    for head in range(HEADS):
        memory = head // (HEADS // KV_HEADS)
        weights = (phi[:, head] @ phi[:, HEADS + memory].mT).tril()
        o = weights / weights.sum(-1, keepdim=True) @ rows[:, HEADS + KV_HEADS + memory]
        torch.testing.assert_close(y[..., head * D : (head + 1) * D], o, atol=1e-9, rtol=1e-7)


def test_the_state_is_the_sum_and_the_normaliser():
    path, x = path_of(**LINEAR), inputs()
    _, (memory, normalizer) = path(qkv(x), use_cache=True)
    _, k, v = (part.unflatten(-1, (-1, D)) for part in qkv(x))
    phi = torch.nn.functional.elu(k) + 1
    torch.testing.assert_close(memory.s, torch.einsum("bthd,bthv->bhdv", phi, v), atol=1e-9, rtol=1e-7)
    torch.testing.assert_close(normalizer.s[..., 0], phi.sum(1), atol=1e-9, rtol=1e-7)


def test_phi_keeps_its_digits_and_its_gradient():
    x = torch.tensor([-30.0, -3.0, -0.5, 0.0, 0.5, 3.0], dtype=torch.float64, requires_grad=True)
    want = torch.where(x > 0, x + 1, x.exp())
    (gradient,) = torch.autograd.grad(elu_plus_one(x).sum(), x)
    torch.testing.assert_close(elu_plus_one(x), want)
    torch.testing.assert_close(gradient, x.clamp(max=0).exp().detach())
    for dtype in (torch.float32, torch.bfloat16):
        torch.testing.assert_close(elu_plus_one(x.to(dtype)), want.to(dtype))


@torch.no_grad()
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)], ids=str)
def test_16_bit_sums_beyond_the_range_of_fp16(dtype, tolerance, autocast):
    """phi(q) phi(k) is about 600 a token, so the sum over 3000 tokens exceeds 65504."""
    path, tokens = PATHS["linear_attention"](SIZES, Injection(**LINEAR)), 3000
    x = (
        9 + torch.randn(1, tokens, (HEADS + 2 * KV_HEADS) * D, generator=torch.Generator().manual_seed(0))
    ).to(dtype)
    with torch.autocast("cpu", dtype, enabled=autocast):
        y, state = path(qkv(x), use_cache=True)
        step, _ = path(qkv(x[:, :1]), state=state, use_cache=True)
    want, _ = path(qkv(x.double()))
    assert y.dtype == step.dtype == dtype and step.isfinite().all()
    assert ((y.double() - want) / want).abs().max() < tolerance


@pytest.mark.parametrize("rows", ["masked", "far below"])
def test_tokens_of_zero_weight_give_finite_results(rows):
    """The token is masked, or its e^q is 0 in fp32."""
    path, x = PATHS["linear_attention"](SIZES, Injection(**LINEAR)), inputs().float()
    mask = torch.ones(2, T, dtype=torch.long)
    if rows == "masked":
        mask[0, :3], mask[1] = 0, 0
    else:
        x[:, 2] = -200.0
    y, _ = path(qkv(x.requires_grad_()), mask)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    assert y.isfinite().all() and gradient.isfinite().all()


VARIANTS = (
    [
        {"n": n, "virtual_tokens": virtual, "gate": gate, "pool": pool}
        for n, virtual, gate, pool in itertools.product(
            (1, 2, 4), ("derivative", "rotary", "both"), ("k", "v", "kv"), ("past", "window")
        )
        if n == 4 or (virtual == "derivative" and gate != "v")
    ]
    + [{"gate_per": "head", "gate": gate} for gate in ("v", "kv")]
    + [{"between_chunks": phi, "chunk": 4} for phi in ("gelu", "tanh")]
    + [
        {"n": 3, "virtual_tokens": "both", "gate": "kv", "gate_per": "head", "pool": "window"}
        | {"between_chunks": "gelu", "chunk": 4, "norm_eps": 0.3}
    ]
)


@torch.no_grad()
@pytest.mark.parametrize("options", VARIANTS, ids=lambda o: " ".join(map(str, o.values())))
def test_the_path_computes_its_equations(options):
    path, x = path_of(**options), inputs()
    y, _ = path(qkv(x))
    for row in range(2):
        torch.testing.assert_close(
            y[row], reference_path(path, x[row], Injection(**options)), atol=1e-9, rtol=1e-7
        )


STATES = [
    {"n": 4, "virtual_tokens": "both", "gate": "kv"},
    {"n": 3, "pool": "window", "gate": "v", "gate_per": "head"},
    {"n": 1, "between_chunks": "tanh", "chunk": 3},
    LINEAR,
]


@pytest.mark.parametrize("options", STATES, ids=str)
def test_state_continues_a_sequence(options):
    path, x = path_of(**options), inputs()
    whole, _ = path(qkv(x))
    for cuts in ((4,), (1, 2), tuple(range(1, T))):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                state, parts = None, []
                for a, b in zip((0, *cuts), (*cuts, T), strict=True):
                    y, state = path(qkv(x[:, a:b]), None, state, True)
                    parts.append(y)
                torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-9, rtol=1e-7)


@torch.no_grad()
@pytest.mark.parametrize("options", STATES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3])
def test_call_without_use_cache_leaves_the_state_unchanged(options, tokens):
    path, x = path_of(**options), inputs()
    _, state = path(qkv(x[:, :4]), use_cache=True)
    before = [part.clone() for part in tree_leaves(state) if isinstance(part, torch.Tensor)]
    want, _ = path(qkv(x[:, : 4 + tokens]))
    for _ in range(2):
        y, new_state = path(qkv(x[:, 4 : 4 + tokens]), None, state, False)
        torch.testing.assert_close(y, want[:, 4:], atol=1e-9, rtol=1e-7)
        assert new_state is None
    after = [part for part in tree_leaves(state) if isinstance(part, torch.Tensor)]
    assert len(before) >= 2 and all(a.equal(b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("options", STATES, ids=str)
def test_packed_and_masked_sequences_match_separate_sequences(options):
    path, x = path_of(**options), inputs(rows=1)
    packed, state = path(qkv(x), cu_seqlens=torch.tensor([0, 4, 4, 5, T]), use_cache=True)
    alone = [path(qkv(x[:, a:b]), use_cache=True) for a, b in ((0, 4), (4, 5), (5, T))]
    torch.testing.assert_close(packed, torch.cat([y for y, _ in alone], 1), atol=1e-9, rtol=1e-7)
    torch.testing.assert_close(state.memory.s[3], alone[2][1].memory.s[0], atol=1e-9, rtol=1e-7)
    mask = torch.ones(1, T, dtype=torch.long)
    mask[0, [0, 1, 5, 10]] = 0
    masked, state = path(qkv(x), mask, use_cache=True)
    unmasked, expected = path(qkv(x[:, mask[0].bool()]), use_cache=True)
    torch.testing.assert_close(masked[:, mask[0].bool()], unmasked, atol=1e-9, rtol=1e-7)
    after, _ = path(qkv(x[:, :3]), None, state, True)
    torch.testing.assert_close(after, path(qkv(x[:, :3]), None, expected, True)[0], atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("options", STATES, ids=str)
def test_gradients_match_finite_differences(options):
    path, x = path_of(**options), inputs(tokens=5, rows=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: path(qkv(x))[0], (x,), atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("pool", ["past", "window"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)], ids=str)
def test_16_bit_step_sizes_beyond_the_range_of_fp16(pool, dtype, tolerance, autocast):
    """The sum of 9000 keys of mean -8 exceeds 65504, the maximum of fp16. The sigmoid of the
    mean is 0.0003."""
    path, tokens = LinearPath(SIZES, Injection(n=1, pool=pool)).to(dtype), 9000
    k_dtype = torch.float32 if autocast else dtype
    k = -8 + torch.randn(1, tokens, KV_HEADS, D, generator=torch.Generator().manual_seed(0)).to(k_dtype)
    with torch.autocast("cpu", dtype, enabled=autocast):
        beta, *_ = path.step_sizes(k, k, None, False, None)
    wide = k.double()
    if pool == "past":
        mean = wide.cumsum(1) / torch.arange(1, tokens + 1)[:, None, None]
    else:
        mean = sum(F.pad(wide, (0, 0, 0, 0, m, 0))[:, :tokens] for m in range(3)) / 3
    late = slice(tokens - 500, None)
    assert ((beta.double() / mean.sigmoid())[:, late] - 1).abs().max() < 10 * tolerance


def change_part(state, i, change):
    """The state with its i-th tensor changed."""
    number = itertools.count()
    return map_state(lambda part: change(part) if next(number) == i else part, state)


@torch.no_grad()
@pytest.mark.parametrize("options", STATES, ids=str)
@pytest.mark.parametrize("cross", [False, True])
def test_invalid_state_of_a_layer_is_refused_before_any_write(options, cross):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_heads": 4, "num_kv_heads": 2}
    model = GirihForCausalLM(GirihConfig(mixer="attention", **sizes)).eval()
    girih.inject(model, cross=cross, **options)
    layer, x = model.model.layers[0].mixer, torch.randn(2, 5, 32)
    _, state = layer(x, use_cache=True)
    parts = []
    map_state(lambda part: parts.append(part) or part, state)
    before = [part.clone() for part in parts]
    wrong = [change_part(state, i, f) for i in range(len(parts)) for f in (lambda p: p[:1], torch.Tensor.int)]
    wrong += [MixState(state.base, None), MixState(None, state.mixer), MixState(state.base, state.base)]
    for other in wrong:
        with pytest.raises(ValueError, match="state"):
            layer(x[:, :1], None, other, True)
    for other in (state.base, 5):
        with pytest.raises(ValueError, match=f"state is a {type(other).__name__}; expected a MixState"):
            layer(x[:, :1], None, other, True)
    assert all(now.equal(old) for now, old in zip(parts, before, strict=True))
    layer(x[:, :1], None, state, True)
    assert not any(now.equal(old) for now, old in zip(parts, before, strict=True) if now.is_floating_point())


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"pool": "window"}, {"gate": "kv", "n": 3}], ids=str)
@pytest.mark.parametrize("prefill_in_bf16", [False, True])
def test_cache_inside_and_outside_autocast(options, prefill_in_bf16):
    model = base_model("llama").eval()
    girih.inject(model, **options)
    want = model(IDS[:, :7]).logits
    with torch.autocast("cpu", torch.bfloat16, enabled=prefill_in_bf16):
        cache = model(IDS[:, :5], use_cache=True).past_key_values
    found = []
    for t in (5, 6):
        with torch.autocast("cpu", torch.bfloat16, enabled=not prefill_in_bf16):
            found.append(model(IDS[:, t : t + 1], past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(found, 1).float(), want[:, 5:], atol=0.05, rtol=0.05)


@torch.no_grad()
def test_invalid_state_of_a_model_is_refused_before_keys_are_written():
    model = base_model("llama").eval()
    girih.inject(model)
    cache = model(IDS[:, :5], use_cache=True).past_key_values
    layer = cache.layers[0]
    saved_state, layer.state = layer.state, map_state(lambda part: part[:1], layer.state)
    with pytest.raises(ValueError, match="state has 1 sequences; expected 2"):
        model(IDS[:, 5:6], past_key_values=cache)
    layer.state = saved_state
    torch.testing.assert_close(
        model(IDS[:, 5:6], past_key_values=cache).logits,
        model(IDS[:, :6]).logits[:, 5:],
        atol=1e-4,
        rtol=1e-4,
    )


def test_rotary_tokens_need_an_even_head_dim():
    with pytest.raises(
        ValueError, match="virtual_tokens is 'rotary', which turns pairs of channels; heads have 5"
    ):
        LinearPath(SIZES._replace(head_dim=5), Injection(n=3, virtual_tokens="rotary"))


def test_unit_rows_are_16_bit_and_their_lengths_are_not():
    """The output has independent rounding errors in each channel. A rounded length would change
    all channels."""
    x = 3 * torch.randn(500, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y = silu_normalize(x)
    assert y.dtype == torch.bfloat16
    assert (y.double().norm(dim=-1) - 1).abs().max() < 2**-8


def test_gradients_of_rows_of_length_zero_match_normalize():
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[1], x[2], x[3, 1:] = 0, x[2] * 1e-7, 0
    dz, gradients = torch.randn_like(x), []
    for function in (silu_normalize, lambda x: F.normalize(F.silu(x), dim=-1, eps=1e-6)):
        leaf = x.clone().requires_grad_()
        z = function(leaf)
        gradients.append((z.detach(), *torch.autograd.grad(z, leaf, dz)))
    torch.testing.assert_close(*gradients)


class HostTensorCounter(TorchDispatchMode):
    """Counts tensors created from Python numbers. Each would make the host wait for the GPU."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.lift_fresh.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", STATES, ids=str)
def test_no_tensors_come_from_the_host(options):
    path, x = path_of(**options), inputs()
    with HostTensorCounter() as found:
        y, _ = path(qkv(x.requires_grad_()), cu_seqlens=None)
        y.sum().backward()
        with torch.no_grad():
            _, state = path(qkv(x[:, :4]), None, None, True)
            path(qkv(x[:, 4:5]), None, state, True)
    assert found.count == 0


def test_rows_of_two_dtypes_are_read_as_the_wider(monkeypatch):
    """Norms with fp32 weights return such rows under autocast."""
    path, seen = LinearPath(SIZES, Injection(n=1)), []
    q, k, v = (x.float() for x in qkv(inputs()))
    monkeypatch.setattr(liza, "has_kernel", lambda x: True)
    monkeypatch.setattr(liza.ChannelGate, "apply", lambda k, n: k.sigmoid())
    monkeypatch.setattr(liza.VirtualRows, "apply", lambda *a: (seen.extend(x.dtype for x in a[:3]), a[:3])[1])
    path((q, k, v.bfloat16()))
    assert seen == [torch.float32] * 3
    monkeypatch.undo()
    torch.testing.assert_close(path((q, k, v.bfloat16()))[0], path((q, k, v.bfloat16().float()))[0])


@torch.no_grad()
@pytest.mark.parametrize("options", STATES, ids=str)
def test_state_continues_padded_and_packed_sequences(options):
    path, x = path_of(**options), inputs()
    mask = torch.ones(2, T, dtype=torch.long)
    mask[0, [2, 5]], mask[1, 4:7] = 0, 0
    state, parts = None, []
    for a, b in ((0, 4), (4, 8), (8, T)):
        y, state = path(qkv(x[:, a:b]), mask[:, a:b], state, True)
        parts.append(y)
    for row, valid in enumerate(mask.bool()):
        alone, _ = path(qkv(x[row : row + 1, valid]))
        torch.testing.assert_close(torch.cat(parts, 1)[row, valid], alone[0], atol=1e-9, rtol=1e-7)
    first, second = [[0, 4], [0, 2]], [[4, T], [2, 5]]  # bounds of both rows
    state, packed = None, []
    for bounds in (first, second):
        row = torch.cat([x[i : i + 1, a:b] for i, (a, b) in enumerate(bounds)], 1)
        ends = torch.tensor([0, bounds[0][1] - bounds[0][0], row.shape[1]])
        y, state = path(qkv(row), None, state, True, ends)
        packed.append(y.split(ends.diff().tolist(), 1))
    for i, (_, end) in enumerate(second):
        alone, _ = path(qkv(x[i : i + 1, :end]))
        torch.testing.assert_close(torch.cat([part[i] for part in packed], 1), alone, atol=1e-9, rtol=1e-7)
