"""What a model is told of its tokens, for all its layers at once."""

import inspect
from typing import Any

from torch import Tensor, nn

from girih.conversion.attention import ReplacedAttention
from girih.models.adapters.attention_call import Tokens, cache_of, is_recorded, is_seen, where_masked
from girih.nn.functional.masking import own_mask
from girih.nn.functional.packing import bounds, restarting, seq_idx_of
from girih.nn.layers.sequence_layer import CACHES


class TokensForLayers:
    """A hook before a model's `forward`: `girih_tokens`, what converted layers need to know of the tokens.

    Those see no attention_mask but what attention makes of it, if anything, and to find out where packed
    sequences start each of them would have to wait for the device. A packed row gets position_ids that
    restart, by which transformers makes its masks, seq_idx and cu_seq_lens_q, which transformers' own linear
    layers read, and no cache unless it is asked for.
    """

    def __init__(self, model: nn.Module):
        found = (m for m in model.modules() if isinstance(getattr(m, "layer_idx", None), int))
        self.attention = [m for m in found if "Attention" in type(m).__name__]
        parameters = inspect.signature(type(model).forward).parameters.values()
        self.order = tuple(p.name for p in parameters)[1:]
        self.takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def __call__(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]):
        given = dict(zip(self.order, args, strict=False)) | kwargs
        x = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
        mask = given.get("attention_mask")
        if (
            not self.takes_more
            or x is None
            or "girih_tokens" in given
            or (mask is not None and not flat(mask))
        ):
            refuse_blocks(given)
            return None  # the layers see for themselves
        x = x[None] if x.dim() == 1 else x
        valid = where_masked(own_mask(mask, x.shape[1]))
        position_ids = given.get("position_ids")
        if position_ids is not None and (not flat(position_ids) or cache_of(given) is not None):
            position_ids = None
        said = any(given.get(name) is not None for name in ("cu_seqlens", "cu_seq_lens_q", "seq_idx"))
        cu_seqlens = bounds(
            x,
            valid,
            cu_seqlens=given.pop("cu_seqlens", None),
            cu_seq_lens_q=given.get("cu_seq_lens_q"),
            seq_idx=given.get("seq_idx"),
            position_ids=position_ids,
        )
        if cu_seqlens is not None:
            if valid is not None:
                raise ValueError("attention_mask: packed sequences have no padding to mask; leave it out")
            self.refuse_packed_encoder()
            given["attention_mask"] = None  # of ones; with one transformers looks for no sequences
            there = given.get("position_ids")
            if there is None or (said and flat(there)):
                given["position_ids"] = restarting(cu_seqlens, x.shape[1])
            if given.get("use_cache") is None:
                given["use_cache"] = False
            # Linear layers of transformers that are not converted keep sequences apart by these, or refuse.
            given["cu_seq_lens_q"] = cu_seqlens
            if given.get("seq_idx") is None and cu_seqlens.shape[0] > 2:
                given["seq_idx"] = seq_idx_of(cu_seqlens, x.shape[1])
        if given.get("position_ids") is not None and all(
            isinstance(m, ReplacedAttention) for m in self.attention
        ):
            given["attention_mask"] = None  # or one of T x T would be made of it, for nobody
        return (), given | {"girih_tokens": Tokens(valid, cu_seqlens)}

    def refuse_packed_encoder(self) -> None:
        """Attention that stays in an encoder beside mixers keeps packed sequences apart by flash attention
        alone."""
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


def flat(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 2


def refuse_blocks(given: dict[str, Any]) -> None:
    """Refuses a mask of pairs in which a token does not see the one before it, if nothing else says why."""
    mask = given.get("attention_mask")
    said = ("position_ids", "cu_seqlens", "cu_seq_lens_q", "seq_idx", *CACHES, "girih_tokens")
    if (
        not isinstance(mask, Tensor)
        or mask.dim() != 4
        or mask.shape[2] != mask.shape[3]
        or any(given.get(name) is not None for name in said)
        or is_recorded()
        or mask.device.type == "meta"
    ):
        return
    see = is_seen(mask)
    valid = see.diagonal(0, 2, 3)
    if (valid[..., 1:] & valid[..., :-1] & ~see.diagonal(-1, 2, 3)).any():
        raise ValueError(
            "attention_mask: a token does not see the one before it; the linear path knows packed sequences "
            "by position_ids, seq_idx or cu_seqlens, so give one of these too"
        )
