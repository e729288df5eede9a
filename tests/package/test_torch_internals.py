"""Each function of girih._torch_internals on the installed PyTorch. No other module uses private names of
torch."""

import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import girih
import pytest
import torch
from conftest import needs_cuda
from girih import _torch_internals as internals
from girih.models import graph
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

PACKAGE = Path(girih.__file__).parent
PRIVATE = re.compile(
    r"\btorch\._(?!_)\w|\bnn\.modules\.module\b|forward_ad\._|torch\.utils\._|_(forward|backward)(_pre)?_hooks"
)


def test_no_other_module_uses_private_names_of_torch():
    found = {
        str(file.relative_to(PACKAGE)): names
        for file in PACKAGE.rglob("*.py")
        if file.name != "_torch_internals.py"
        and (names := [m[0] for m in PRIVATE.finditer(file.read_text())])
    }
    assert not found


def test_every_function_has_a_test_here():
    source = Path(__file__).read_text()
    functions = [
        name
        for name, value in vars(internals).items()
        if getattr(value, "__module__", "") == internals.__name__
    ]
    assert len(functions) >= 9
    assert not [name for name in functions if f"internals.{name}(" not in source]


def test_operators_are_known():
    assert internals.is_operator(torch.ops.aten.mm)
    assert not internals.is_operator(torch.ops.aten.mm.default) and not internals.is_operator(torch.mm)


def test_a_dispatch_mode_watches_operators():
    assert not internals.has_dispatch_mode()
    with FlopCounterMode(display=False):
        assert internals.has_dispatch_mode()
    with TorchDispatchMode():
        assert internals.has_dispatch_mode()
    assert not internals.has_dispatch_mode()


def test_transforms_of_torch_func_are_seen():
    seen = []

    def f(x):
        seen.append((internals.has_transform(), internals.has_forward_mode()))
        return x.sum()

    f(torch.ones(2))
    torch.func.grad(f)(torch.ones(2))
    torch.vmap(f)(torch.ones(2, 2))
    torch.func.jvp(f, (torch.ones(2),), (torch.ones(2),))
    with forward_ad.dual_level():
        f(torch.ones(2))
    f(torch.ones(2))
    assert seen == [(False, False), (True, False), (True, False), (True, True), (False, True), (False, False)]


def test_transforms_are_seen_by_a_compiler():
    def f(x):
        return x + 1 if internals.has_transform() or internals.has_forward_mode() else x - 1

    def mapped(x):
        return torch.vmap(f)(x)

    assert torch.compile(f, backend="eager", fullgraph=True)(torch.zeros(1)) == -1
    assert (
        torch.compile(mapped, backend="eager", fullgraph=True)(torch.zeros(1)) == mapped(torch.zeros(1)) == 1
    )


def test_global_hooks_are_seen():
    assert not internals.has_global_hook()
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert internals.has_global_hook()
    hook.remove()
    assert not internals.has_global_hook()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.register_forward_hook(lambda *_: None),
        lambda m: m.register_forward_pre_hook(lambda *_: None),
        lambda m: m.register_full_backward_hook(lambda *_: None),
        lambda m: m.register_full_backward_pre_hook(lambda *_: None),
        lambda m: setattr(m, "forward", lambda x: x),
    ],
)
def test_a_module_that_does_more_than_its_forward_is_seen(change):
    module = nn.Linear(2, 2)
    assert internals.is_called_plainly(module)
    change(module)
    assert not internals.is_called_plainly(module)


def test_a_module_compiled_in_place_is_seen():
    module = nn.Linear(2, 2)
    assert not internals.is_compiled_in_place(vars(module))
    module.compile()
    assert internals.is_compiled_in_place(vars(module))


def test_changes_of_a_module_appear_in_its_tables():
    module = nn.Linear(2, 2)
    children, parameters, buffers = internals.module_tables(module)
    module.child, module.scale = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    module.register_buffer("mask", torch.ones(2))
    assert children["child"] is module.child and buffers["mask"] is module.mask
    assert list(parameters) == ["weight", "bias", "scale"]
    after, before = internals.hook_tables(module)
    module.register_forward_hook(lambda *_: None)
    assert len(after) == 1 and not before
    module.register_forward_pre_hook(lambda *_: None)
    assert len(before) == 1


def test_a_registered_dataclass_is_taken_apart():
    @dataclass(frozen=True)
    class Pair:
        a: torch.Tensor
        b: torch.Tensor

    internals.register_dataclass(Pair, "girih.test.Pair")
    pair = Pair(torch.ones(1), torch.zeros(1))
    assert [id(x) for x in tree_leaves(pair)] == [id(pair.a), id(pair.b)]


@needs_cuda
def test_the_pool_of_a_capture_that_failed_is_released():
    """The test goes through `graph.record`, which also restores the random generator of the device."""
    stream = torch.cuda.current_stream()

    def synchronize():
        torch.ones(2**27, device="cuda")
        torch.cuda.current_stream().synchronize()  # a stream under capture cannot be synchronized

    graph.record(lambda: None, stream)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with pytest.raises(RuntimeError):
        graph.record(synchronize, stream)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before
    outputs = []
    replay = graph.record(lambda: outputs.append(torch.ones(5, device="cuda")), stream)
    replay()
    assert outputs[0].sum() == 5
    assert torch.rand(3, device="cuda").isfinite().all()


@needs_cuda
def test_the_pool_of_a_capture_is_released_once():
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        captured.capture_begin(pool=pool, capture_error_mode="thread_local")
        torch.zeros(2**20, device="cuda")
        captured.capture_end()
    with pytest.raises(RuntimeError):  # capture_end has released the pool
        internals.release_graph_pool(stream.device_index, pool)


def test_errors_of_fsdp_about_dtypes_have_a_note():
    class Group:
        modules = (nn.Linear(1, 1),)

        def _init_mp_dtypes(self):
            raise AssertionError("uniform dtype")

    for text in ("a note", None):
        groups = ModuleType("groups")
        groups.FSDPParamGroup = type("FSDPParamGroup", (Group,), {})
        internals.note_on_mixed_dtypes(
            groups, lambda modules, text=text: modules == [*Group.modules] and text
        )
        with pytest.raises(AssertionError, match="uniform dtype") as error:
            groups.FSDPParamGroup()._init_mp_dtypes()
        assert getattr(error.value, "__notes__", []) == ([text] if text else [])
