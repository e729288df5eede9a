"""Packed sequences in models of transformers: passes the bounds of the sequences to every layer.

If a call has neither an attention_mask nor a cache, transformers starts a packed sequence where position_ids
do not rise by one, and separates the sequences only in the masks of attention. A wrapper `X(original)`
returns the `forward` that replaces `original` in a class of a modelling module.
"""

import functools
import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask

from girih.nn.functional.packing import cu_seqlens_from_starts, make_position_ids, make_seq_idx
from girih.nn.layers.sequence_layer import CACHES

Forward = Callable[..., Any]
CACHE_ARGUMENTS = ("cache_params", *CACHES)
MASKS = ("create_causal_mask", "create_recurrent_attention_mask")
HEADS_WITHOUT_KEYWORDS = ("Mamba2ForCausalLM", "MambaForCausalLM", "FalconMambaForCausalLM")
# Models that compute attention's mask without position_ids, and do not pass position_ids to attention.
MASKS_WITHOUT_POSITIONS = ("GraniteMoeHybridModel",)
# Models that cannot separate packed sequences, and why.
MODELS_OF_SINGLE_SEQUENCES = {
    **dict.fromkeys(
        ("MambaModel", "FalconMambaModel", "JambaModel", "ZambaModel"),
        "the scan of Mamba-1 reads a row as one sequence",
    ),
    "InklingTextModel": "its short convolutions get no bounds",
}


class Keywords(NamedTuple):
    """Arguments that a head without keyword arguments passes to its model in place of attention_mask."""

    attention_mask: Any
    position_ids: Tensor | None
    seq_idx: Tensor | None
    cu_seqlens: Tensor | None
    cu_seq_lens_q: Tensor | None


@torch.compiler.disable(
    reason="position_ids or seq_idx of packed sequences are read on the host; give cu_seq_lens_q [N + 1] too"
)
def find_bounds(name: str, index: Tensor, rows: int) -> Tensor | None:
    """`cu_seqlens [N + 1]` int32 from position_ids or seq_idx, `[1, T]`; None if each row is one sequence.

    A sequence starts where position_ids do not rise by one, as in transformers' masks, or where seq_idx
    changes. Waits for the device. Raises ValueError if a sequence starts within one of several rows.
    """
    starts = (index.diff() != (1 if name == "position_ids" else 0)).nonzero()
    if len(starts) == 0:
        return None
    if max(rows, index.shape[0]) > 1:
        raise ValueError(
            f"{name} starts new sequences within a row of {list(index.shape)}; expected one row, [1, T]: the "
            "linear layers keep packed sequences apart in one row alone"
        )
    return cu_seqlens_from_starts(starts[:, 1] + 1, index.shape[1])


def text_positions(position_ids: Any) -> Tensor | None:
    """Positions in the text, `[B, T]`; None for positions in images, `[3, B, T]`."""
    if not isinstance(position_ids, Tensor) or position_ids.device.type == "meta":
        return None
    if position_ids.dim() == 3 and position_ids.shape[0] in (1, 4):  # text, then time, height, width
        position_ids = position_ids[0]
    return position_ids if position_ids.dim() == 2 else None


def bounds_of_call(arguments: dict[str, Any], rows: int, tokens: int) -> Tensor | None:
    """The bounds of the packed sequences that a model's arguments hold, `[N + 1]`; None if they hold none."""
    if arguments.get("girih_tokens") is not None:  # found by a hook of a converted model
        return arguments["girih_tokens"].cu_seqlens
    for name in ("cu_seqlens", "cu_seq_lens_q"):
        if arguments.get(name) is not None:
            return arguments[name]
    index = arguments.get("seq_idx")
    if index is not None:
        found_bounds = find_bounds("seq_idx", index, rows)
        single_sequence = torch.tensor([0, tokens], dtype=torch.int32, device=index.device)
        return single_sequence if found_bounds is None and rows == 1 else found_bounds
    positions = text_positions(arguments.get("position_ids"))
    if positions is None or tokens < 2 or not has_packed_mask(arguments):
        return None
    return find_bounds("position_ids", positions, rows)


def has_packed_mask(arguments: dict[str, Any]) -> bool:
    """Whether transformers looks for packed sequences in this call: it has neither a mask nor a cache."""
    return all(arguments.get(name) is None for name in ("attention_mask", *CACHE_ARGUMENTS))


def class_names(model: nn.Module) -> set[str]:
    """Names of a model's class and of its bases: a model may be a subclass of a model of transformers."""
    return {kind.__name__ for kind in type(model).__mro__}


def refuse_packed(model: nn.Module, cu_seqlens: Tensor) -> None:
    """Raises ValueError for a model that would mix the sequences."""
    for name in class_names(model) & MODELS_OF_SINGLE_SEQUENCES.keys():
        raise ValueError(
            f"{name} is called with {cu_seqlens.shape[0] - 1} packed sequences; expected one sequence a row: "
            f"{MODELS_OF_SINGLE_SEQUENCES[name]}"
        )


def refuse_cache(arguments: dict[str, Any], cu_seqlens: Tensor) -> None:
    """Raises ValueError if a cache is given: it has one place a row, not one a sequence."""
    given = [name for name in CACHE_ARGUMENTS if arguments.get(name) is not None]
    if given:
        raise ValueError(
            f"{given[0]} is given with {cu_seqlens.shape[0] - 1} packed sequences; expected none: no cache "
            "is kept of packed sequences"
        )


def separate_attention(
    model: nn.Module, arguments: dict[str, Any], x: Tensor, cu_seqlens: Tensor, has_explicit_bounds: bool
) -> None:
    """Sets the arguments by which attention separates the packed sequences, and use_cache=False.

    has_explicit_bounds: the bounds come from other arguments than position_ids, which may then continue from
    one sequence to the next.
    """
    if arguments.get("use_cache"):
        raise ValueError(
            "use_cache is True, but no cache is kept of packed sequences; call the model with use_cache=False"
        )
    arguments["use_cache"] = False
    positions, position_ids = make_position_ids(cu_seqlens, x.shape[1]), arguments.get("position_ids")
    if position_ids is None or (has_explicit_bounds and position_ids.dim() == 2):
        arguments["position_ids"] = positions
    if not class_names(model).isdisjoint(MASKS_WITHOUT_POSITIONS):
        sizes = torch.empty(*x.shape[:2], 0, dtype=model.dtype, device=x.device)
        mask = create_causal_mask(model.config, sizes, None, None, position_ids=positions)
        arguments["attention_mask"] = mask
        if mask is None:  # flash attention reads the bounds and the largest length
            longest = arguments.get("max_length_q") or int(cu_seqlens.diff().max())  # waits for the device
            arguments |= {"cu_seq_lens_k": cu_seqlens, "max_length_q": longest, "max_length_k": longest}


def separate_packed(original: Forward) -> Forward:
    """Wraps a model's `forward`: finds the bounds of packed sequences once and passes them to all layers."""
    argument_names = tuple(inspect.signature(original).parameters)[1:]

    @functools.wraps(original)
    def separated_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(argument_names, args, strict=False)) | kwargs
        mask = arguments.get("attention_mask")
        if isinstance(mask, Keywords):
            arguments |= mask._asdict()
        x = (
            arguments.get("input_ids")
            if arguments.get("inputs_embeds") is None
            else arguments["inputs_embeds"]
        )
        if x is None or x.dim() < 2:
            return original(self, *args, **kwargs)
        cu_seqlens = bounds_of_call(arguments, *x.shape[:2])
        if cu_seqlens is None:
            if isinstance(mask, Keywords):
                kwargs["attention_mask"] = mask.attention_mask
            return original(self, *args, **kwargs)
        has_explicit_bounds = any(
            arguments.get(name) is not None for name in ("cu_seqlens", "cu_seq_lens_q", "seq_idx")
        )
        arguments.pop("cu_seqlens", None)
        arguments["cu_seq_lens_q"] = cu_seqlens
        if cu_seqlens.shape[0] > 2:
            refuse_packed(self, cu_seqlens)
            refuse_cache(arguments, cu_seqlens)
            if arguments.get("seq_idx") is None:  # functions of transformers reject packed sequences by it
                arguments["seq_idx"] = make_seq_idx(cu_seqlens, x.shape[1])
            if has_packed_mask(arguments):
                separate_attention(self, arguments, x, cu_seqlens, has_explicit_bounds)
        if "position_ids" not in argument_names:
            arguments.pop("position_ids", None)
        return original(self, **arguments)

    return separated_forward


def pass_on_keywords(original: Forward) -> Forward:
    """Wraps `forward` of a head that does not pass keywords to its model: passes them in attention_mask."""

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        packing = {name: kwargs.get(name) for name in Keywords._fields[1:]}
        if any(value is not None for value in packing.values()):
            attention_mask = Keywords(attention_mask, **packing)
        return original(self, *args, attention_mask=attention_mask, **kwargs)

    return forward


def find_wrapper(value: type) -> Callable[[Forward], Forward] | None:
    """The wrapper of a class's `forward`, if the class is a model or a head that drops keywords; else
    None."""
    if not issubclass(value, PreTrainedModel) or "forward" not in vars(value):
        return None
    if value.__name__ in HEADS_WITHOUT_KEYWORDS:
        return pass_on_keywords
    code = getattr(inspect.unwrap(value.forward), "__code__", None)
    has_masks = code is not None and not names_of(code).isdisjoint(MASKS)
    return separate_packed if has_masks or value.__name__ in MODELS_OF_SINGLE_SEQUENCES else None


def names_of(code: CodeType) -> set[str]:
    """The global names and attributes that a function's code uses, and those of functions within it."""
    inner = (names_of(const) for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*inner)
