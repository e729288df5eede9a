"""Finds libgirih.so for the PyTorch that runs, and loads it.

    girih/lib/libgirih_kernels.so    CUDA without torch, where kernels were built
    girih/lib/torch2.15/libgirih.so  operators and C++ modules for one minor version of PyTorch

A checkout also has `_C` beside libgirih.so: the C++ language model for tests in Python. This file imports
nothing of girih, so that the installed programs can read it without importing torch.
"""

from pathlib import Path

# The versions of PyTorch that girih supports. CMake reads these two lines.
OLDEST = "2.11"
NEWEST = "2.15"

LIBRARIES = Path(__file__).parent / "lib"


def numbers(version: str) -> tuple[int, ...]:
    """The major and minor version as numbers.

    >>> numbers("2.15.0+cpu")
    (2, 15)
    """
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def built() -> list[str]:
    """The minor versions of PyTorch that libraries are there for, the oldest first."""
    found = (file.parent.name.removeprefix("torch") for file in LIBRARIES.glob("torch*/libgirih.so"))
    return sorted(found, key=numbers)


def folder(torch_version: str) -> Path:
    """The folder of the libraries for this version of PyTorch.

    Raises ImportError in one line where the version is outside of the supported range or has no library.
    """
    supported = f"torch {OLDEST} to {NEWEST}"
    if not numbers(OLDEST) <= numbers(torch_version) <= numbers(NEWEST):
        raise ImportError(
            f"girih supports {supported}, but torch {torch_version} is installed: install a torch of these, "
            f"`pip install torch~={NEWEST}.0`"
        )
    minor = ".".join(map(str, numbers(torch_version)))
    found = LIBRARIES / f"torch{minor}"
    if (found / "libgirih.so").exists():
        return found
    if not (others := built()):
        raise ImportError("girih is not built: run `make build`, or `pip install --no-build-isolation .`")
    raise ImportError(
        f"girih was built for torch {', '.join(others)}, but torch {torch_version} is installed: install one "
        f"of these, or build girih for torch {minor} with `pip install --no-build-isolation .`"
    )


#: The folder of the library that is loaded.
loaded: Path | None = None


def load() -> None:
    """Load libgirih.so, which registers `torch.ops.girih`. Raises ImportError where none fits (`folder`)."""
    global loaded
    import torch

    fitting = folder(torch.__version__)
    try:
        torch.ops.load_library(fitting / "libgirih.so")
    except OSError as error:
        if torch.version.cuda or "cuda" not in str(error):
            raise
        raise ImportError(
            f"girih was built with kernels, for a torch with CUDA, but torch {torch.__version__} has none: "
            "install PyPI's torch, or build girih with GIRIH_CUDA=OFF"
        ) from error
    loaded = fitting
