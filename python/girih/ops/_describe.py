"""The library's description of its operators, and the path of a call."""

import functools
import inspect
import json
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from girih._torch_internals import is_operator


@functools.cache
def describe() -> dict[str, dict[str, Any]]:
    """All operators by name: tensors with shapes, options with defaults, words and ranges, sizes.

    The checks of calls, the configurations of models and the tests use the same description.

    >>> [tensor["name"] for tensor in describe()["gla"]["tensors"]]
    ['q', 'k', 'v', 'g', 'state_s']
    """
    return json.loads(torch.ops.girih.describe())


def option(op: str, name: str) -> dict[str, Any]:
    """One option of an operator: name and type, and optionally default, words, least, most.

    >>> option("trellis", "chunk")["most"]
    64.0
    """
    return next(option for option in describe()[op]["options"] if option["name"] == name)


def words(op: str, name: str) -> tuple[str, ...]:
    """The allowed words of an option of an operator.

    >>> words("lattice", "objective")
    ('decode', 'encode', 'similarity')
    """
    return tuple(option(op, name)["words"])


class Explanation(NamedTuple):
    """path: "tensor cores", "fp32" (kernels in fp32) or "aten" (PyTorch's operators).

    why: the reason for this path, and why no faster path is possible.
    """

    path: str
    why: str

    def __str__(self) -> str:
        return f"{self.path}: {self.why}"


class _Flat(Exception):
    """Carries the arguments of the registered operator that a function of girih.ops calls."""


class _Catch(TorchFunctionMode):
    """Raises `_Flat` when a function of girih.ops calls its registered operator."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if is_operator(function):
            raise _Flat(args, kwargs or {})
        return function(*args, **kwargs or {})


def explain(name: str, /, *args: Any, device: str | None = None, **kwargs: Any) -> Explanation:
    """The path of a call of `girih.ops.<name>`, and the reason; nothing is computed.

    name: "gsa", "gsa_step", ...; args, kwargs: arguments of the call. device: "cuda" or "cpu", default: the
    device of the tensors; meta tensors count as tensors on the GPU. Raises the errors of the call.

    >>> q = k = v = torch.empty(1, 512, 4, 64, dtype=torch.bfloat16)
    >>> print(explain("gla", q, k, v, device="cuda"))
    tensor cores: 16-bit products, sums and states in fp32
    >>> explain("gla", q.float(), k.float(), v.float(), device="cuda").path
    'fp32'
    """
    from girih import ops

    op = name.removesuffix("_step")
    if op not in describe() or not hasattr(ops, name):
        raise ValueError(f"name is {name!r}; expected one of {', '.join(describe())}, or one with _step")
    function = getattr(ops, name)
    inspect.signature(function).bind(*args, **kwargs)
    try:
        with _Catch():
            function(*args, **kwargs)
    except _Flat as call:
        flat, options = call.args
    if name != op and "packing" in describe()[op]:  # a step's arguments are X's without packing
        flat = (*flat, None)
    if device is None:
        tensors = [x for x in flat if isinstance(x, Tensor)]
        device = "cpu" if all(x.device.type == "cpu" for x in tensors) else "cuda"
    registered = getattr(torch.ops.girih, f"{op}_explain")
    return Explanation(*registered(*flat, **options, device=device, step=name != op))
