"""What a bug report says about a machine: `python -m girih.environment`.

The report lists versions, the cards, the libraries that were found, and the path that a small call of each
operator takes. Where girih cannot be imported, the report has the error in one line instead of the paths.
`python path/to/girih/environment.py` prints the same report.
"""

import importlib.metadata
import inspect
import platform
import re
import shutil
import subprocess
import sys
import typing
from collections import Counter
from collections.abc import Iterable
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

# No import of girih at this level: the report also serves installations that cannot import girih.
PACKAGE = Path(__file__).resolve().parent
LIBRARIES = PACKAGE / "lib"
KERNELS = LIBRARIES / "libgirih_kernels.so"

# Sizes of the small calls, by the letters of `girih.ops.describe()`; a width that is not listed is WIDTH.
SIZES = {"B": 1, "T": 64, "N": 1, "H": 2, "HQ": 2, "HK": 2, "n": 1, "W": 4, "chunk": 16}
WIDTH = 64

Row = tuple[str, str]


def one_line(error: BaseException) -> str:
    """The type and the first line of an error and of what caused it."""
    message = str(error).strip().splitlines()
    line = f"{type(error).__name__}: {message[0]}" if message else type(error).__name__
    return f"{line}, from {one_line(error.__cause__)}" if error.__cause__ else line


def count_lines(lines: Iterable[str]) -> str:
    """Equal lines with their number: "2 x NVIDIA H200"."""
    return "; ".join(f"{count} x {line}" for line, count in Counter(lines).items())


# ---- the machine -------------------------------------------------------------------------------------------


def installed_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def girih_version() -> str:
    """The version of the package that holds this file."""
    found = re.search(r'^__version__ = "(.+)"$', (PACKAGE / "__init__.py").read_text(), re.MULTILINE)
    return found[1] if found else installed_version("girih")


def torch_version() -> str:
    """The version of the torch that is imported, and the CUDA that it was built with."""
    try:
        import torch

        cuda = getattr(getattr(torch, "version", None), "cuda", None)
        return f"{torch.__version__}, {f'CUDA {cuda}' if cuda else 'without CUDA'}"
    except Exception as error:
        return f"not importable, {one_line(error)}"


def system_version() -> str:
    """The distribution, the kernel and glibc."""
    try:
        distribution = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        distribution = platform.system()
    return f"{distribution}, {platform.platform()}"


def torch_cards() -> str:
    """The cards that torch sees."""
    try:
        from torch import cuda

        cards = [
            f"{cuda.get_device_name(index)}, compute capability {'.'.join(map(str, capability))}"
            for index in range(cuda.device_count())
            for capability in [cuda.get_device_capability(index)]
        ]
        return count_lines(cards) or "none"
    except Exception as error:
        return f"none, {one_line(error)}"


def driver_cards() -> str:
    """The driver, and the cards that the driver sees."""
    if shutil.which("nvidia-smi") is None:
        return "no nvidia-smi"
    query = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, check=True, capture_output=True, text=True, timeout=30)
        return count_lines(answer.stdout.splitlines()) or "no card"
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi fails, {one_line(error)}"


def list_libraries() -> list[Row]:
    """libgirih.so of each torch that one was built for, and the kernels."""
    found = sorted(LIBRARIES.glob("torch*/libgirih.so")) or ["none"]
    kernels = str(KERNELS) if KERNELS.exists() else "none: on a GPU too, operators run as PyTorch's (aten)"
    return [*(("library", str(file)) for file in found), ("kernels", kernels)]


def has_kernels() -> bool:
    """Whether the libgirih.so that is loaded calls kernels."""
    import torch

    return hasattr(torch.ops.girih, "residual_norm")


# ---- a small call of each operator -------------------------------------------------------------------------


def size_of(expression: str) -> int:
    """A size of `girih.ops.describe()` as a number.

    >>> size_of("T * n"), size_of("W - 1"), size_of("D")
    (64, 3, 64)
    """
    if " * " in expression:
        return prod(map(size_of, expression.split(" * ")))
    if " - " in expression:
        whole, less = map(size_of, expression.split(" - "))
        return whole - less
    return int(expression) if expression.isdigit() else SIZES.get(expression, WIDTH)


def shape_of(shapes: str) -> list[int]:
    """The first of the shapes that a tensor may have.

    >>> shape_of("[B, T, H] or [B, T, H, D]"), shape_of("[..., dim]")
    ([1, 64, 2], [1, 64, 64])
    """
    sizes = shapes.split(" or ")[0].strip("[]").replace("...", "B, T").split(", ")
    return [size_of(size) for size in sizes]


def small_call(name: str, device: str, dtype: Any) -> dict[str, Any]:
    """Arguments of `girih.ops.<name>`: all data tensors, and the state and the options that are required.

    dtype: torch.dtype of the data; gates, step sizes, weights and states are fp32.
    """
    import torch

    from girih import ops

    description = ops.describe()[name]
    dtypes = {"data": dtype, "position": torch.int64}
    tensors = {
        tensor["name"]: torch.zeros(
            shape_of(tensor["shapes"]), device=device, dtype=dtypes.get(tensor["kind"], torch.float32)
        )
        for tensor in description["tensors"]
    }
    state_names = [tensor["name"] for tensor in description["tensors"] if tensor["state"]]
    call = {argument: tensor for argument, tensor in tensors.items() if argument not in state_names}
    required = {option["name"] for option in description["options"] if "default" not in option}
    call |= {option: size_of(option) for option in required}
    state = inspect.signature(getattr(ops, name)).parameters.get("state")
    if state is not None and state.default is inspect.Parameter.empty:
        (kind,) = (kind for kind in typing.get_args(state.annotation) if hasattr(kind, "_fields"))
        call["state"] = kind(*(tensors[argument] for argument in state_names))
    return call


def list_paths(device: str, dtype: Any) -> list[Row]:
    """The path that a small call of each operator takes; nothing is computed."""
    from girih import ops

    rows = []
    for name in ops.describe():
        try:
            path = str(ops.explain(name, **small_call(name, device, dtype)))
        except Exception as error:
            path = f"unknown, {one_line(error)}"
        rows.append((name, path))
    return rows


# ---- the report --------------------------------------------------------------------------------------------


def import_girih() -> ModuleType:
    """The package with its library loaded; raises what keeps girih from being imported."""
    import girih
    from girih import _library

    if _library.loaded is None:  # `python -m girih.environment` imports the package without the library
        _library.load()
    return girih


def report() -> str:
    """The report as text."""
    machine = [
        ("girih", girih_version()),
        ("Python", f"{platform.python_version()}, {sys.executable}"),
        ("torch", torch_version()),
        ("transformers", installed_version("transformers")),
        ("triton", installed_version("triton")),
        ("system", system_version()),
        ("cards", torch_cards()),
        ("driver", driver_cards()),
        *list_libraries(),
    ]
    parts: list[tuple[str, list[Row]]] = []
    try:
        import_girih()
        import torch

        call = ", ".join(f"{letter} = {size_of(letter)}" for letter in "BTHD")
        parts.append((f"path of a call with {call}, CPU, float32", list_paths("cpu", torch.float32)))
        if torch.cuda.is_available() and has_kernels():
            parts.append((f"path of a call with {call}, CUDA, bfloat16", list_paths("cuda", torch.bfloat16)))
    except Exception as error:
        machine.append(("error", one_line(error)))
    sections = ["\n".join(f"{name:<16}{value}" for name, value in machine)]
    for title, rows in parts:
        sections.append("\n".join([title, *(f"  {name:<16}{path}" for name, path in rows)]))
    return "\n\n".join(sections)


def main() -> None:
    print(report())


if __name__ == "__main__":
    if not __package__:
        # Run as a file: the folder that holds the package replaces the package's own folder.
        sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != PACKAGE]
        if str(PACKAGE.parent) not in sys.path:
            sys.path.insert(0, str(PACKAGE.parent))
    main()
