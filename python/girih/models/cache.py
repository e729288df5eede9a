"""The mixers' states as the cache of `generate()`."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, StaticLayer

from girih.nn import map_state


class StateLayer(CacheLayerMixin):
    """The state of one layer, whatever its mixer keeps, and how many tokens it has seen.

    there: the layer of keys whose place it takes in a cache, if it takes one's. Where that is one of a
    `StaticCache`, whose masks have the size of its room, masks go on having it, for the layers that stay.
    """

    supports_early_init = False

    def __init__(self, there: CacheLayerMixin | None = None) -> None:
        super().__init__()
        self.static = there if isinstance(there, StaticLayer) else None
        self.reset()

    @property
    def is_compileable(self) -> bool:
        """By this transformers knows that masks must not be left out."""
        return self.static is not None

    @property
    def is_sliding(self) -> bool:
        return self.static is not None and self.static.is_sliding

    def reset(self) -> None:
        self.state: Any = None
        self.tokens = 0

    def advance(self, state: Any, tokens: int) -> None:
        """Keeps what a layer returned after `tokens` more tokens."""
        self.state = state
        self.tokens += tokens
        self.is_initialized = True

    def offload(self) -> None:
        """A state has one size, whatever it has read: it stays on its device."""

    def prefetch(self) -> None:
        """It was never away."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise TypeError("a girih layer keeps a state, not keys and values")

    update = lazy_initialization

    def get_seq_length(self) -> int:
        return self.tokens

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.static is None:
            return self.tokens + query_length, 0
        self.static.cumulative_length_int = self.tokens
        return self.static.get_mask_sizes(query_length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.state = map_state(lambda part: part.index_select(0, indices.to(part.device)), self.state)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.state = map_state(lambda part: part.repeat_interleave(repeats, 0), self.state)

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError(
            "a recurrent state cannot be cropped: it has forgotten what stood before its last token"
        )


class GirihCache(Cache):
    """One `StateLayer` a layer; a model called with `use_cache=True` and without one makes it."""

    def __init__(self, num_layers: int):
        super().__init__(layers=[StateLayer() for _ in range(num_layers)])
