"""What all girih models share: initialisation, loading, caches, checkpointing."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from girih.models.cache import GirihCache
from girih.models.config import GirihConfig


class GirihPreTrainedModel(PreTrainedModel):
    config_class = GirihConfig
    config: GirihConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar = ["Block"]
    _is_stateful = True  # a state cannot be rolled back: assisted decoding is refused

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
        elif hasattr(module, "reset_parameters") and not _loaded(module):
            module.reset_parameters()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any):
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        with torch.device("meta"):  # loading replaced the parameters, and with them the marks of the layers
            fresh = cls(model.config)
        for name, parameter in fresh.named_parameters():
            if getattr(parameter, "_no_weight_decay", False):
                model.get_parameter(name)._no_weight_decay = True
        return loaded

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs: dict, *args: Any, **kwargs: Any
    ) -> None:
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation is {generation_config.cache_implementation!r}; "
                "a girih model keeps its mixers' states and has no other cache"
            )
        if generation_config.use_cache and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = self.new_cache()

    def cache_for(self, use_cache: bool | None, past_key_values: GirihCache | None) -> GirihCache | None:
        """The cache that this call reads and writes, if any; training keeps none unless asked."""
        if past_key_values is not None:
            if not isinstance(past_key_values, GirihCache):
                raise ValueError(
                    f"past_key_values is a {type(past_key_values).__name__}; expected a GirihCache"
                )
            return past_key_values
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        return self.new_cache() if use_cache else None

    def run_block(self, block: nn.Module, *arguments: Any) -> tuple[Tensor, Any]:
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(block.__call__, *arguments)
        return block(*arguments)

    def output(
        self, x: Tensor, cache: GirihCache | None, every: list[Tensor] | None, return_dict: bool | None
    ):
        every = None if every is None else tuple(every)
        output = BaseModelOutputWithPast(last_hidden_state=x, past_key_values=cache, hidden_states=every)
        return output.to_tuple() if return_dict is False else output

    def new_cache(self) -> GirihCache:
        return GirihCache(1 if self.config.is_whole_cat else self.config.num_hidden_layers)


def _loaded(module: nn.Module) -> bool:
    """Whether a checkpoint gave all of this module's own parameters and buffers."""
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return all(getattr(tensor, "_is_hf_initialized", False) for tensor in own) and bool(own)


def own_mask(attention_mask: Tensor | None, tokens: int) -> Tensor | None:
    """The last `tokens` columns of a mask over past and present tokens, `[B, tokens]`."""
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2:
        raise ValueError(f"attention_mask has {attention_mask.dim()} dimensions; expected [batch, tokens]")
    if attention_mask.shape[1] < tokens:
        raise ValueError(
            f"attention_mask covers {attention_mask.shape[1]} tokens; expected at least {tokens}"
        )
    return attention_mask[:, -tokens:].bool()
