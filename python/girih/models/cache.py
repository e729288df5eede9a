"""The mixers' states as the cache of `generate()`."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, StaticLayer

from girih.models.graph import StepGraphs, copy_state_to
from girih.nn import map_state
from girih.nn.functional.masking import join_masks
from girih.nn.functional.state import first_tensor


class LayerInput(NamedTuple):
    """The input of a layer: x `[B, T, ...]`, and valid `[B, T]`, true at tokens that count; None: all do."""

    x: Tensor
    valid: Tensor | None

    @property
    def tokens(self) -> int:
        return self.x.shape[1]

    def split(self, tokens: int) -> tuple["LayerInput", "LayerInput"]:
        """The first `tokens` tokens, and the others."""
        first, others = slice(tokens), slice(tokens, None)
        if self.valid is None:
            return LayerInput(self.x[:, first], None), LayerInput(self.x[:, others], None)
        return tuple(LayerInput(self.x[:, part], self.valid[:, part]) for part in (first, others))

    def concat(self, other: "LayerInput") -> "LayerInput":
        valid = join_masks(self.valid, other.valid, self.tokens, other.x)
        return LayerInput(torch.cat([self.x, other.x], 1), valid)


class StateLayer(CacheLayerMixin):
    """The state of one layer of any mixer, and the number of tokens that it has read.

    key_layer: the layer of keys that this layer replaces in a cache, or None. If it belongs to a
    `StaticCache`, masks keep that cache's size, which the layers of attention need.

    A state does not hold the tokens before its last one. To roll back tokens, as assisted decoding does, a
    layer records the state and the input of every call after `activate_past_recording()`. `crop` restores the
    state before the call that contains the first wrong token, and the next call reads the right tokens of
    that call again, before its own. A long call is split in two, so that less of it is read again.

    chunk: of CAT, the chunk length that the sequences began with.
    """

    supports_early_init = False

    def __init__(self, key_layer: CacheLayerMixin | None = None) -> None:
        super().__init__()
        self.static = key_layer if isinstance(key_layer, StaticLayer) else None
        self.record_past = False
        self.reread_limit = 64  # tokens; a longer call is split this far before its end
        self.reset()

    @property
    def is_compileable(self) -> bool:
        """By this transformers knows that masks must not be left out."""
        return self.static is not None

    @property
    def is_sliding(self) -> bool:
        return self.static is not None and self.static.is_sliding

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be rolled back. transformers 5.24 and newer reads it."""
        return self.record_past

    def reset(self) -> None:
        self.state: Any = None
        self.tokens = 0
        self.chunk: int | None = None
        self.calls: list[tuple[Any, LayerInput]] = []  # since the last crop: the state before, and the input
        self.reread: LayerInput | None = None  # right tokens that the next call reads again

    def advance(self, state: Any, tokens: int) -> None:
        """Stores the state that a layer returned after `tokens` more tokens."""
        self.state = state
        self.tokens += tokens
        self.is_initialized = True

    def run(self, call: Callable[..., tuple[Any, Any]], x: Tensor, valid: Tensor | None) -> Any:
        """y of call(x, valid, state) -> (y, the state after it), a tensor `[B, T, ...]` or a list of such."""
        if not (torch.is_inference_mode_enabled() or torch.compiler.is_compiling()):
            any_part = first_tensor(self.state)
            if any_part is not None and any_part.is_inference():  # which is read-only outside of its mode
                self.state = map_state(torch.clone, self.state)
        inputs = LayerInput(x, valid)
        if self.reread is not None:
            inputs = self.reread.concat(inputs)
        num_reread, split_at = inputs.tokens - x.shape[1], inputs.tokens - self.reread_limit
        state, calls, parts = self.state, [], []
        for part in inputs.split(split_at) if self.record_past and split_at > 0 else (inputs,):
            if self.record_past:
                calls.append((map_state(torch.clone, state), part))  # a step writes its state in place
            y, state = call(part.x, part.valid, state)
            parts.append(y)
        # All went well.
        self.calls, self.reread = self.calls + calls, None
        self.advance(state, x.shape[1])
        if isinstance(parts[0], list):
            return [_join_parts(ys, num_reread) for ys in zip(*parts, strict=True)]
        return _join_parts(parts, num_reread)

    def activate_past_recording(self) -> None:
        self.record_past = True

    def end_past_recording(self) -> None:
        """Stops the recording. Later calls of `crop` fail; earlier ones keep their effect."""
        self.record_past, self.calls = False, []

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

    def map(self, f: Callable[[Tensor], Tensor]) -> None:
        """Applies f to every stored tensor; dimension 0 of each is the batch."""
        self.state, self.reread = map_state(f, self.state), map_state(f, self.reread)
        self.calls = [map_state(f, call) for call in self.calls]

    def batch_select_indices(self, indices: Tensor) -> None:
        self.map(lambda part: part.index_select(0, indices.to(part.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.map(lambda part: part.repeat_interleave(repeats, 0))

    def crop(self, tokens_to_remove: int) -> None:
        """Rolls back the last `-tokens_to_remove` tokens, all of which have come since the last crop."""
        if not self.record_past:
            raise ValueError(
                "a recurrent state cannot be cropped: it has forgotten what stood before its last token, and "
                "did not record its past (activate_past_recording() of a girih model's cache)"
            )
        if tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove is {tokens_to_remove}; expected how many to remove, as -1 for one"
            )
        if self.reread is not None:
            self.calls.append((self.state, self.reread))
        recorded = sum(call.tokens for _, call in self.calls)
        if -tokens_to_remove > recorded:
            raise ValueError(
                f"tokens_to_remove is {tokens_to_remove}; expected at most the {recorded} tokens since the "
                "last crop"
            )
        num_removed = -tokens_to_remove
        self.tokens -= num_removed
        # A later crop may roll back as many.
        self.reread_limit = max(self.reread_limit, 2 * num_removed)
        while num_removed > 0:
            self.state, call = self.calls.pop()
            num_kept = call.tokens - num_removed
            self.reread, num_removed = (call.split(num_kept)[0], 0) if num_kept > 0 else (None, -num_kept)
        self.reread = map_state(torch.clone, self.reread)  # not the whole call
        self.calls = []


def _join_parts(parts: list[Tensor], start: int) -> Tensor:
    """Concatenates `[B, T, ...]` over tokens, from token `start` on."""
    return (torch.cat(parts, 1) if len(parts) > 1 else parts[0])[:, start:]


class GirihCache(Cache):
    """One `StateLayer` a layer; a model called with `use_cache=True` and without one makes it.

    steps: on a CUDA device, the graphs that its tokens are (`StepGraphs`).
    """

    def __init__(self, num_layers: int):
        super().__init__(layers=[StateLayer() for _ in range(num_layers)])
        self.steps = StepGraphs()

    def reset(self) -> None:
        super().reset()
        self.steps = StepGraphs()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorders one layer at a time and copies it to the tensors that graphs read, so that only one
        layer's state exists twice."""
        for layer, places in itertools.zip_longest(self.layers, self.steps.captured_tensors):
            layer.reorder_cache(beam_idx)
            if places is not None:
                copy_state_to(layer, places)

    def end_past_recording(self) -> None:
        """Stops the recording that `activate_past_recording()` began."""
        for layer in self.layers:
            layer.end_past_recording()

    def checkpoint(self) -> "GirihCache":
        """A copy of the current states, which later calls with this cache do not change: for `restore`, or
        for use as a cache itself. Tokens before it cannot be cropped from it.

        >>> from girih.models import GirihConfig, GirihForCausalLM
        >>> model = GirihForCausalLM(GirihConfig(hidden_size=64, num_hidden_layers=1, num_heads=2)).eval()
        >>> cache = model.new_cache()
        >>> with torch.no_grad():
        ...     _ = model(torch.randint(256, (1, 50)), cache=cache)
        ...     then = cache.checkpoint()
        ...     _ = model(torch.randint(256, (1, 7)), cache=cache)
        >>> cache.get_seq_length(), then.get_seq_length(), cache.restore(then).get_seq_length()
        (57, 50, 50)
        """
        return GirihCache(len(self.layers)).restore(self)

    def restore(self, checkpoint: "GirihCache") -> "GirihCache":
        """Makes this cache what `checkpoint` was made of, as often as asked."""
        if len(checkpoint.layers) != len(self.layers):
            raise ValueError(f"checkpoint has {len(checkpoint.layers)} layers; expected {len(self.layers)}")
        for layer, saved in zip(self.layers, checkpoint.layers, strict=True):
            layer.tokens, layer.record_past, layer.is_initialized = (
                saved.tokens,
                saved.record_past,
                saved.is_initialized,
            )
            layer.chunk = saved.chunk
            layer.state, layer.reread, layer.calls = saved.state, saved.reread, list(saved.calls)
            layer.map(torch.clone)
        return self
