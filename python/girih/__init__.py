"""Sequence mixers that compress their past.

``girih.ops`` holds the functions, ``girih.nn`` the layers, ``girih.models`` the language models.
Importing the package loads ``libgirih.so``, which registers ``torch.ops.girih.*``.
"""

from pathlib import Path

import torch

try:
    from girih import _build
except ImportError:
    raise ImportError(
        "girih is not built: run `make build`, or `pip install --no-build-isolation .`"
    ) from None

_running = torch.__version__.split("+")[0]
if _running != _build.torch:
    raise ImportError(
        f"girih was built for torch {_build.torch} but torch {_running} is running: rebuild girih"
    )

torch.ops.load_library(Path(__file__).parent / "lib" / "libgirih.so")

from girih import ops

__version__ = "0.1.0"
__all__ = ["accelerate", "ops"]


def __getattr__(name):
    if name == "accelerate":
        from girih.acceleration import accelerate

        return accelerate
    raise AttributeError(f"module 'girih' has no attribute {name!r}")
