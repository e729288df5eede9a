"""A hook that finds the mask and the packed sequences of a model's call once for all of its layers."""

import inspect
from typing import Any

from torch import Tensor, nn

from girih.conversion.attention import ReplacedAttention
from girih.models.adapters.attention_call import (
    Tokens,
    cache_of,
    drop_trivial_mask,
    get_visibility,
    is_traced,
)
from girih.nn.functional.masking import select_current_mask
from girih.nn.functional.packing import make_position_ids, make_seq_idx, resolve_cu_seqlens
from girih.nn.layers.sequence_layer import CACHES


class TokensForLayers:
    """A hook before a model's `forward` that adds `girih_tokens`, the tokens' mask and bounds, for converted
    layers.

    Without the hook a layer would get only attention's mask, and each layer would wait for the device to find
    the starts of packed sequences. For packed sequences the hook also sets the arguments that the other
    layers of transformers read: position_ids that restart, from which transformers creates masks; seq_idx and
    cu_seq_lens_q, for its linear layers; and use_cache=False by default.
    """

    def __init__(self, model: nn.Module):
        modules = (m for m in model.modules() if isinstance(getattr(m, "layer_idx", None), int))
        self.attention = [m for m in modules if "Attention" in type(m).__name__]
        parameters = inspect.signature(type(model).forward).parameters.values()
        self.argument_names = tuple(p.name for p in parameters)[1:]
        self.has_kwargs = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def __call__(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]):
        arguments = dict(zip(self.argument_names, args, strict=False)) | kwargs
        x = (
            arguments.get("input_ids")
            if arguments.get("inputs_embeds") is None
            else arguments["inputs_embeds"]
        )
        mask = arguments.get("attention_mask")
        if (
            not self.has_kwargs
            or x is None
            or "girih_tokens" in arguments
            or (mask is not None and not is_matrix(mask))
        ):
            refuse_blocks(arguments)
            return None  # each layer reads its own arguments
        x = x[None] if x.dim() == 1 else x
        valid = drop_trivial_mask(select_current_mask(mask, x.shape[1]))
        position_ids = arguments.get("position_ids")
        if position_ids is not None and (not is_matrix(position_ids) or cache_of(arguments) is not None):
            position_ids = None
        has_bounds = any(
            arguments.get(name) is not None for name in ("cu_seqlens", "cu_seq_lens_q", "seq_idx")
        )
        cu_seqlens = resolve_cu_seqlens(
            x,
            valid,
            cu_seqlens=arguments.pop("cu_seqlens", None),
            cu_seq_lens_q=arguments.get("cu_seq_lens_q"),
            seq_idx=arguments.get("seq_idx"),
            position_ids=position_ids,
        )
        if cu_seqlens is not None:
            if valid is not None:
                raise ValueError("attention_mask: packed sequences have no padding to mask; leave it out")
            self.refuse_packed_encoder()
            # With a mask, even of ones, transformers does not look for packed sequences.
            arguments["attention_mask"] = None
            positions = arguments.get("position_ids")
            if positions is None or (has_bounds and is_matrix(positions)):
                arguments["position_ids"] = make_position_ids(cu_seqlens, x.shape[1])
            if arguments.get("use_cache") is None:
                arguments["use_cache"] = False
            # Linear layers of transformers separate packed sequences by these arguments, or raise an error.
            arguments["cu_seq_lens_q"] = cu_seqlens
            if arguments.get("seq_idx") is None and cu_seqlens.shape[0] > 2:
                arguments["seq_idx"] = make_seq_idx(cu_seqlens, x.shape[1])
        if arguments.get("position_ids") is not None and all(
            isinstance(m, ReplacedAttention) for m in self.attention
        ):
            arguments["attention_mask"] = None  # transformers would compute an unused T x T mask from it
        return (), arguments | {"girih_tokens": Tokens(valid, cu_seqlens)}

    def refuse_packed_encoder(self) -> None:
        """Raises for packed sequences in an encoder if attention that is not converted is not flash
        attention: only flash attention separates them."""
        if all(isinstance(m, ReplacedAttention) or getattr(m, "is_causal", True) for m in self.attention):
            return
        if not any(isinstance(m, ReplacedAttention) and not m.projections.causal for m in self.attention):
            return
        implementation = self.attention[0].config._attn_implementation
        if "flash" not in implementation:
            raise ValueError(
                "layers: attention that stays reads packed sequences as one (attn_implementation is "
                f"{implementation!r}); expected flash attention, layers=None, or a row for each sequence"
            )


def is_matrix(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 2


def refuse_blocks(arguments: dict[str, Any]) -> None:
    """Raises for a mask `[B, heads, T, T]` in which a token does not attend to its predecessor, unless
    another argument has the bounds of packed sequences."""
    mask = arguments.get("attention_mask")
    names = ("position_ids", "cu_seqlens", "cu_seq_lens_q", "seq_idx", *CACHES, "girih_tokens")
    if (
        not isinstance(mask, Tensor)
        or mask.dim() != 4
        or mask.shape[2] != mask.shape[3]
        or any(arguments.get(name) is not None for name in names)
        or is_traced()
        or mask.device.type == "meta"
    ):
        return
    is_visible = get_visibility(mask)
    valid = is_visible.diagonal(0, 2, 3)
    if (valid[..., 1:] & valid[..., :-1] & ~is_visible.diagonal(-1, 2, 3)).any():
        raise ValueError(
            "attention_mask: a token does not see the one before it; the linear path knows packed sequences "
            "by position_ids, seq_idx or cu_seqlens, so give one of these too"
        )
