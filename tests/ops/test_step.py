"""`X_step` equals `X` on one token and writes the state in place."""

from dataclasses import replace

import pytest
import torch
from cases import RECURRENT, operator, precision, step
from comparison import assert_within


def with_own_state(inputs):
    """The inputs with state tensors that share no memory with other tensors."""
    state = {name: x.detach().clone() for name, x in operator(inputs.part(0, 0)).items() if name != "o"}
    return replace(inputs, state_fields=state)


@pytest.mark.parametrize("resumed", [False, True], ids=["start", "resumed"])
@pytest.mark.parametrize("case", RECURRENT, ids=str)
def test_steps_equal_the_forward(case, resumed, device):
    dtype, tolerance, _ = precision(case, device)
    inputs = with_own_state(case.draw(9, resumed=resumed, dtype=dtype, device=device))
    want = operator(inputs)
    pointers = {name: x.data_ptr() for name, x in inputs.state_fields.items()}
    rows = [step(inputs.part(t, t + 1)) for t in range(9)]
    assert_within({"o": torch.cat(rows, 1), **inputs.state_fields}, want, tolerance)
    assert pointers == {name: x.data_ptr() for name, x in inputs.state_fields.items()}


@pytest.mark.parametrize("case", RECURRENT, ids=str)
def test_a_step_increments_the_versions_of_state_tensors(case, device):
    inputs = with_own_state(case.draw(2, resumed=True, dtype=torch.float32, device=device))
    for t in range(2):
        before = {name: x._version for name, x in inputs.state_fields.items()}
        step(inputs.part(t, t + 1))
        assert {name: x._version for name, x in inputs.state_fields.items()} == {
            n: v + 1 for n, v in before.items()
        }


@pytest.mark.parametrize("case", RECURRENT, ids=str)
def test_backward_fails_after_a_step_on_its_state(case, device):
    """PyTorch's in-place operators do the same; otherwise the gradients would be wrong."""
    inputs = with_own_state(case.draw(4, resumed=True, dtype=torch.float32, device=device))
    data = {name: x.clone().requires_grad_(x.is_floating_point()) for name, x in inputs.data.items()}
    loss = operator(replace(inputs, data=data))["o"].square().sum()
    with torch.no_grad():
        step(inputs.part(0, 1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("case", RECURRENT, ids=str)
def test_a_step_accepts_an_inference_mode_state(case, device):
    with torch.inference_mode():
        inputs = with_own_state(case.draw(1, resumed=True, dtype=torch.float32, device=device))
        want = operator(inputs)["o"]
        assert_within({"o": step(inputs)}, {"o": want}, 1e-4)


@pytest.mark.parametrize("case", RECURRENT, ids=str)
def test_a_step_at_bf16_keeps_an_fp32_state(case, device):
    inputs = with_own_state(
        case.draw(1, resumed=True, dtype=torch.bfloat16, gate_dtype=torch.float32, device=device)
    )
    dtypes = {name: x.dtype for name, x in inputs.state_fields.items()}
    assert step(inputs).dtype == torch.bfloat16
    assert dtypes == {name: x.dtype for name, x in inputs.state_fields.items()}


@pytest.mark.parametrize("case", RECURRENT, ids=str)
def test_invalid_states_are_refused_by_name_and_not_written(case, device):
    """A gradient, a missing tensor, an expanded or negated view, two tensors that share memory."""
    inputs = with_own_state(case.draw(1, resumed=True, dtype=torch.float32, device=device))
    copies = {name: x.clone() for name, x in inputs.state_fields.items()}

    def check_refused(change, words, name):
        with pytest.raises(ValueError, match=f"girih.{case.op}_step: {name}{words}"):
            step(replace(inputs, state_fields=inputs.state_fields | change))
        assert_within(inputs.state_fields, copies, 0.0)

    names = [name for name, x in inputs.state_fields.items() if name != "position" and x.numel()]
    for name in names:
        x = inputs.state_fields[name]
        check_refused({name: x.detach().requires_grad_()}, " requires a gradient", f"state_{name}")
        check_refused({name: x[:1].expand(x.shape)}, " is an expanded or negated view", f"state_{name}")
        check_refused({name: torch._neg_view(x)}, " is an expanded or negated view", f"state_{name}")
    optional = {"z", "decay", "position"}
    for name in set(inputs.state_fields) - (
        optional - {"position"} if case.op != "delta_product" else optional
    ):
        check_refused({name: None}, " is None but is written in place", f"state_{name}")
    twins = [
        (a, b)
        for a in names
        for b in names
        if a < b and inputs.state_fields[a].shape == inputs.state_fields[b].shape
    ]
    for a, b in twins:
        check_refused({b: inputs.state_fields[a]}, " shares memory with", "state_[a-z_]*")
    x = next(iter(inputs.data.values()))
    with pytest.raises(ValueError, match=f"girih.{case.op}_step: .* requires a gradient but a step has none"):
        step(replace(inputs, data=inputs.data | {next(iter(inputs.data)): x.clone().requires_grad_()}))


@pytest.mark.parametrize("case", RECURRENT, ids=str)
def test_an_invalid_last_tensor_leaves_the_state_unchanged(case, device):
    inputs = with_own_state(case.draw(1, resumed=True, dtype=torch.float32, device=device))
    copies = {name: x.clone() for name, x in inputs.state_fields.items()}
    last = list(inputs.state_fields)[-1]
    with pytest.raises(ValueError, match=f"state_{last} "):
        step(replace(inputs, state_fields=inputs.state_fields | {last: inputs.state_fields[last].half()}))
    assert_within(inputs.state_fields, copies, 0.0)
