"""A token of every sequence of a cache as one CUDA graph."""

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
from girih.nn.functional.state import by_itself, stepped
from girih.nn.functional.step import by_weights_alone

if TYPE_CHECKING:
    from girih.models.base import Backbone
    from girih.models.cache import GirihCache, StateLayer

_one_at_a_time = threading.Lock()


class Shared:
    """What the graphs that run on one stream have in common, as they run one after the other.

    stream: they are recorded on it.  pool: the memory that they all use, in turn. Memory of its own would
    stay with each until all of PyTorch's free memory is given back.  keeper: a graph, that the pool stays.
    """

    def __init__(self, device: torch.device):
        self.stream, self.pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        self.keeper = self.record(lambda: torch.zeros(1, device=device))

    def record(self, call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        graph, device = torch.cuda.CUDAGraph(), self.stream.device_index
        numbers = torch.cuda.default_generators[device]
        own = numbers.graphsafe_get_state()
        with torch.cuda.stream(self.stream):
            try:
                # The device's generator gives nobody else numbers while it is recorded, nor ever after if
                # that fails. A step takes none: a copy is recorded in its place.
                numbers.graphsafe_set_state(numbers.clone_state())
                try:
                    graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                finally:
                    numbers.graphsafe_set_state(own)
                try:
                    call()
                finally:
                    graph.capture_end()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the pool is closed, unless capture_end failed
                    internals.release_graph_pool(device, self.pool)
                raise
        return graph


_shared: dict[torch.cuda.Stream, Shared] = {}
# Of the streams that graphs run on: from a graph's inputs until its output is read nothing else runs there
# that uses the same memory.
_runs: dict[torch.cuda.Stream | None, threading.Lock] = {}


def record(call: Callable[[], Any], stream: torch.cuda.Stream) -> Callable[[], None]:
    """What does again on the device, on `stream`, what `call` does there; now it runs on the host alone.

    torch.cuda.graph would wait for the device and give PyTorch's free memory back, for each cache.
    """
    with _one_at_a_time:
        if stream not in _shared:
            _shared[stream] = Shared(stream.device)
        try:
            return _shared[stream].record(call).replay
        except BaseException:
            del _shared[stream]  # the next has other memory
            raise


def stream_of(x: Tensor) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(x.device) if x.is_cuda else None


def here(x: Tensor) -> bool:
    """Whether a graph can be made or run where x is."""
    return x.is_cuda and not torch.is_autocast_enabled("cuda")  # which makes weights anew


class Taken:
    """What a graph has of a model: the modules that ran, and where their weights stand.

    gone: called when the model is no more; of the model itself nothing is kept.
    """

    def __init__(self, model: nn.Module, gone: Callable[[Any], None]):
        self.model, modules = weakref.ref(model, gone), [*model.modules()]
        self.own = [vars(module) for module in modules]
        self.named = [table for module in modules for table in internals.module_tables(module) if table]
        self.parts = [*values(self.named)]
        self.weights = [part for part in self.parts if isinstance(part, Tensor)]
        self.places = self.stand()
        self.hooks = [table for module in modules for table in internals.hook_tables(module)]
        # Other modules may do more than their operators, as adapters that are switched on and off.
        self.known = all(type(m).__module__.startswith(("girih.", "torch.nn.modules.")) for m in modules)

    def can_be(self, device: torch.device) -> bool:
        plain = all(type(w) in (Tensor, nn.Parameter) and w.device == device for w in self.weights)
        compiled = any(map(internals.is_compiled_in_place, self.own))
        return self.known and plain and not compiled

    def stand(self) -> list:
        every = (map(f, self.weights) for f in (Tensor.data_ptr, Tensor.stride, dtype_of))
        return [*itertools.chain.from_iterable(every)]

    def is_still(self, model: nn.Module) -> bool:
        """Asked before every token, so without a loop in Python: a tenth of a millisecond would be seen."""
        return (
            model is self.model()
            and not any(self.hooks)
            and not internals.has_global_hook()
            and not any(map(operator.contains, self.own, itertools.repeat("forward")))
            and sum(map(len, self.named)) == len(self.parts)
            and all(map(operator.is_, values(self.named), self.parts))
            and self.stand() == self.places
        )


dtype_of = operator.attrgetter("dtype")


def values(dicts: list[dict]) -> Iterator[Any]:
    return itertools.chain.from_iterable(map(dict.values, dicts))


class Recorded(NamedTuple):
    replay: Callable[[], None]
    last: Tensor  # the hidden states that come out of it


class StepGraphs:
    """The steps of one cache, each of one token for every sequence, as CUDA graphs.

    A step runs as ever the first time, is recorded the second time, and replayed from then on, for each kind
    of step that the states tell (`stepped`). A graph reads and writes the tensors that it was recorded with:
    they are what the cache's layers hold; others that come into these (beams in another order, a restored
    checkpoint) are copied there. All graphs are dropped, and the step runs as ever, where shapes, the call or
    the model are others, where keys need more room, and at any call that is not a step.
    """

    def __init__(self) -> None:
        self.refused = False  # there was a reason that stays
        self.drop()

    def __reduce__(self) -> tuple:
        """A copy of a cache has tensors of its own, and no graphs yet."""
        return StepGraphs, ()

    def drop(self) -> None:
        self.graphs: dict[Hashable, Recorded | tuple] = {}  # a tuple: the layout of a step that ran
        self.taken: Taken | None = None
        self.ids: Tensor | None = None
        self.stream: torch.cuda.Stream | None = None
        self.places: list[list[Tensor]] = []  # the tensors of each layer
        self.states: list[Any] = []  # of each layer, as it was left
        self.plain: list[bool] = []  # of each layer, whether a step changes tensors alone
        self.kept: list[Any] = []  # what else the recorded states hold on to

    def hidden_states(
        self,
        model: "Backbone",
        ids: Tensor | None,
        embeds: Tensor | None,
        mask: Tensor | None,
        cache: "GirihCache",
        cu_seqlens: Tensor | None,
        chunk: int | None,
    ) -> list[Tensor] | None:
        """The model's, of its last layer alone, and the cache moved on; None: the model has to run."""
        if ids is None or ids.shape[1] != 1 or mask is not None or cu_seqlens is not None:
            self.drop()
            return None
        if (
            self.refused
            or not (by_itself(ids) and here(ids))
            or model.training
            or any(layer.record_past or layer.again is not None for layer in cache.layers)
            or not model.takes_step(cache, chunk)
        ):
            return None
        if self.places and not self.fits(model, ids, cache.layers):
            self.drop()
        after = [
            ((), layer.state) if plain else stepped(layer.state)
            for layer, plain in zip(cache.layers, self.plain or itertools.repeat(False), strict=False)
        ]
        if None in after:
            self.drop()
            return None
        kind = tuple(kind for kind, _ in after)
        graph = self.graphs.get(kind)
        if not isinstance(graph, Recorded):
            now = layout(ids, cache.layers)
            if graph != now:
                self.graphs[kind] = now
                return None
            graph = self.recorded(model, ids, cache, chunk)
            if graph is None:
                return None
            self.graphs[kind] = graph
        with _runs.setdefault(self.stream, threading.Lock()):
            self.ids.copy_(ids)
            graph.replay()
            last = graph.last.clone()
        for layer, (_, state) in zip(cache.layers, after, strict=True):
            layer.advance(state, 1)
        self.states = [layer.state for layer in cache.layers]
        return [last]

    def fits(self, model: "Backbone", ids: Tensor, layers: list["StateLayer"]) -> bool:
        """Whether the graphs are of this call; brings what the layers hold to its place."""
        return (
            self.taken.is_still(model)
            and same_layout(self.ids, ids)
            and self.stream == stream_of(ids)
            and self.ids.is_inference() == torch.is_inference_mode_enabled()
            and all(
                layer.state is state or move(layer, places)
                for layer, state, places in zip(layers, self.states, self.places, strict=True)
            )
        )

    def recorded(
        self, model: "Backbone", ids: Tensor, cache: "GirihCache", chunk: int | None
    ) -> Recorded | None:
        """A step's graph, which has yet to run; the cache is as before."""
        before = [(layer.state, layer.tokens) for layer in cache.layers]
        if not self.places:
            self.taken = Taken(model, weakly(self.drop))
            self.ids, self.stream = ids.clone(), stream_of(ids)
            self.states = [state for state, _ in before]
            self.places = [tensors_of(state) for state in self.states]
            self.plain = [stepped(state)[1] is state for state in self.states]
        if not self.taken.is_still(model):  # it has a hook, which may go again
            self.drop()
            return None
        every: list[Tensor] = []
        graph = None
        own = {part.device for part in itertools.chain.from_iterable(self.places)}
        try:
            if self.taken.can_be(ids.device) and own <= {ids.device}:
                replay = record(
                    lambda: every.extend(
                        alone(model.hidden_states, self.ids, None, None, cache, None, chunk)
                    ),
                    self.stream,
                )
                if all(
                    now is place
                    for layer, places in zip(cache.layers, self.places, strict=True)
                    for now, place in zip(tensors_of(layer.state), places, strict=True)
                ):
                    self.kept += before
                    graph = Recorded(replay, every[-1])
            self.refused = graph is None
        except Exception as error:  # of what only runs outside of graphs; nothing has run on the device
            self.refused = True
            warnings.warn(f"a token cannot be a CUDA graph and runs as ever: {error}", stacklevel=2)
        finally:
            for layer, (state, tokens) in zip(cache.layers, before, strict=True):
                layer.state, layer.tokens = state, tokens
            if graph is None:
                self.drop()
        return graph


def alone(call: Callable[..., Any], *arguments: Any) -> Any:
    """The call, in which a model's blocks step by their weights alone."""
    token = by_weights_alone.set(True)
    try:
        return call(*arguments)
    finally:
        by_weights_alone.reset(token)


def weakly(method: Callable[[], None]) -> Callable[[Any], None]:
    """Of an object that this does not keep."""
    found = weakref.WeakMethod(method)
    return lambda _: (call := found()) and call()


def tensors_of(state: Any) -> list[Tensor]:
    """Those that the device has."""
    found: list[Tensor] = []
    map_state(lambda part: found.append(part), state, device_only=True)
    return found


def same_layout(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def layout(ids: Tensor, layers: list["StateLayer"]) -> tuple:
    parts = [ids, *(part for layer in layers for part in tensors_of(layer.state))]
    return tuple((part.shape, part.dtype, part.device) for part in parts)


def move(layer: "StateLayer", places: list[Tensor]) -> bool:
    """Copies the tensors of a layer's state to these places, if they fit there."""
    now = tensors_of(layer.state)
    if len(now) != len(places) or not all(map(same_layout, now, places)):
        return False
    if not torch.is_inference_mode_enabled() and any(map(Tensor.is_inference, places)):
        return False  # they cannot be written
    for part, place in zip(now, places, strict=True):
        if part is not place:
            place.copy_(part)
    each = iter(places)
    layer.state = map_state(lambda _: next(each), layer.state, device_only=True)
    return True
