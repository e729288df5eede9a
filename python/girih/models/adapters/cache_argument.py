"""The name of the cache in calls and outputs of models: `cache`; before transformers 5.24 `past_key_values`.

girih's models accept both names. Outputs use the name of the installed transformers.
"""

from dataclasses import fields
from typing import Any

from transformers.modeling_outputs import BaseModelOutputWithPast

OLD = "past_key_values"
CACHE = "cache" if "cache" in {field.name for field in fields(BaseModelOutputWithPast)} else OLD


def resolve_cache(cache: Any, past_key_values: Any) -> Any:
    """The cache argument of a call, by either name."""
    if cache is not None and past_key_values is not None:
        raise ValueError("cache, past_key_values: two names of one argument; give cache alone")
    return past_key_values if cache is None else cache
