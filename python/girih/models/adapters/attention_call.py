"""Calls a layer with the arguments of transformers' attention modules.

transformers calls `attention(hidden_states, position_embeddings=, attention_mask=, position_ids=, cache=,
use_cache=, ...)` and expects `(y, attention weights)`. This module converts the arguments to those of a
layer: the mask of valid tokens, the bounds of packed sequences, and the layer's state in the cache.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from girih.distributed.context import reading
from girih.models.cache import StateLayer
from girih.nn.functional.masking import select_current_mask
from girih.nn.functional.packing import resolve_cu_seqlens
from girih.nn.layers.sequence_layer import CACHES

# The arguments of a call that mark packed sequences.
TOKEN_ARGUMENTS = ("girih_tokens", "cu_seqlens", "cu_seq_lens_q", "seq_idx", "position_ids")


class Tokens(NamedTuple):
    """valid: `[B, T]` bool, false at masked tokens; None: no token is masked. cu_seqlens: as in every
    layer. pieces: a `girih.distributed.Pieces` if the tokens are a piece of sequences that are cut."""

    valid: Tensor | None
    cu_seqlens: Tensor | None
    pieces: Any = None

    def reading(self) -> AbstractContextManager[None]:
        """The context in which layers read these tokens."""
        return nullcontext() if self.pieces is None else reading(self.pieces)


def is_traced() -> bool:
    """Whether torch.compile or torch.jit.trace traces this call: the program may run with other values."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def drop_trivial_mask(valid: Tensor | None) -> Tensor | None:
    """None for a mask that masks no token, which selects faster code; else the mask. Reads the mask on the
    host, so a traced call keeps its mask."""
    if valid is None or is_traced() or valid.device.type == "meta":
        return valid
    return None if bool(valid.all()) else valid


def valid_tokens(x: Tensor, attention_mask: Any, past: int) -> Tensor | None:
    """The mask of valid tokens `[B, T]` of x `[B, T, ...]`, after `past` tokens; None: no mask.

    attention_mask: None, `[B, past + T]`, or a mask of scores, boolean or additive, `[B, heads, T, keys]` or
    `[B, heads, N, N]` with N > T for all positions (OpenELM).
    In a mask of scores a token is masked if it does not attend to itself. It is also masked if it attends to
    the last token and the last token does not attend to it: older models let padding attend to all keys, so
    that the softmax of sdpa is defined.
    """
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor):
        raise ValueError(
            f"attention_mask is a {type(attention_mask).__name__}; expected a tensor, [batch, tokens] or "
            "[batch, heads, tokens, keys]"
        )
    B, T = x.shape[:2]
    if attention_mask.dim() == 2:
        return select_current_mask(attention_mask, T)
    rows, keys = attention_mask.shape[2:] if attention_mask.dim() == 4 else (0, 0)
    is_square = rows == keys and rows > T and rows >= past + T
    if not is_square and (rows != T or keys < T):
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}; expected [B, heads, {T}, keys]"
        )
    # The keys of a growing cache end with x's keys. A static cache has further, unused keys.
    first = past if is_square else min(past, keys - T)
    last = keys - 1 if is_square else first + T - 1  # of the mask's rows
    mask = attention_mask[:, 0]
    row = mask[:, past : past + T] if is_square else mask
    own = get_visibility(row.diagonal(first, 1, 2))
    is_opened = get_visibility(row[:, :, last]) & ~get_visibility(mask[:, -1, first : first + T])
    return (own & ~is_opened).expand(B, -1)


def get_visibility(mask: Tensor) -> Tensor:
    """The boolean mask of scores, true where attention reads the key, from a boolean or an additive mask."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def resolve_tokens(
    x: Tensor,
    attention_mask: Any,
    past: int,
    *,
    girih_tokens: Tokens | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    seq_idx: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> Tokens:
    """The `Tokens` of x `[B, T, ...]` from the arguments of a call.

    girih_tokens: the result, if a hook of the model has found it for all layers (`conversion.tokens`).
    cu_seqlens, cu_seq_lens_q, seq_idx, position_ids: as in `packing.resolve_cu_seqlens`.
    """
    if girih_tokens is not None:
        return girih_tokens
    valid = drop_trivial_mask(valid_tokens(x, attention_mask, past))
    if position_ids is not None and (position_ids.dim() != 2 or past):
        position_ids = None  # positions in images, or after a past: neither marks packed sequences
    cu_seqlens = resolve_cu_seqlens(
        x,
        valid,
        cu_seqlens=cu_seqlens,
        cu_seq_lens_q=cu_seq_lens_q,
        seq_idx=seq_idx,
        position_ids=position_ids,
    )
    return Tokens(valid, cu_seqlens)


def get_state_layer(cache: Any, layer_idx: int | None, kind: type | None = None) -> Any:
    """The `StateLayer` at index layer_idx of a cache of transformers.

    transformers creates caches with a layer of keys for each layer of the model. The first call replaces the
    layer of keys by `kind(layer of keys)`; kind: default: `StateLayer`.
    """
    if layer_idx is None:
        raise ValueError(
            "cache: the layer does not know its place in a cache; set its layer_idx, let "
            "girih.replace_attention put it into the model, or call the model with use_cache=False"
        )
    layers = getattr(cache, "self_attention_cache", cache).layers
    while len(layers) <= layer_idx and getattr(cache, "layer_class_to_replicate", None) is not None:
        layers.append(cache.layer_class_to_replicate())
    if len(layers) <= layer_idx:
        raise ValueError(f"cache has {len(layers)} layers; the layer's layer_idx is {layer_idx}")
    layer = layers[layer_idx]
    if not isinstance(layer, StateLayer):
        seen = layer.get_seq_length() if hasattr(layer, "get_seq_length") else 0
        if not isinstance(seen, int) or seen > 0:
            raise ValueError(
                f"cache holds keys of layer {layer_idx}, of tokens that its mixer has not read; "
                "start from an empty cache"
            )
        layers[layer_idx] = layer = (kind or StateLayer)(layer)
    return layer


def attend(
    layer: Any,
    hidden_states: Tensor,
    layer_idx: int | None,
    attention_mask: Any = None,
    **call: Any,
) -> tuple[Tensor, None]:
    """Calls `layer` with the arguments of an attention module. hidden_states and y `[B, T, hidden_size]`;
    returns (y, None): there are no attention weights."""
    token_arguments = {name: call[name] for name in TOKEN_ARGUMENTS if call.get(name) is not None}
    cache = cache_of(call)
    if cache is None:
        tokens = resolve_tokens(hidden_states, attention_mask, 0, **token_arguments)
        with tokens.reading():
            return layer(hidden_states, tokens.valid, None, False, tokens.cu_seqlens)[0], None
    state_layer = get_state_layer(cache, layer_idx)
    tokens = resolve_tokens(hidden_states, attention_mask, state_layer.tokens, **token_arguments)
    refuse_packed(tokens)
    y = state_layer.run(lambda *inputs: layer(*inputs, True, None), hidden_states, tokens.valid)
    return y, None


def cache_of(call: dict[str, Any]) -> Any:
    """The cache argument of a call, by any of its names (`CACHES`). Raises for a paged cache."""
    cache = next((call[name] for name in CACHES if call.get(name) is not None), None)
    if cache is not None and not hasattr(getattr(cache, "self_attention_cache", cache), "layers"):
        raise ValueError(
            f"cache has type {type(cache).__name__}; a state has no pages: continuous batching is for "
            "attention"
        )
    return cache


def refuse_packed(tokens: Tokens) -> None:
    if tokens.cu_seqlens is not None:
        raise ValueError("no cache is kept of packed sequences; call the model with use_cache=False")
