"""The fields of a configuration and of layers made without one, as the library checks and completes them."""

import json
import numbers
import sys
from typing import Any

import torch


def plain(value: Any) -> Any:
    """A value as JSON has it; a number that it does not have becomes words, which are refused like others."""
    if isinstance(value, numbers.Real) and not isinstance(value, int | float):
        value = int(value) if isinstance(value, numbers.Integral) else float(value)  # NumPy's
    if isinstance(value, int | float) and not abs(value) <= sys.float_info.max:
        return repr(value)
    return value


def text_of(fields: dict[str, Any]) -> str:
    """For the library, which has a configuration as JSON."""
    return json.dumps({name: plain(value) for name, value in fields.items()}, default=repr)


def completed(fields: dict[str, Any], for_layer: bool = False) -> dict[str, Any]:
    """Every field of `girih::nn::Config` with these given, and the values that follow from them.

    One that does not fit raises a ValueError that names it, and so does an option that the mixers do not
    read, unless it is for a layer, which may have options that the name of a mixer sets.

    >>> completed({"hidden_size": 96})["head_dim"]
    24
    """
    return json.loads(torch.ops.girih.complete_configuration(text_of(fields), for_layer=for_layer))


def heads_of(mixer: str, hidden_size: int, num_heads: int, **options: Any) -> tuple[int, int]:
    """num_kv_heads and head_dim of a layer, whose options are refused where `mixer`'s configuration is.

    >>> heads_of("gsa", 96, 4, num_kv_heads=2, num_slots=0)
    Traceback (most recent call last):
    ValueError: num_slots is 0; expected 1 to 1048576
    """
    layer = {"mixer": [mixer], "num_hidden_layers": 1, "hidden_size": hidden_size, "num_heads": num_heads}
    fields = completed(layer | options, for_layer=True)
    return fields["num_kv_heads"], fields["head_dim"]


def head_widths(head_dim: int, expand_k: float, expand_v: float) -> tuple[int, int]:
    """The channels of a head's keys and values, which `heads_of` has found to be whole numbers."""
    return round(head_dim * expand_k), round(head_dim * expand_v)
