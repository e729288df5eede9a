"""A layer that can replace attention: its own call, and the call of transformers' attention modules."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor

from girih.nn.functional.step import PLAIN, Product, RowInput
from girih.nn.layers.layer import Layer
from girih.nn.layers.projections import Projection, products_of

# Names of the cache argument of attention modules: transformers 5.24; older versions; GPT-NeoX and
# GPT-BigCode; models with remote code for older versions, such as OpenELM.
CACHES = ("cache", "past_key_values", "layer_past", "past_key_value")
# A call with any of these arguments is a call by transformers, not a layer's own call.
ATTENTION_ARGUMENTS = frozenset((*CACHES, "hidden_states", "position_embeddings", "position_ids"))


class SequenceLayer(Layer):
    """A layer that can replace attention: `layer(x, attention_mask, state, use_cache, cu_seqlens)`.

    It also accepts the arguments of transformers' attention modules, and then returns what these return.
    `layer_idx` is its index in a cache, as in attention modules.

    attention_call: handles such a call, `attention_call(layer, hidden_states, layer_idx, **call)`; `layer` is
        the layer's own call. Layers do not import the models' cache: `girih._auto` sets
        `girih.models.adapters.attention_call.attend`.
    """

    layer_idx: int | None = None
    reads_pieces: ClassVar[bool] = True  # whether it can read a piece of a sequence (girih.context_parallel)
    attention_call: ClassVar[Callable[..., tuple[Tensor, None]]]

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        if ATTENTION_ARGUMENTS.isdisjoint(kwargs):
            return super().__call__(*args, **kwargs)
        if len(args) > 1:
            names = ", ".join(sorted(kwargs.keys() & ATTENTION_ARGUMENTS))
            raise ValueError(
                f"{type(self).__name__}: {names} beside {len(args)} positional arguments; expected "
                "hidden_states as the only one"
            )
        if args:
            kwargs["hidden_states"] = args[0]
        x = kwargs.pop("hidden_states")
        return self.attention_call(super().__call__, x, self.layer_idx, **kwargs)

    def input_projections(self) -> tuple[Projection, ...] | None:
        """The projections of x, if the layer is `o_proj(output_prologue(core(projections of x)))`; else
        None."""
        return None

    def products(self) -> tuple[Product, ...] | None:
        """`input_projections` as products of the weights. Only a decoding step under CUDA-graph capture
        (`Block.step`) uses them: it computes all products in one launch.
        None: `Block.step` calls the layer."""
        specs = self.input_projections()
        return None if specs is None else products_of(self, specs)

    def core(
        self, projected: Sequence[Tensor], state: Any, use_cache: bool, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Any]:
        """The part of the layer between the projections and `output_prologue`. Returns o and the state."""
        raise NotImplementedError

    def output_prologue(self) -> RowInput:
        """The function of core's output that precedes `o_proj`."""
        return PLAIN
