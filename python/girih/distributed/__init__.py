"""Models and sequences over several processes.

:func:`shard` applies FSDP2 to a model. :func:`context_parallel` cuts the sequences of a model over processes.
The operators of this module are those of ``girih.ops`` for a sequence that is cut: each rank of a process
group has a piece (:class:`Pieces`).
"""

from importlib import import_module
from pathlib import Path
from typing import Any

_IN = {
    "Pieces": "pieces",
    "attention": "neighbours",
    "cat_attention": "neighbours",
    "context_parallel": "context",
    "delta_product": "scans",
    "gla": "scans",
    "gsa": "scans",
    "shard": "fsdp",
    "short_conv": "neighbours",
}
# Other operators have a file of their own, _<operator>.py.
_IN |= {file.stem[1:]: file.stem for file in Path(__file__).parent.glob("_[a-z]*.py")}
__all__ = sorted(_IN)


def __getattr__(name: str) -> Any:
    if name in _IN:
        return getattr(import_module(f"{__name__}.{_IN[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
