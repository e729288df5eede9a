"""The cache of a layer with attention and a linear path: keys and values, and the path's state."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from girih.models.cache import StateLayer


class AttentionStateLayer(StateLayer):
    """A layer of a cache that holds a layer of keys, of any kind, and the state of a linear path.

    window: the number of tokens that attention attends to, of which the layer stores window - 1 keys; None:
    all. Mask sizes count all keys, because layers share masks; `InjectedAttention.cut_mask` applies the
    window.

    full: the layer of keys for mask sizes. softmax: the layer of keys that attention uses.
    """

    def __init__(self, key_layer: CacheLayerMixin, window: int | None = None):
        self.full, self.softmax = key_layer, key_layer
        if window is not None:
            if type(key_layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
                raise ValueError(
                    f"max_self_attn_length: cache has a {type(key_layer).__name__} where a layer of a "
                    "DynamicCache is expected"
                )
            self.softmax = DynamicSlidingWindowLayer(
                min(window, getattr(key_layer, "sliding_window", window))
            )
        super().__init__(key_layer)

    @property
    def is_sliding(self) -> bool:
        return self.full.is_sliding

    @property
    def num_keys(self) -> int:
        """The number of stored keys."""
        keys = self.softmax.keys
        return 0 if keys is None or keys.dim() < 3 else keys.shape[-2]

    def reset(self) -> None:
        super().reset()
        if self.softmax.is_initialized:
            self.softmax.reset()
            if isinstance(self.softmax, DynamicSlidingWindowLayer):
                self.softmax.cumulative_length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any):
        return self.softmax.update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self) -> int | Tensor:
        return self.tokens if self.static is None else self.static.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.softmax is self.full:
            return self.full.get_mask_sizes(query_length)
        if self.full.is_sliding:
            self.full.cumulative_length = self.tokens
            return self.full.get_mask_sizes(query_length)
        return self.tokens + query_length, 0

    def get_max_length(self) -> int:
        return self.full.get_max_length()

    def offload(self) -> None:
        self.softmax.offload()

    def prefetch(self) -> None:
        self.softmax.prefetch()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Also reorders beams."""
        super().batch_select_indices(indices)
        self.softmax.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.softmax.batch_repeat_interleave(repeats)
