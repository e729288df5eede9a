"""Finds libgirih.so for the PyTorch that runs, and loads it.

    girih/lib/libgirih_kernels.so    CUDA without torch, where kernels were built
    girih/lib/torch2.15/libgirih.so  operators and C++ modules for one minor version of PyTorch

A checkout also has `_C` beside libgirih.so: the C++ language model for tests in Python. This file imports
nothing of girih, so that the installed programs can read it without importing torch.
"""

import re
from pathlib import Path

# The versions of PyTorch that girih supports. CMake reads these two lines.
OLDEST = "2.11"
NEWEST = "2.15"

LIBRARIES = Path(__file__).parent / "lib"


def parse_version(version: str) -> tuple[int, ...]:
    """The major and minor version as numbers.

    >>> parse_version("2.15.0+cpu")
    (2, 15)
    """
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def list_built() -> list[str]:
    """The minor versions of PyTorch that libraries are there for, the oldest first."""
    found = (file.parent.name.removeprefix("torch") for file in LIBRARIES.glob("torch*/libgirih.so"))
    return sorted(found, key=parse_version)


def find_folder(torch_version: str) -> Path:
    """The folder of the libraries for this version of PyTorch.

    Raises ImportError in one line where the version is outside of the supported range or has no library.
    """
    supported = f"torch {OLDEST} to {NEWEST}"
    if not parse_version(OLDEST) <= parse_version(torch_version) <= parse_version(NEWEST):
        raise ImportError(
            f"girih supports {supported}, but torch {torch_version} is installed: install a torch of these, "
            f"`pip install torch~={NEWEST}.0`"
        )
    minor = ".".join(map(str, parse_version(torch_version)))
    found = LIBRARIES / f"torch{minor}"
    if (found / "libgirih.so").exists():
        return found
    if not (others := list_built()):
        raise ImportError("girih is not built: run `make build`, or `pip install --no-build-isolation .`")
    raise ImportError(
        f"girih was built for torch {', '.join(others)}, but torch {torch_version} is installed: install one "
        f"of these, or build girih for torch {minor}: `make build TORCH={minor}` in a checkout, else "
        "`pip install --no-build-isolation .`"
    )


#: The folder of the library that is loaded.
loaded: Path | None = None


def load() -> None:
    """Load libgirih.so, which registers `torch.ops.girih`.

    Raises ImportError in one line where no library fits (`find_folder`), or where that one cannot be loaded.
    """
    global loaded
    import torch

    fitting = find_folder(torch.__version__)
    try:
        torch.ops.load_library(fitting / "libgirih.so")
    except OSError as error:
        reason = str(error.__cause__ or error)
        missing = re.match(r"(lib\S*cuda\S*): cannot open shared object file", reason)
        if missing is None:
            raise ImportError(f"{fitting / 'libgirih.so'} cannot be loaded: {reason}") from error
        cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        raise ImportError(
            f"girih's kernels need {missing[1]}, but torch {torch.__version__} has {cuda}: install PyPI's "
            "torch, or build girih with GIRIH_CUDA=OFF"
        ) from error
    loaded = fitting
