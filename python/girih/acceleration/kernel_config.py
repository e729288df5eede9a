"""girih's functions as kernels of transformers: `from_pretrained(..., kernel_config=girih.kernel_config())`.

The package `kernels` replaces the `forward` of layers that transformers registers by name. Functions, such as
the gated delta rule, are registered as layers without parameters, one a modelling module. A repository is any
object whose `load()` returns a class with the new `forward`; those here need neither files nor a hub.
"""

import copy
import os
from collections.abc import Callable
from inspect import signature
from typing import Any, NamedTuple

from torch import nn
from transformers import KernelConfig, PreTrainedModel
from transformers.utils.import_utils import KERNELS_MAX_VERSION, KERNELS_MIN_VERSION, is_kernels_available

from girih.acceleration import functions

DEVICES = ("cpu", "cuda")
# Registered functions by name, and the wrappers that serve them.
FUNCTIONS: dict[str, Callable] = {
    "chunk_gated_delta_rule": functions.chunk_gated_delta_rule,
    "fused_recurrent_gated_delta_rule": functions.fused_recurrent_gated_delta_rule,
    "mamba_chunk_scan_combined": functions.mamba_chunk_scan_combined,
    "selective_state_update": functions.selective_state_update,
    "mamba_split_conv1d_scan_combined": functions.mamba_split_conv1d_scan_combined,
    "causal_conv1d_fn": functions.causal_conv1d_fn,
    "causal_conv1d_update": functions.causal_conv1d_update,
}
# Registered layers with parameters. All of this name are norms followed by their gate.
LAYERS: dict[str, Callable] = {"RMSNormGated": functions.rms_norm_gated}


class Repository(NamedTuple):
    """The kernel of a registered name. kind: the class whose `forward` it replaces."""

    name: str
    kind: type[nn.Module]

    def load(self) -> type[nn.Module]:
        """The class with the new `forward`, which has no state and the signature of the registered one."""
        make_forward = forward_of_function if self.name in FUNCTIONS else forward_of_layer
        forward = make_forward((FUNCTIONS | LAYERS)[self.name], self.kind)
        forward.__signature__ = signature(self.kind.forward)
        members = {"forward": forward, "can_torch_compile": True, "has_backward": True}
        return type(f"girih_{self.name}", (nn.Module,), members)


def forward_of_function(serve: Callable, kind: type[nn.Module]) -> Callable:
    """`forward` of a function that is registered as a layer without parameters."""
    serving = serve(kind().forward)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return serving(*args, **kwargs)

    return forward


def forward_of_layer(serve: Callable, kind: type[nn.Module]) -> Callable:
    serving = serve(kind.forward)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return serving(self, *args, **kwargs)

    return forward


def registered_classes(model: nn.Module) -> dict[str, type[nn.Module]]:
    """The names that transformers registers for kernels in a model, and a class of each name."""
    layers = list(model.modules())
    layers += [function for layer in layers for function in getattr(layer, "_kernel_funcs", {}).values()]
    return {
        type(layer).kernel_layer_name: type(layer)
        for layer in layers
        if hasattr(type(layer), "kernel_layer_name")
    }


class GirihKernelConfig(KernelConfig):
    """A `KernelConfig` whose kernels are girih's, for each model those that the model registers."""

    def sanitize_kernel_mapping(self, model: PreTrainedModel) -> None:
        """transformers calls this method before `create_compatible_mapping`. Raises ValueError for a model
        that girih does not serve."""
        device = model.device.type
        if device not in DEVICES:
            raise ValueError(f"kernel_config: the model is on {device!r}; girih serves {DEVICES}")
        if os.environ.get("DISABLE_KERNEL_MAPPING", "0") != "0":
            raise ValueError(
                "kernel_config: the environment sets DISABLE_KERNEL_MAPPING, so no kernel is used; unset it"
            )
        if (FUNCTIONS | LAYERS).keys().isdisjoint(registered_classes(model)):
            raise ValueError(
                f"kernel_config: {type(model).__name__} registers no function that girih serves: no gated "
                "delta rule, no Mamba-2, no short convolution (with USE_HUB_KERNELS=0 in the environment, "
                "transformers registers nothing)"
            )
        self.store_registered_layer_names(model)

    def create_compatible_mapping(self, model: PreTrainedModel, compile: bool = False) -> None:
        """Gives the model a configuration of its own, so that this one serves further models."""
        mapping: dict[str, dict] = {}
        for name, kind in registered_classes(model).items():
            # Without a device the layer keeps transformers' code, and `kernelize` prints no warning.
            repository = Repository(name, kind)
            mapping[name] = dict.fromkeys(DEVICES, repository) if name in FUNCTIONS | LAYERS else {}
        model.kernel_config = copy.copy(self)
        model.kernel_config.kernel_mapping = mapping | self.kernel_mapping


def kernel_config(*, inherit_mapping: bool = False) -> KernelConfig:
    """The configuration by which `from_pretrained` and `set_use_kernels` of transformers run a model's linear
    layers on girih, with the same weights and results. Needs the package `kernels`; nothing is downloaded.

    Serves the functions that `girih.accelerate` serves, but not MiniMax's lightning attention, which
    transformers does not register. transformers replaces functions for each family of models and does not
    restore them: every model of the family in this process uses them from then on.

    inherit_mapping: whether layers that girih does not serve use transformers' kernels, which are downloaded
    from the hub. False: they keep transformers' code.

    Raises ImportError without a version of `kernels` that transformers accepts. For a model that girih does
    not serve, `from_pretrained` and `set_use_kernels` raise ValueError.
    """
    if not is_kernels_available():
        raise ImportError(
            "girih.kernel_config: transformers needs the package kernels, version "
            f"{KERNELS_MIN_VERSION} or newer and before {KERNELS_MAX_VERSION}; girih.accelerate needs none"
        )
    if not isinstance(inherit_mapping, bool):
        raise TypeError(f"inherit_mapping is {inherit_mapping!r}; expected True or False")
    return GirihKernelConfig(inherit_mapping=inherit_mapping)
