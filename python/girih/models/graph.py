"""Decoding steps as CUDA graphs. A step computes one token of every sequence of a cache."""

import contextlib
import itertools
import operator
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from girih import _torch_internals as internals
from girih.nn import map_state
from girih.nn.functional.state import is_eager_inference, stepped
from girih.nn.functional.step import use_weights_only

if TYPE_CHECKING:
    from girih.models.base import Backbone
    from girih.models.cache import GirihCache, StateLayer

_capture_lock = threading.Lock()


class CapturePool:
    """The capture stream and the memory pool of graphs that replay one after the other on one stream.

    stream: graphs are captured on this stream. pool: memory that all graphs share, because a graph's own pool
    would hold its memory until PyTorch releases all free memory. first_graph: a graph that keeps the pool
    alive.
    """

    def __init__(self, device: torch.device):
        self.stream, self.pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        self.first_graph = self.record(lambda: torch.zeros(1, device=device))

    def record(self, call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        graph, device = torch.cuda.CUDAGraph(), self.stream.device_index
        generator = torch.cuda.default_generators[device]
        generator_state = generator.graphsafe_get_state()
        with torch.cuda.stream(self.stream):
            try:
                # A generator under capture serves no other stream, and no stream at all if the capture
                # fails. A step draws no random numbers, so a copy of the device's generator is captured.
                generator.graphsafe_set_state(generator.clone_state())
                try:
                    graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                finally:
                    generator.graphsafe_set_state(generator_state)
                try:
                    call()
                finally:
                    graph.capture_end()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the pool is closed, unless capture_end failed
                    internals.release_graph_pool(device, self.pool)
                raise
        return graph


_pools: dict[torch.cuda.Stream, CapturePool] = {}
# A lock for each stream on which graphs replay. Graphs of a stream share memory, so none replays between the
# copy of a graph's input and the copy of its output.
_stream_locks: dict[torch.cuda.Stream | None, threading.Lock] = {}


def record(call: Callable[[], Any], stream: torch.cuda.Stream) -> Callable[[], None]:
    """Captures the device work of `call` without executing it; returns a function that replays it on
    `stream`.

    torch.cuda.graph is not used: it synchronizes and empties PyTorch's memory cache for each `GirihCache`.
    """
    with _capture_lock:
        if stream not in _pools:
            _pools[stream] = CapturePool(stream.device)
        try:
            return _pools[stream].record(call).replay
        except BaseException:
            del _pools[stream]  # the next capture allocates a new pool
            raise


def stream_of(x: Tensor) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(x.device) if x.is_cuda else None


def can_capture(x: Tensor) -> bool:
    """Whether a graph can be captured or replayed on x's device."""
    # Autocast casts the weights to new tensors in each call.
    return x.is_cuda and not torch.is_autocast_enabled("cuda")


class ModelSnapshot:
    """The modules of a captured model and the addresses of its weights, to detect later changes.

    on_deleted: called when the model is deleted; this object holds a weak reference.
    """

    def __init__(self, model: nn.Module, on_deleted: Callable[[Any], None]):
        self.model, modules = weakref.ref(model, on_deleted), [*model.modules()]
        self.module_dicts = [vars(module) for module in modules]
        self.tables = [table for module in modules for table in internals.module_tables(module) if table]
        self.entries = [*values(self.tables)]
        self.weights = [part for part in self.entries if isinstance(part, Tensor)]
        self.weight_layout = self.describe_weights()
        self.hooks = [table for module in modules for table in internals.hook_tables(module)]
        # Other modules may run host code that a graph does not contain, such as switchable adapters.
        self.has_known_modules = all(
            type(m).__module__.startswith(("girih.", "torch.nn.modules.")) for m in modules
        )

    def is_capturable(self, device: torch.device) -> bool:
        has_plain_weights = all(
            type(w) in (Tensor, nn.Parameter) and w.device == device for w in self.weights
        )
        is_compiled = any(map(internals.is_compiled_in_place, self.module_dicts))
        return self.has_known_modules and has_plain_weights and not is_compiled

    def describe_weights(self) -> list:
        properties = (map(f, self.weights) for f in (Tensor.data_ptr, Tensor.stride, dtype_of))
        return [*itertools.chain.from_iterable(properties)]

    def matches(self, model: nn.Module) -> bool:
        """Whether the model is unchanged. Called before every token, so it has no loop in Python."""
        return (
            model is self.model()
            and not any(self.hooks)
            and not internals.has_global_hook()
            and not any(map(operator.contains, self.module_dicts, itertools.repeat("forward")))
            and sum(map(len, self.tables)) == len(self.entries)
            and all(map(operator.is_, values(self.tables), self.entries))
            and self.describe_weights() == self.weight_layout
        )


dtype_of = operator.attrgetter("dtype")


def values(dicts: list[dict]) -> Iterator[Any]:
    return itertools.chain.from_iterable(map(dict.values, dicts))


class RecordedStep(NamedTuple):
    replay: Callable[[], None]
    last: Tensor  # the last hidden states, which a replay overwrites


class StepGraphs:
    """The CUDA graphs of the decoding steps of one cache.

    For each kind of step that the states report (`stepped`), the first step runs eagerly, the second is
    captured, and later ones are replayed. A graph reads and writes the state tensors that existed at capture.
    New states (reordered beams, a restored checkpoint) are copied to these tensors. All graphs are dropped,
    and the step runs eagerly, if shapes, the kind of call or the model change, if a key-value cache must
    grow, and at any call that is not a step.
    """

    def __init__(self) -> None:
        self.refused = False  # capture has failed
        self.drop()

    def __reduce__(self) -> tuple:
        """A copied or pickled cache has no graphs: they refer to the tensors of the original."""
        return StepGraphs, ()

    def drop(self) -> None:
        self.graphs: dict[Hashable, RecordedStep | tuple] = {}  # a tuple: `layout` of the eager step
        self.snapshot: ModelSnapshot | None = None
        self.ids: Tensor | None = None
        self.stream: torch.cuda.Stream | None = None
        self.captured_tensors: list[list[Tensor]] = []  # for each layer, the tensors that the graphs use
        self.states: list[Any] = []  # of each layer, after the last replay
        self.steps_in_place: list[bool] = []  # for each layer, whether a step changes only tensors
        self.keep_alive: list[Any] = []  # objects that captured graphs refer to

    def try_replay(
        self,
        model: "Backbone",
        ids: Tensor | None,
        embeds: Tensor | None,
        mask: Tensor | None,
        cache: "GirihCache",
        cu_seqlens: Tensor | None,
        chunk: int | None,
    ) -> list[Tensor] | None:
        """Replays or captures the step, and updates the cache. Returns `[last hidden states]`; None: the
        caller must run the model."""
        if ids is None or ids.shape[1] != 1 or mask is not None or cu_seqlens is not None:
            self.drop()
            return None
        if (
            self.refused
            or not (is_eager_inference(ids) and can_capture(ids))
            or model.training
            or any(layer.record_past or layer.reread is not None for layer in cache.layers)
            or not model.is_capturable_step(cache, chunk)
        ):
            return None
        if self.captured_tensors and not self.matches_call(model, ids, cache.layers):
            self.drop()
        after = [
            ((), layer.state) if steps_in_place else stepped(layer.state)
            for layer, steps_in_place in zip(
                cache.layers, self.steps_in_place or itertools.repeat(False), strict=False
            )
        ]
        if None in after:
            self.drop()
            return None
        kind = tuple(kind for kind, _ in after)
        graph = self.graphs.get(kind)
        if not isinstance(graph, RecordedStep):
            now = layout(ids, cache.layers)
            if graph != now:
                self.graphs[kind] = now
                return None
            graph = self.record_step(model, ids, cache, chunk)
            if graph is None:
                return None
            self.graphs[kind] = graph
        with _stream_locks.setdefault(self.stream, threading.Lock()):
            self.ids.copy_(ids)
            graph.replay()
            last = graph.last.clone()
        for layer, (_, state) in zip(cache.layers, after, strict=True):
            layer.advance(state, 1)
        self.states = [layer.state for layer in cache.layers]
        return [last]

    def matches_call(self, model: "Backbone", ids: Tensor, layers: list["StateLayer"]) -> bool:
        """Whether the graphs are valid for this call. Copies new states to the tensors that the graphs
        use."""
        return (
            self.snapshot.matches(model)
            and same_layout(self.ids, ids)
            and self.stream == stream_of(ids)
            and self.ids.is_inference() == torch.is_inference_mode_enabled()
            and all(
                layer.state is state or copy_state_to(layer, targets)
                for layer, state, targets in zip(layers, self.states, self.captured_tensors, strict=True)
            )
        )

    def record_step(
        self, model: "Backbone", ids: Tensor, cache: "GirihCache", chunk: int | None
    ) -> RecordedStep | None:
        """Captures a step, without executing it, and leaves the cache unchanged. None: the step cannot be
        captured now."""
        before = [(layer.state, layer.tokens) for layer in cache.layers]
        if not self.captured_tensors:
            self.snapshot = ModelSnapshot(model, weak_callback(self.drop))
            self.ids, self.stream = ids.clone(), stream_of(ids)
            self.states = [state for state, _ in before]
            self.captured_tensors = [tensors_of(state) for state in self.states]
            self.steps_in_place = [stepped(state)[1] is state for state in self.states]
        if not self.snapshot.matches(model):  # the model has a hook, which may be removed later
            self.drop()
            return None
        all_hidden: list[Tensor] = []
        graph = None
        devices = {part.device for part in itertools.chain.from_iterable(self.captured_tensors)}
        try:
            if self.snapshot.is_capturable(ids.device) and devices <= {ids.device}:
                replay = record(
                    lambda: all_hidden.extend(
                        call_with_weights_only(
                            model.compute_hidden_states, self.ids, None, None, cache, None, chunk
                        )
                    ),
                    self.stream,
                )
                if all(
                    tensor is target
                    for layer, captured in zip(cache.layers, self.captured_tensors, strict=True)
                    for tensor, target in zip(tensors_of(layer.state), captured, strict=True)
                ):
                    self.keep_alive += before
                    graph = RecordedStep(replay, all_hidden[-1])
            self.refused = graph is None
        except Exception as error:  # an operation cannot be captured; the device ran nothing
            self.refused = True
            warnings.warn(
                f"a decoding step cannot be captured as a CUDA graph and runs eagerly: {error}", stacklevel=2
            )
        finally:
            for layer, (state, tokens) in zip(cache.layers, before, strict=True):
                layer.state, layer.tokens = state, tokens
            if graph is None:
                self.drop()
        return graph


def call_with_weights_only(call: Callable[..., Any], *arguments: Any) -> Any:
    """Calls `call` with `use_weights_only` set, so that blocks run `Block.step`, which calls no module."""
    token = use_weights_only.set(True)
    try:
        return call(*arguments)
    finally:
        use_weights_only.reset(token)


def weak_callback(method: Callable[[], None]) -> Callable[[Any], None]:
    """A callback that calls a bound method if its object still exists."""
    reference = weakref.WeakMethod(method)
    return lambda _: (call := reference()) and call()


def tensors_of(state: Any) -> list[Tensor]:
    """The tensors of a state, except those in `on_host` fields."""
    tensors: list[Tensor] = []
    map_state(lambda part: tensors.append(part), state, device_only=True)
    return tensors


def same_layout(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def layout(ids: Tensor, layers: list["StateLayer"]) -> tuple:
    parts = [ids, *(part for layer in layers for part in tensors_of(layer.state))]
    return tuple((part.shape, part.dtype, part.device) for part in parts)


def copy_state_to(layer: "StateLayer", targets: list[Tensor]) -> bool:
    """Copies the tensors of a layer's state to the tensors `targets`, and stores these in the state. False:
    shapes or dtypes differ, or the targets cannot be written."""
    tensors = tensors_of(layer.state)
    if len(tensors) != len(targets) or not all(map(same_layout, tensors, targets)):
        return False
    if not torch.is_inference_mode_enabled() and any(map(Tensor.is_inference, targets)):
        return False  # inference tensors cannot be written outside of inference mode
    for part, target in zip(tensors, targets, strict=True):
        if part is not target:
            target.copy_(part)
    remaining = iter(targets)
    layer.state = map_state(lambda _: next(remaining), layer.state, device_only=True)
    return True
