"""Properties of the layers, checked for every mixer."""

import doctest
import importlib
import itertools
import pkgutil
import re
import weakref
from functools import partial
from math import nan
from types import SimpleNamespace

import girih.nn
import pytest
import torch
from girih.nn import (
    MIXERS,
    Attention,
    AttentionState,
    CompressAttend,
    DeltaProduct,
    GatedDeltaProduct,
    GatedLinearAttention,
    GatedSlotAttention,
    Lattice,
    Mamba2,
    MixAttention,
    Raven,
    ShortConv,
    Trellis,
    TTTLinear,
    map_state,
    mix_weight,
)
from small_models import config_of

HIDDEN, CHUNK = 16, 4

LAYERS = {
    "short_conv": lambda: ShortConv(HIDDEN, 3, bias=True),
    "gsa": lambda: GatedSlotAttention(HIDDEN, 2, num_slots=6),
    "gsa_grouped": lambda: GatedSlotAttention(
        HIDDEN, 4, num_kv_heads=2, num_slots=6, conv_size=3, feature="relu2"
    ),
    "gsa_no_gate": lambda: GatedSlotAttention(HIDDEN, 2, num_slots=6, data_dependent_decay=False),
    "abc": lambda: GatedSlotAttention(HIDDEN, 2, num_slots=6, gated=False),
    "linear_attention": lambda: GatedLinearAttention(HIDDEN, 2, gate="none"),
    "fixed_decay": lambda: GatedLinearAttention(HIDDEN, 2, gate="fixed"),
    "retnet": lambda: GatedLinearAttention(HIDDEN, 2, expand_v=2, gate="fixed", rotary=True),
    "gla": lambda: GatedLinearAttention(HIDDEN, 2, gate="vector"),
    "scalar_decay": lambda: GatedLinearAttention(HIDDEN, 4, num_kv_heads=2, gate="scalar", conv_size=4),
    "mamba2": lambda: Mamba2(HIDDEN, 2, state_size=6),
    "gated_delta_product": lambda: GatedDeltaProduct(HIDDEN, 4, n=3, num_groups=2, state_size=6),
    "raven": lambda: Raven(HIDDEN, 2, num_slots=6, topk=2),
    "raven_options": lambda: Raven(
        HIDDEN,
        4,
        num_kv_heads=2,
        num_slots=6,
        topk=4,
        expand_k=0.5,
        expand_v=2,
        slot_decay=True,
        router_score="softmax",
        router_mlp=True,
        router_bias=True,
        output_gate=True,
    ),
    "gla_expanded": lambda: GatedLinearAttention(HIDDEN, 2, expand_k=0.5, expand_v=1.5),
    "deltanet": lambda: DeltaProduct(HIDDEN, 2),
    "deltanet_expanded": lambda: DeltaProduct(HIDDEN, 2, n=2, gated=True, expand_k=0.5, expand_v=2),
    "delta_product": lambda: DeltaProduct(HIDDEN, 4, num_kv_heads=2, n=2, gated=True, allow_neg_eigval=True),
    "delta_product_gelu": lambda: DeltaProduct(HIDDEN, 2, n=2, between_chunks="gelu", chunk=CHUNK),
    "trellis": lambda: Trellis(HIDDEN, 2, num_slots=6, chunk=CHUNK),
    "ttt": lambda: TTTLinear(HIDDEN, 2, chunk=CHUNK),
    "trellis_identity": lambda: Trellis(
        HIDDEN, 2, num_slots=6, chunk=CHUNK, phi="identity", f="softmax", gated=False
    ),
    "trellis_options": lambda: Trellis(
        HIDDEN,
        2,
        num_slots=6,
        chunk=CHUNK,
        shared_qk=True,
        normalize_kv=False,
        value_read="phi",
        post_norm=False,
    ),
    "lattice": lambda: Lattice(HIDDEN, 2, num_slots=6, chunk=CHUNK),
    "lattice_options": lambda: Lattice(
        HIDDEN, 2, num_slots=6, chunk=1, objective="encode", shrinkage=0.05, post_norm=True
    ),
    "lattice_any_length": lambda: Lattice(HIDDEN, 2, num_slots=6, chunk=1, normalize=False),
    "lattice_encode": lambda: Lattice(HIDDEN, 2, num_slots=12, chunk=CHUNK, objective="encode", gated=False),
    "attention": lambda: Attention(HIDDEN, 2),
    "attention_grouped": lambda: Attention(HIDDEN, 4, num_kv_heads=2),
    "attention_window": lambda: Attention(HIDDEN, 2, window=3),
    "cat": lambda: CompressAttend(HIDDEN, 2, chunk=CHUNK),
    "mag": lambda: MixAttention(
        Attention(HIDDEN, 2), DeltaProduct(HIDDEN, 2, gated=True), weight=0.3, cross=True
    ),
    "mag_learned": lambda: MixAttention(
        Trellis(HIDDEN, 2, num_slots=6, chunk=CHUNK), Attention(HIDDEN, 2), learned=True
    ),
}
for name, mixer in MIXERS.items():  # mixers without an entry above
    small = config_of(mixer=name, hidden_size=HIDDEN, num_heads=2, num_slots=6, chunk=CHUNK)
    LAYERS.setdefault(name, partial(mixer.build, small))
KEEPS_PACKED_STATE = [name for name in LAYERS if name.split("_")[0] not in ("attention", "cat", "mag")]


@pytest.fixture(params=LAYERS)
def layer(request):
    torch.manual_seed(0)
    return LAYERS[request.param]().double()


def close(a, b):
    torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


def tensors_of(state):
    """The tensors of a state in a fixed order, keys and values cut to their length."""
    if isinstance(state, AttentionState):
        state = state._replace(k=state.k[:, : state.tokens], v=state.v[:, : state.tokens])
    if isinstance(state, tuple):
        return [tensor for part in state for tensor in tensors_of(part)]
    return [state] if isinstance(state, torch.Tensor) else []


def gradients(layer, loss):
    layer.zero_grad()
    loss.backward()
    return {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "module", [module.name for module in pkgutil.walk_packages(girih.nn.__path__, "girih.nn.")]
)
def test_examples_in_docstrings_run(module):
    module = importlib.import_module(module)
    assert doctest.testmod(module, extraglobs={"torch": torch}).failed == 0


@pytest.mark.parametrize("T", [0, 1, 2 * CHUNK + 1])
def test_shapes_and_finite_gradients_of_every_parameter(layer, T):
    x = torch.randn(3, T, HIDDEN, dtype=torch.double, requires_grad=True)
    y, state = layer(x)
    assert y.shape == x.shape and y.dtype == x.dtype and state is None
    y.square().sum().backward()
    assert x.grad.isfinite().all()
    if T > CHUNK:
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name
            assert parameter.grad.any(), name


@pytest.mark.parametrize("split", [1, CHUNK - 1, CHUNK, CHUNK + 2])
def test_state_continues_a_sequence(layer, split):
    """Outputs and gradients of f(a + b) equal those of f(a) followed by f(b, state)."""
    x = torch.randn(2, 2 * CHUNK + 1, HIDDEN, dtype=torch.double)
    target = torch.randn_like(x)
    whole, _ = layer(x)
    a, state = layer(x[:, :split], use_cache=True)
    b, _ = layer(x[:, split:], state=state, use_cache=True)
    close(torch.cat((a, b), 1), whole)
    together = gradients(layer, (whole * target).sum())
    apart = gradients(layer, (torch.cat((a, b), 1) * target).sum())
    assert together.keys() == apart.keys()
    for name in together:
        close(apart[name], together[name])


@torch.no_grad()
def test_token_by_token_equals_all_at_once(layer):
    x = torch.randn(2, 2 * CHUNK + 1, HIDDEN, dtype=torch.double)
    before = {name: p.clone() for name, p in layer.state_dict().items()}
    y, state = layer(x[:, :1], use_cache=True)
    ys = [y]
    for t in range(1, x.shape[1]):
        y, state = layer(x[:, t : t + 1], state=state, use_cache=True)
        ys.append(y)
    close(torch.cat(ys, 1), layer(x)[0])
    for name, p in layer.state_dict().items():
        assert p.equal(before[name]), f"decoding wrote {name}"


@pytest.mark.parametrize("use_cache", [False, True])
def test_padding_does_nothing(layer, use_cache):
    """A sequence padded on the left, and its continuation, equal the same sequence alone."""
    T, lengths = 2 * CHUNK + 1, [2 * CHUNK + 1, CHUNK + 2, 1]
    x, more = (torch.randn(3, n, HIDDEN, dtype=torch.double) for n in (T, 3))
    mask = torch.stack([torch.arange(T) >= T - n for n in lengths])
    y, state = layer(x, mask.long(), use_cache=use_cache)
    assert y.isfinite().all()
    if use_cache:
        with torch.no_grad():
            after = [layer(more[:, :2], mask.new_ones(3, 2), state, True)]
            after.append(layer(more[:, 2:], None, after[0][1], True))
        after = torch.cat([out for out, _ in after], 1)
    for i, n in enumerate(lengths):
        alone, state = layer(x[i : i + 1, T - n :], use_cache=use_cache)
        close(y[i, T - n :], alone[0])
        if use_cache:
            close(after[i], layer(more[i : i + 1], state=state)[0][0])


MASKS = {
    "left": lambda T, n: torch.arange(T) >= T - n,
    "right": lambda T, n: torch.arange(T) < n,
    "holes": lambda T, n: torch.rand(T).argsort() < n,
}


@pytest.mark.parametrize("where", MASKS)
@pytest.mark.parametrize("name", [*KEEPS_PACKED_STATE, "cat"])
def test_masked_tokens_have_no_effect(name, where):
    """Several calls reach every position in a chunk. Outputs, states and gradients equal those of each row
    alone."""
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    pieces = [  # number of tokens, and of valid tokens in each row
        (CHUNK + 1, [CHUNK + 1, 3, 0, 1]),
        (2 * CHUNK + 2, [1, 2 * CHUNK + 2, CHUNK, 2 * CHUNK]),
        (1, [0, 1, 1, 0]),
        (CHUNK + 1, [2, 0, CHUNK, 1]),
    ]
    masks = [torch.stack([MASKS[where](T, n) for n in counts]) for T, counts in pieces]
    xs = [torch.randn(4, T, HIDDEN, dtype=torch.double) for T, _ in pieces]
    state, ys = None, []
    for x, mask in zip(xs, masks, strict=True):
        y, state = layer(x, mask.long(), state, True)
        ys.append(y)
    x, y, mask = torch.cat(xs, 1), torch.cat(ys, 1), torch.cat(masks, 1)
    alone = [layer(x[i : i + 1, mask[i]], use_cache=True) for i in range(4)]
    apart = torch.cat([y[0] for y, _ in alone])
    close(y[mask], apart)
    weight = torch.randn_like(apart)
    losses = [(y[mask] * weight).sum(), (apart * weight).sum()]
    if name != "cat":  # the state of cat depends on the mask
        together = tensors_of(state)
        one_by_one = [torch.cat(parts) for parts in zip(*(tensors_of(s) for _, s in alone), strict=True)]
        close(together, one_by_one)
        for i, parts in enumerate((together, one_by_one)):
            losses[i] = losses[i] + sum(part.square().sum() for part in parts if part.is_floating_point())
    together, one_by_one = (gradients(layer, loss) for loss in losses)
    assert together.keys() == one_by_one.keys()
    for key in together:
        close(together[key], one_by_one[key])


@torch.no_grad()
def test_state_is_written_only_with_use_cache(layer):
    """A call of one token may advance the state in place. A call without use_cache never writes the state."""
    x = torch.randn(2, CHUNK, HIDDEN, dtype=torch.double)
    _, state = layer(x[:, :-1], use_cache=True)
    before = map_state(torch.clone, state)
    y, none = layer(x[:, -1:], state=state)
    assert none is None
    assert all(a.equal(b) for a, b in zip(tensors_of(state), tensors_of(before), strict=True))
    close(layer(x[:, -1:], state=state, use_cache=True)[0], y)


@torch.no_grad()
def test_a_batch_may_start_with_padding_only(layer):
    """A prompt arrives in several calls; the first calls hold only padding for one sequence."""
    x = torch.randn(2, 3 * CHUNK, HIDDEN, dtype=torch.double)
    mask = torch.ones(2, 3 * CHUNK, dtype=torch.bool)
    mask[1, : CHUNK + 2] = False
    ys, state = [], None
    for cut in (slice(0, 3), slice(3, 4), slice(4, 2 * CHUNK), slice(2 * CHUNK, 3 * CHUNK)):
        y, state = layer(x[:, cut], mask[:, cut], state, True)
        ys.append(y)
    y = torch.cat(ys, 1)
    close(y[0], layer(x[:1])[0][0])
    close(y[1, CHUNK + 2 :], layer(x[1:, CHUNK + 2 :])[0][0])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_sequences_equal_a_loop(layer, dtype):
    x = torch.randn(1, 3 * CHUNK, HIDDEN, dtype=torch.double)
    cu_seqlens = torch.tensor([0, 1, CHUNK + 2, CHUNK + 2, 3 * CHUNK], dtype=dtype)
    y, _ = layer(x, cu_seqlens=cu_seqlens)
    for a, b in itertools.pairwise(cu_seqlens.tolist()):
        close(y[:, a:b], layer(x[:, a:b])[0])


@pytest.mark.parametrize("name", KEEPS_PACKED_STATE)
def test_packed_sequences_return_their_states(name):
    layer = LAYERS[name]().double()
    x = torch.randn(1, 2 * CHUNK, HIDDEN, dtype=torch.double)
    _, state = layer(x, use_cache=True, cu_seqlens=torch.tensor([0, 3, 2 * CHUNK]))
    more = torch.randn(2, 3, HIDDEN, dtype=torch.double)
    _, first = layer(x[:, :3], use_cache=True)
    close(layer(more, state=state)[0][:1], layer(more[:1], state=first)[0])


def test_no_token_sees_a_later_one(layer):
    x = torch.randn(2, 2 * CHUNK + 1, HIDDEN, dtype=torch.double, requires_grad=True)
    for t in (0, CHUNK - 1, CHUNK, CHUNK + 2):
        (grad,) = torch.autograd.grad(layer(x)[0][:, t].square().sum(), x)
        assert grad[:, t].any() and not grad[:, t + 1 :].any()


@pytest.mark.parametrize("name", ["gsa", "delta_product", "trellis", "ttt", "lattice", "attention", "cat"])
def test_compiles_as_one_graph(name):
    """Training with and without a mask, and decoding steps that write the state in place."""
    torch.compiler.reset()  # layers share one forward; the recompile limit counts their graphs together
    torch.manual_seed(0)
    layer = LAYERS[name]()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 2 * CHUNK + 1, HIDDEN, requires_grad=True)
    y, _ = compiled(x)
    y.sum().backward()
    torch.testing.assert_close(y, layer(x)[0])
    mask = torch.rand(2, 2 * CHUNK + 1) < 0.5
    torch.testing.assert_close(compiled(x, mask)[0][mask], layer(x, mask)[0][mask])
    assert x.grad.isfinite().all()
    with torch.no_grad():
        _, state = layer(x[:, :-3], use_cache=True)
        for t in range(x.shape[1] - 3, x.shape[1]):
            token, state = compiled(x[:, t : t + 1], state=state, use_cache=True)
            torch.testing.assert_close(token, y[:, t : t + 1], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_compiled_attention_step_grows_the_cache():
    torch.compiler.reset()
    layer, x = Attention(HIDDEN, 2), torch.randn(2, 260, HIDDEN)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected, (_, state) = layer(x)[0], layer(x[:, :190], use_cache=True)
    for t in range(190, 260):
        # Some steps mask the token of the last sequence.
        mask = torch.tensor([[True], [t % 7 > 0]]) if t > 200 else None
        y, state = compiled(x[:, t : t + 1], mask, state, True)
        torch.testing.assert_close(y[:1], expected[:1, t : t + 1], atol=1e-5, rtol=1e-5)
    assert state.k.shape[1] == 512 and state.tokens == 260


@torch.no_grad()
def test_a_step_that_returns_its_state_is_exported():
    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Attention(HIDDEN, 2)

        def forward(self, x, state):
            return self.layer(x, state=state, use_cache=True)

    step, x = Step(), torch.randn(2, 8, HIDDEN)
    _, state = step.layer(x[:, :7], use_cache=True)
    program = torch.export.export(step, (x[:, 7:], map_state(torch.clone, state))).module()
    y, after = program(x[:, 7:], state)
    torch.testing.assert_close(y, step.layer(x)[0][:, 7:])
    assert after.tokens == 8 and after.place.tolist() == [8, 8] and after.slots.turn.equal(state.slots.turn)


EXPORTED = ["gsa", "delta_product", "trellis", "ttt", "lattice", "attention_grouped", "cat", "mag"]


@pytest.mark.parametrize("name", EXPORTED)
def test_exports_with_any_number_of_tokens(name):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    program = torch.export.export(
        layer,
        (torch.randn(2, 3 * CHUNK + 1, HIDDEN),),
        dynamic_shapes={"x": {1: torch.export.Dim("T", min=CHUNK, max=512)}},
        prefer_deferred_runtime_asserts_over_guards=True,
    ).module()
    for T in (CHUNK, CHUNK + 1, 2 * CHUNK, 5 * CHUNK - 1):
        x = torch.randn(2, T, HIDDEN)
        torch.testing.assert_close(program(x)[0], layer(x)[0])


def test_cached_call_of_one_token_has_gradients(layer):
    """A cached call of one token writes the state in place only when no gradient is needed."""
    x = torch.randn(2, CHUNK, HIDDEN, dtype=torch.double)
    _, state = layer(x[:, :-1], use_cache=True)
    before = map_state(torch.clone, state)
    y, after = layer(x[:, -1:], state=state, use_cache=True)
    assert all(a.equal(b) for a, b in zip(tensors_of(state), tensors_of(before), strict=True))
    target = torch.randn_like(y)
    found = gradients(layer, (y * target).sum())
    expected = gradients(layer, (layer(x)[0][:, -1:] * target).sum())
    assert found.keys() == expected.keys()
    for name in found:
        close(found[name], expected[name])
    with torch.no_grad():
        _, state = layer(x[:, :-1], use_cache=True)
        stepped, at_once = layer(x[:, -1:], state=state, use_cache=True)
    close(stepped, y)
    close(tensors_of(at_once), tensors_of(map_state(torch.Tensor.detach, after)))


def test_initial_state_is_a_copy():
    """A step writes the state in place. The tensors that the state was built from, shared or per sequence, do
    not change."""
    for lead in ((), (2,)):
        k, v = (torch.randn(*lead, 3, 4, 5, dtype=torch.double) for _ in range(2))
        before = k.clone(), v.clone()
        trellis = girih.ops.TrellisState.start(2, k, v)
        lattice = girih.ops.LatticeState.start(2, k)
        for state in (trellis, lattice):
            places = [part.data_ptr() for part in state if part is not None and part.numel()]
            assert len({*places, k.data_ptr(), v.data_ptr()}) == len(places) + 2
            for part in state:
                if part is not None:
                    part.fill_(7)
        assert k.equal(before[0]) and v.equal(before[1])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("delta_product", ["n=2", "gated=True", "allow_neg_eigval=True", "heads=(4, 4, 4)"]),
        ("delta_product_gelu", ["between_chunks='gelu'", f"chunk={CHUNK}"]),
        ("trellis", ["num_slots=6", f"chunk={CHUNK}", "phi='ln_silu'", "gated=True", "kernel_size=4"]),
        ("lattice_encode", ["num_slots=12", "objective='encode'", "gated=False"]),
        ("gsa_grouped", ["num_slots=6", "feature='relu2'", "heads=(4, 2, 2)", "gate_logit_normalizer=8.0"]),
        ("retnet", ["gate='fixed'", "rotary=True"]),
        ("cat", [f"chunk={CHUNK}", "running_positions=False"]),
        ("mag_learned", ["learned=True"]),
    ],
)
def test_a_printed_layer_shows_its_options(name, options):
    printed = repr(LAYERS[name]())
    assert not [option for option in options if option not in printed], printed


def test_mask_and_packing_exclude_each_other(layer):
    x = torch.randn(1, 4, HIDDEN, dtype=torch.double)
    with pytest.raises(ValueError, match="attention_mask and cu_seqlens"):
        layer(x, attention_mask=torch.ones(1, 4), cu_seqlens=torch.tensor([0, 4]))


@pytest.mark.parametrize("shape", [(2, 5), (2, 3), (1, 4), (3, 4), (2, 1, 4, 4)], ids=str)
def test_a_mask_of_another_shape_is_refused(layer, shape):
    x = torch.randn(2, 4, HIDDEN, dtype=torch.double)
    with pytest.raises(ValueError, match=r"attention_mask has shape .*; expected \[B, T\] = \[2, 4\]"):
        layer(x, torch.ones(shape))


def test_packed_sequences_need_batch_size_one(layer):
    x = torch.randn(2, 4, HIDDEN, dtype=torch.double)
    with pytest.raises(ValueError, match="cu_seqlens"):
        layer(x, cu_seqlens=torch.tensor([0, 4]))


@pytest.mark.parametrize("name", LAYERS)
def test_autocast_stays_close_to_fp32(name):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    x = torch.randn(2, 3 * CHUNK, HIDDEN)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = layer(x)
        y.float().square().mean().backward()
    assert (y.float() - layer(x)[0]).norm() < 0.05 * y.float().norm() + 1e-3
    assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in layer.parameters())


def test_trellis_gradients_keep_their_size_through_a_long_sequence():
    """The word frequencies are as uneven as in text. The growth is the median of five layers."""
    growth = []
    for seed in range(5):
        torch.manual_seed(seed)
        layer = Trellis(128, 4, num_slots=64)
        for module in layer.modules():
            if isinstance(module, torch.nn.Linear):
                torch.nn.init.normal_(module.weight, std=128**-0.5)  # the initialization of a model
        words = (32 * torch.rand(2, 512) ** 4).long()
        x = torch.randn(32, 128)[words].requires_grad_()
        y, _ = layer(x)
        dy = torch.randn_like(y)
        (dx,) = torch.autograd.grad(y, x, dy)
        growth.append((dx.norm() / dy.norm()).item())
    assert sorted(growth)[2] < 3.0


@pytest.mark.parametrize("name", LAYERS)
def test_reset_parameters_repeats_the_first_values(name):
    """A model built on the meta device is initialized only by `reset_parameters()` of every module."""
    torch.manual_seed(0)
    layer = LAYERS[name]()
    expected = {key: value.std() if value.numel() > 1 else value for key, value in layer.state_dict().items()}
    with torch.no_grad():
        for value in layer.state_dict().values():
            value.fill_(float("nan"))
    for module in [*layer.modules()][::-1]:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for key, value in layer.state_dict().items():
        assert value.isfinite().all(), key
        if value.numel() > 100:
            torch.testing.assert_close(value.std(), expected[key], rtol=0.3, atol=0.0)


def test_lattice_starts_orthonormal():
    memory = Lattice(HIDDEN, 2, num_slots=6).memory
    torch.testing.assert_close(memory.mT @ memory, torch.eye(6).expand(2, 6, 6))


@torch.no_grad()
def test_mixture_follows_its_weight():
    torch.manual_seed(0)
    layer = LAYERS["mag"]()
    x = torch.randn(2, 5, HIDDEN)
    base, mixer = layer.base(x)[0], layer.mixer(x)[0]
    layer.set_weight(0.0)
    torch.testing.assert_close(layer(x)[0], base)
    layer.set_weight(0.25)
    torch.testing.assert_close(layer(x)[0], 0.75 * base + 0.25 * mixer + 0.75 * base * 0.25 * mixer)
    for wrong in (-0.25, 1.5, nan, True, "x", None):
        with pytest.raises(ValueError, match=f"weight is {wrong!r}; expected a number from 0 to 1"):
            layer.set_weight(wrong)
    assert layer.weight.item() == 0.25
    with pytest.raises(ValueError, match="weight"):
        LAYERS["mag_learned"]().set_weight(0.5)


def test_mix_weight_follows_its_schedule():
    assert [mix_weight("constant", step, final=0.3) for step in (0, 1000)] == [0.3, 0.3]
    assert [mix_weight("gradual", step, first=0.0, final=0.5, steps=4) for step in range(6)] == [
        0.0,
        0.125,
        0.25,
        0.375,
        0.5,
        0.5,
    ]
    assert [mix_weight("cyclic", step, steps=2) for step in range(8)] == [
        0.0,
        0.0,
        0.5,
        0.5,
        1.0,
        1.0,
        0.0,
        0.0,
    ]
    with pytest.raises(ValueError, match="schedule is 'cosine'"):
        mix_weight("cosine", 0)


def test_map_state_keeps_structure():
    layer = LAYERS["mag_learned"]()
    _, state = layer(torch.randn(3, 5, HIDDEN), use_cache=True)
    first = map_state(lambda part: part[:1], state)
    assert type(first) is type(state) and first.base.memory.k.shape[0] == 1 and first.mixer.valid is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GatedLinearAttention(HIDDEN, 2, gate="soft"), "gate is 'soft'"),
        (
            lambda: GatedLinearAttention(HIDDEN, 2, rope_theta=500.0),
            "rope_theta is 500.0; expected none: it is for rotary",
        ),
        (lambda: ShortConv(HIDDEN, activation="gelu"), "activation is 'gelu'"),
        (lambda: MixAttention(Attention(HIDDEN, 2), Attention(HIDDEN, 2), weight=1.5), "weight is 1.5"),
        (lambda: girih.nn.GatedRMSNorm(4, activation="tanh"), "activation is 'tanh'"),
        (
            lambda: DeltaProduct(HIDDEN, 2, between_chunks="gelu"),
            "chunk is None; expected 1 to 64 with between_chunks",
        ),
        (lambda: DeltaProduct(HIDDEN, 2, chunk=4), "chunk is 4; expected none: it is for between_chunks"),
        (
            lambda: DeltaProduct(HIDDEN, 2, between_chunks="gelu", chunk=65),
            "chunk is 65; expected 1 to 64 for between_chunks",
        ),
        (
            lambda: DeltaProduct(HIDDEN, 2, between_chunks="gelu", chunk=0),
            "chunk is 0; expected 1 to 64 for between_chunks",
        ),
        (
            lambda: DeltaProduct(HIDDEN, 2, between_chunks="gelu", chunk=257),
            "chunk is 257; expected 1 to 64 for between_chunks",
        ),
    ],
)
def test_wrong_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


SIZES = {"hidden_size": HIDDEN, "num_heads": 2, "num_slots": 8, "chunk": 4}


@pytest.mark.parametrize("mixer", [name for name in girih.nn.MIXERS if name != "mag"])  # mag has two mixers
def test_layer_and_configuration_raise_the_same_errors(mixer):
    build, fields = girih.nn.MIXERS[mixer].build, girih.nn.MIXERS[mixer].fields
    # chunk is read only with between_chunks
    used = {"between_chunks": "gelu"} if "between_chunks" in fields else {}

    def make_config(**fields):
        return config_of(mixer=[mixer], num_hidden_layers=1, **SIZES | used | fields)

    invalid = [
        {name: wrong} for name in ("hidden_size", "num_heads", *fields) for wrong in (-1, 10**31, "word", nan)
    ]
    invalid += [{"hidden_size": 15}, {"num_heads": 0}, {"head_dim": 0}]
    invalid += [{name: 0} for name in ("num_kv_heads", "num_slots", "n", "chunk") if name in fields]
    invalid += [{"num_kv_heads": 3}] if "num_kv_heads" in fields else []
    invalid += [{"chunk": 65}] if mixer in ("trellis", "ttt", "lattice") else []
    build(make_config())
    arguments = vars(make_config()) | {"num_kv_heads": None, "head_dim": None}
    for wrong in invalid:
        with pytest.raises(ValueError) as error:
            make_config(**wrong)
        assert next(iter(wrong)) in str(error.value)
        with pytest.raises(ValueError, match=re.escape(str(error.value))):
            build(SimpleNamespace(**arguments | wrong))


def test_module_limits_match_operator_limits():
    for op, make in (("short_conv", ShortConv), ("gated_rms_norm", girih.nn.GatedRMSNorm)):
        for word in girih.ops.words(op, "activation"):
            make(HIDDEN, activation=word)
    for size in (-1, 1 + girih.ops.describe()["short_conv"]["sizes"]["W"]["most"]):
        with pytest.raises(ValueError, match=f"kernel_size is {size}; expected 0 to "):
            ShortConv(HIDDEN, kernel_size=size)


def test_chunk_attention_names_invalid_arguments():
    for wrong, message in [
        ({"num_heads": 0}, "num_heads is 0"),
        ({"chunk": 0}, "chunk is 0"),
        ({"num_kv_heads": 3}, "num_kv_heads is 3"),
        ({"head_dim": 7}, "head_dim is 7"),
    ]:
        with pytest.raises(ValueError, match=message):
            girih.nn.ChunkAttention(**{"hidden_size": HIDDEN, "num_heads": 2, "chunk": 4} | wrong)


@torch.no_grad()
def test_attention_writes_in_place_and_grows_the_cache():
    layer = Attention(HIDDEN, 2).double()
    x = torch.randn(2, 600, HIDDEN, dtype=torch.double)
    expected, ys, state, places = layer(x)[0], [], None, set()
    for i in range(0, 10), *(range(i, i + 1) for i in range(10, 600)):
        y, state = layer(x[:, i.start : i.stop], state=state, use_cache=True)
        ys.append(y)
        places.add((state.k.data_ptr(), state.k.shape[1]))
    close(torch.cat(ys, 1), expected)
    assert state.tokens == 600 and state.place.tolist() == [600, 600]
    assert [slots for _, slots in sorted(places, key=lambda place: place[1])] == [256, 512, 768]
    # A call of several tokens does not change its state, so two calls may continue one state.
    before = map_state(torch.clone, state)
    for more in torch.randn(2, 2, 3, HIDDEN, dtype=torch.double):
        y, _ = layer(more, state=state, use_cache=True)
        close(y, layer(torch.cat((x, more), 1))[0][:, -3:])
    assert all(a.equal(b) for a, b in zip(tensors_of(state), tensors_of(before), strict=True))


@torch.no_grad()
@pytest.mark.parametrize("first", [None, 9], ids=["no_mask_before", "masks_from_the_start"])
def test_attention_writes_masked_tokens_in_place_too(first):
    layer = Attention(HIDDEN, 4, num_kv_heads=2).double()
    x, mask = torch.randn(3, 40, HIDDEN, dtype=torch.double), torch.rand(3, 40) < 0.6
    mask[:, :9] |= first is None
    y, state = layer(x[:, :9], mask[:, :first] if first else None, use_cache=True)
    ys, k = [y], state.k
    for t in range(9, 40):
        now = None if t % 5 == 4 else mask[:, t : t + 1].long()
        mask[:, t] |= now is None
        y, state = layer(x[:, t : t + 1], now, state, True)
        ys.append(y)
    close(torch.cat(ys, 1), layer(x, mask)[0])
    assert state.k is k and state.valid[:, 9:40].equal(mask[:, 9:])


@torch.no_grad()
def test_attention_layers_share_slots():
    layers, x = [Attention(HIDDEN, 2) for _ in range(2)], torch.randn(2, 5, HIDDEN)
    states = [layer(x, use_cache=True)[1] for layer in layers for _ in range(2)]
    assert len({id(state.slots) for state in states}) == 1
    before = weakref.ref(states[0].slots)
    other = Attention(HIDDEN, 2, rope_theta=500.0)(x, use_cache=True)[1]
    assert other.slots is not before() and not other.slots.turn.equal(before().turn)
    del states
    assert before() is None


@torch.no_grad()
def test_attention_adds_slots_to_a_state_without_slots():
    layer, x = Attention(HIDDEN, 2).double(), torch.randn(2, 5, HIDDEN, dtype=torch.double)
    _, state = layer(x[:, :4], torch.ones(2, 4), use_cache=True)
    parts = [part[:, :4] for part in (state.k, state.v, state.valid)]
    close(layer(x[:, 4:], state=AttentionState(*parts, 4), use_cache=True)[0], layer(x)[0][:, 4:])


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 2])
def test_attention_refuses_invalid_states(tokens):
    layer = girih.nn.Attention(HIDDEN, 2).eval()
    x = torch.randn(2, 5, HIDDEN)
    _, state = layer(x, use_cache=True)
    rows = state.k.shape[1]
    for wrong, message in (
        (tuple(state), "state is a tuple; expected an AttentionState"),
        (state._replace(tokens=rows + 1), f"state.tokens is {rows + 1}; expected 0 to {rows}"),
        (state._replace(tokens=0, k=state.k[..., :1]), "state.k is torch.float32 of shape"),
        (state._replace(k=None), "state.k is a NoneType; expected a Tensor"),
        (state._replace(k=state.k[:, 0, 0, 0]), r"state.k has shape \[2\]; expected 4 dimensions"),
        (state._replace(v=None), "state.v is a NoneType; expected a Tensor"),
        (state._replace(tokens=None), "state.tokens is a NoneType; expected an int"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(x[:, :tokens], state=wrong, use_cache=True)


def test_refused_step_leaves_retnet_state_unchanged():
    torch.manual_seed(0)
    layer = GatedLinearAttention(HIDDEN, 2, gate="fixed", rotary=True)
    plain = GatedLinearAttention(HIDDEN, 2, gate="fixed")
    x = torch.randn(2, 5, HIDDEN)
    with torch.no_grad():
        state, other = (each(x, use_cache=True)[1] for each in (layer, plain))
        for each, wrong, message in (
            (layer, other, "state is a LayerState; expected a RotaryState"),
            (plain, state, "state is a RotaryState; expected a LayerState"),
            (layer, 5, "state is a int; expected a RotaryState"),
        ):
            with pytest.raises(ValueError, match=message):
                each(x[:, :1], state=wrong, use_cache=True)
        memory = girih.ops.GLAState(state.memory.s[:1])
        with pytest.raises(ValueError, match="state has 1 sequences; expected 2"):
            layer(x[:, :1], state=state._replace(memory=memory), use_cache=True)
    assert state.length.tolist() == [5, 5]


@torch.no_grad()
def test_compress_attend_names_a_missing_part_of_its_state():
    layer, x = CompressAttend(HIDDEN, 2, chunk=4), torch.randn(2, 5, HIDDEN)
    _, state = layer(x, use_cache=True)
    for wrong, message in (
        (state._replace(x=None), "state.x is a NoneType; expected a Tensor"),
        (state._replace(kv=None), "state.kv is a NoneType; expected a KeyValues"),
        (state._replace(kv=state.kv._replace(k=None)), "state.kv.k is a NoneType; expected a Tensor"),
        (state._replace(kv=state.kv._replace(v=None)), "state.kv.v is a NoneType; expected a Tensor"),
        (state._replace(seq_lengths=None), "state.seq_lengths is a NoneType; expected a SequenceLengths"),
        (
            state._replace(seq_lengths=state.seq_lengths._replace(host_tokens=None)),
            "state.seq_lengths.host_tokens is a NoneType; expected a Tensor",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            layer(x[:, :1], state=wrong, use_cache=True)


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 2])
def test_mixture_refuses_a_state_without_a_part(tokens):
    layer, x = MixAttention(Attention(HIDDEN, 2), DeltaProduct(HIDDEN, 2)), torch.randn(2, 5, HIDDEN)
    _, state = layer(x, use_cache=True)
    for name in ("base", "mixer"):
        with pytest.raises(ValueError, match=f"state.{name} is missing; pass the state"):
            layer(x[:, :tokens], state=state._replace(**{name: None}), use_cache=True)


@torch.no_grad()
def test_mixture_with_a_layer_without_a_state_continues():
    layer = MixAttention(ShortConv(HIDDEN, kernel_size=0), DeltaProduct(HIDDEN, 2)).double()
    x = torch.randn(2, 5, HIDDEN, dtype=torch.double)
    _, state = layer(x[:, :4], use_cache=True)
    assert state.base is None
    close(layer(x[:, 4:], state=state, use_cache=True)[0], layer(x)[0][:, 4:])


def with_changed_part(state, index, change):
    """The state with `change` applied to its tensor number `index`."""
    count = itertools.count()
    return map_state(lambda part: change(part) if next(count) == index else part, state)


WRONG_PARTS = {
    "dtype": lambda part: part.long() if part.is_floating_point() else part.float(),
    "shape": lambda part: torch.cat((part, part[..., :1]), -1),
    "sequences": lambda part: part[:1],
}


@pytest.mark.parametrize("wrong", WRONG_PARTS)
@torch.no_grad()
def test_a_wrong_part_of_a_state_is_refused_before_a_step_writes(layer, wrong):
    _, state = layer(torch.randn(2, CHUNK - 1, HIDDEN, dtype=torch.double), use_cache=True)
    token = torch.randn(2, 1, HIDDEN, dtype=torch.double)
    parts = []
    map_state(parts.append, state)
    for index in range(len(parts)):
        given = with_changed_part(map_state(torch.clone, state), index, WRONG_PARTS[wrong])
        before = map_state(torch.clone, given)
        with pytest.raises(ValueError, match="state"):
            layer(token, state=given, use_cache=True)
        assert all(a.equal(b) for a, b in zip(tensors_of(given), tensors_of(before), strict=True)), index


@pytest.mark.parametrize("name", ["retnet", "attention"])
@torch.no_grad()
def test_state_of_another_batch_size_is_refused(name):
    layer = {"retnet": LAYERS["retnet"], "attention": lambda: Attention(HIDDEN, 2)}[name]()
    _, state = layer(torch.randn(3, 5, HIDDEN), use_cache=True)
    with pytest.raises(ValueError, match="state has 3 sequences; expected 2"):
        layer(torch.randn(2, 1, HIDDEN), state=state, use_cache=True)
