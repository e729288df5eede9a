"""Sharding rules of the operators for DTensor; importing this module registers them.

Sequences of a batch are independent, and so are memory heads (channels of the short convolution). All tensors
may be sharded along the batch, or along the heads, each with its queries. A tensor without these dimensions
is replicated, and its gradient is a partial sum. Sizes must be divisible by the number of devices. A step has
no rule: its state is written in place, and DTensor would write a copy.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from girih.ops._describe import describe

Strategy = tuple[list[Placement | None], list[Placement | None]]  # placements of results, of arguments
BATCH = ("B", "N", "chunks", "segments")
HEADS = ("HQ", "H", "HK", "HO", "channels")


def letters(shapes: str, tensor: Any) -> list[str]:
    """The letters of a tensor's dimensions, from shapes such as "[B, T, H] or [B, T, H, D]"."""
    for shape in shapes.split(" or "):
        names = shape.strip("[]").split(", ")
        if names[0] == "...":
            return [f"...{dim}" for dim in range(tensor.ndim - len(names) + 1)] + names[1:]
        if len(names) == tensor.ndim:
            return names
    return [""] * tensor.ndim  # an empty saved tensor


def list_shardings(sizes: dict[str, int], packed: bool, devices: int) -> Iterator[tuple[str, ...]]:
    """Sets of letters along which all tensors can be sharded together."""
    if "B" in sizes and not packed and sizes["B"] % devices == 0:
        yield BATCH
    for letter, size in sizes.items():
        if letter.startswith("...") and size % devices == 0:
            yield (letter,)
    heads = [sizes[letter] for letter in HEADS if letter in sizes]
    if heads and all(size % devices == 0 for size in heads):
        yield HEADS


def to_meta(spec: Any) -> Any:
    """A meta tensor of the global shape of a DTensor spec."""
    return None if spec is None else torch.empty(spec.shape, dtype=spec.tensor_meta.dtype, device="meta")


def choose_placement(
    shapes: str, tensor: Any, shard_letters: Sequence[str], default: Placement
) -> Placement | None:
    if tensor is None:
        return None
    dims = [dim for dim, letter in enumerate(letters(shapes, tensor)) if letter in shard_letters]
    return Shard(dims[0]) if dims else default


def strategies(name: str, form: str, *specs: Any, **options: Any) -> list[Strategy]:
    """The accepted placements of X, X_forward or X_backward on a dimension of a mesh."""
    op = describe()[name]
    inputs = [t["shapes"] for t in op["tensors"]] + ["[N + 1] or [B, 2]"] * ("packing" in op)
    outputs = [op["output"]["shapes"]] + [t["shapes"] for t in op["tensors"] if t["state"]]
    saved = [kept["shapes"] for kept in op["saved"]]

    input_specs = (
        specs[len(outputs) :] if form == "_backward" else specs
    )  # the inputs, then the saved tensors
    data = input_specs[: len(inputs)]
    options.pop("save", None)
    results = getattr(torch.ops.girih, f"{name}_forward")(*map(to_meta, data), **options, save=True)
    results = results if isinstance(results, tuple) else (results,)
    if form == "_backward":
        arguments = list(zip(outputs + inputs + saved, specs, strict=True))
        floating = [x is not None and x.tensor_meta.dtype.is_floating_point for x in data]
        returned = [(s, x if f else None) for s, x, f in zip(inputs, data, floating, strict=True)]
    else:
        arguments = list(zip(inputs, specs, strict=True))
        # An output that is saved for backward is returned once.
        kept = [x["shapes"] for x in op["saved"] if x["name"] != op["output"]["name"]]
        returned = list(zip(outputs + kept, results, strict=True))[: len(outputs) if form == "" else None]

    sizes = {
        letter: size
        for shapes, x in zip(inputs, data, strict=True)
        if x is not None
        for letter, size in zip(letters(shapes, x), x.shape, strict=True)
    }
    packed = "packing" in op and data[-1] is not None and data[-1].ndim == 1
    found: list[Strategy] = []
    # A tensor that is not sharded is replicated; its gradient on a device is the partial sum of the device's
    # shard.
    missing = Partial() if form == "_backward" else Replicate()
    mesh = next(spec.mesh for spec in specs if spec is not None)
    for shard_letters in ((), *list_shardings(sizes, packed, mesh.size())):
        default = missing if shard_letters else Replicate()
        found.append(
            (
                [choose_placement(shapes, x, shard_letters, default) for shapes, x in returned],
                [choose_placement(shapes, x, shard_letters, Replicate()) for shapes, x in arguments],
            )
        )
    return found


for _name in describe():
    for _form in ("", "_forward", "_backward"):
        _overload = getattr(torch.ops.girih, _name + _form).default
        register_sharding(_overload)(partial(strategies, _name, _form))
