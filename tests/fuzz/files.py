"""Damaged folders of models: reading each gives a working model or one error that names a file or a field.

    python tests/fuzz/files.py [--count 10000] [--seed 0] [--language python] [--jobs 2] [--memory 8]

A folder written by `save_pretrained` is damaged in one to three places (fields and text of the configuration,
header and bytes of the tensors, the index, the types of files) and read. A folder that crashes or hangs the
reader, or exhausts the memory, is reported by its number, and `--only NUMBER` reads the folder again.
"""

import functools
import json
import math
import random
import re
import shutil
import string
import sys
import tempfile
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import girih
import torch
from girih import _C
from girih._auto import FIELD
from girih.conversion import Injection
from girih.models import MIXERS, GirihForCausalLM
from girih.models.config import OWN_FIELDS
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM
from transformers.utils import logging
from workers import main

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from small_models import config_of

SIZES = {
    "vocab_size": 11,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "num_slots": 3,
    "chunk": 4,
    "max_position_embeddings": 32,
}
# Mixers that learn a first memory.
MEMORY_MIXERS = [
    m for m in MIXERS if "num_slots" in MIXERS[m].fields and "num_kv_heads" not in MIXERS[m].fields
]
MODELS = [
    {"mixer": "gsa"},
    {"mixer": "cat", "num_kv_heads": 1},
    {"mixer": MEMORY_MIXERS, "num_hidden_layers": len(MEMORY_MIXERS), "tie_word_embeddings": False},
    {"mixer": "mag", "mag_base": "gla", "mag_mixer": "delta_product", "mag_learned": True},
    {"mixer": ["attention", "cat"], "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    {"mixer": "attention", "num_kv_heads": 1},
]
# Injections into the last model: all options in the first layer, the defaults in the second.
INJECTIONS = [
    {
        "layers": [0],
        "n": 3,
        "virtual_tokens": "both",
        "gate": "kv",
        "gate_per": "head",
        "pool": "window",
        "between_chunks": "tanh",
        "chunk": 4,
        "weight": 0.25,
        "learned": True,
        "cross": True,
    },
    {"layers": [1]},
]
INJECTED = [field.name for field in fields(Injection)]
# Fields of the configuration that affect a girih model, including fields of transformers.
FIELDS = [*OWN_FIELDS, "use_cache", "dtype", "architectures", "model_type", "transformers_version", FIELD]
DEEP = 100_000

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
NAMES = re.compile(rf"{CONFIG}|\.safetensors|\b({'|'.join([*FIELDS, *INJECTED])})\b")


folders: list[tempfile.TemporaryDirectory] = []  # deleted at exit


@functools.cache
def undamaged_folder(kind: int, sharded: bool) -> Path:
    """The folder of an undamaged model."""
    folders.append(tempfile.TemporaryDirectory())
    folder = Path(folders[-1].name)
    torch.manual_seed(0)
    model = GirihForCausalLM(config_of(**SIZES | MODELS[kind]))
    for options in INJECTIONS if kind == len(MODELS) - 1 else ():
        girih.inject(model, **options)
    model.to(torch.bfloat16 if sharded else torch.float32)
    model.save_pretrained(folder, max_shard_size="2KB" if sharded else "1GB")
    return folder


class Damage:
    """One folder with damage drawn from a seed and a number; `changes` describes the damage."""

    def __init__(self, seed: int, number: int, folder: Path):
        self.random = random.Random(f"{seed}:{number}")
        self.sharded = self.random.random() < 0.2
        self.folder = folder
        kind = self.random.randrange(len(MODELS))
        original = undamaged_folder(kind, self.sharded)
        shutil.copytree(original, folder, dirs_exist_ok=True)
        places = [self.fields, self.fields, self.text, self.header, self.header, self.tensor_bytes, self.kind]
        places += [self.index] * 2 * self.sharded
        places += [self.injection] * 3 * (kind == len(MODELS) - 1)
        config = (folder / CONFIG).read_bytes()
        self.changes = []
        for place in self.random.choices(places, k=self.random.choice([1, 1, 1, 2, 3])):
            try:
                place()
            except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
                self.changes.append("(already damaged)")
        file = folder / CONFIG
        self.config_is_whole = file.is_file() and file.read_bytes() == config

    def choice(self, *values: Any) -> Any:
        return self.random.choice(values)

    def tensor_file(self) -> Path:
        return self.random.choice(sorted(self.folder.glob("*.safetensors")))

    def anything(self) -> Any:
        """A value for a JSON field; a Raw value has no equivalent in Python."""
        mixers = [self.random.choice(list(MIXERS)) for _ in range(self.choice(1, 2, 2, 3))]
        return self.choice(
            *(0, -1, 1, 2, 3, 5, 8, 64, 257, 2**20, 2**31 - 1, 2**31, 10**9, 10**12, 2**63 - 1),
            *(2**63, 2**70, -(2**63), 10**400, 0.5, 1.9, 2.0, -0.0, 1e-300, 1e300),
            *(math.nan, math.inf, -math.inf, Raw("1e400"), Raw("1" * 5000)),
            *(True, False, None, "", "word", "8", "w" * 100_000, "\0", "\ud800", "né", mixers[0]),
            *([], {}, [1], [[]], {"a": 1}, [None, "gsa"], mixers, [*mixers, 3]),
            Raw("[" * DEEP + "]" * DEEP),
            Raw('{"a":' * 3000 + "1" + "}" * 3000),
        )

    def fields(self) -> None:
        """Changes values of the configuration."""
        config = json.loads((self.folder / CONFIG).read_text())
        for _ in range(self.choice(1, 1, 1, 2, 4)):
            name = self.random.choice(FIELDS)
            if self.random.random() < 0.1:
                config.pop(name, None)
                self.changes.append(f"{name} is missing")
            else:
                config[name] = self.anything()
                self.changes.append(f"{name} = {config[name]!r:.60}")
        if self.random.random() < 0.05:
            config["".join(self.random.choices(string.ascii_letters, k=5))] = self.anything()
        (self.folder / CONFIG).write_bytes(to_json(config))

    def injection(self) -> None:
        """Changes values of an injection."""
        config = json.loads((self.folder / CONFIG).read_text())
        entries = config[FIELD]
        entry = self.random.choice(entries)
        name = self.choice("how", *INJECTED)
        change = self.random.random()
        if change < 0.1:
            entries.append(dict(entry))
            self.changes.append("an injection twice")
        elif change < 0.2:
            entry.pop(name, None)
            self.changes.append(f"{FIELD}.{name} is missing")
        elif change < 0.25:
            entry[f"{name}_"] = entry.pop(name, None)
            self.changes.append(f"{FIELD}.{name} is renamed")
        else:
            entry[name] = self.anything()
            self.changes.append(f"{FIELD}.{name} = {entry[name]!r:.60}")
        (self.folder / CONFIG).write_bytes(to_json(config))

    def text(self) -> None:
        """Changes the bytes of the configuration."""
        file = self.folder / CONFIG
        what, data = self.garble(file.read_bytes())
        file.write_bytes(data)
        self.changes.append(f"{CONFIG} {what}")

    def garble(self, data: bytes) -> tuple[str, bytes]:
        start, stop = sorted(self.random.randint(0, len(data)) for _ in range(2))
        noise = self.random.randbytes(self.choice(1, 4, 300))
        return self.choice(
            (f"cut off at {start}", data[:start]),
            (f"without {start} to {stop}", data[:start] + data[stop:]),
            (f"with {start} to {stop} twice", data[:stop] + data[start:]),
            (f"with noise at {start}", data[:start] + noise + data[start:]),
            (f"overwritten at {start}", data[:start] + noise + data[start + len(noise) :]),
            (f"with a bit of byte {start} flipped", flip_bits(data, start, 1 << self.random.randrange(8))),
            ("twice", data * 2),
            ("empty", b""),
            ("zeros", bytes(len(data))),
            ("with a mark of byte order", b"\xef\xbb\xbf" + data),
            ("in UTF-16", data.decode("latin1").encode("utf-16")),
            ("noise", self.random.randbytes(200)),
            ("a list", b"[" + data + b"]"),
            ("a value", self.choice(b"null", b"3", b'"config"', b"[]", b"{}", b"[" * DEEP)),
        )

    def header(self) -> None:
        """Changes the header of a tensor file, or its length."""
        file = self.tensor_file()
        data = file.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
        name = self.random.choice([n for n in header if n != "__metadata__"])
        entry, (begin, end) = header[name], header[name]["data_offsets"]
        total = len(rest)
        other = self.random.choice(list(header))

        def set_key(key: str, value: Any) -> None:
            entry[key] = value
            self.changes.append(f"{file.name}: {name}: {key} = {value!r:.60}")

        def offsets() -> None:
            candidates = [
                begin,
                end,
                0,
                1,
                -1,
                -8,
                total,
                total + 8,
                begin + 0.5,
                2**63,
                2**64,
                2**64 - 8,
                None,
                "0",
            ]
            change = self.choice(
                *(
                    [begin, end + 4],
                    [begin + 4, end],
                    [begin - 4, end - 4],
                    [begin + 4, end + 4],
                    [end, begin],
                ),
                *([begin, end, total], [begin], [], {}, None, [[begin], [end]], {"begin": begin, "end": end}),
                *([begin + 0.5, end + 0.5], [float(begin), float(end)], [0, end - begin], [0, total]),
                self.random.choices(candidates, k=2),
            )
            set_key("data_offsets", change)

        def shape() -> None:
            right = list(entry["shape"])
            change = self.choice(
                *(right[::-1], [], [*right, 1], [1, *right], right[:-1], [math.prod(right)], [0], [-1]),
                *([-x for x in right], [2**32, 2**32], [2**62, 4], [2**63], [0, 2**62], [1] * 70, [1] * 3000),
                *([x + 0.5 for x in right], [float(x) for x in right], [str(x) for x in right], right[0]),
                *(None, "word", {}, [None], [[x] for x in right], [10**400]),
            )
            set_key("shape", change)

        def dtype() -> None:
            set_key(
                "dtype", self.choice("F64", "F16", "BF16", "I64", "I8", "F8_E4M3", "X9", "", None, 7, [], {})
            )

        def remove() -> None:
            del header[name]
            self.changes.append(f"{file.name}: no {name}")

        def extra() -> None:
            header[self.choice("more", "", "\0", "model.embed_tokens", "lm_head.weight")] = dict(entry)
            self.changes.append(f"{file.name}: one more tensor")

        def rename() -> None:
            header[f"{name}_"] = header.pop(name)
            self.changes.append(f"{file.name}: {name} is renamed")

        def swap() -> None:
            header[name], header[other] = header[other], header[name]
            self.changes.append(f"{file.name}: {name} and {other} swapped")

        def replace() -> None:
            header[self.choice(name, "__metadata__")] = value = self.anything()
            self.changes.append(f"{file.name}: {name} or metadata = {value!r:.60}")

        def remove_key() -> None:
            key = self.random.choice(list(entry))
            del entry[key]
            self.changes.append(f"{file.name}: {name} has no {key}")

        self.choice(
            *(offsets, offsets, offsets, shape, shape, shape, dtype, dtype),
            *(remove, extra, rename, swap, replace, remove_key),
        )()
        text = to_json(header)
        length = len(text)
        if self.random.random() < 0.1:
            what, text = self.garble(text)
            self.changes.append(f"header {what}")
        if self.random.random() < 0.2:
            candidates = [
                length + 1,
                length - 1,
                length - 8,
                0,
                1,
                2**31,
                2**63,
                2**64 - 1,
                100_000_001,
                total + length,
            ]
            length = self.random.choice(candidates) % 2**64
            self.changes.append(f"header of {length} bytes")
        if self.random.random() < 0.1:
            rest = self.choice(rest[:-1], rest[:-4], rest[: total // 2], b"", rest + bytes(8))
            self.changes.append(f"{len(rest)} bytes of data for {total}")
        file.write_bytes(length.to_bytes(8, "little") + text + rest)

    def tensor_bytes(self) -> None:
        """Changes bytes of a tensor file, most often at the beginning, where a single bit matters."""
        file = self.tensor_file()
        data = file.read_bytes()
        if self.random.random() < 0.5:
            start = self.random.randrange(self.choice(8, 200, len(data)))
            what, data = f"with byte {start} flipped", flip_bits(data, start, self.random.randint(1, 255))
        else:
            what, data = self.garble(data)
        file.write_bytes(data)
        self.changes.append(f"{file.name} {what}")

    def index(self) -> None:
        """Changes the index of a sharded model."""
        file = self.folder / INDEX
        index = json.loads(file.read_text())
        names = index["weight_map"]
        tensor_name = self.random.choice(list(names))
        if self.random.random() < 0.3:
            what, data = self.garble(file.read_bytes())
        else:
            what, change = self.choice(
                ("without weight_map", {"metadata": {}}),
                ("with another weight_map", {"weight_map": self.anything()}),
                ("with an empty weight_map", {"weight_map": {}}),
                ("with another value", index | {"weight_map": names | {tensor_name: self.anything()}}),
                (
                    "with a file that is not there",
                    index | {"weight_map": names | {tensor_name: "no.safetensors"}},
                ),
                ("with another place", index | {"weight_map": names | {tensor_name: "../../etc/passwd"}}),
                ("with a folder for a file", index | {"weight_map": names | {tensor_name: "."}}),
                ("with the configuration", index | {"weight_map": names | {tensor_name: CONFIG}}),
                (
                    "with one name less",
                    index | {"weight_map": {n: f for n, f in names.items() if n != tensor_name}},
                ),
                ("with one name more", index | {"weight_map": names | {"more": names[tensor_name]}}),
                (
                    "with all names in one file",
                    index | {"weight_map": dict.fromkeys(names, names[tensor_name])},
                ),
            )
            data = to_json(change)
        file.write_bytes(data)
        self.changes.append(f"{INDEX} {what}")

    def kind(self) -> None:
        """Replaces a file by a folder, a link or nothing."""
        file = self.random.choice(sorted(self.folder.iterdir()))
        what = self.choice("missing", "a folder", "a link to itself", "a link to nothing", "/dev/null")
        file.unlink()
        if what == "a folder":
            file.mkdir()
        elif what != "missing":
            targets = {"a link to itself": file, "a link to nothing": file.with_name("nothing")}
            file.symlink_to(targets.get(what, what))
        self.changes.append(f"{file.name} is {what}")


class Raw(float):
    """JSON text that json.dumps cannot produce; `written` inserts the text."""

    def __new__(cls, text: str):
        raw = super().__new__(cls)
        raw.text = text
        return raw

    def __repr__(self) -> str:
        return self.text


def to_json(value: Any) -> bytes:
    """The JSON text of a value; lone surrogates are passed through."""
    raws = []

    def replace_raw(x: Any) -> Any:
        if isinstance(x, Raw):
            raws.append(x.text)
            return f"<raw {len(raws) - 1}>"
        if isinstance(x, dict):
            return {name: replace_raw(part) for name, part in x.items()}
        return [replace_raw(part) for part in x] if isinstance(x, list) else x

    text = json.dumps(replace_raw(value), ensure_ascii=False)
    for i, raw in enumerate(raws):
        text = text.replace(f'"<raw {i}>"', raw)
    return text.encode(errors="surrogatepass")


def flip_bits(data: bytes, start: int, bits: int) -> bytes:
    return data[:start] + bytes(x ^ bits for x in data[start : start + 1]) + data[start + 1 :]


def reader_of(damage: Damage, language: str) -> Any:
    """AutoModel reports errors in the configuration with transformers' own messages, so it reads only
    undamaged ones."""
    if language == "cpp":
        return _C.LanguageModel
    return (
        damage.choice(AutoModelForCausalLM, GirihForCausalLM) if damage.config_is_whole else GirihForCausalLM
    )


def logits_of(folder: Path, reader: Any) -> tuple[torch.Tensor, int]:
    """The model's logits of three tokens, and the size of its vocabulary."""
    ids = torch.zeros(1, 3, dtype=torch.int64)
    model = reader.from_pretrained(str(folder))
    if reader is _C.LanguageModel:
        rows = model.named_parameters()["model.embed_tokens.weight"].shape[0]
        return model.forward(ids)[0], rows
    with torch.no_grad():
        return model(ids).logits, model.config.vocab_size


def problem_of(damage: Damage, language: str) -> str | None:
    """Reads the folder and returns what is wrong with the outcome, or None."""
    try:
        logits, rows = logits_of(damage.folder, reader_of(damage, language))
    except (ValueError, OSError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        # StrictDataclassError: transformers 5.17 validates its own configuration fields.
        reason = str(error)
        if isinstance(error, NotImplementedError | RecursionError | UnicodeError):
            return f"{type(error).__name__}: {reason:.300}"
        if "INTERNAL ASSERT" in reason:
            return f"an internal assertion: {reason:.300}"
        if len(reason) > 20_000:
            return f"a message of {len(reason)} characters: {reason:.300}"
        return (
            None
            if NAMES.search(reason) or str(damage.folder) in reason
            else f"names nothing: {type(error).__name__}: {reason:.300}"
        )
    except Exception as error:
        return f"{type(error).__name__}: {error!s:.300}"
    return None if logits.shape == (1, 3, rows) else f"logits of shape {list(logits.shape)}"


def attempt(seed: int, number: int, language: str) -> tuple[str, str | None]:
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        damage = Damage(seed, number, Path(folder))
        return "; ".join(damage.changes), problem_of(damage, language)


if __name__ == "__main__":
    sys.exit(main(__file__, __doc__, "folder", ("language", ["cpp", "python"]), attempt))
