"""Sequence mixers that compress their past.

``girih.ops`` holds the functions, ``girih.nn`` the layers, ``girih.models`` the language models,
``girih.distributed`` applies FSDP2 to them, ``girih.context_parallel`` cuts their sequences over processes.
``girih.accelerate`` serves those of transformers, ``girih.replace_attention`` and ``girih.inject`` convert
them, ``girih.from_pretrained`` loads what was converted, ``girih.MixSchedule`` trains what was injected.
``girih.conversion`` also reads layers of Megatron-LM, ``girih.fla`` has the functions of
flash-linear-attention. All but the first are imported when they are first used.
Importing the package loads ``libgirih.so``, which registers ``torch.ops.girih.*``, and makes the language
models known to transformers' ``AutoConfig``, ``AutoModel`` and ``AutoModelForCausalLM``, and the operators to
DTensor, once those are imported.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from girih import _library

try:
    _library.load()
    __path__.append(str(_library.loaded))  # of a checkout: _C, for its tests
    from girih import _auto, ops

    _auto.register()
except Exception:
    # `python -m girih.environment` reports what is wrong with an installation that cannot be imported.
    if not any(argument in ("girih.environment", "-mgirih.environment") for argument in sys.orig_argv):
        raise

__version__ = "0.1.0"
#: Where CMake's ``find_package(girih)`` finds an installed package; torch's ``torch.utils.cmake_prefix_path``
#: stands beside it in ``CMAKE_PREFIX_PATH``.
cmake_prefix_path = str(Path(__file__).parent)
_IN = {
    "accelerate": "acceleration",
    "context_parallel": "distributed",
    "inject": "conversion",
    "kernel_config": "acceleration",
    "replace_attention": "conversion",
    "from_pretrained": "conversion",
    "MixSchedule": "conversion",
}
__all__ = [
    "MixSchedule",
    "accelerate",
    "context_parallel",
    "conversion",
    "distributed",
    "fla",
    "from_pretrained",
    "inject",
    "kernel_config",
    "models",
    "nn",
    "ops",
    "replace_attention",
]


def __getattr__(name: str) -> Any:
    if name in ("conversion", "distributed", "fla", "models", "nn"):
        return import_module(f"girih.{name}")
    if name in _IN:
        return getattr(import_module(f"girih.{_IN[name]}"), name)
    raise AttributeError(f"module 'girih' has no attribute {name!r}")
