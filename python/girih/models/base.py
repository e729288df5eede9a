"""Initialisation, arguments, caches and checkpointing of all girih models."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from girih._torch_internals import is_called_plainly, is_compiled_in_place
from girih.distributed.context import (
    bind_pieces,
    check_cache,
    check_layers,
    cut_tokens,
    entered_group,
    piece_of,
    reading,
)
from girih.models.adapters.cache_argument import CACHE, resolve_cache
from girih.models.cache import GirihCache
from girih.models.config import OWN_FIELDS, GirihConfig
from girih.models.folder import check_folder, is_adapter
from girih.nn import Block
from girih.nn.functional.fields import complete_fields, fields_to_json
from girih.nn.functional.masking import select_current_mask
from girih.nn.functional.packing import resolve_cu_seqlens
from girih.nn.functional.state import current_pieces
from girih.nn.functional.step import MAX_ROWS, use_weights_only


class GirihPreTrainedModel(PreTrainedModel):
    config_class = GirihConfig
    config: GirihConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # num_items_in_batch
    _no_split_modules: ClassVar = ["Block"]
    _supports_sdpa = True  # the mixer "attention" calls scaled_dot_product_attention

    def __init__(self, config: GirihConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        probe = nn.Module()
        probe.register_parameter("weight", nn.Parameter(torch.empty(0)))
        data = probe.weight.data
        if type(data) is Tensor and data.is_cpu:  # a meta or fake tensor needs no memory
            torch.ops.girih.check_memory(fields_to_json(config.own_fields()), data.element_size())
        else:
            complete_fields(config.own_fields())  # checks attributes that were set after construction

    @classmethod
    def from_pretrained(cls, folder: str | PathLike | None, *args: Any, config: Any = None, **kwargs: Any):
        """`PreTrainedModel.from_pretrained`, after `check_folder` if `folder` is a local folder of a model.

        folder: None loads the tensors of the argument state_dict. transformers resolves a folder of adapters
        to the folder of their base model.
        """
        unchecked = {"state_dict", "variant", "gguf_file", "ignore_mismatched_sizes", *OWN_FIELDS}
        if folder is not None and not kwargs.keys() & unchecked:
            local_folder = Path(folder, kwargs.get("subfolder", ""))
            if local_folder.is_dir() and not is_adapter(local_folder):
                check_folder(local_folder, cls, config)
        return super().from_pretrained(folder, *args, config=config, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Does nothing: `GirihConfig.save_pretrained` writes the module that names the classes."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
        elif hasattr(module, "reset_parameters") and not _is_loaded(module):
            module.reset_parameters()

    def compressors(self) -> list[nn.Module]:
        """The compressors of CAT. Each has its own token embedding, beside `get_input_embeddings()`."""
        return [module for name, module in self.named_modules() if name.split(".")[-1] == "compressor"]

    def enable_input_require_grads(self) -> None:
        """Also makes the outputs of the compressors' embeddings require gradients: reentrant checkpointing
        passes gradients to adapters only if a block's input requires them."""
        super().enable_input_require_grads()
        for compressor in self.compressors():
            hook = compressor.embed_tokens.register_forward_hook(lambda *call: call[-1].requires_grad_(True))
            self._require_grads_hooks.append(hook)

    def _resize_token_embeddings(self, new_num_tokens: int, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Also resizes the token embeddings of the compressors."""
        resized = super()._resize_token_embeddings(new_num_tokens, *args, **kwargs)
        tokens = resized.weight.shape[0]  # may exceed new_num_tokens because of padding
        mean = args[1] if len(args) > 1 else kwargs.get("mean_resizing", True)
        for compressor in self.compressors():
            before = compressor.embed_tokens
            compressor.embed_tokens = self._get_resized_embeddings(before, tokens, mean_resizing=mean)
            compressor.embed_tokens.requires_grad_(before.weight.requires_grad)
        return resized

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs: dict, *args: Any, **kwargs: Any
    ) -> None:
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation is {generation_config.cache_implementation!r}; "
                "a girih model keeps its mixers' states and has no other cache"
            )
        if generation_config.assistant_early_exit is not None:
            raise ValueError("assistant_early_exit: a girih model's layers cannot be left early")
        if not generation_config.use_cache:
            return
        caches = [model_kwargs.pop(name, None) for name in ("cache", "past_key_values")]
        cache = resolve_cache(*caches)
        if cache is None:
            cache = self.new_cache()
        model_kwargs[CACHE] = cache
        if generation_config.is_assistant:  # wrong tokens of an assistant are rolled back
            cache.activate_past_recording()
        elif isinstance(cache, GirihCache):  # assisted decoding activates the recording again
            cache.end_past_recording()

    def new_cache(self) -> GirihCache:
        return GirihCache(1 if self.config.is_whole_cat else self.config.num_hidden_layers)

    def find_bounds(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        **bound_arguments: Any,
    ) -> Tensor | None:
        """`packing.resolve_cu_seqlens` for the arguments of a model."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids, inputs_embeds: give exactly one of them")
        x = input_ids if inputs_embeds is None else inputs_embeds
        return resolve_cu_seqlens(x, select_current_mask(attention_mask, x.shape[1]), **bound_arguments)


class Backbone(GirihPreTrainedModel):
    """Maps tokens `[B, T]` to hidden states `[B, T, hidden_size]`.

    attention_mask: `[B, T]`, or `[B, past + T]`; 0 at masked tokens, which change no state and no other
        token.
    cache, past_key_values: two names of one `GirihCache`.
    use_cache: default: `config.use_cache`, but False in training and for packed sequences.
    cu_seqlens, cu_seq_lens_q: `[N + 1]`, bounds of N sequences packed into one row `[1, T]`. Sequences do not
        read each other.
    seq_idx, position_ids: `[1, T]`; without bounds a new sequence starts where seq_idx changes or
        position_ids restart. The host reads them. position_ids must rise by one within a sequence.
    chunk: the chunk length of this call, one of `config.chunks`; only for an adaptive CAT.

    cache_position, cu_seq_lens_k, max_length_q and max_length_k are accepted and ignored: the other arguments
    determine them.
    """

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: GirihCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        cache_position: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        chunk: int | None = None,
        past_key_values: GirihCache | None = None,
    ) -> BaseModelOutputWithPast | tuple:
        config = self.config
        cache = resolve_cache(cache, past_key_values)
        if output_attentions or (output_attentions is None and config.output_attentions):
            raise ValueError("output_attentions: the mixers compute no attention weights to return")
        cu_seqlens = self.find_bounds(
            input_ids,
            inputs_embeds,
            attention_mask,
            cu_seqlens=cu_seqlens,
            cu_seq_lens_q=cu_seq_lens_q,
            seq_idx=seq_idx,
            position_ids=position_ids,
        )
        if (group := entered_group()) is not None:
            return self.forward_piece(
                group,
                input_ids,
                inputs_embeds,
                attention_mask,
                cu_seqlens,
                cache,
                use_cache,
                output_hidden_states=output_hidden_states,
                return_dict=return_dict,
                chunk=chunk,
            )
        if current_pieces.get() is not None:
            use_cache = False
        if cache is not None and not isinstance(cache, GirihCache):
            raise ValueError(f"cache has type {type(cache).__name__}; expected GirihCache")
        if cu_seqlens is not None and cache is not None and cache.layers[0].record_past:
            raise ValueError(
                "cu_seqlens: packed sequences cannot be rolled back, as the cache's past is recorded"
            )
        if use_cache is None:
            use_cache = config.use_cache and not self.training and cu_seqlens is None
        if cache is None and use_cache:
            cache = self.new_cache()
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        call, all_hidden = (input_ids, inputs_embeds, attention_mask, cache, cu_seqlens, chunk), None
        if cache is not None and not output_hidden_states:
            all_hidden = cache.steps.try_replay(self, *call)
        if all_hidden is None:
            all_hidden = self.compute_hidden_states(*call)
        return self.make_output(all_hidden, cache, output_hidden_states, return_dict)

    def make_output(
        self,
        all_hidden: list[Tensor],
        cache: GirihCache | None,
        output_hidden_states: bool,
        return_dict: bool | None,
    ) -> BaseModelOutputWithPast | tuple:
        output = BaseModelOutputWithPast(
            last_hidden_state=all_hidden[-1],
            **{CACHE: cache},
            hidden_states=tuple(all_hidden) if output_hidden_states else None,
        )
        as_dict = self.config.return_dict if return_dict is None else return_dict
        return output if as_dict else output.to_tuple()

    def forward_piece(
        self,
        group: Any,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        cache: GirihCache | None,
        use_cache: bool | None,
        **options: Any,
    ) -> BaseModelOutputWithPast | tuple:
        """`forward` of this rank's piece, within `girih.context_parallel`."""
        self.check_piece(cache, use_cache)
        x = input_ids if inputs_embeds is None else inputs_embeds
        pieces = cut_tokens(group, x.shape[1], cu_seqlens)
        with reading(pieces):
            return Backbone.forward(
                self,
                piece_of(input_ids, pieces),
                piece_of(select_current_mask(attention_mask, x.shape[1]), pieces),
                inputs_embeds=piece_of(inputs_embeds, pieces),
                use_cache=False,
                cu_seqlens=pieces.cu_seqlens,
                **options,
            )

    def check_piece(self, cache: GirihCache | None, use_cache: bool | None) -> None:
        """Raises if the model cannot read a piece."""
        check_cache(cache, use_cache)
        check_layers(self)

    @abstractmethod
    def compute_hidden_states(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        cache: GirihCache | None,
        cu_seqlens: Tensor | None,
        chunk: int | None,
    ) -> list[Tensor]:
        """The input of each block, then the output of the final norm. Updates the cache."""

    def is_capturable_step(self, cache: GirihCache, chunk: int | None) -> bool:
        """Whether `compute_hidden_states` of one more token can be captured as a CUDA graph: it only calls
        the layers, and the host checks and updates nothing else."""
        return chunk is None

    def run_blocks(
        self, blocks: Sequence[nn.Module], x: Tensor, arguments: Callable[[int], tuple]
    ) -> tuple[list[Tensor], list[Any]]:
        """Returns (the input of each block and the output of the last block, the state of each block).

        arguments(i): the arguments of block i after x. Blocks without hooks run as `Block.parts`: a block
        returns x and the output of its feed-forward layer, and the norm of the next block adds them.
        A decoding step under capture (`uses_weights_only`) calls `Block.step`; with at most MAX_ROWS rows
        `Block.parts` is not used.
        """
        all_hidden, states, branch = [], [], None
        use_checkpoints = self.gradient_checkpointing and self.training
        use_steps = self.uses_weights_only() and x.numel() <= MAX_ROWS * x.shape[-1]
        use_parts = not (use_checkpoints or use_steps) and all(
            type(block) is Block and is_called_plainly(block) and not is_compiled_in_place(vars(block))
            for block in blocks
        )
        for i, block in enumerate(blocks):
            if use_parts:
                hidden, x, branch, state = block.parts(x, branch, *arguments(i))
                all_hidden.append(hidden)
            else:
                all_hidden.append(x)
                x, state = self.run_block(block, x, *arguments(i))
            states.append(state)
        return [*all_hidden, x if branch is None else x + branch], states

    def run_block(self, block: nn.Module, *arguments: Any) -> tuple[Tensor, Any]:
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(bind_pieces(block.__call__), *arguments)
        return block.step(*arguments) if self.uses_weights_only() else block(*arguments)

    def uses_weights_only(self) -> bool:
        return not torch.compiler.is_compiling() and use_weights_only.get()


def _is_loaded(module: nn.Module) -> bool:
    """Whether a checkpoint loaded all of this module's own parameters and buffers."""
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return all(getattr(tensor, "_is_hf_initialized", False) for tensor in tensors) and bool(tensors)
