"""Converted attention modules: a mixer replaces the attention, or a linear path is mixed with it.

Conversion keeps the module object and the names of its weights. It changes the module's class to a subclass
of its original class and of a class in this file, and adds the mixer or the path as the submodule `girih`.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from accelerate.hooks import add_hook_to_module, remove_hook_from_module
from torch import Tensor, nn

from girih.conversion.cache import AttentionStateLayer
from girih.conversion.config import Injection, Replacement
from girih.conversion.projections import Projections, RecordingAttention
from girih.models.adapters.attention_call import (
    TOKEN_ARGUMENTS,
    attend,
    cache_of,
    get_state_layer,
    refuse_packed,
    resolve_tokens,
)
from girih.nn import Attention, MixState
from girih.nn.functional.state import check_type
from girih.nn.layers.sequence_layer import CACHES

PART_NAME = "girih"
# Implementations of attention whose masks are tensors, as `cut_mask` requires.
MASKED = ("sdpa", "eager", "girih")


class ConvertedAttention(nn.Module):
    """Base of the converted classes.

    original: the module's class before the conversion. argument_names: the arguments of its forward. returns:
    the names of the values that its forward returns after the output (`returned_names`). prefix: of the name
    of the converted class.
    """

    prefix: ClassVar[str]
    original: ClassVar[type[nn.Module]]
    argument_names: ClassVar[tuple[str, ...]]
    returns: ClassVar[tuple[str, ...] | None]

    projections: Projections
    layer_idx: int

    def __reduce__(self):
        """The class is created at run time, so pickle cannot find it by name."""
        kind = next(kind for kind in type(self).__mro__[1:] if issubclass(kind, ConvertedAttention))
        return empty, (kind, self.original), vars(self)

    def bind_arguments(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, without hidden_states."""
        return dict(zip(self.argument_names[1:], args, strict=False)) | kwargs


class ReplacedLayer(ConvertedAttention):
    """`girih.nn.Attention` that calls a mixer instead."""

    prefix = "Replaced"

    def check_state(self, state: Any, x: Tensor, cu_seqlens: Tensor | None = None) -> None:
        if hasattr(self.girih, "check_state"):  # mixers of other packages have none
            self.girih.check_state(state, x, cu_seqlens)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        return self.girih(x, *args, **kwargs)


class InjectedLayer(ConvertedAttention):
    """`girih.nn.Attention` mixed with a linear path. The state has attention's keys and values, and the
    path's state."""

    prefix = "Injected"

    def check_state(self, state: MixState | None, x: Tensor, cu_seqlens: Tensor | None = None) -> None:
        if state is not None:
            check_type(state, MixState)
        base_state, path_state = state or (None, None)
        if (base_state is None) != (path_state is None):
            raise ValueError(
                "state: one of attention's state and the linear path's state is None; expected both, or "
                "None alone"
            )
        self.original.check_state(self, base_state, x, cu_seqlens)
        self.girih.path.check_state(path_state, x, cu_seqlens)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        state: MixState | None = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, MixState | None]:
        self.check_state(state, x, cu_seqlens)  # before attention writes its state
        base_state, path_state = state or (None, None)
        softmax = RecordingAttention(self, self.projections.qkv)
        base, base_state = self.original.forward(
            softmax, x, attention_mask, base_state, use_cache, cu_seqlens
        )
        qkv = self.projections.get_qkv(self, softmax.outputs())
        out = functools.partial(self.projections.project_out, self)
        y, path_state = self.girih(base, qkv, out, attention_mask, path_state, use_cache, cu_seqlens)
        return y, MixState(base_state, path_state) if use_cache else None


class ReplacedAttention(ConvertedAttention):
    """An attention module of transformers that calls a mixer, which reads and writes through its
    projections."""

    prefix = "Replaced"

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        call = self.bind_arguments(args, kwargs)
        y, _ = attend(self.girih, hidden_states, self.layer_idx, **call)
        return y, *(call.get(name) if name in CACHES else None for name in self.returns)


class InjectedAttention(ConvertedAttention):
    """An attention module of transformers mixed with a linear path that reads the same q, k and v (`Liza`).

    max_self_attn_length: number of tokens that attention attends to; None: unchanged.
    """

    prefix = "Injected"
    max_self_attn_length: int | None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        call = self.bind_arguments(args, kwargs)
        given = call.get("girih_tokens")
        with nullcontext() if given is None else given.reading():
            return self.mix_call(hidden_states, call)

    def mix_call(self, hidden_states: Tensor, call: dict[str, Any]) -> tuple[Any, ...]:
        token_arguments = {name: call[name] for name in TOKEN_ARGUMENTS if call.get(name) is not None}
        # The original forward does not accept these. Its attention needs the tokens of a piece.
        if getattr(call.get("girih_tokens"), "pieces", None) is None:
            call.pop("girih_tokens", None)
        call.pop("cu_seqlens", None)
        cache, mask = cache_of(call), call.get("attention_mask")
        layer = None
        if cache is not None:
            window = self.max_self_attn_length
            layer = get_state_layer(
                cache, self.layer_idx, functools.partial(AttentionStateLayer, window=window)
            )
        tokens = resolve_tokens(hidden_states, mask, 0 if layer is None else layer.tokens, **token_arguments)
        if self.max_self_attn_length is not None:
            num_keys = 0 if layer is None else layer.num_keys
            call["attention_mask"] = self.cut_mask(mask, hidden_states, num_keys)
        options = {"attention_mask": tokens.valid, "cu_seqlens": tokens.cu_seqlens}
        if layer is not None:
            refuse_packed(tokens)
            if layer.state is not None:  # check before attention writes its keys
                self.girih.path.check_state(layer.state, hidden_states)
            options |= {"state": layer.state, "use_cache": True}
        path = functools.partial(self.mix_path, options=options)
        softmax = RecordingAttention(self, self.projections.qkv)
        if not self.girih.cross:
            softmax.change(self.projections.out, path)
        y, *rest = self.original.forward(softmax, hidden_states, **call)
        if not softmax.has_changed:
            y, state = path(y, softmax.outputs(), functools.partial(self.projections.project_out, self))
        else:
            state = softmax.result
        if layer is not None:
            layer.advance(state, hidden_states.shape[1])
        return y, *rest

    def mix_path(
        self,
        base: Tensor,
        outputs: list[Tensor],
        project: Callable[[Tensor], Tensor],
        options: dict[str, Any],
    ) -> tuple[Tensor, Any]:
        """Mixes base with the linear path of the projections' `outputs`. Returns the mixture and the path's
        state.

        project: maps the path's output to the space of base. The output projection is linear, so base is its
        input and project only reshapes: the mixture is projected once. With `cross`, which multiplies both
        paths, base is the output of the projection, and project applies it.
        """
        return self.girih(base, self.projections.get_qkv(self, outputs), project, **options)

    def cut_mask(self, mask: Tensor | None, x: Tensor, num_keys: int) -> Tensor | None:
        """The mask of attention restricted to the window, `[B, heads, T, num_keys + T]`, over the num_keys
        cached keys and the new keys.

        mask: the mask of attention over all keys; None: causal.
        """
        implementation = self.config._attn_implementation
        if implementation not in MASKED:
            raise ValueError(
                f"max_self_attn_length: attn_implementation is {implementation!r}; expected one of "
                f"{', '.join(MASKED)}, whose masks are tensors"
            )
        T, window = x.shape[1], self.max_self_attn_length
        keys = num_keys + T
        if mask is not None:
            if mask.shape[-2] != T:
                raise ValueError(
                    f"max_self_attn_length: attention_mask has shape {list(mask.shape)}; expected a row for "
                    f"each of {T} tokens"
                )
            mask = mask[..., -keys:]
        if keys <= window:
            return mask
        key = torch.arange(keys, device=x.device)
        query = key[num_keys:, None]
        is_visible = ((key <= query) & (key > query - window))[None, None]
        if mask is None:
            mask = torch.ones_like(is_visible)
            if implementation == "eager":
                mask = torch.zeros_like(is_visible, dtype=x.dtype)
        if mask.dtype == torch.bool:
            return mask & is_visible
        # The smallest number, as in transformers, not -inf: the softmax of a fully masked row is not NaN.
        return mask.masked_fill(~is_visible, torch.finfo(mask.dtype).min)


@functools.cache
def converted_class(kind: type[ConvertedAttention], original: type[nn.Module]) -> type[ConvertedAttention]:
    argument_names = tuple(inspect.signature(original.forward).parameters)[1:]
    name = kind.prefix + original.__name__
    attributes = {
        "__module__": kind.__module__,
        "original": original,
        "argument_names": argument_names,
        "returns": returned_names(original.forward),
    }
    return type(name, (kind, original), attributes)


def returned_names(forward: Callable[..., Any]) -> tuple[str, ...] | None:
    """Names of the values that an attention's forward returns after the first; "" for a value without a name.

    Current forwards of transformers return one more value, the attention weights. Older ones, with an
    argument `past_key_value`, return one to three values, which their annotations do not state, so the names
    are read from the code. None: the code is not available, or its `return` statements list different values.
    """
    if "past_key_value" not in inspect.signature(forward).parameters:
        return ("",)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    except (OSError, TypeError, SyntaxError):
        return None
    statements = list(iterate_statements(tree.body[0]))
    caches = cache_names(statements, set(inspect.signature(forward).parameters))
    lists = {
        names_after_first(statement.value, caches)
        for statement in statements
        if isinstance(statement, ast.Return)
    }
    return lists.pop() if len(lists) == 1 else None


def names_after_first(value: ast.AST | None, caches: dict[str, str]) -> tuple[str, ...] | None:
    """The names of the variables in a tuple expression after its first value; "" for a value that is not a
    variable. None if the expression is not a tuple."""
    if not isinstance(value, ast.Tuple):
        return None
    names = [variable_name(each) for each in value.elts[1:]]
    return tuple(caches.get(name, name) for name in names)


def variable_name(value: ast.AST | None) -> str:
    """The variable that an expression returns, such as x in `x if use_cache else None`; "" if there is
    none."""
    if isinstance(value, ast.IfExp):
        return variable_name(value.body) or variable_name(value.orelse)
    return value.id if isinstance(value, ast.Name) else ""


def cache_names(statements: list[ast.stmt], parameters: set[str]) -> dict[str, str]:
    """Maps each variable of a forward that holds its cache to the cache parameter that it comes from: both
    names in `present = past_key_value`. A variable that is also assigned another value than None is
    omitted."""
    values: dict[str, list[ast.AST | None]] = {}
    for statement in statements:
        for name, value in assignments(statement):
            if not (isinstance(value, ast.Constant) and value.value is None):
                values.setdefault(name, []).append(value)
    names = {name: name for name in CACHES if name in parameters}
    before = None
    while names != before:
        before = dict(names)
        for name, assigned in values.items():
            sources = {before.get(variable_name(value)) for value in assigned}
            if len(sources) == 1 and None not in sources:
                names.setdefault(name, *sources)
    return names


def assignments(statement: ast.stmt) -> Iterator[tuple[str, ast.AST | None]]:
    """The variables that a statement assigns, each with its value expression; None: a value of another
    form."""
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            yield from assigned_variables(target, statement.value)
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        yield from assigned_variables(statement.target, statement.value)
    assigns_unread = isinstance(statement, ast.AugAssign | ast.For | ast.AsyncFor | ast.With | ast.AsyncWith)
    for part in ast.iter_child_nodes(statement):
        for node in () if isinstance(part, ast.stmt) else ast.walk(part):
            if isinstance(node, ast.NamedExpr):
                yield node.target.id, node.value
            elif assigns_unread and isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id, None


def assigned_variables(target: ast.AST, value: ast.AST | None) -> Iterator[tuple[str, ast.AST | None]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Starred):
        yield from assigned_variables(target.value, None)
    elif isinstance(target, ast.Tuple | ast.List):
        is_pairwise = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
        values = value.elts if is_pairwise else [None] * len(target.elts)
        for each, each_value in zip(target.elts, values, strict=True):
            yield from assigned_variables(each, each_value)


def iterate_statements(function: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a function in order, except those of nested functions."""
    for node in ast.iter_child_nodes(function):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(node, ast.stmt):
            yield node
        yield from iterate_statements(node)


def empty(kind: type[ConvertedAttention], original: type[nn.Module]) -> ConvertedAttention:
    """A converted module without attributes; pickle or copy sets them."""
    return nn.Module.__new__(converted_class(kind, original))


def convert(
    attention: nn.Module, conversion: Injection | Replacement, projections: Projections, part: nn.Module
) -> None:
    is_own_attention = isinstance(attention, Attention)
    if isinstance(conversion, Replacement):
        kind = ReplacedLayer if is_own_attention else ReplacedAttention
    else:
        kind = InjectedLayer if is_own_attention else InjectedAttention
        attention.max_self_attn_length = conversion.max_self_attn_length
    hook = detach_hook(attention)
    attention.__class__ = converted_class(kind, type(attention))
    attention.projections = projections
    setattr(attention, PART_NAME, part)
    attach_hook(attention, hook)


def restore(attention: nn.Module) -> None:
    hook = detach_hook(attention)
    original = type(attention).original
    delattr(attention, PART_NAME)
    del attention.projections
    attention.__dict__.pop("max_self_attn_length", None)
    attention.__class__ = original
    attach_hook(attention, hook)


def refuse_unknown_returns(attention: nn.Module) -> None:
    if returned_names(type(attention).forward) is None:
        raise ValueError(
            f"model: the forward of a {type(attention).__name__} takes past_key_value, and its code does not "
            "list what it returns; expected `return output, weights, past_key_value` or another such list. "
            "girih.inject takes any"
        )


def refuse_replaced_forward(attention: nn.Module) -> None:
    """Raises if the instance has an attribute `forward`, which would hide the method of its new class."""
    if "forward" in vars(attention) and not hasattr(attention, "_hf_hook"):
        raise ValueError(
            f"model: the forward of a {type(attention).__name__} has been replaced, in the module itself; "
            "convert the model before that"
        )


def detach_hook(attention: nn.Module) -> Any:
    """Removes the hook with which accelerate wraps the module's forward, and returns it; None: there is
    none."""
    hook = getattr(attention, "_hf_hook", None)
    if hook is not None:
        remove_hook_from_module(attention)
        del attention.forward  # accelerate leaves the old class's bound method there
    return hook


def attach_hook(attention: nn.Module, hook: Any) -> None:
    if hook is not None:
        add_hook_to_module(attention, hook)
