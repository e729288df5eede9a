"""Attention modules of transformers that girih computes, or computes beside.

A converted module stays the object it was, with its weights under their names; its class becomes one made of
its own and of one here, and its new part is its submodule `girih`.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from accelerate.hooks import add_hook_to_module, remove_hook_from_module
from torch import Tensor, nn

from girih.conversion.cache import AttentionStateLayer
from girih.conversion.config import Injection, Replacement
from girih.conversion.projections import Projections, Recording
from girih.models.adapters.attention_call import (
    OF_TOKENS,
    attend,
    cache_of,
    refuse_packed,
    state_layer,
    tokens_of,
)
from girih.nn import Attention, MixState
from girih.nn.layers.sequence_layer import CACHES

PART = "girih"
MASKED = ("sdpa", "eager")  # implementations of attention whose masks are tensors, which a window can cut


class ConvertedAttention(nn.Module):
    """What all kinds have: `original`, the class the module had, `order`, its forward's arguments, and
    `returns`, the names that its forward returns behind the output, where `returned` reads them."""

    how: ClassVar[str]
    original: ClassVar[type[nn.Module]]
    order: ClassVar[tuple[str, ...]]
    returns: ClassVar[tuple[str, ...] | None]

    projections: Projections
    layer_idx: int

    def __reduce__(self):
        """A class that is made of two has no name to be found by."""
        kind = next(kind for kind in type(self).__mro__[1:] if issubclass(kind, ConvertedAttention))
        return empty, (kind, self.original), vars(self)

    def named(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments behind hidden_states, by their names."""
        return dict(zip(self.order[1:], args, strict=False)) | kwargs


class ReplacedLayer(ConvertedAttention):
    """A mixer in the place of `girih.nn.Attention`, whose call it takes."""

    how = "Replaced"

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        return self.girih(x, *args, **kwargs)


class InjectedLayer(ConvertedAttention):
    """`girih.nn.Attention` with a linear path mixed in. Its keys are its state's, and grow."""

    how = "Injected"

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        state: MixState | None = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, MixState | None]:
        base_state, path_state = state or (None, None)
        if (base_state is None) != (path_state is None):
            raise ValueError("state: attention or the path beside it has none; expected both, or None alone")
        if path_state is not None:  # before attention writes its own
            self.girih.path.check_state(path_state, x, cu_seqlens)
        softmax = Recording(self, self.projections.qkv)
        base, base_state = self.original.forward(
            softmax, x, attention_mask, base_state, use_cache, cu_seqlens
        )
        qkv = self.projections.parts(self, softmax.outputs())
        out = functools.partial(self.projections.written, self)
        y, path_state = self.girih(base, qkv, out, attention_mask, path_state, use_cache, cu_seqlens)
        return y, MixState(base_state, path_state) if use_cache else None


class ReplacedAttention(ConvertedAttention):
    """A mixer of girih's in the place of attention, reading what attention's projections give."""

    how = "Replaced"

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        call = self.named(args, kwargs)
        y, _ = attend(self.girih, hidden_states, self.layer_idx, **call)
        return y, *(call.get(name) if name in CACHES else None for name in self.returns)


class InjectedAttention(ConvertedAttention):
    """Attention as it was, with a linear path of the same q, k and v mixed in (`Liza`).

    max_self_attn_length: how many tokens attention itself sees; None: as many as before.
    """

    how = "Injected"
    max_self_attn_length: int | None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        call = self.named(args, kwargs)
        token_arguments = {name: call[name] for name in OF_TOKENS if call.get(name) is not None}
        for name in ("girih_tokens", "cu_seqlens"):  # not the original's
            call.pop(name, None)
        cache, mask = cache_of(call), call.get("attention_mask")
        place = None
        if cache is not None:
            window = self.max_self_attn_length
            place = state_layer(cache, self.layer_idx, functools.partial(AttentionStateLayer, window=window))
        tokens = tokens_of(hidden_states, mask, 0 if place is None else place.tokens, **token_arguments)
        if self.max_self_attn_length is not None:
            kept = 0 if place is None else place.kept
            call["attention_mask"] = self.windowed(mask, hidden_states, kept)
        options = {"attention_mask": tokens.valid, "cu_seqlens": tokens.cu_seqlens}
        if place is not None:
            refuse_packed(tokens)
            if place.state is not None:  # before attention writes its keys
                self.girih.path.check_state(place.state, hidden_states)
            options |= {"state": place.state, "use_cache": True}
        path = functools.partial(self.mixed, options=options)
        softmax = Recording(self, self.projections.qkv)
        if not self.girih.cross:
            softmax.change(self.projections.out, path)
        y, *rest = self.original.forward(softmax, hidden_states, **call)
        if not softmax.changed:
            y, state = path(y, softmax.outputs(), functools.partial(self.projections.written, self))
        else:
            state = softmax.found
        if place is not None:
            place.advance(state, hidden_states.shape[1])
        return y, *rest

    def mixed(
        self,
        base: Tensor,
        outputs: list[Tensor],
        project: Callable[[Tensor], Tensor],
        options: dict[str, Any],
    ) -> tuple[Tensor, Any]:
        """base with the linear path of these q, k and v mixed in, and the path's state.

        Attention's output projection is linear, so base may be what it is given, and `project` then nothing:
        one projection serves both. Not so with `cross`, as a product is not.
        """
        return self.girih(base, self.projections.parts(self, outputs), project, **options)

    def windowed(self, mask: Tensor | None, x: Tensor, kept: int) -> Tensor | None:
        """A mask over the keys that are kept, `[B, heads, T, kept + T]`, in which a token sees a window only.

        mask: as attention would get it, over all keys; None: a token sees those up to itself.
        """
        implementation = self.config._attn_implementation
        if implementation not in MASKED:
            raise ValueError(
                f"max_self_attn_length: attn_implementation is {implementation!r}; expected one of "
                f"{', '.join(MASKED)}, whose masks are tensors"
            )
        T, window = x.shape[1], self.max_self_attn_length
        keys = kept + T
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
        query = key[kept:, None]
        see = ((key <= query) & (key > query - window))[None, None]
        if mask is None:
            mask = torch.ones_like(see) if implementation == "sdpa" else torch.zeros_like(see, dtype=x.dtype)
        # The least number, as transformers has it, and not -inf: a token that sees nothing gives no NaN.
        return mask & see if mask.dtype == torch.bool else mask.masked_fill(~see, torch.finfo(mask.dtype).min)


@functools.cache
def converted_class(kind: type[ConvertedAttention], original: type[nn.Module]) -> type[ConvertedAttention]:
    order = tuple(inspect.signature(original.forward).parameters)[1:]
    name = kind.how + original.__name__
    own = {"original": original, "order": order, "returns": returned(original.forward)}
    return type(name, (kind, original), own | {"__module__": kind.__module__})


def returned(forward: Callable[..., Any]) -> tuple[str, ...] | None:
    """Names of the values behind the first that an attention's forward returns; "" for one without a name.

    transformers' return the attention weights. Those that call their cache `past_key_value` return one, two
    or three values, whatever their annotations say, so their code says which: None if it does not, as it is
    not there or its `return` has no list of values.
    """
    if "past_key_value" not in inspect.signature(forward).parameters:
        return ("",)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    except (OSError, TypeError, SyntaxError):
        return None
    statements = list(own_statements(tree.body[0]))
    caches = cache_names(statements, set(inspect.signature(forward).parameters))
    lists = {
        names_behind_first(statement.value, caches)
        for statement in statements
        if isinstance(statement, ast.Return)
    }
    return lists.pop() if len(lists) == 1 else None


def names_behind_first(value: ast.AST | None, caches: dict[str, str]) -> tuple[str, ...] | None:
    """Of a list of values, as code writes it: "" for one that is no name. None: it is no list."""
    if not isinstance(value, ast.Tuple):
        return None
    names = [passed_name(each) for each in value.elts[1:]]
    return tuple(caches.get(name, name) for name in names)


def passed_name(value: ast.AST | None) -> str:
    """The name whose value an expression may be, as `x if use_cache else None`; "" for none."""
    if isinstance(value, ast.IfExp):
        return passed_name(value.body) or passed_name(value.orelse)
    return value.id if isinstance(value, ast.Name) else ""


def cache_names(statements: list[ast.stmt], parameters: set[str]) -> dict[str, str]:
    """Every name that a forward has for its cache, with the parameter: of `present = past_key_value` both."""
    names = {name: name for name in CACHES if name in parameters}
    for statement in statements:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and passed_name(statement.value) in names:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            parameter = names[passed_name(statement.value)]
            names = {target.id: parameter for target in targets if isinstance(target, ast.Name)} | names
    return names


def own_statements(function: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a function in order, not of functions within it."""
    for node in ast.iter_child_nodes(function):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(node, ast.stmt):
            yield node
        yield from own_statements(node)


def empty(kind: type[ConvertedAttention], original: type[nn.Module]) -> ConvertedAttention:
    """A converted module without anything in it, which a pickle or a copy fills."""
    return nn.Module.__new__(converted_class(kind, original))


def convert(
    attention: nn.Module, conversion: Injection | Replacement, projections: Projections, part: nn.Module
) -> None:
    own = isinstance(attention, Attention)
    if isinstance(conversion, Replacement):
        kind = ReplacedLayer if own else ReplacedAttention
    else:
        kind = InjectedLayer if own else InjectedAttention
        attention.max_self_attn_length = conversion.max_self_attn_length
    hook = without_hook(attention)
    attention.__class__ = converted_class(kind, type(attention))
    attention.projections = projections
    setattr(attention, PART, part)
    with_hook(attention, hook)


def restore(attention: nn.Module) -> None:
    hook = without_hook(attention)
    original = type(attention).original
    delattr(attention, PART)
    del attention.projections
    attention.__dict__.pop("max_self_attn_length", None)
    attention.__class__ = original
    with_hook(attention, hook)


def refuse_unknown_returns(attention: nn.Module) -> None:
    if returned(type(attention).forward) is None:
        raise ValueError(
            f"model: the forward of a {type(attention).__name__} takes past_key_value, and its code does not "
            "list what it returns; expected `return output, weights, past_key_value` or another such list. "
            "girih.inject takes any"
        )


def refuse_replaced_forward(attention: nn.Module) -> None:
    """A forward of the module's own would go on being called in place of its new class's."""
    if "forward" in vars(attention) and not hasattr(attention, "_hf_hook"):
        raise ValueError(
            f"model: the forward of a {type(attention).__name__} has been replaced, in the module itself; "
            "convert the model before that"
        )


def without_hook(attention: nn.Module) -> Any:
    """Takes off what accelerate has put around a module's forward, and returns it."""
    hook = getattr(attention, "_hf_hook", None)
    if hook is not None:
        remove_hook_from_module(attention)
        del attention.forward  # which it leaves there: the old class's, bound
    return hook


def with_hook(attention: nn.Module, hook: Any) -> None:
    if hook is not None:
        add_hook_to_module(attention, hook)
