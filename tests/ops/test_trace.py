"""torch.jit.trace: a traced program equals an eager call on other inputs of the same shapes."""

import io
from dataclasses import replace

import pytest
import torch
from cases import CASES, ONE_EACH, RECURRENT, float_of, gradients, operator, step
from comparison import assert_within
from converted import WAYS, converted
from girih.acceleration import accelerate
from girih.models import GirihForCausalLM
from girih.nn.functional.loss import linear_cross_entropy
from test_accelerate import FAMILIES, model_of
from test_models import MODELS, small
from test_nn import HIDDEN, LAYERS

pytestmark = pytest.mark.filterwarnings(
    "ignore::torch.jit.TracerWarning", "ignore:`torch.jit", "ignore:girih.accelerate"
)


def trace(function, inputs):
    """`function(inputs, cu)` traced as a function of the inputs' floating tensors, position and bounds."""
    names = list(inputs.floats)

    def call(floats, position, cu):
        traced_inputs = inputs.with_floats(dict(zip(names, floats, strict=True)))
        result = function(
            replace(traced_inputs, position=position if inputs.position is not None else None), cu
        )
        call.names = list(result)
        return tuple(result.values())

    def arguments(inputs):
        position = torch.zeros(()) if inputs.position is None else inputs.position
        return tuple(inputs.floats.values()), position, next(iter(inputs.cu().values()), torch.zeros(()))

    program = torch.jit.trace(call, arguments(inputs), check_trace=False)
    return lambda inputs: dict(zip(call.names, program(*arguments(inputs)), strict=True))


def call_operator(inputs, cu):
    return operator(inputs, **({inputs.case.packing: cu} if inputs.lengths else {}))


@pytest.mark.parametrize("resumed", [False, True], ids=["start", "resumed"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_operator(case, resumed, device):
    first, other = (
        case.draw(7, resumed=resumed and case.has_state, dtype=float_of(device), device=device, seed=seed)
        for seed in (0, 1)
    )
    other = other.requiring_grad()
    outs, want = trace(call_operator, first)(other), operator(other)
    assert_within(outs, want, 1e-6)
    assert_within(gradients(outs, other), gradients(want, other), 1e-6)


@pytest.mark.parametrize("case", [case for case in ONE_EACH if case.has_state], ids=str)
def test_packed_sequences(case, device):
    first, other = (
        case.draw(0, lengths=lengths, resumed=True, dtype=float_of(device), device=device, seed=seed)
        for seed, lengths in enumerate(([5, 0, 3], [2, 4, 2]))
    )
    assert_within(trace(call_operator, first)(other), operator(other), 1e-6)


@pytest.mark.parametrize("case", RECURRENT, ids=str)
def test_a_step(case, device):
    def step_copy(inputs, cu):
        fields = {name: x.clone() for name, x in dict(inputs.state).items()}
        return {"o": step(replace(inputs, state_fields=fields))} | fields

    first, other = (
        case.draw(1, resumed=True, dtype=float_of(device), device=device, seed=seed) for seed in (0, 1)
    )
    with torch.no_grad():
        assert_within(trace(step_copy, first)(other), step_copy(other, None), 1e-6)


class Program(torch.nn.Module):
    """Holds a module's parameters and calls `call(module, *inputs)`."""

    def __init__(self, module, call):
        super().__init__()
        self.module, self.call = module, call

    def forward(self, *inputs):
        return self.call(self.module, *inputs)


def check(program, inputs, others, tolerance=1e-7):
    """Traces with `inputs`, saves and loads; outputs and gradients on `others` equal an eager
    call."""
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(program, inputs, check_trace=False), file)
    file.seek(0)
    loaded = torch.jit.load(file)
    found, want = list(loaded(*others)), list(program(*others))

    def gradients(module, outputs):
        loss = sum(x.square().sum() for x in outputs)
        parameters = dict(module.named_parameters())
        found = torch.autograd.grad(loss, parameters.values(), allow_unused=True, materialize_grads=True)
        return dict(zip(parameters, found, strict=True))

    torch.testing.assert_close(found, want, atol=1e-9, rtol=1e-9)
    if torch.is_grad_enabled():
        both = gradients(loaded, found), gradients(program, want)
        torch.testing.assert_close(*both, atol=tolerance, rtol=10 * tolerance)


def normal(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer(name):
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    x, other = (normal(2, 11, HIDDEN, seed=seed) for seed in (0, 1))
    valid = torch.ones(2, 11, dtype=torch.bool)
    padded = valid.clone()
    padded[1, :5] = False
    check(Program(layer, lambda layer, x: layer(x)[:1]), (x,), (other,))
    masked = Program(layer, lambda layer, x, mask: (layer(x, mask)[0] * mask[..., None],))
    check(masked, (x, valid), (other, padded))
    packed = Program(layer, lambda layer, x, cu: layer(x, None, None, False, cu)[:1])
    check(packed, (x[:1], torch.tensor([0, 4, 11])), (other[:1], torch.tensor([0, 7, 11])))

    def two_calls(layer, x):
        first, state = layer(x[:, :10], None, None, True)
        return first, layer(x[:, 10:], None, state, True)[0]

    with torch.no_grad():
        check(Program(layer, two_calls), (x,), (other,))


def check_model(model, **tolerance):
    """Without a mask, and with a mask that is all ones when traced."""
    model = model.double().eval()
    ids, others = (
        torch.randint(3, 30, (2, 20), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)
    )
    mask = torch.ones_like(ids)
    padded = mask.clone()
    padded[0, :4] = 0
    whole = Program(model, lambda model, ids: (model(ids, use_cache=False).logits,))
    check(whole, (ids,), (others,), **tolerance)

    def masked(model, ids, mask):
        return (model(ids, attention_mask=mask, use_cache=False).logits * mask[..., None],)

    check(Program(model, masked), (ids, mask), (others, padded), **tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_a_model(name):
    torch.manual_seed(0)
    check_model(GirihForCausalLM(small(**MODELS[name], initializer_range=0.2)))


@pytest.mark.parametrize("way", WAYS)
def test_a_converted_model(way):
    check_model(converted("llama", way))


# Qwen4's indexer uses PyTorch calls that torch.jit.trace does not support.
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"qwen4_exp_text"}))
def test_an_accelerated_model(family):
    model = model_of(family)
    with accelerate(model):
        check_model(model, tolerance=1e-4)  # transformers computes some parts in fp32


def test_the_loss():
    weight = torch.nn.Linear(8, 30).double()
    labels, others = torch.arange(12), torch.arange(12) * 2
    others[3] = -100
    program = Program(weight, lambda m, x, labels: (linear_cross_entropy(x, m.weight, labels),))
    check(program, (normal(12, 8, seed=0), labels), (normal(12, 8, seed=1), others))
