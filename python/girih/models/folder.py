"""Checks of a model's folder before transformers reads it: an error names the file and the entry."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from girih.nn.functional.fields import fields_to_json

CONFIG = "config.json"
TENSORS = "model.safetensors"
INDEX = f"{TENSORS}.index.json"


def read_object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise OSError(f"{file}: is not a file")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file}: is not a JSON object")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    values = read_object(folder / CONFIG)
    if not isinstance(kind := values.get("model_type", ""), str):
        raise ValueError(f"{folder / CONFIG}: model_type is {kind!r:.60}; expected a word")
    for name in ("dtype", "torch_dtype"):
        dtype = values.get(name)
        if dtype is not None and not (
            isinstance(dtype, str) and isinstance(getattr(torch, dtype, None), torch.dtype)
        ):
            raise ValueError(f"{folder / CONFIG}: {name} is {dtype!r:.60}; expected the name of a dtype")
    return values


def tensor_files(folder: Path) -> list[Path]:
    """The safetensors files of a model: one, or those that the index names. Empty if the folder has other
    formats only."""
    index = folder / INDEX
    if (folder / TENSORS).exists() or not index.exists():
        return [folder / TENSORS] if (folder / TENSORS).exists() else []
    values = read_object(index)
    if not isinstance(values.get("metadata"), dict):
        raise ValueError(f"{index}: has no metadata, an object")
    names = values.get("weight_map")
    if not (isinstance(names, dict) and names):
        raise ValueError(f"{index}: has no weight_map, an object")
    for name in names.values():
        if not isinstance(name, str) or name != Path(name).name or len(name) > 255:
            raise ValueError(f"{index}: weight_map names {name!r:.60}; expected files of its own folder")
    return [folder / name for name in sorted(set(names.values()))]


def shapes_in(file: Path) -> dict[str, list[int]]:
    if not file.is_file():
        raise OSError(f"{file}: is not a file")
    try:
        with safe_open(file, "pt") as tensors:
            return {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: {error!s:.300}") from error


def is_adapter(folder: Path) -> bool:
    """Whether the folder has adapters of peft and no model."""
    return (folder / "adapter_config.json").exists() and not (folder / CONFIG).exists()


def check_folder(folder: Path, model_class: type, config: Any = None) -> None:
    """Raises unless the configuration and the tensors of a folder can be read and the tensors have the
    model's shapes.

    config: use this configuration instead of the folder's. Shapes of quantized models are not checked.
    transformers reports missing and unknown tensors.
    """
    config_class, prefix = model_class.config_class, f"{model_class.base_model_prefix}."
    if not isinstance(config, config_class):
        config = config_class.from_dict(read_config(folder))
    files = {file: shapes_in(file) for file in tensor_files(folder)}
    if getattr(config, "quantization_config", None) is not None:
        return
    with torch.device("meta"):
        expected = {name: list(x.shape) for name, x in model_class(config).state_dict().items()}
    for file, shapes in files.items():
        for name, shape in shapes.items():
            # A base model's names lack the prefix.
            for candidate in (name, prefix + name, name.removeprefix(prefix)):
                if expected.get(candidate, shape) != shape:
                    earlier = torch.ops.girih.earlier_mixers(fields_to_json(config.own_fields()))
                    raise ValueError(
                        f"{file}: {name} has shape {shape}; expected {expected[candidate]}{earlier}"
                    )
