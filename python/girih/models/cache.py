"""The cache of `generate()`: the states of the mixers."""

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
    """The input of a layer: x `[B, T, ...]`, and valid `[B, T]`, false at masked tokens; None: none is
    masked."""

    x: Tensor
    valid: Tensor | None

    @property
    def tokens(self) -> int:
        return self.x.shape[1]

    def split(self, tokens: int) -> tuple["LayerInput", "LayerInput"]:
        """The input split after the first `tokens` tokens."""
        first, others = slice(tokens), slice(tokens, None)
        if self.valid is None:
            return LayerInput(self.x[:, first], None), LayerInput(self.x[:, others], None)
        return tuple(LayerInput(self.x[:, part], self.valid[:, part]) for part in (first, others))

    def concat(self, other: "LayerInput") -> "LayerInput":
        valid = join_masks(self.valid, other.valid, self.tokens, other.x)
        return LayerInput(torch.cat([self.x, other.x], 1), valid)


class StateLayer(CacheLayerMixin):
    """The state of one layer of any mixer, and the number of tokens that it has read.

    key_layer: the layer of keys that this layer replaces in a cache, or None. If it is a layer of a
    `StaticCache`, `get_mask_sizes` returns that cache's sizes, because attention layers share the masks.

    A state cannot be rolled back by itself. For assisted decoding, `activate_past_recording()` makes the
    layer record the state before each call and the call's input. `crop` restores the recorded state before
    the call with the first removed token, and `reread` holds the tokens of that call that remain. The next
    call reads these tokens again, before its own. A call of more than `reread_limit` tokens is split in two
    and both parts are recorded, so that fewer tokens are read again.

    tokens: number of tokens read.  chunk: the chunk length of the sequences (CAT only).
    """

    supports_early_init = False

    def __init__(self, key_layer: CacheLayerMixin | None = None) -> None:
        super().__init__()
        self.static = key_layer if isinstance(key_layer, StaticLayer) else None
        self.record_past = False
        self.reread_limit = 64  # tokens; a longer call is split this many tokens before its end
        self.reset()

    @property
    def is_compileable(self) -> bool:
        """transformers omits no masks for a compileable cache, which a `StaticCache` requires."""
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
        # The calls since the last crop: the state before the call, and its input.
        self.calls: list[tuple[Any, LayerInput]] = []
        self.reread: LayerInput | None = None  # the tokens that the next call reads again

    def advance(self, state: Any, tokens: int) -> None:
        """Stores the state that a layer returned after `tokens` more tokens."""
        self.state = state
        self.tokens += tokens
        self.is_initialized = True

    def run(self, call: Callable[..., tuple[Any, Any]], x: Tensor, valid: Tensor | None) -> Any:
        """Returns y of `call(x, valid, state) -> (y, state)`, and stores the state and, while recording, the
        call.

        y: a tensor `[B, T, ...]` or a list of such tensors. `call` gets the tokens to reread before x; y
        omits them.
        """
        if not (torch.is_inference_mode_enabled() or torch.compiler.is_compiling()):
            any_part = first_tensor(self.state)
            if any_part is not None and any_part.is_inference():  # read-only outside of inference mode
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
        # No call has raised an error: store the results.
        self.calls, self.reread = self.calls + calls, None
        self.advance(state, x.shape[1])
        if isinstance(parts[0], list):
            return [_join_parts(ys, num_reread) for ys in zip(*parts, strict=True)]
        return _join_parts(parts, num_reread)

    def activate_past_recording(self) -> None:
        self.record_past = True

    def end_past_recording(self) -> None:
        """Stops the recording: `crop` raises an error until it is activated again. Tokens to reread stay."""
        self.record_past, self.calls = False, []

    def offload(self) -> None:
        """Does nothing: a state has a constant size and stays on its device."""

    def prefetch(self) -> None:
        """Does nothing, like `offload`."""

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
        """Rolls back the last `-tokens_to_remove` tokens. Only tokens since the last crop can be rolled
        back."""
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
        # A later crop may remove as many tokens: split calls early enough.
        self.reread_limit = max(self.reread_limit, 2 * num_removed)
        while num_removed > 0:
            self.state, call = self.calls.pop()
            num_kept = call.tokens - num_removed
            self.reread, num_removed = (call.split(num_kept)[0], 0) if num_kept > 0 else (None, -num_kept)
        self.reread = map_state(torch.clone, self.reread)  # a slice would keep the whole call alive
        self.calls = []


def _join_parts(parts: list[Tensor], start: int) -> Tensor:
    """Concatenates `[B, T, ...]` over tokens, from token `start` on."""
    return (torch.cat(parts, 1) if len(parts) > 1 else parts[0])[:, start:]


class GirihCache(Cache):
    """One `StateLayer` for each layer. A model creates it if `use_cache` is set and no cache is passed.

    steps: the CUDA graphs of decoding steps (`StepGraphs`).
    """

    def __init__(self, num_layers: int):
        super().__init__(layers=[StateLayer() for _ in range(num_layers)])
        self.steps = StepGraphs()

    def reset(self) -> None:
        super().reset()
        self.steps = StepGraphs()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorders the layers one at a time, and copies each to the tensors that the graphs read: only one
        layer's state exists twice at a time."""
        for layer, targets in itertools.zip_longest(self.layers, self.steps.captured_tensors):
            layer.reorder_cache(beam_idx)
            if targets is not None:
                copy_state_to(layer, targets)

    def end_past_recording(self) -> None:
        """Stops the recording that `activate_past_recording()` began."""
        for layer in self.layers:
            layer.end_past_recording()

    def checkpoint(self) -> "GirihCache":
        """A copy of the current states, for `restore` or as a cache of its own. Later calls with this cache
        do not change the copy. Tokens before the checkpoint cannot be cropped from the copy.

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
        """Sets this cache to the states of `checkpoint`, which is copied and can be restored again."""
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
