"""torch.compile(fullgraph=True): no graph breaks, and the results equal eager mode."""

import pytest
import torch
from cases import CASES, ONE_EACH, RECURRENT, float_of, gradients, operator, precision, step
from comparison import assert_within

in_half_precision = True


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    # The on-disk caches do not notice a rebuilt library and would return an older graph.
    with torch.compiler.config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


def compile_operator(inputs, **how):
    """The compiled operator as a function of inputs with the same options."""

    @torch.compile(fullgraph=True, **how)
    def call(floats, extra):
        return operator(inputs.with_floats(floats), **extra)

    return lambda inputs: call(inputs.floats, inputs.cu())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_aot_eager_equals_eager(case, device):
    inputs = case.draw(7, resumed=case.has_state, dtype=float_of(device), device=device).requiring_grad()
    outs, want = compile_operator(inputs, backend="aot_eager")(inputs), operator(inputs)
    assert_within(outs, want, 1e-6)
    assert_within(gradients(outs, inputs), gradients(want, inputs), 1e-6)


@pytest.mark.parametrize("case", ONE_EACH, ids=str)
def test_inductor_equals_eager(case, device):
    # From a start: a state in mid-chunk is built by more operators, whose kernels take long to compile. In
    # float64: the compiler rounds the first state in another order, and a gradient can amplify the difference
    # ten times.
    dtype, tolerance = device.dtype or torch.float64, 1e-9
    if device.dtype:
        _, tolerance, _ = precision(case, device)
    inputs = case.draw(7, dtype=dtype, device=device).requiring_grad()
    call = compile_operator(inputs, backend="inductor")
    want = operator(inputs)
    outs = call(inputs)
    assert_within(outs, want, tolerance)
    assert_within(gradients(outs, inputs), gradients(want, inputs), tolerance)
    with torch.no_grad():
        assert_within(call(inputs), want, tolerance)


@pytest.mark.parametrize("case", ONE_EACH, ids=str)
def test_lengths_share_a_few_graphs(case, device):
    call = None
    # One graph for T = 0, one for T = 1, one for all others.
    with torch._dynamo.config.patch(recompile_limit=3, fail_on_recompile_limit_hit=True):
        for T in (9, 6, 17, 4, 1, 0, 33):
            inputs = case.draw(
                T, resumed=case.has_state, dtype=float_of(device), device=device
            ).requiring_grad()
            call = call or compile_operator(inputs, backend="aot_eager", dynamic=True)
            assert_within(call(inputs), operator(inputs), 1e-6)


@pytest.mark.parametrize("case", [c for c in ONE_EACH if c.has_state], ids=str)
def test_packed_sequences(case, device):
    inputs = case.draw(
        0, lengths=[5, 0, 3], resumed=True, dtype=float_of(device), device=device
    ).requiring_grad()
    outs, want = compile_operator(inputs, backend="aot_eager")(inputs), operator(inputs)
    assert_within(outs, want, 1e-6)
    assert_within(gradients(outs, inputs), gradients(want, inputs), 1e-6)


@pytest.mark.parametrize("case", [c for c in RECURRENT if c in ONE_EACH], ids=str)
def test_steps(case, device):
    start = case.draw(3, resumed=True, dtype=float_of(device), device=device)
    eager, graph = (dict(operator(start.part(0, 0))) for _ in range(2))
    eager.pop("o"), graph.pop("o")
    call = torch.compile(
        lambda token, state: step(token.part(0, 1, state)), fullgraph=True, backend="aot_eager"
    )
    for t in range(3):
        token = start.part(t, t + 1)
        assert_within(call(token, graph), step(token.part(0, 1, eager)), 1e-6)
    assert_within(graph, eager, 1e-6)


class Program(torch.nn.Module):
    """The operator on inputs multiplied by a parameter, which does or does not require gradients."""

    def __init__(self, inputs, trained):
        super().__init__()
        self.inputs, self.one = inputs, torch.nn.Parameter(torch.ones(()), requires_grad=trained)

    def forward(self, floats):
        return operator(self.inputs.with_floats({name: x * self.one for name, x in floats.items()}))


def export_program(case, inputs, trained=False):
    """Exports for any number of tokens from 2 on."""
    tokens = torch.export.Dim("tokens", min=2)
    dynamic = {
        name: {1: rows * tokens} if (rows := name in inputs.data and case.token_rows(name)) else None
        for name in inputs.floats
    }
    return torch.export.export(Program(inputs, trained), (inputs.floats,), dynamic_shapes=(dynamic,)).module()


@pytest.mark.parametrize("case", ONE_EACH, ids=str)
def test_exported_programs_accept_any_length(case, device):
    inputs = case.draw(9, resumed=case.has_state, dtype=float_of(device), device=device)
    program = export_program(case, inputs)
    for T in (9, 33):
        other = case.draw(T, resumed=case.has_state, dtype=float_of(device), device=device)
        assert_within(program(other.floats), operator(other), 1e-6)


@pytest.mark.parametrize("case", ONE_EACH, ids=str)
def test_saved_tensors_do_not_bound_the_exported_length(case, device):
    """16-bit inputs save the most tensors; a bound on the length would make the export fail."""
    export_program(
        case, case.draw(9, resumed=case.has_state, dtype=torch.bfloat16, device=device), trained=True
    )
