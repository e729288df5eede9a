"""The cache of a layer whose attention stays: its keys and values, and the state of the path beside it."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from girih.models.cache import StateLayer


class AttentionStateLayer(StateLayer):
    """A layer of keys as the cache has it, whatever its kind, with a state beside it.

    window: how many tokens attention sees. Then as many keys less one are kept; masks have the size they had
    without, as one mask serves many layers, and `windowed` cuts them.
    """

    def __init__(self, there: CacheLayerMixin, window: int | None = None):
        self.whole, self.softmax = there, there
        if window is not None:
            if type(there) not in (DynamicLayer, DynamicSlidingWindowLayer):
                raise ValueError(
                    f"max_self_attn_length: cache has a {type(there).__name__} where a layer of a "
                    "DynamicCache is expected"
                )
            self.softmax = DynamicSlidingWindowLayer(min(window, getattr(there, "sliding_window", window)))
        super().__init__(there)

    @property
    def is_sliding(self) -> bool:
        return self.whole.is_sliding

    @property
    def kept(self) -> int:
        """How many keys a call finds."""
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
        if self.softmax is self.whole:
            return self.whole.get_mask_sizes(query_length)
        if self.whole.is_sliding:
            self.whole.cumulative_length = self.tokens
            return self.whole.get_mask_sizes(query_length)
        return self.tokens + query_length, 0

    def get_max_length(self) -> int:
        return self.whole.get_max_length()

    def offload(self) -> None:
        self.softmax.offload()

    def prefetch(self) -> None:
        self.softmax.prefetch()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Beams are reordered by this too."""
        super().batch_select_indices(indices)
        self.softmax.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.softmax.batch_repeat_interleave(repeats)
