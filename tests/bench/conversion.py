"""A Transformer, converted in several ways and trained further: `make conversion [SIZE=25m]`.

A byte-level Llama is trained on the corpus of `make train`. These runs start from its checkpoint and train
all weights:

    attention                     the Transformer itself, trained further without a conversion
    gsa, delta_product            replace_attention
    inject constant, gradual, cyclic, learned
                                  LiZA, a delta_product beside attention, with each schedule of its weight m
    gsa, delta_product from scratch
                                  the replaced models, from random weights, on the tokens of these runs alone

All runs read the same windows in the same order. All have the recipe of `girih.train`: AdamW, warm-up over a
twentieth of the steps, cosine to zero. The learning rate restarts after the checkpoint. Held-out bits a byte
are measured from token 0 on, that is, after the conversion and before the first step.

FOLDER/conversion.json holds all results. A run is written when it is finished, and is not trained again. The
checkpoint is in WORK. Table and figure are made from the file alone, also with `--draw`.
"""

import argparse
import contextlib
import gc
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path

import girih
import torch
import transformers
from girih.conversion.config import to_json
from girih.data import Corpus, Windows, read_corpus
from girih.nn import MemoryAsGate
from girih.training.command import (
    Parser,
    Refusal,
    answer,
    disk_full,
    path,
    refuse_steps,
    refuse_unknown,
    seed,
)
from girih.training.folder import (
    damaged,
    draft_of,
    lock_folder,
    make_folder,
    publish,
    read_json,
    refuse_unusable,
)
from girih.training.processes import Interrupt, Interrupted, together, use_one_device
from girih.training.recipe import SIZES as OF_TRAIN
from girih.training.recipe import STEP, Recipe
from girih.training.trainer import BITS, fit
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

SIZES = OF_TRAIN | {"25m": Recipe(25_000_000, 8, 8, 64, 64, 512, 32, 1830, 1e-3, 256)}
NUM_POINTS = 24  # points of a curve after the first; four of them for each level of the cyclic schedule
# values of m: levels of the cyclic schedule, and weights at which every mixture is measured at the end
LEVELS = (0.0, 0.5, 1.0)
BASE = "base"


@dataclass(frozen=True)
class Way:
    """The conversion of a run. schedule: arguments of `MixSchedule` for the weight of the mixture."""

    convert: Callable[[nn.Module], girih.conversion.Conversion | None]
    schedule: dict | None = None
    scratch: bool = False


@dataclass(frozen=True)
class Plan:
    recipe: Recipe
    base_steps: int
    steps: int
    settings: dict  # plans with equal settings are the same study
    corpus: Corpus
    folder: Path
    work: Path
    seed: int

    @property
    def file(self) -> Path:
        return self.folder / "conversion.json"

    @property
    def checkpoint(self) -> Path:
        return self.work / BASE


def point_period(steps: int) -> int:
    """Steps between two points of a curve."""
    return -(-steps // NUM_POINTS)


def ways(recipe: Recipe, steps: int, gate_per: str) -> dict[str, Way]:
    """The runs that follow the training of the Transformer, by name."""

    def make_replacement(mixer: str, **options) -> Callable:
        return lambda model: girih.replace_attention(model, mixer, **options)

    def make_injection(weight: float, learned: bool = False) -> Callable:
        return lambda model: girih.inject(
            model, "delta_product", weight=weight, learned=learned, gate_per=gate_per
        )

    gsa, delta_product = make_replacement("gsa", num_slots=recipe.slots), make_replacement("delta_product")
    schedules = {
        "constant": {"final": 0.5},
        "gradual": {"first": 0.0, "final": 0.5, "steps": -(-steps // 2)},
        "cyclic": {"levels": LEVELS, "steps": 4 * point_period(steps)},
    }
    result = {"attention": Way(lambda model: None), "gsa": Way(gsa), "delta_product": Way(delta_product)}
    for name, options in schedules.items():
        first = girih.MixSchedule(name, **options).weight(0)
        result[f"inject {name}"] = Way(make_injection(first), {"schedule": name} | options)
    result["inject learned"] = Way(make_injection(0.5, learned=True), {"schedule": "learned"})
    result["gsa from scratch"] = Way(gsa, scratch=True)
    result["delta_product from scratch"] = Way(delta_product, scratch=True)
    return result


def transformer(recipe: Recipe) -> LlamaForCausalLM:
    """A Llama of about `recipe.parameters`. The width of its MLPs is fitted. Its weights start as girih's do:
    with the 0.02 of transformers, models of this size learn far later."""
    width = recipe.heads * recipe.head_dim
    outside = 256 * width + recipe.layers * 4 * width**2
    intermediate = STEP * max(1, round((recipe.parameters - outside) / (3 * width * recipe.layers * STEP)))
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        max_position_embeddings=recipe.context,
        initializer_range=width**-0.5,
        tie_word_embeddings=True,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


@torch.no_grad()
def bits_per_byte(model: nn.Module, rows: torch.Tensor, batch: int) -> float:
    """Bits a byte of held-out rows `[N, context]`. The first byte of a row is not predicted."""
    training, device = model.training, next(model.parameters()).device
    model.eval()
    total = 0.0
    for ids in rows.to(device).split(batch):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        total = total + loss.double() * len(ids)
    model.train(training)
    return total.item() / len(rows) * BITS


def mixtures(model: nn.Module) -> list[MemoryAsGate]:
    return [module for module in model.modules() if isinstance(module, MemoryAsGate)]


@torch.no_grad()
def weights(model: nn.Module) -> list[float]:
    """m of every injected layer."""
    return [float(mixture.current_weight()) for mixture in mixtures(model)]


@torch.no_grad()
def bits_at(model: nn.Module, m: float, rows: torch.Tensor, batch: int) -> float:
    """Bits a byte with the weight m in every injected layer. Overwrites the weights of these layers."""
    for mixture in mixtures(model):
        if mixture.learned:
            mixture.logit.fill_(torch.logit(torch.tensor(m)))  # infinite at 0 and 1
        else:
            mixture.set_weight(m)
    return bits_per_byte(model, rows, batch)


class Curve(TrainerCallback):
    """Held-out bits a byte before the first step, after every `period` steps and after the last step."""

    def __init__(self, rows: torch.Tensor, recipe: Recipe, period: int):
        self.rows, self.batch, self.period = rows, recipe.batch, period
        self.tokens_a_step = recipe.batch * recipe.context
        self.points: dict[str, list] = {"tokens": [], "bits_per_byte": []}
        self.seconds = 0.0  # spent on measuring

    def measure(self, step: int, model: nn.Module) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started = time.perf_counter()
        self.points["tokens"].append(step * self.tokens_a_step)
        self.points["bits_per_byte"].append(bits_per_byte(model, self.rows, self.batch))
        if m := weights(model):
            self.points.setdefault("weight", []).append(sum(m) / len(m))
        self.seconds += time.perf_counter() - started

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.measure(0, model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % self.period == 0 or state.global_step == state.max_steps:
            self.measure(state.global_step, model)


def train_model(plan: Plan, way: Way, steps: int, windows_seed: int) -> tuple[nn.Module, dict]:
    """Builds, converts and trains a model. Returns the model and its entry in the file."""
    torch.manual_seed(plan.seed)
    recipe = replace(plan.recipe, steps=steps)
    if way.scratch:
        model = transformer(recipe)
    else:
        model = LlamaForCausalLM.from_pretrained(plan.checkpoint, dtype=torch.float32)
    before = model.num_parameters()
    conversion = way.convert(model)
    windows = Windows.drawn(plan.corpus.train, steps * recipe.batch, recipe.context, windows_seed)
    held_out = Windows.spread(plan.corpus.held_out, recipe.held_out, recipe.context)
    rows = torch.stack([window["input_ids"] for window in held_out])
    curve = Curve(rows, recipe, point_period(steps))
    with tempfile.TemporaryDirectory() as folder:  # the trainer needs a folder, and writes nothing to it
        trainer = fit(model, recipe, windows, held_out, Path(folder), plan.seed, save_strategy="no")
        trainer.add_callback(curve)
        if way.schedule:
            trainer.add_callback(girih.MixSchedule(**way.schedule))
        started = time.perf_counter()
        trainer.train()
        if on_gpu := model.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started - curve.seconds
    run = {
        "conversion": to_json(conversion.spec) if conversion else None,
        "schedule": way.schedule,
        "from_scratch": way.scratch,
        "parameters": model.num_parameters(),
        "new_parameters": model.num_parameters() - before,
        **curve.points,
        "seconds": round(seconds, 2),
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}",
        "date": date.today().isoformat(),
    }
    if way.schedule:
        run["weights"] = weights(model)
        run["bits_per_byte_at_weight"] = {f"{m:g}": bits_at(model, m, rows, recipe.batch) for m in LEVELS}
    figures = [*run["bits_per_byte"], *run.get("bits_per_byte_at_weight", {}).values()]
    if not torch.tensor(figures).isfinite().all():
        raise FloatingPointError("the held-out loss is not finite")
    return model, run


def digest(checkpoint: Path) -> str | None:
    """SHA-256 of the weights of a checkpoint, or None if there are none."""
    files = sorted(checkpoint.glob("*.safetensors"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest() if files else None


def train_base(plan: Plan) -> dict:
    model, run = train_model(plan, Way(lambda model: None, scratch=True), plan.base_steps, plan.seed)
    draft = draft_of(plan.checkpoint)
    for folder in (draft, plan.checkpoint):
        shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(draft)
    os.replace(draft, plan.checkpoint)
    return run | {"sha256": digest(plan.checkpoint)}


def read_study(plan: Plan) -> dict:
    """The contents of the file. Refuses the file of another study, which must not be overwritten."""
    if not plan.file.exists():
        sizes = {"train": len(plan.corpus.train), "held_out": len(plan.corpus.held_out)}
        return {"settings": plan.settings, "corpus": {"name": plan.corpus.name} | sizes, "runs": {}}
    result = read_json(plan.file)
    saved = result.get("settings")
    if not isinstance(saved, dict) or not isinstance(result.get("runs"), dict):
        raise damaged(plan.file)
    other = [name for name in sorted({*saved, *plan.settings}) if saved.get(name) != plan.settings.get(name)]
    if other:
        names = " and ".join(name.removesuffix("_sha256") for name in other)
        raise Refusal(f"file {plan.file}: it is of another {names}; name another folder, or remove it")
    return result


def study(plan: Plan, chosen: dict[str, Way], minutes: float | None) -> bool:
    """Trains the missing runs. Each run is written when it is finished. Returns False if a run failed."""
    result, started, failed = read_study(plan), time.monotonic(), []
    runs = result["runs"]
    ordered = [BASE, *ways(plan.recipe, plan.steps, plan.settings["gate_per"])]

    def store_run(name: str, run: dict) -> None:
        runs[name] = run
        result["runs"] = {each: runs[each] for each in ordered if each in runs}
        publish(plan.file, json.dumps(result, indent=1) + "\n")
        print(f"{name}: {run['bits_per_byte'][-1]:.4f} bits a byte, {run['seconds']:.0f} s", flush=True)

    def is_missing(name: str) -> bool:
        return name not in runs

    needs_checkpoint = any(is_missing(name) and not way.scratch for name, way in chosen.items())
    if is_missing(BASE) or (needs_checkpoint and runs[BASE]["sha256"] != digest(plan.checkpoint)):
        if dropped := [name for name, run in runs.items() if not run["from_scratch"] or name == BASE]:
            print(f"{plan.checkpoint} is not what these came from, which count no more: {', '.join(dropped)}")
            for name in dropped:
                del runs[name]
        print(f"{BASE}: {plan.base_steps} steps", flush=True)
        store_run(BASE, train_base(plan))
    for name, way in chosen.items():
        if not is_missing(name):
            print(f"{name}: there already")
            continue
        if minutes is not None and time.monotonic() - started > 60 * minutes:
            print(f"{name}: not begun, {minutes:g} minutes are over; the same command continues")
            break
        print(f"{name}: {plan.steps} steps", flush=True)
        try:
            _, run = train_model(plan, way, plan.steps, plan.seed + 1)
        except Exception as error:
            if isinstance(error, Interrupted) or disk_full(error):
                raise
            traceback.print_exc()
            failed.append(f"{name}: {type(error).__name__}: {error}")
            continue
        finally:
            gc.collect()  # models and trainers refer to each other
            torch.cuda.empty_cache()
        store_run(name, run)
    for line in failed:
        print(f"conversion: failed: {line}", file=sys.stderr)
    return not failed


def show(folder: Path) -> None:
    """Prints the table and draws the figure, from the file alone."""
    import curves

    file = folder / "conversion.json"
    if not file.exists():
        raise Refusal(f"file {file}: no such file")
    result = read_json(file)
    if not curves.converted_runs(result):
        return
    print("\n" + curves.table(result))
    try:
        curves.draw(result, folder / "conversion.png")
    except ImportError as error:
        print(f"no figure: {error}; --draw draws it from {file}")


def plan_of(options: argparse.Namespace) -> Plan:
    size = options.size or ("25m" if torch.cuda.is_available() else "small")
    refuse_unknown("size", [size], SIZES)
    if (processes := together().num_processes) > 1:
        raise Refusal(f"{processes} processes: the study runs in one, on one device")
    recipe = SIZES[size]
    if options.learning_rate is not None:
        recipe = replace(recipe, learning_rate=options.learning_rate)
    tokens_a_step = recipe.batch * recipe.context
    base_steps = recipe.steps if options.base_tokens is None else options.base_tokens // tokens_a_step
    steps = recipe.steps // 3 if options.tokens is None else options.tokens // tokens_a_step
    for number in (base_steps, steps):
        refuse_steps(number, recipe.bytes_a_step)
    corpus = read_corpus(options.corpus, recipe.context)
    settings = {
        "size": size,
        **asdict(recipe),
        "steps": steps,
        "base_steps": base_steps,
        "gate_per": options.gate_per,
        "seed": options.seed,
        "corpus_sha256": corpus.digest,
    }
    return Plan(recipe, base_steps, steps, settings, corpus, options.folder, options.work, options.seed)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        prog="conversion", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", help=f"{', '.join(SIZES)} (default: 25m on a GPU, small without)")
    parser.add_argument(
        "--base-tokens", type=int, help="of the Transformer (default: as many as the size has)"
    )
    parser.add_argument("--tokens", type=int, help="of each run after it (default: a third of the size's)")
    parser.add_argument("--learning-rate", type=float, help="its peak, of all runs (default: the size's)")
    parser.add_argument(
        "--gate-per", choices=["head", "channel"], default="head", help="of inject (default: head)"
    )
    parser.add_argument(
        "--scratch", action=argparse.BooleanOptionalAction, default=True, help="with the runs from scratch"
    )
    parser.add_argument("--runs", help="names with commas (default: all)")
    parser.add_argument("--minutes", type=float, help="after which no run begins; the same command continues")
    parser.add_argument("--corpus", type=path, help="a file or folder (default: Python's standard library)")
    default_folder = Path("runs/conversion")
    parser.add_argument("--folder", type=path, default=default_folder, help="where the results are")
    parser.add_argument("--work", type=path, default=default_folder, help="where the checkpoint is")
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--draw", action="store_true", help="train nothing: table and figure of the file")
    use_one_device()

    def work() -> int:
        Interrupt()
        together()
        options = parser.parse_args(argv)
        if options.draw:
            show(options.folder)
            return 0
        plan = plan_of(options)
        every_way = ways(plan.recipe, plan.steps, options.gate_per)
        names = options.runs.split(",") if options.runs else list(every_way)
        refuse_unknown("run", names, every_way)
        chosen = {
            name: way
            for name, way in every_way.items()
            if name in names and (options.scratch or not way.scratch)
        }
        with contextlib.ExitStack() as locks:
            for folder in (plan.folder, plan.work):
                with refuse_unusable(folder):
                    make_folder(folder)
            for folder in sorted({plan.folder.resolve(), plan.work.resolve()}):
                locks.enter_context(lock_folder(folder))
            succeeded = study(plan, chosen, options.minutes)
        show(plan.folder)
        return 0 if succeeded else 1

    return answer("conversion", work)


if __name__ == "__main__":
    sys.exit(main())
