"""Checks and defaults of configuration fields and of layer options, computed by the C++ library."""

import json
import numbers
import sys
from typing import Any

import torch


def to_json_value(value: Any) -> Any:
    """A value that JSON can represent. An infinite or too large number becomes a string, which the library
    rejects."""
    if isinstance(value, numbers.Real) and not isinstance(value, int | float):
        value = int(value) if isinstance(value, numbers.Integral) else float(value)  # NumPy scalars
    if isinstance(value, int | float) and not abs(value) <= sys.float_info.max:
        return repr(value)
    return value


def fields_to_json(fields: dict[str, Any]) -> str:
    """Fields as JSON, the format in which the library reads a configuration."""
    return json.dumps({name: to_json_value(value) for name, value in fields.items()}, default=repr)


def complete_fields(fields: dict[str, Any], for_layer: bool = False) -> dict[str, Any]:
    """Every field of `girih::nn::Config`: `fields`, and defaults that depend on them.

    A wrong value raises a ValueError that names the field. An option that no mixer reads raises one too,
    except with `for_layer`: the options of a layer include some that the mixer's name determines in a
    configuration.

    >>> complete_fields({"hidden_size": 96})["head_dim"]
    24
    """
    return json.loads(torch.ops.girih.complete_configuration(fields_to_json(fields), for_layer=for_layer))


def resolve_heads(mixer: str, hidden_size: int, num_heads: int, **options: Any) -> tuple[int, int]:
    """num_kv_heads and head_dim of a layer, with defaults. Checks all options: raises the errors of a
    configuration with this `mixer` and these options.

    >>> resolve_heads("gsa", 96, 4, num_kv_heads=2, num_slots=0)
    Traceback (most recent call last):
    ValueError: num_slots is 0; expected 1 to 1048576
    """
    layer = {"mixer": [mixer], "num_hidden_layers": 1, "hidden_size": hidden_size, "num_heads": num_heads}
    fields = complete_fields(layer | options, for_layer=True)
    return fields["num_kv_heads"], fields["head_dim"]


def head_widths(head_dim: int, expand_k: float, expand_v: float) -> tuple[int, int]:
    """Channels of the keys and the values of a head; `resolve_heads` has checked that they are whole
    numbers."""
    return round(head_dim * expand_k), round(head_dim * expand_v)
