"""A Transformer converted in every way and trained on, loss against tokens: `make conversion [SIZE=25m]`.

A byte-level Llama is trained on the corpus of `make train`. From its checkpoint go on, all weights trained:

    attention                     the Transformer itself: what further training does without a conversion
    gsa, delta_product            replace_attention
    inject constant, gradual, cyclic, learned
                                  LiZA, a delta_product beside attention, with each schedule of its weight m
    gsa, delta_product from scratch
                                  the replaced models once more, from random weights, on these tokens alone

All see the same windows in the same order and have one schedule of the learning rate (`girih.train`'s: AdamW,
warm-up over a twentieth of the steps, cosine to zero), which restarts after the checkpoint. Held-out bits
a byte are measured from token 0 on: right after the conversion, before the first step.

FOLDER/conversion.json holds all of it. A run is written there when it is finished, and not trained again; the
checkpoint lies in WORK. Table and figure are made from the file alone, by `--draw` too.
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
MEASURED = 24  # points of a curve after its first; four of them for a level of the cyclic schedule
LEVELS = (0.0, 0.5, 1.0)  # of m: the cyclic schedule's, and where every mixture is measured in the end
BASE = "base"


@dataclass(frozen=True)
class Way:
    """What a run does to the Transformer. schedule: of the mixture's weight, by `MixSchedule`'s arguments."""

    convert: Callable[[nn.Module], girih.conversion.Conversion | None]
    schedule: dict | None = None
    scratch: bool = False


@dataclass(frozen=True)
class Plan:
    recipe: Recipe
    base_steps: int
    steps: int
    settings: dict  # equal settings are the same study
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


def every(steps: int) -> int:
    """Steps from one point of a curve to the next."""
    return -(-steps // MEASURED)


def ways(recipe: Recipe, steps: int, gate_per: str) -> dict[str, Way]:
    """The runs that follow the Transformer's, by name."""

    def replaced(mixer: str, **options) -> Callable:
        return lambda model: girih.replace_attention(model, mixer, **options)

    def injected(weight: float, learned: bool = False) -> Callable:
        return lambda model: girih.inject(
            model, "delta_product", weight=weight, learned=learned, gate_per=gate_per
        )

    gsa, delta_product = replaced("gsa", num_slots=recipe.slots), replaced("delta_product")
    schedules = {
        "constant": {"final": 0.5},
        "gradual": {"first": 0.0, "final": 0.5, "steps": -(-steps // 2)},
        "cyclic": {"levels": LEVELS, "steps": 4 * every(steps)},
    }
    made = {"attention": Way(lambda model: None), "gsa": Way(gsa), "delta_product": Way(delta_product)}
    for name, options in schedules.items():
        first = girih.MixSchedule(name, **options).weight(0)
        made[f"inject {name}"] = Way(injected(first), {"schedule": name} | options)
    made["inject learned"] = Way(injected(0.5, learned=True), {"schedule": "learned"})
    made["gsa from scratch"] = Way(gsa, scratch=True)
    made["delta_product from scratch"] = Way(delta_product, scratch=True)
    return made


def transformer(recipe: Recipe) -> LlamaForCausalLM:
    """A Llama of about `recipe.parameters`: the width of its MLPs is fitted. Weights start as girih's do, in
    whose size of model transformers' own 0.02 learns far later."""
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
    """Of held-out rows `[N, context]`, whose first byte nothing predicts."""
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
    """Bits a byte with the weight m in every injected layer, which loses what it had."""
    for mixture in mixtures(model):
        if mixture.learned:
            mixture.logit.fill_(torch.logit(torch.tensor(m)))  # infinite at 0 and 1
        else:
            mixture.set_weight(m)
    return bits_per_byte(model, rows, batch)


class Curve(TrainerCallback):
    """Held-out bits a byte before the first step, every `period` steps and after the last."""

    def __init__(self, rows: torch.Tensor, recipe: Recipe, period: int):
        self.rows, self.batch, self.period = rows, recipe.batch, period
        self.tokens_a_step = recipe.batch * recipe.context
        self.points: dict[str, list] = {"tokens": [], "bits_per_byte": []}
        self.seconds = 0.0  # that measuring took

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


def trained(plan: Plan, way: Way, steps: int, windows_seed: int) -> tuple[nn.Module, dict]:
    """A model made, converted and trained, and what the file keeps of it."""
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
    curve = Curve(rows, recipe, every(steps))
    with tempfile.TemporaryDirectory() as folder:  # which the trainer wants and leaves empty
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
    measured = [*run["bits_per_byte"], *run.get("bits_per_byte_at_weight", {}).values()]
    if not torch.tensor(measured).isfinite().all():
        raise FloatingPointError("the held-out loss is not finite")
    return model, run


def digest(checkpoint: Path) -> str | None:
    """Of a checkpoint's weights, or None where there are none."""
    files = sorted(checkpoint.glob("*.safetensors"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest() if files else None


def train_base(plan: Plan) -> dict:
    model, run = trained(plan, Way(lambda model: None, scratch=True), plan.base_steps, plan.seed)
    draft = draft_of(plan.checkpoint)
    for folder in (draft, plan.checkpoint):
        shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(draft)
    os.replace(draft, plan.checkpoint)
    return run | {"sha256": digest(plan.checkpoint)}


def known(plan: Plan) -> dict:
    """What the file holds already. Refuses that of another study, which is not to be overwritten."""
    if not plan.file.exists():
        sizes = {"train": len(plan.corpus.train), "held_out": len(plan.corpus.held_out)}
        return {"settings": plan.settings, "corpus": {"name": plan.corpus.name} | sizes, "runs": {}}
    result = read_json(plan.file)
    has = result.get("settings")
    if not isinstance(has, dict) or not isinstance(result.get("runs"), dict):
        raise damaged(plan.file)
    other = [name for name in sorted({*has, *plan.settings}) if has.get(name) != plan.settings.get(name)]
    if other:
        names = " and ".join(name.removesuffix("_sha256") for name in other)
        raise Refusal(f"file {plan.file}: it is of another {names}; name another folder, or remove it")
    return result


def study(plan: Plan, chosen: dict[str, Way], minutes: float | None) -> bool:
    """Train what is missing, each run written as soon as it is there. False if one failed."""
    result, started, failed = known(plan), time.monotonic(), []
    runs = result["runs"]
    ordered = [BASE, *ways(plan.recipe, plan.steps, plan.settings["gate_per"])]

    def keep(name: str, run: dict) -> None:
        runs[name] = run
        result["runs"] = {each: runs[each] for each in ordered if each in runs}
        publish(plan.file, json.dumps(result, indent=1) + "\n")
        print(f"{name}: {run['bits_per_byte'][-1]:.4f} bits a byte, {run['seconds']:.0f} s", flush=True)

    def missing(name: str) -> bool:
        return name not in runs

    continues = any(missing(name) and not way.scratch for name, way in chosen.items())
    if missing(BASE) or (continues and runs[BASE]["sha256"] != digest(plan.checkpoint)):
        if gone := [name for name, run in runs.items() if not run["from_scratch"] or name == BASE]:
            print(f"{plan.checkpoint} is not what these came from, which count no more: {', '.join(gone)}")
            for name in gone:
                del runs[name]
        print(f"{BASE}: {plan.base_steps} steps", flush=True)
        keep(BASE, train_base(plan))
    for name, way in chosen.items():
        if not missing(name):
            print(f"{name}: there already")
            continue
        if minutes is not None and time.monotonic() - started > 60 * minutes:
            print(f"{name}: not begun, {minutes:g} minutes are over; the same command continues")
            break
        print(f"{name}: {plan.steps} steps", flush=True)
        try:
            _, run = trained(plan, way, plan.steps, plan.seed + 1)
        except Exception as error:
            if isinstance(error, Interrupted) or disk_full(error):
                raise
            traceback.print_exc()
            failed.append(f"{name}: {type(error).__name__}: {error}")
            continue
        finally:
            gc.collect()  # models and trainers refer to each other
            torch.cuda.empty_cache()
        keep(name, run)
    for line in failed:
        print(f"conversion: failed: {line}", file=sys.stderr)
    return not failed


def show(folder: Path) -> None:
    """Table and figure, from the file alone."""
    import curves

    file = folder / "conversion.json"
    if not file.exists():
        raise Refusal(f"file {file}: no such file")
    result = read_json(file)
    if not curves.continued(result):
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
    a_step = recipe.batch * recipe.context
    base_steps = recipe.steps if options.base_tokens is None else options.base_tokens // a_step
    steps = recipe.steps // 3 if options.tokens is None else options.tokens // a_step
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
    own = Path("runs/conversion")
    parser.add_argument("--folder", type=path, default=own, help="where the results are")
    parser.add_argument("--work", type=path, default=own, help="where the checkpoint is")
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
        with contextlib.ExitStack() as held:
            for folder in (plan.folder, plan.work):
                with refuse_unusable(folder):
                    make_folder(folder)
            for folder in sorted({plan.folder.resolve(), plan.work.resolve()}):
                held.enter_context(lock_folder(folder))
            done = study(plan, chosen, options.minutes)
        show(plan.folder)
        return 0 if done else 1

    return answer("conversion", work)


if __name__ == "__main__":
    sys.exit(main())
