"""The mixers' states as the cache of `generate()`."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, StaticLayer

from girih.models.graph import StepGraphs, move
from girih.nn import map_state
from girih.nn.functional.masking import joined_masks
from girih.nn.functional.state import first_tensor


class Given(NamedTuple):
    """What a layer was called with: x `[B, T, ...]`, and valid `[B, T]`, where tokens count; None: all do."""

    x: Tensor
    valid: Tensor | None

    @property
    def tokens(self) -> int:
        return self.x.shape[1]

    def parted(self, tokens: int) -> tuple["Given", "Given"]:
        """The first so many, and the others."""
        first, others = slice(tokens), slice(tokens, None)
        if self.valid is None:
            return Given(self.x[:, first], None), Given(self.x[:, others], None)
        return tuple(Given(self.x[:, part], self.valid[:, part]) for part in (first, others))

    def followed_by(self, other: "Given") -> "Given":
        valid = joined_masks(self.valid, other.valid, self.tokens, other.x)
        return Given(torch.cat([self.x, other.x], 1), valid)


class StateLayer(CacheLayerMixin):
    """The state of one layer, whatever its mixer keeps, and how many tokens it has seen.

    there: the layer of keys whose place it takes in a cache, if it takes one's. Where that is one of a
    `StaticCache`, whose masks have the size of its room, masks go on having it, for the layers that stay.

    A state has forgotten what stood before its last token. To take tokens back, as assisted decoding does, a
    layer keeps what every call began with from `activate_past_recording()` on, until `crop` says how many of
    its tokens were right: it goes back to the state of the call that those end in, and reads the right tokens
    of that call again before those of the next. A long call is made in two, that it is not read again whole.

    chunk: of CAT, what its sequences were begun with.
    """

    supports_early_init = False

    def __init__(self, there: CacheLayerMixin | None = None) -> None:
        super().__init__()
        self.static = there if isinstance(there, StaticLayer) else None
        self.record_past = False
        self.read_again = 64  # tokens of the end of a long call
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
        """Whether tokens can be taken back. transformers 5.24 and newer reads it."""
        return self.record_past

    def reset(self) -> None:
        self.state: Any = None
        self.tokens = 0
        self.chunk: int | None = None
        self.calls: list[tuple[Any, Given]] = []  # since the last crop: the state before, and what came
        self.again: Given | None = None  # of the state's last call, what is right

    def advance(self, state: Any, tokens: int) -> None:
        """Keeps what a layer returned after `tokens` more tokens."""
        self.state = state
        self.tokens += tokens
        self.is_initialized = True

    def run(self, call: Callable[..., tuple[Any, Any]], x: Tensor, valid: Tensor | None) -> Any:
        """y of call(x, valid, state) -> (y, the state after it), a tensor `[B, T, ...]` or a list of such."""
        if not (torch.is_inference_mode_enabled() or torch.compiler.is_compiling()):
            any_part = first_tensor(self.state)
            if any_part is not None and any_part.is_inference():  # which is read-only outside of its mode
                self.state = map_state(torch.clone, self.state)
        now = Given(x, valid)
        if self.again is not None:
            now = self.again.followed_by(now)
        first, long = now.tokens - x.shape[1], now.tokens - self.read_again
        state, calls, parts = self.state, [], []
        for part in now.parted(long) if self.record_past and long > 0 else (now,):
            if self.record_past:
                calls.append((map_state(torch.clone, state), part))  # a step writes its state in place
            y, state = call(part.x, part.valid, state)
            parts.append(y)
        # All went well.
        self.calls, self.again = self.calls + calls, None
        self.advance(state, x.shape[1])
        if isinstance(parts[0], list):
            return [_joined(ys, first) for ys in zip(*parts, strict=True)]
        return _joined(parts, first)

    def activate_past_recording(self) -> None:
        self.record_past = True

    def end_past_recording(self) -> None:
        """What has been taken back stays so; nothing more can be."""
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
        """f of every tensor that is kept, all of which have a batch in front."""
        self.state, self.again = map_state(f, self.state), map_state(f, self.again)
        self.calls = [map_state(f, call) for call in self.calls]

    def batch_select_indices(self, indices: Tensor) -> None:
        self.map(lambda part: part.index_select(0, indices.to(part.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.map(lambda part: part.repeat_interleave(repeats, 0))

    def crop(self, tokens_to_remove: int) -> None:
        """Takes the last `-tokens_to_remove` tokens back, all of which have come since the last crop."""
        if not self.record_past:
            raise ValueError(
                "a recurrent state cannot be cropped: it has forgotten what stood before its last token, and "
                "did not record its past (activate_past_recording() of a girih model's cache)"
            )
        if tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove is {tokens_to_remove}; expected how many to remove, as -1 for one"
            )
        if self.again is not None:
            self.calls.append((self.state, self.again))
        there = sum(given.tokens for _, given in self.calls)
        if -tokens_to_remove > there:
            raise ValueError(
                f"tokens_to_remove is {tokens_to_remove}; expected at most the {there} tokens since the last "
                "crop"
            )
        left = -tokens_to_remove
        self.tokens -= left
        # Who takes so many back may do so again.
        self.read_again = max(self.read_again, 2 * left)
        while left > 0:
            self.state, given = self.calls.pop()
            right = given.tokens - left
            self.again, left = (given.parted(right)[0], 0) if right > 0 else (None, -right)
        self.again = map_state(torch.clone, self.again)  # not the whole call
        self.calls = []


def _joined(parts: list[Tensor], first: int) -> Tensor:
    """Along the tokens, from `first` on."""
    return (torch.cat(parts, 1) if len(parts) > 1 else parts[0])[:, first:]


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
        """Layer by layer to where graphs read it, so that no two states of all layers are there at once."""
        for layer, places in itertools.zip_longest(self.layers, self.steps.places):
            layer.reorder_cache(beam_idx)
            if places is not None:
                move(layer, places)

    def end_past_recording(self) -> None:
        """After `activate_past_recording()`: nothing is kept any more to crop."""
        for layer in self.layers:
            layer.end_past_recording()

    def checkpoint(self) -> "GirihCache":
        """The states as they are now, which nothing that is done with this cache changes: to `restore`, or to
        go on from as a cache itself. What came before cannot be cropped from it.

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
        for own, then in zip(self.layers, checkpoint.layers, strict=True):
            own.tokens, own.record_past, own.is_initialized = (
                then.tokens,
                then.record_past,
                then.is_initialized,
            )
            own.chunk = then.chunk
            own.state, own.again, own.calls = then.state, then.again, list(then.calls)
            own.map(torch.clone)
        return self
