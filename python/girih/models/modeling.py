"""The language model around the layers, as Hugging Face models."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from girih.models.base import GirihPreTrainedModel, own_mask
from girih.models.cache import GirihCache
from girih.models.cat import CatModel
from girih.models.config import GirihConfig
from girih.nn import MIXERS, Block, RMSNorm
from girih.nn.masking import check_packing


class GirihModel(GirihPreTrainedModel):
    """Embedding, `num_hidden_layers` blocks, RMS norm.

    input_ids `[B, T]` -> last_hidden_state `[B, T, hidden_size]`. attention_mask `[B, T]` or over past tokens
    too; `cu_seqlens [N + 1]` packs N sequences into B = 1. past_key_values is a `GirihCache`.
    """

    def __init__(self, config: GirihConfig):
        super().__init__(config)
        if config.is_whole_cat:
            raise ValueError(
                "mixer is 'cat', the model CatModel; in a list, as ['cat', ...], it is a layer of GirihModel"
            )
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Block(MIXERS[mixer].build(config), config.hidden_size, config.intermediate_size, config.norm_eps)
            for mixer in config.mixers
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: GirihCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | tuple:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids, inputs_embeds: give exactly one of them")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        check_packing(x, cu_seqlens)
        past_key_values = self.cache_for(use_cache, past_key_values)
        mask = own_mask(attention_mask, x.shape[1])
        every = [x]
        for i, block in enumerate(self.layers):
            if past_key_values is None:
                x, _ = self.run_block(block, x, mask, None, False, cu_seqlens)
            else:
                past = past_key_values.layers[i]
                x, state = self.run_block(block, x, mask, past.state, True, cu_seqlens)
                past.advance(state, x.shape[1])
            every.append(x)
        every[-1] = x = self.norm(x)
        return self.output(x, past_key_values, every if output_hidden_states else None, return_dict)


class GirihForCausalLM(GirihPreTrainedModel, GenerationMixin):
    """A language model of any mixer: `GirihModel` (or `CatModel`) and a head.

    With `labels` `[B, T]` (-100: not counted) the output has the mean cross entropy of every token after the
    first of its sequence, in nats. `generate()` keeps the mixers' states as its cache.

    >>> model = GirihForCausalLM(GirihConfig(hidden_size=64, num_hidden_layers=1, num_heads=2, num_slots=8))
    >>> ids = torch.randint(256, (2, 12))
    >>> model(ids, labels=ids).loss.shape, model.generate(ids, max_new_tokens=4, do_sample=False).shape
    (torch.Size([]), torch.Size([2, 16]))
    """

    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: GirihConfig):
        super().__init__(config)
        self.model = CatModel(config) if config.is_whole_cat else GirihModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _update_model_kwargs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Called after every pass of the model but those that read a prompt in pieces."""
        return super()._update_model_kwargs_for_generation(*args, **kwargs) | {"written": True}

    def prepare_inputs_for_generation(
        self, *args: Any, written: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """A written token is valid: without a mask its step is in place. A prompt's token may be masked."""
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        if written and inputs["input_ids"].shape[1] == 1:
            inputs["attention_mask"] = None
        return inputs

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: GirihCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple:
        output = self.model(
            input_ids,
            attention_mask,
            past_key_values,
            inputs_embeds,
            use_cache,
            cu_seqlens,
            output_hidden_states,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, keep])
        loss = None
        if labels is not None:
            if cu_seqlens is not None:
                labels = without_first(labels, cu_seqlens)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=output.past_key_values,
            hidden_states=output.hidden_states,
        )
        return output.to_tuple() if return_dict is False else output


def without_first(labels: Tensor, cu_seqlens: Tensor) -> Tensor:
    """labels `[1, T]` without each packed sequence's first token, which nothing before it predicts."""
    start = torch.zeros(labels.shape[1] + 1, dtype=torch.bool, device=labels.device)
    return labels.masked_fill(start.index_fill(0, cu_seqlens.long(), True)[:-1], -100)
