"""A layer in the place of attention: its own call, and the call that transformers' attention modules get."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor

from girih.nn.functional.step import PLAIN, Product, RowInput
from girih.nn.layers.layer import Layer

# Names of the cache in attention modules: transformers 5.24; older versions; GPT-NeoX and GPT-BigCode; models
# with code of their own that older versions ran, as OpenELM.
CACHES = ("cache", "past_key_values", "layer_past", "past_key_value")
# By any of these a call is one of transformers' and not one of a layer's own.
OF_ATTENTION = frozenset((*CACHES, "hidden_states", "position_embeddings", "position_ids"))


class SequenceLayer(Layer):
    """A layer that takes the place of attention: `layer(x, attention_mask, state, use_cache, cu_seqlens)`.

    It also takes the call that attention modules of transformers get, and answers as they do. `layer_idx`,
    which they have too, is its place in a cache.

    attention_call: answers that call, as `attention_call(layer, hidden_states, layer_idx, **call)`, where
        `layer` takes a layer's own call. Layers do not know the models' cache: `girih._auto` sets
        `girih.models.adapters.attention_call.attend`.
    """

    layer_idx: int | None = None
    attention_call: ClassVar[Callable[..., tuple[Tensor, None]]]

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        if OF_ATTENTION.isdisjoint(kwargs):
            return super().__call__(*args, **kwargs)
        if len(args) > 1:
            names = ", ".join(sorted(kwargs.keys() & OF_ATTENTION))
            raise ValueError(
                f"{type(self).__name__}: {names} beside {len(args)} positional arguments; expected "
                "hidden_states as the only one"
            )
        if args:
            kwargs["hidden_states"] = args[0]
        x = kwargs.pop("hidden_states")
        return self.attention_call(super().__call__, x, self.layer_idx, **kwargs)

    def products(self) -> tuple[Product, ...] | None:
        """Of a layer that is `o_proj(core(projections of x))`: those, for a step that computes them at once
        and has nothing of modules but weights. None: a step calls the layer."""
        return None

    def core(
        self, projected: Sequence[Tensor], state: Any, use_cache: bool, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Any]:
        """What `o_proj` takes, but for `before_output`, and the state."""
        raise NotImplementedError

    def before_output(self) -> RowInput:
        """What is left to do with core's output."""
        return PLAIN
