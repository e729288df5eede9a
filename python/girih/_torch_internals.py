"""All uses of private names of PyTorch's Python code. A new version of PyTorch may require changes here.

One more is elsewhere: `girih.nn.Layer` overrides `Module._apply`.
tests/package/test_torch_internals.py has a test of each function.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils import _pytree


def is_operator(function: Any) -> bool:
    """Whether function is an operator of torch.ops (an overload packet)."""
    return isinstance(function, torch._ops.OpOverloadPacket)


def has_dispatch_mode() -> bool:
    """Whether a TorchDispatchMode is active, such as one that counts FLOPs."""
    return torch._C._len_torch_dispatch_stack() > 0


def has_transform() -> bool:
    """Whether a transform of torch.func is active."""
    return torch._C._are_functorch_transforms_active()


def has_forward_mode() -> bool:
    """Whether forward-mode AD is active."""
    return forward_ad._current_level >= 0


def has_global_hook() -> bool:
    """Whether a hook is registered for all modules of the process."""
    return nn.modules.module._has_any_global_hook()


def is_called_plainly(module: nn.Module) -> bool:
    """Whether a call of the module runs only its class's forward: there is no hook and no replaced
    forward."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in vars(module)
        or has_global_hook()
    )


def is_compiled_in_place(own: dict[str, Any]) -> bool:
    """Whether `module.compile()` was called; own: `vars(module)`."""
    return own.get("_compiled_call_impl") is not None


def module_tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The dicts of the module's submodules, parameters and buffers; later changes appear in them."""
    own = vars(module)
    return own["_modules"], own["_parameters"], own["_buffers"]


def hook_tables(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """The dicts that hold the module's forward hooks and forward pre-hooks; later changes appear in them."""
    own = vars(module)
    return own["_forward_hooks"], own["_forward_pre_hooks"]


def release_graph_pool(device: int, pool: Any) -> None:
    """Give up a memory pool of CUDA graphs after a capture that failed between begin and end.

    device: index of the CUDA device. pool: what `torch.cuda.graph_pool_handle()` returned. Raises
    RuntimeError where the capture's end has released it.
    """
    torch._C._cuda_endAllocateToPool(device, pool)
    torch._C._cuda_releasePool(device, pool)


def register_dataclass(cls: type, name: str) -> None:
    """Let torch.export and torch.compile take a dataclass apart into its fields.

    name: what exported programs call it. `torch.export.register_dataclass` does the same, but its import
    takes half a second.
    """
    _pytree.register_dataclass(cls, serialized_type_name=name)


def note_on_mixed_dtypes(groups: ModuleType, note: Callable[[list[nn.Module]], str | None]) -> None:
    """Add a note to the error with which FSDP2 refuses a group of parameters of two dtypes.

    groups: `torch.distributed.fsdp._fully_shard._fsdp_param_group`. note(modules): the note for the group of
    these modules, if any.
    """
    original = groups.FSDPParamGroup._init_mp_dtypes

    @functools.wraps(original)
    def init_mp_dtypes(group: Any) -> None:
        try:
            original(group)
        except AssertionError as error:
            if (text := note(list(group.modules))) is not None:
                error.add_note(text)
            raise

    groups.FSDPParamGroup._init_mp_dtypes = init_mp_dtypes
