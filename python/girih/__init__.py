"""Sequence mixers that compress their past.

``girih.ops`` holds the functions, ``girih.nn`` the layers, ``girih.models`` the language models.
``girih.accelerate`` serves those of transformers, ``girih.replace_attention`` and ``girih.inject`` convert
them, ``girih.from_pretrained`` loads what was converted, ``girih.MixSchedule`` trains what was injected. All
but the first are imported when they are first used.
Importing the package loads ``libgirih.so``, which registers ``torch.ops.girih.*``, and makes the language
models known to transformers' ``AutoConfig``, ``AutoModel`` and ``AutoModelForCausalLM``, and the operators to
DTensor, once those are imported.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

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

from girih import _auto, ops

__version__ = "0.1.0"
#: Where CMake's ``find_package(girih)`` finds an installed package; torch's ``torch.utils.cmake_prefix_path``
#: stands beside it in ``CMAKE_PREFIX_PATH``.
cmake_prefix_path = str(Path(__file__).parent)
_IN = {
    "accelerate": "acceleration",
    "inject": "conversion",
    "replace_attention": "conversion",
    "from_pretrained": "conversion",
    "MixSchedule": "conversion",
}
__all__ = [
    "MixSchedule",
    "accelerate",
    "from_pretrained",
    "inject",
    "models",
    "nn",
    "ops",
    "replace_attention",
]


def __getattr__(name: str) -> Any:
    if name in ("models", "nn"):
        return import_module(f"girih.{name}")
    if name in _IN:
        return getattr(import_module(f"girih.{_IN[name]}"), name)
    raise AttributeError(f"module 'girih' has no attribute {name!r}")


_auto.register()
