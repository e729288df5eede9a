"""linear_cross_entropy, which computes the loss without all logits at once, and the tensors saved for
training."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from girih.models import GirihConfig, GirihForCausalLM
from girih.nn.functional import loss as losses
from girih.nn.functional.loss import linear_cross_entropy
from girih.nn.layers.swiglu import SwiGLU
from small_models import config_of
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

N, D, V = 37, 16, 29


@pytest.fixture(autouse=True, params=["Python", "C++"])
def in_both_languages(request, monkeypatch):
    """Python is the version that torch.compile traces; the C++ operator serves the C++ models."""
    if request.param == "C++":
        op = torch.ops.girih.linear_cross_entropy
        monkeypatch.setattr(
            losses._LinearCrossEntropy, "apply", lambda *arguments: op(*arguments, losses.MAX_LOGITS)
        )


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of five rows."""
    monkeypatch.setattr(losses, "MAX_LOGITS", 5 * V + 3)


def draw(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, D, generator=generator, dtype=torch.float64).to(dtype) for n in (N, V))
    labels = torch.randint(V, (N,), generator=generator)
    labels[[0, 7, 8, 36]] = -100
    return x.requires_grad_(), weight.requires_grad_(), labels


def reference_loss(x, weight, labels, num_items=None):
    logits = F.linear(x, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if num_items is None:
        return F.cross_entropy(logits, labels)
    return F.cross_entropy(logits, labels, reduction="sum") / num_items


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("num_items", [None, 11, torch.tensor(50)], ids=str)
def test_loss_and_gradients_match_cross_entropy(num_items):
    x, weight, labels = draw()
    actual = linear_cross_entropy(x, weight, labels, num_items=num_items)
    expected = reference_loss(x, weight, labels, num_items)
    torch.testing.assert_close(actual, expected)
    for a, b in zip(*(torch.autograd.grad(3 * y, (x, weight)) for y in (actual, expected)), strict=True):
        torch.testing.assert_close(a, b)
    assert a.dtype == weight.dtype


def test_ignored_labels_alone_give_nan_and_zero_gradients():
    x, weight, labels = draw()
    loss = linear_cross_entropy(x, weight, torch.full_like(labels, -100))
    assert loss.isnan()
    assert not any(grad.any() for grad in torch.autograd.grad(loss, (x, weight)))


def test_no_grad_computes_only_the_logits():
    x, weight, labels = draw()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        linear_cross_entropy(x, weight, labels)
    assert counter.get_total_flops() == 2 * N * D * V


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("needs_grad", ["x", "weight", "neither"])
def test_gradients_of_the_required_input_only(needs_grad):
    x, weight, labels = draw()
    expected_grads = dict(
        zip(("x", "weight"), torch.autograd.grad(reference_loss(x, weight, labels), (x, weight)), strict=True)
    )
    x.requires_grad_(needs_grad == "x"), weight.requires_grad_(needs_grad == "weight")
    actual = linear_cross_entropy(x, weight, labels)
    assert actual.requires_grad == (needs_grad != "neither")
    if needs_grad != "neither":
        (grad,) = torch.autograd.grad(actual, {"x": x, "weight": weight}[needs_grad])
        torch.testing.assert_close(grad, expected_grads[needs_grad])


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("mode", ["bfloat16", "autocast"])
def test_16_bit_errors_are_close_to_the_reference(mode):
    x, weight, labels = draw(torch.bfloat16 if mode == "bfloat16" else torch.float32)
    double = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = reference_loss(*double, labels)
    exact = [exact, *torch.autograd.grad(exact, double)]
    cast = torch.autocast("cpu", torch.bfloat16) if mode == "autocast" else nullcontext()

    def errors(f):
        with cast:
            loss = f(x, weight, labels)
        found = [loss, *torch.autograd.grad(loss, (x, weight))]
        return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]

    for actual, expected in zip(errors(linear_cross_entropy), errors(reference_loss), strict=True):
        assert actual < 2 * expected + 1e-3


def test_ignored_labels_alone_give_nan_like_the_reference():
    x, weight, labels = draw()
    assert (
        linear_cross_entropy(x, weight, labels.fill_(-100)).isnan()
        and reference_loss(x, weight, labels).isnan()
    )


def model_of(**options):
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "num_slots": 8}
    return GirihForCausalLM(config_of(**sizes | options)).train()


def saved_shapes(f):
    """Shapes of the tensors that autograd saves."""
    shapes = []
    with saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
        f()
    return shapes


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_loss_in_chunks_matches_loss_of_all_logits(tied, packed):
    ids = torch.randint(V, (1 if packed else 3, 30), generator=torch.Generator().manual_seed(0))
    call = {"cu_seqlens": torch.tensor([0, 11, 30])} if packed else {}
    found = []
    for in_chunks in (False, True):
        model = model_of(tie_word_embeddings=tied, loss_in_chunks=in_chunks)
        output = model(ids, labels=ids, **call)
        output.loss.backward()
        found.append((output.loss, {name: p.grad for name, p in model.named_parameters()}))
        assert (output.logits is None) == in_chunks
        shapes = saved_shapes(lambda model=model: model(ids, labels=ids, **call))
        assert any(s[-1:] == (V,) for s in shapes) != in_chunks  # logits or their gradients
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)
    assert model.eval()(ids, labels=ids, **call).logits is not None
    assert GirihConfig(**model.config.to_dict()).loss_in_chunks


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("num_items", [7, torch.tensor(90)], ids=str)
def test_num_items_in_batch_divides_the_loss(num_items):
    ids = torch.randint(V, (3, 30), generator=torch.Generator().manual_seed(0))
    losses = [
        model_of(loss_in_chunks=in_chunks)(ids, labels=ids, num_items_in_batch=num_items).loss
        for in_chunks in (False, True)
    ]
    mean = model_of()(ids, labels=ids).loss
    torch.testing.assert_close(losses, [mean * 87 / num_items] * 2, rtol=1e-5, atol=0)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("wrong", [V, -1, -101])
def test_label_out_of_range_is_refused(wrong):
    x, weight, labels = draw()
    labels[3] = wrong
    for loss in (reference_loss, linear_cross_entropy):
        with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
            loss(x, weight, labels)


def test_swiglu_saves_two_projections_and_their_product():
    layer, x = SwiGLU(8, 24).double(), torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    wide = [s for s in saved_shapes(lambda: layer(x)) if (s[-1] == 24 and len(s) > 2) or s == (15, 24)]
    assert len(wide) == 3
    expected = layer.down_proj(F.silu(layer.gate_proj(x)) * layer.up_proj(x))
    torch.testing.assert_close(layer(x), expected)
    assert torch.autograd.gradcheck(layer, (x,))
    arguments = (x, *layer.parameters())
    for a, b in zip(
        *(torch.autograd.grad(y.square().sum(), arguments) for y in (layer(x), expected)), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("in_chunks", [False, True])
def test_a_compiled_model_has_the_same_gradients(in_chunks):
    ids = torch.randint(V, (2, 20), generator=torch.Generator().manual_seed(0))
    found = []
    for compiled in (False, True):
        model = model_of(loss_in_chunks=in_chunks)
        torch._dynamo.reset()
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        loss = run(ids, labels=ids).loss
        loss.backward()
        found.append((loss, {name: p.grad for name, p in model.named_parameters()}))
        assert all(p.grad.any() for p in model.parameters())
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)


def test_fp16_mean_of_70000_rows_does_not_overflow():
    x = torch.full((70000, 4), 3.0, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(3, 4, dtype=torch.float16, requires_grad=True)
    loss = linear_cross_entropy(x, weight, torch.zeros(70000, dtype=torch.long))
    dx, dweight = torch.autograd.grad(loss, (x, weight))
    torch.testing.assert_close(dweight, torch.tensor([-2.0, 1.0, 1.0]).half()[:, None].expand(3, 4))
    assert dx.isfinite().all()


@pytest.mark.parametrize("kind", ["hook", "bias", "loss", "logits_to_keep"])
def test_changed_head_or_loss_computes_all_logits(kind):
    model, ids, call = model_of(loss_in_chunks=True, tie_word_embeddings=False), torch.arange(20)[None], {}
    if kind == "hook":
        model.lm_head.register_forward_hook(lambda *_: None)
    elif kind == "bias":
        model.lm_head.bias = torch.nn.Parameter(torch.ones(V))
    elif kind == "loss":
        model.loss_function = lambda logits, **_: logits.sum()
    else:
        call = {"logits_to_keep": 20}
    assert model(ids, labels=ids, **call).logits is not None


def test_loss_in_chunks_must_be_a_bool():
    with pytest.raises(ValueError, match="loss_in_chunks is 'no'; expected True or False"):
        GirihConfig(loss_in_chunks="no")


def test_swiglu_under_trace_vmap_and_grad():
    layer, x = SwiGLU(8, 24), torch.randn(3, 5, 8)
    with torch.no_grad():
        assert torch.jit.trace(layer, (x,))(x).equal(layer(x))
    torch.testing.assert_close(torch.vmap(layer)(x), layer(x))
    call = torch.func.functional_call
    grads = torch.func.grad(lambda p: call(layer, p, (x,)).sum())(dict(layer.named_parameters()))
    expected = torch.autograd.grad(layer(x).sum(), list(layer.parameters()))
    torch.testing.assert_close(list(grads.values()), list(expected))


def test_meta_tensors():
    with torch.device("meta"):
        x, weight = torch.empty(6, 8, requires_grad=True), torch.empty(16, 8, requires_grad=True)
        loss = linear_cross_entropy(x, weight, torch.zeros(6, dtype=torch.long))
        assert loss.is_meta and torch.autograd.grad(loss, x)[0].is_meta


def test_operator_refuses_invalid_calls():
    x, weight, labels = draw()
    op = torch.ops.girih.linear_cross_entropy
    with pytest.raises(RuntimeError, match="expected .classes, in. with at least one class"):
        op(x, weight[:0], labels, -100, 8)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(op(x, weight, labels, -100, losses.MAX_LOGITS), x, create_graph=True)
