"""The language model around the layers, as Hugging Face models."""

import functools
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import CausalLMOutputWithPast

from girih.distributed.context import (
    check_labels,
    check_logits_to_keep,
    cut_tokens,
    entered_group,
    next_labels,
    piece_of,
    sum_of_losses,
)
from girih.models.adapters.cache_argument import CACHE, resolve_cache
from girih.models.base import Backbone, GirihPreTrainedModel
from girih.models.cache import GirihCache
from girih.models.cat import CatModel
from girih.models.config import GirihConfig
from girih.nn import MIXERS, Block, RMSNorm
from girih.nn.functional.fused import is_plain_linear
from girih.nn.functional.loss import linear_cross_entropy
from girih.nn.functional.masking import select_current_mask
from girih.nn.functional.state import check_layer_states
from girih.nn.layers.layer import Layer


class GirihModel(Backbone):
    """Embedding, `num_hidden_layers` blocks and an RMS norm. `Backbone` documents the arguments."""

    def __init__(self, config: GirihConfig):
        super().__init__(config)
        if config.is_whole_cat:
            raise ValueError(
                "mixer is 'cat', the model CatModel; in a list, as ['cat', ...], it is a layer of GirihModel"
            )
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Block(
                mixer.build(config),
                config.hidden_size,
                config.intermediate_size if mixer.has_mlp else None,
                config.norm_eps,
            )
            for mixer in map(MIXERS.get, config.mixers)
        )
        for i, block in enumerate(self.layers):
            block.mixer.layer_idx = i
            for module in block.mixer.modules():
                if isinstance(module, Layer):
                    module.set_depth(i, config.num_hidden_layers)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any):
        """AutoModel calls this method with the configuration in kwargs; for mixer "cat" it loads a
        `CatModel`."""
        model_class = CatModel if _is_whole_cat(kwargs.get("config")) else super()
        return model_class.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    @classmethod
    def _from_config(cls, config: GirihConfig, **kwargs: Any):
        return (CatModel if _is_whole_cat(config) else super())._from_config(config, **kwargs)

    def compute_hidden_states(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        cache: GirihCache | None,
        cu_seqlens: Tensor | None,
        chunk: int | None,
    ) -> list[Tensor]:
        if chunk is not None:
            raise ValueError(f"chunk is {chunk!r}; expected none: only the CAT model has a choice of chunks")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        mask = select_current_mask(attention_mask, x.shape[1])
        if cache is None:
            all_hidden, _ = self.run_blocks(self.layers, x, lambda i: (mask, None, False, cu_seqlens))
        else:
            check_layer_states(  # before the first layer writes its state
                (f"state of layer {i}" for i in range(len(self.layers))),
                (block.mixer for block in self.layers),
                [cache.layers[i].state for i in range(len(self.layers))],
                x,
                cu_seqlens,
            )
            all_hidden = [x]
            for i, block in enumerate(self.layers):
                x = cache.layers[i].run(
                    lambda *call, block=block: self.run_block(block, *call, True, cu_seqlens),
                    all_hidden[-1],
                    mask,
                )
                all_hidden.append(x)
        all_hidden[-1] = self.norm(all_hidden[-1])
        return all_hidden


class GirihForCausalLM(GirihPreTrainedModel, GenerationMixin):
    """A language model with any mixer: `GirihModel` (or `CatModel`) and a head.

    labels `[B, T]`: the output then has the mean cross entropy, in nats, of every token after the first of
    its sequence. Tokens with label -100 do not count. With `config.loss_in_chunks` the output of a training
    call has the loss and no logits. `Backbone` documents the other arguments. The cache of `generate()` holds
    the states of the mixers.

    Exclude memories, time scales, gate biases and norms from a Trainer's weight decay with
    `girih.nn.decay_parameter_names`.

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
        """transformers calls this method after each forward pass, except after the parts of a chunked
        prefill."""
        return super()._update_model_kwargs_for_generation(*args, **kwargs) | {"written": True}

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        inputs_embeds: Tensor | None = None,  # generate() accepts inputs_embeds only if it is named here
        written: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Omits the mask of a generated token, which is always valid: only a step without a mask runs in
        place. A token of the prompt may be masked and keeps its mask.

        written: whether the model has already run in this `generate()` call.
        """
        inputs = super().prepare_inputs_for_generation(input_ids, inputs_embeds=inputs_embeds, **kwargs)
        if written and inputs["input_ids"].shape[1] == 1:
            inputs["attention_mask"] = None
        return inputs

    def _has_loss_in_chunks(self) -> bool:
        """Whether the loss is computed without all logits: `config.loss_in_chunks` is set, the model trains,
        the head is a plain linear layer, and the loss function is the default."""
        return (
            self.config.loss_in_chunks
            and self.training
            and is_plain_linear(self.lm_head)
            and getattr(self, "_loss_function", None) is None
        )

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: GirihCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        cache_position: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        chunk: int | None = None,
        past_key_values: GirihCache | None = None,
    ) -> CausalLMOutputWithPast | tuple:
        cu_seqlens = self.find_bounds(
            input_ids,
            inputs_embeds,
            attention_mask,
            cu_seqlens=cu_seqlens,
            cu_seq_lens_q=cu_seq_lens_q,
            seq_idx=seq_idx,
            position_ids=position_ids,
        )
        group = entered_group()
        if group is not None:
            check_logits_to_keep(logits_to_keep)
        if labels is not None and cu_seqlens is not None:
            labels = ignore_first(labels, cu_seqlens)
        if group is not None and labels is not None:
            x = input_ids if inputs_embeds is None else inputs_embeds
            check_labels(labels, x)
            targets = piece_of(next_labels(labels), cut_tokens(group, x.shape[1], cu_seqlens)).contiguous()
            if num_items_in_batch is None:
                num_items_in_batch = (labels[:, 1:] != -100).sum()
        output = self.model(
            input_ids,
            attention_mask,
            cache=resolve_cache(cache, past_key_values),
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cu_seqlens=cu_seqlens,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=True,
            chunk=chunk,
        )
        x, logits, loss = output.last_hidden_state, None, None
        all_logits = isinstance(logits_to_keep, int) and logits_to_keep == 0
        has_loss_in_chunks = labels is not None and all_logits and self._has_loss_in_chunks()
        if not has_loss_in_chunks:
            keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(x[:, keep])
        if labels is not None:
            whole = group is None
            if has_loss_in_chunks:
                loss = linear_cross_entropy(
                    (x[:, :-1] if whole else x).flatten(0, 1),
                    self.lm_head.weight,
                    (labels[:, 1:] if whole else targets).flatten().to(x.device),
                    num_items=num_items_in_batch,
                )
            else:
                loss = self.loss_function(
                    logits=logits,
                    labels=labels if whole else None,
                    vocab_size=self.vocab_size,
                    num_items_in_batch=num_items_in_batch,
                    **{} if whole else {"shift_labels": targets},
                )
            if group is not None:
                loss = sum_of_losses(loss, group)
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            **{CACHE: getattr(output, CACHE)},
            hidden_states=output.hidden_states,
        )
        return (
            output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()
        )


class GirihForSequenceClassification(GenericForSequenceClassification, GirihPreTrainedModel):
    """`GirihModel` (or `CatModel`) with the classification head of transformers, as reward models use it.

    The scores `[B, num_labels]` are computed from the last token of each sequence. A batch of several
    sequences needs `config.pad_token_id`, which determines the last token. labels `[B]`: the output then has
    a loss.

    >>> config = GirihConfig(hidden_size=64, num_hidden_layers=1, num_heads=2, pad_token_id=0, num_labels=3)
    >>> GirihForSequenceClassification(config)(torch.randint(1, 256, (2, 12))).logits.shape
    torch.Size([2, 3])
    """

    @functools.wraps(GenericForSequenceClassification.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if entered_group() is not None:
            raise ValueError("context_parallel: GirihForSequenceClassification reads whole sequences")
        return super().forward(*args, **kwargs)


def ignore_first(labels: Tensor, cu_seqlens: Tensor) -> Tensor:
    """labels `[1, T]` with -100 at the first token of each packed sequence, which no earlier token
    predicts."""
    start = torch.zeros(labels.shape[1] + 1, dtype=torch.bool, device=labels.device)
    return labels.masked_fill(start.index_fill(0, cu_seqlens.long(), True)[:-1], -100)


def _is_whole_cat(config: Any) -> bool:
    return isinstance(config, GirihConfig) and config.is_whole_cat
