"""torch.func and other transforms equal a loop, or raise an error that says so."""

import pytest
import torch
from cases import CASES, ONE_EACH, cotangents, float_of, gradients, operator, precision, step
from comparison import assert_within
from girih import ops
from test_dispatch import registered_call

in_half_precision = True


def is_leaf(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


WITHOUT_WEIGHTS = [case for case in CASES if not {"weight", "bias", "phi_weight"} & set(case.data)]


@pytest.mark.parametrize("resumed", [False, True], ids=["start", "resumed"])
@pytest.mark.parametrize("case", WITHOUT_WEIGHTS, ids=str)
def test_vmap_equals_a_loop(case, resumed, device):
    """Outputs and gradients. All draws share the position in the chunk."""
    dtype, tolerance, grad_tolerance = precision(case, device)
    resumed = resumed and case.has_state
    draws = [case.draw(9, resumed=resumed, dtype=dtype, device=device, seed=seed) for seed in range(3)]
    first = draws[0]
    alone = [first.with_floats(x.floats).requiring_grad() for x in draws]
    leaves = {name: torch.stack([x.floats[name] for x in draws]).requires_grad_() for name in first.floats}
    outs = torch.vmap(lambda floats: operator(first.with_floats(floats)))(leaves)
    want = [operator(x) for x in alone]
    assert_within(outs, {name: torch.stack([w[name] for w in want]) for name in outs}, tolerance)
    grads = cotangents(outs)
    found = torch.autograd.grad(
        [outs[name] for name in grads],
        list(leaves.values()),
        list(grads.values()),
        materialize_grads=True,
        allow_unused=True,
    )
    draw_grads = [
        gradients(w, x, {name: g[i] for name, g in grads.items()})
        for i, (w, x) in enumerate(zip(want, alone, strict=True))
    ]
    want_grads = {name: torch.stack([e[name] for e in draw_grads]) for name in leaves}
    assert_within(dict(zip(leaves, found, strict=True)), want_grads, grad_tolerance)


def test_vmap_over_any_dimension_with_shared_tensors(device):
    q, k, v = torch.randn(3, 2, 5, 7, 4, device=device).unbind(0)
    k = k.expand(2, 5, 7, 4)
    found = torch.vmap(lambda q: ops.gla(q, k, v)[0], in_dims=3, out_dims=2)(
        q[:, :, :, None].expand(-1, -1, -1, 6, -1)
    )
    want = ops.gla(q, k, v)[0]
    for i in range(6):
        assert_within(found[:, :, i], want, 1e-5)


@pytest.mark.parametrize("case", ONE_EACH, ids=str)
def test_nested_vmap_where_only_the_outer_level_maps_tensors(case, device):
    inputs = case.draw(5, resumed=case.has_state, dtype=float_of(device), device=device)
    name, x = next(iter(inputs.data.items()))
    xs, count = torch.stack([x, -x, 2 * x]), torch.zeros(4, device=device)
    call = lambda x: operator(inputs.with_floats(inputs.floats | {name: x}))["o"]  # noqa: E731
    want = torch.stack([call(x) for x in xs])[:, None].expand(-1, 4, *[-1] * x.dim())
    outer_only = torch.vmap(lambda x: torch.vmap(lambda _: call(x))(count))(xs)
    assert_within(outer_only, want, 1e-5)
    three_levels = torch.vmap(lambda x: torch.vmap(lambda y: torch.vmap(lambda _: call(x) + y)(count))(count))
    assert_within(three_levels(xs), want[:, None].expand(-1, 4, *[-1] * want[0].dim()), 1e-5)
    inner_only = torch.vmap(lambda _: torch.vmap(call)(xs))(count)
    assert_within(inner_only, want.transpose(0, 1), 1e-5)


def test_nested_vmap_maps_each_tensor_at_its_own_level(device):
    q, k, v = torch.randn(3, 3, 2, 5, 4, 8, device=device).unbind(0)
    found = torch.vmap(lambda q: torch.vmap(lambda k: ops.gla(q, k, v[0])[0])(k))(q)
    want = torch.stack([torch.stack([ops.gla(x, y, v[0])[0] for y in k]) for x in q])
    assert_within(found, want, 1e-5)


def test_vmap_over_a_dimension_of_size_0(device):
    q, k, v = torch.randn(3, 0, 2, 5, 7, 4, device=device).unbind(0)
    assert torch.vmap(lambda *x: ops.gla(*x)[0])(q, k, v).shape == (0, 2, 5, 7, 4)


@pytest.mark.parametrize("case", [case for case in ONE_EACH if "weight" in case.data], ids=str)
def test_vmap_over_weights_is_refused(case, device):
    inputs = case.draw(4, dtype=float_of(device), device=device)
    weights = torch.stack([inputs.data["weight"]] * 2)
    with pytest.raises(ValueError, match=f"girih.{case.op}: weight is mapped by torch.vmap"):
        torch.vmap(lambda w: operator(inputs.with_floats(inputs.floats | {"weight": w})))(weights)


@pytest.mark.parametrize("case", [case for case in ONE_EACH if case.packing], ids=str)
def test_vmap_over_packed_sequences_is_refused(case, device):
    inputs = case.draw(0, lengths=[case.chunk] * 2, dtype=float_of(device), device=device)
    name = next(iter(inputs.data))
    with pytest.raises(ValueError, match=f"{case.packing} packs sequences into one row"):
        torch.vmap(lambda x: operator(inputs.with_floats(inputs.floats | {name: x})))(
            torch.stack([inputs.data[name]] * 2)
        )


@pytest.mark.parametrize("case", [case for case in ONE_EACH if case.has_state], ids=str)
def test_vmap_of_a_step_is_refused(case, device):
    inputs = case.draw(1, resumed=True, dtype=float_of(device), device=device)
    name, x = next(iter(inputs.data.items()))
    with pytest.raises(ValueError, match=f"girih.{case.op}_step: torch.vmap cannot map a state"):
        torch.vmap(lambda x: step(inputs.with_floats(inputs.floats | {name: x})))(torch.stack([x, x]))


@pytest.mark.parametrize("case", ONE_EACH, ids=str)
def test_forward_mode_is_refused_by_name(case, device):
    """Never a silent zero, for a tangent of any input."""
    inputs = case.draw(5, resumed=case.has_state, dtype=float_of(device), device=device)
    for name, x in inputs.floats.items():
        with pytest.raises(NotImplementedError, match=f"girih.{case.op}: .* has a tangent"):
            torch.func.jvp(lambda x, name=name: operator(inputs.with_floats(inputs.floats | {name: x}))["o"],
                           (x,), (torch.ones_like(x),))  # fmt: skip


@pytest.mark.parametrize("case", [case for case in ONE_EACH if case.has_state], ids=str)
def test_forward_mode_of_a_step_is_refused_by_name(case, device):
    inputs = case.draw(1, resumed=True, dtype=float_of(device), device=device)
    name, x = next(iter(inputs.data.items()))
    with pytest.raises(NotImplementedError, match=f"girih.{case.op}_step: {name} has a tangent"):
        torch.func.jvp(lambda x: step(inputs.with_floats(inputs.floats | {name: x})), (x,), (x,))


@pytest.mark.parametrize("case", ONE_EACH, ids=str)
def test_reverse_mode_of_torch_func_is_refused(case, device):
    inputs = case.draw(5, dtype=float_of(device), device=device)
    name, x = next(iter(inputs.data.items()))
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda x: operator(inputs.with_floats(inputs.floats | {name: x}))["o"].sum())(x)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_backward_called_in_inference_mode_gives_the_gradients(case, device):
    """Calls the registered X_backward directly; the meta device omits the same gradients."""
    dtype, _, tolerance = precision(case, device)
    inputs = case.draw(7, resumed=case.has_state, dtype=dtype, device=device)
    op, args, options = registered_call(operator, inputs)
    leaves = [x.requires_grad_() if is_leaf(x) else x for x in args]
    outs = op(*leaves, **options)
    outs = outs if isinstance(outs, tuple) else (outs,)
    grads = cotangents({str(i): x for i, x in enumerate(outs) if x is not None})
    want = torch.autograd.grad(
        [outs[int(i)] for i in grads],
        [x for x in leaves if is_leaf(x)],
        list(grads.values()),
        allow_unused=True,
        materialize_grads=True,
    )

    description = ops.describe()[case.op]

    def call(move):
        tensors = [move(x.detach()) if isinstance(x, torch.Tensor) else x for x in args]
        output_grads = [move(grads[str(i)]) if str(i) in grads else None for i in range(len(outs))]
        results = getattr(torch.ops.girih, f"{case.op}_forward")(*tensors, **options, save=True)
        saved = list(results[len(outs) :]) if isinstance(results, tuple) else []
        # forward returns an output that is also a saved tensor only once.
        saved += [
            results[0] for tensor in description["saved"] if tensor["name"] == description["output"]["name"]
        ]
        found = getattr(torch.ops.girih, f"{case.op}_backward")(*output_grads, *tensors, *saved, **options)
        return [x for x in found if x is not None]

    with torch.inference_mode():
        found, on_meta = call(torch.clone), call(lambda x: x.to("meta"))
    assert [x.shape for x in found] == [x.shape for x in on_meta] == [x.shape for x in want]
    for i, x in enumerate(found):
        assert_within(x, want[i], tolerance)


@pytest.mark.parametrize("case", ONE_EACH, ids=str)
def test_autograd_nodes_are_named_after_the_operator(case, device):
    inputs = case.draw(3, dtype=float_of(device), device=device).requiring_grad()
    assert operator(inputs)["o"].grad_fn.name() == f"girih::{case.op}_backward"


@pytest.mark.parametrize("case", ONE_EACH, ids=str)
def test_compiled_autograd_runs_the_backward(case):
    inputs = case.draw(5, dtype=torch.float64).requiring_grad()
    want = gradients(operator(inputs), inputs)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        found = gradients(operator(inputs), inputs)
    assert_within(found, want, 1e-9)
