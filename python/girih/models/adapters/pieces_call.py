"""Calls of transformers' models within `girih.context_parallel`.

A call of a model is cut as those of girih's models are: tokens, positions, mask and labels. Its layers get
`girih_tokens` with the pieces, also where gradient checkpointing calls them again in backward. Converted
layers read pieces as girih's layers do. Attention gathers keys and values in a function that is registered
with transformers as the implementation "girih". Outside of pieces this function is "sdpa".
"""

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from girih.distributed.context import (
    check_cache,
    check_labels,
    check_layers,
    check_logits_to_keep,
    cut_tokens,
    entered_group,
    next_labels,
    piece_of,
    reading,
    sum_of_losses,
)
from girih.distributed.neighbours import attention
from girih.distributed.pieces import Pieces
from girih.models.adapters.attention_call import Tokens, cache_of, drop_trivial_mask
from girih.models.base import GirihPreTrainedModel
from girih.nn.functional.masking import select_current_mask
from girih.nn.functional.packing import make_position_ids, resolve_cu_seqlens
from girih.nn.functional.state import current_pieces

#: Model types that are tested: their tokens are mixed by attention alone, through transformers' interface.
MODEL_TYPES = ("gemma", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3")
LAYER_TYPES = {"full_attention", "sliding_attention"}
IMPLEMENTATION = "girih"
BOUNDS = ("cu_seqlens", "cu_seq_lens_q", "seq_idx")


def call_model(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """`PreTrainedModel.__call__` within `girih.context_parallel`."""
    group = entered_group()
    if group is None or isinstance(model, GirihPreTrainedModel):
        return nn.Module.__call__(model, *args, **kwargs)
    check_model(model)
    signature = inspect.signature(type(model).forward)
    call, (_, *names) = signature.bind(model, *args, **kwargs), signature.parameters
    return call_piece(model, group, dict(zip(names, call.args[1:], strict=False)) | call.kwargs)


def check_model(model: PreTrainedModel) -> None:
    """Raises ValueError unless the model can read pieces. Changes attention's implementation from "sdpa" to
    "girih"."""
    config, name = model.config, type(model).__name__
    is_head = model.base_model is not model
    layer_types = set(getattr(config, "layer_types", None) or ())
    if config.model_type not in MODEL_TYPES or not layer_types <= LAYER_TYPES:
        raise ValueError(
            f"context_parallel: {name} reads whole sequences; expected a model of girih, or one of the types "
            f"{', '.join(MODEL_TYPES)} with layers of attention alone"
        )
    if (is_head and "ForCausalLM" not in name) or getattr(config, "is_causal", True) is False:
        raise ValueError(
            f"context_parallel: {name} reads whole sequences; expected a causal language model or its base"
        )
    check_layers(model)
    for path, module in model.named_modules():
        if getattr(module, "max_self_attn_length", None) is not None:
            raise ValueError(f"context_parallel: max_self_attn_length of {path} should be None")
        rope_type = getattr(module, "rope_type", None) or ""
        if "dynamic" in rope_type or "longrope" in rope_type:  # frequencies follow from the largest position
            raise ValueError(
                f"context_parallel: rope_type of {path} is {rope_type!r}, which depends on the length of the "
                "sequence; expected a type with fixed frequencies"
            )
    if config._attn_implementation == "sdpa":
        model.set_attn_implementation(IMPLEMENTATION)
    if config._attn_implementation != IMPLEMENTATION:
        raise ValueError(
            f"context_parallel: attn_implementation is {config._attn_implementation!r} but should be 'sdpa'"
        )


def call_piece(model: PreTrainedModel, group: dist.ProcessGroup, arguments: dict[str, Any]) -> Any:
    """Calls the model with this rank's piece of the arguments."""
    check_cache(cache_of(arguments), arguments.get("use_cache"))
    if arguments.get("logits_to_keep") is not None:
        check_logits_to_keep(arguments["logits_to_keep"])
    if arguments.get("output_attentions"):
        raise ValueError("output_attentions: context_parallel has no attention weights; expected False")
    ids, embeds = arguments.get("input_ids"), arguments.get("inputs_embeds")
    if (ids is None) == (embeds is None):
        raise ValueError("input_ids, inputs_embeds: give exactly one of them")
    x, positions = ids if embeds is None else embeds, arguments.get("position_ids")
    T = x.shape[1]
    mask = arguments.pop("attention_mask", None)
    if not isinstance(mask, Tensor | None):
        raise ValueError(f"attention_mask is a {type(mask).__name__}; expected a tensor, [batch, tokens]")
    valid = drop_trivial_mask(select_current_mask(mask, T))
    bounds = {name: arguments.pop(name, None) for name in BOUNDS}
    cu_seqlens = resolve_cu_seqlens(x, valid, position_ids=positions, **bounds)
    for name in ("cu_seq_lens_k", "max_length_q", "max_length_k"):  # they follow from the bounds
        arguments.pop(name, None)
    pieces = cut_tokens(group, T, cu_seqlens)
    if 0 in pieces.lengths:  # transformers' models cannot read an empty piece
        name = "input_ids" if embeds is None else "inputs_embeds"
        raise ValueError(
            f"context_parallel: {name} has {T} tokens; expected at least {pieces.size}, one for each rank"
        )
    if positions is None:
        positions = torch.arange(T, device=x.device)[None]
    if cu_seqlens is not None:
        positions = make_position_ids(cu_seqlens, T)
    has_loss = arguments.get("labels") is not None
    arguments |= cut_labels(arguments, x, pieces)
    cut = {"input_ids": ids, "inputs_embeds": embeds, "position_ids": positions}
    arguments |= {name: piece_of(tensor, pieces) for name, tensor in cut.items() if tensor is not None}
    tokens = Tokens(piece_of(valid, pieces), pieces.cu_seqlens, pieces)
    with reading(pieces):
        output = nn.Module.__call__(model, **arguments | {"use_cache": False, "girih_tokens": tokens})
    if not has_loss:
        return output
    if isinstance(output, tuple):
        return sum_of_losses(output[0], group), *output[1:]
    output.loss = sum_of_losses(output.loss, group)
    return output


def cut_labels(arguments: dict[str, Any], x: Tensor, pieces: Pieces) -> dict[str, Any]:
    """The arguments of the loss for this rank's piece, without labels none. x ``[B, T, ...]``: the tokens."""
    labels, targets = arguments.pop("labels", None), arguments.pop("shift_labels", None)
    if labels is None:
        return {}
    check_labels(labels, x)
    targets = next_labels(labels) if targets is None else targets
    check_labels(targets, x, "shift_labels")
    count = arguments.get("num_items_in_batch")
    count = (targets != -100).sum() if count is None else count
    targets = piece_of(targets, pieces).contiguous()
    return {"labels": targets, "shift_labels": targets, "num_items_in_batch": count}


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    girih_tokens: Tokens | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The implementation "girih" of attention: of a piece, or of whole sequences as "sdpa".

    query, key, value: ``[B, heads, T, D]``; returns ``[B, T, heads, D]``.
    """
    if girih_tokens is None or girih_tokens.pieces is None:
        if current_pieces.get() is not None:
            raise ValueError(f"context_parallel: {type(module).__name__} gets no girih_tokens from its model")
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    if dropout:
        raise ValueError(f"context_parallel: attention_dropout is {dropout} but should be 0")
    o = attention(
        *(x.transpose(1, 2) for x in (query, key, value)),
        group=girih_tokens.pieces,
        valid=girih_tokens.valid,
        window=sliding_window,
        scale=scaling,
    )
    return o, None


def make_mask(*args: Any, **options: Any) -> Tensor | None:
    """The mask of the implementation "girih": none for a piece, where attention computes it."""
    return None if current_pieces.get() is not None else sdpa_mask(*args, **options)


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, make_mask)
