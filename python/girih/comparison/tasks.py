"""The tasks of the comparison: sizes, data and score of each in one object."""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch.utils.data import Dataset
from transformers import TrainerCallback

from girih.comparison.answers import AnswerTrainer, StopsWhenLearned, accuracy
from girih.data import Corpus, Needles, Products, Recall, Rows, Windows, cyclic, symmetric
from girih.training.command import Refusal, refuse_beyond_memory, refuse_unknown
from girih.training.recipe import SIZES, Recipe
from girih.training.trainer import BITS, ByteTrainer

TEXT_STEPS, TEXT_RATE = 600, 3e-3  # fewer steps than `make train` runs, at a larger rate
HEAD_DIM = 64  # for models with a given width
BYTES_A_TOKEN = 8  # in rows: the token and its label


@dataclass(frozen=True, kw_only=True)
class RowsRecipe(Recipe):
    """Of rows made by rule: `context` tokens a row in training, over `vocab_size` tokens.

    rows: how many are drawn, and gone through as often as the steps ask for. check: after so many steps the
    answers on rows of their own are looked at, which may end training; `steps` are the most.
    """

    vocab_size: int
    rows: int
    check: int


@dataclass(frozen=True, kw_only=True)
class RecallRecipe(RowsRecipe):
    """Rows take turns over the numbers of `pairs`."""

    pairs: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LengthsRecipe(RowsRecipe):
    """lengths: tokens of the rows that are measured."""

    lengths: tuple[int, ...]


AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)
AnyRowsRecipe = TypeVar("AnyRowsRecipe", bound=RowsRecipe)


class Task(ABC, Generic[AnyRecipe]):
    """name: as `--tasks` has it. title: of its table, with the settings' names in braces.

    widths: of the models, unless a call says otherwise; none: `--size` says how large they are.
    settings: the fields of its recipe that a call may set.
    """

    unit: ClassVar[str]  # unit of the loss in bits
    trainer: ClassVar[type[ByteTrainer]] = ByteTrainer
    name: str
    title: str
    widths: tuple[int, ...] = ()
    settings: tuple[str, ...] = ()

    @abstractmethod
    def recipe(self, size: str, width: int | None) -> AnyRecipe:
        """The recipe of a size, or of a width if the task has `widths`."""

    @abstractmethod
    def vocab_size(self, recipe: AnyRecipe) -> int: ...

    @abstractmethod
    def training_data(self, recipe: AnyRecipe, corpus: Corpus, seed: int) -> Dataset: ...

    def callbacks(self, model: Any, recipe: AnyRecipe, seed: int) -> list[TrainerCallback]:
        return []

    @abstractmethod
    def measure(self, trainer: ByteTrainer, recipe: AnyRecipe, corpus: Corpus, seed: int) -> dict:
        """The score of the trained model, for the cell's file."""

    @abstractmethod
    def has_score(self, cell: dict, recipe: AnyRecipe) -> bool:
        """Whether a cell's file has the complete score."""

    def check(self, recipe: AnyRecipe) -> None:
        """Raises Refusal if the recipe's numbers are inconsistent."""

    def apply_setting(self, recipe: AnyRecipe, setting: str) -> AnyRecipe:
        """The recipe with the fields of "pairs=4,8 vocab_size=256"."""
        fields = {}
        for word in setting.split():
            name, _, value = word.partition("=")
            if name not in self.settings:
                names = ", ".join(self.settings) or "none"
                raise Refusal(f"setting {word}: {name} is no setting of task {self.name}, expected {names}")
            if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", value):
                raise Refusal(f"setting {word}: expected whole numbers from 1 on, with commas")
            numbers = tuple(map(int, value.split(",")))
            takes_several = isinstance(getattr(recipe, name), tuple)
            if not takes_several and len(numbers) > 1:
                raise Refusal(f"setting {word}: expected one number")
            fields[name] = numbers if takes_several else numbers[0]
        return replace(recipe, **fields)

    def label(self, setting: str) -> str:
        """The task with its setting, "mqar_256 pairs=4,8", fields in the task's order; `parse_label` parses
        it."""
        place = {name: i for i, name in enumerate(self.settings)}
        words = sorted(setting.split(), key=lambda word: place.get(word.split("=")[0], 0))
        return " ".join([self.name, *words])


class Text(Task[Recipe]):
    """Bits per byte of held-out text."""

    unit = "bits per byte"
    name = "text"
    title = (
        "Text: held-out bits per byte after {steps:,} steps of {tokens:,} bytes, at the best learning rate "
        "(lr) and at each"
    )

    def recipe(self, size: str, width: int | None) -> Recipe:
        return replace(SIZES[size], steps=TEXT_STEPS, learning_rate=TEXT_RATE)

    def vocab_size(self, recipe: Recipe) -> int:
        return 256

    def training_data(self, recipe: Recipe, corpus: Corpus, seed: int) -> Dataset:
        return Windows.drawn(corpus.train, recipe.steps * recipe.batch, recipe.context, seed)

    def measure(self, trainer: ByteTrainer, recipe: Recipe, corpus: Corpus, seed: int) -> dict:
        held_out = Windows.spread(corpus.held_out, recipe.held_out, recipe.context)
        return {"bits_per_byte": trainer.evaluate(held_out)["eval_loss"] * BITS}

    def has_score(self, cell: dict, recipe: Recipe) -> bool:
        return isinstance(cell.get("bits_per_byte"), int | float)


class Answers(Task[AnyRowsRecipe]):
    """Share of right answers on rows made by rule, trained until nearly all are right."""

    unit = "bits per answer"
    trainer = AnswerTrainer
    own_settings: ClassVar[tuple[str, ...]] = ("vocab_size",)

    def __init__(
        self,
        name: str,
        title: str,
        *,
        sizes: dict[str, AnyRowsRecipe] | None = None,
        width_recipe: AnyRowsRecipe | None = None,
        widths: tuple[int, ...] = (),
    ):
        self.name, self.title, self.widths = name, title, widths
        self.sizes, self.width_recipe = sizes, width_recipe
        recipe = width_recipe or next(iter(sizes.values()))
        fields = [field for field in ("pairs", "lengths") if hasattr(recipe, field)]
        fields += ["head_dim"] if width_recipe else []
        self.settings = (
            *fields,
            *self.own_settings,
            "context",
            "layers",
            "batch",
            "rows",
            "check",
            "held_out",
        )

    def recipe(self, size: str, width: int | None) -> AnyRowsRecipe:
        if width is None:
            return self.sizes.get(size) or self.sizes["large"]
        head_dim = min(width, HEAD_DIM)
        if width < 2 or width % head_dim or head_dim % 2:
            raise Refusal(f"width {width}: expected a multiple of {HEAD_DIM}, or an even number below")
        return replace(self.width_recipe, heads=width // head_dim, head_dim=head_dim)

    def apply_setting(self, recipe: AnyRowsRecipe, setting: str) -> AnyRowsRecipe:
        """The width is kept; the number of heads follows from it and head_dim."""
        width = recipe.heads * recipe.head_dim
        recipe = super().apply_setting(recipe, setting)
        if width % recipe.head_dim or recipe.head_dim % 2:
            raise Refusal(
                f"setting head_dim={recipe.head_dim}: expected an even divisor of the width {width}"
            )
        return replace(recipe, heads=width // recipe.head_dim)

    def vocab_size(self, recipe: AnyRowsRecipe) -> int:
        return recipe.vocab_size

    @abstractmethod
    def rows(self, recipe: AnyRowsRecipe, count: int, length: int, seed: int, measured: bool) -> Rows: ...

    def groups(self, recipe: AnyRowsRecipe, length: int) -> dict[int, str]:
        """The groups of `rows`, and the names of their shares in a cell's file."""
        return {length: str(length)}

    def columns(self, shares: dict[str, float]) -> dict[str, float]:
        """What the table shows of a cell's shares, by the columns' names."""
        return {f"{length} tokens": share for length, share in shares.items()}

    def lengths(self, recipe: AnyRowsRecipe) -> Sequence[int]:
        return getattr(recipe, "lengths", (recipe.context,))

    def shares(self, model: Any, recipe: AnyRowsRecipe, measured: dict[int, Rows]) -> dict[str, float]:
        """Shares of right answers by group name. measured: rows by their length."""
        shares = {}
        for length, rows in measured.items():
            batch = max(1, recipe.batch * recipe.context // length)
            group_shares = accuracy(model, rows, batch)
            shares |= {name: group_shares[group] for group, name in self.groups(recipe, length).items()}
        return shares

    def training_data(self, recipe: AnyRowsRecipe, corpus: Corpus, seed: int) -> Dataset:
        count = min(recipe.steps * recipe.batch, recipe.rows)
        return self.rows(recipe, count, recipe.context, seed, False)

    def callbacks(self, model: Any, recipe: AnyRowsRecipe, seed: int) -> list[TrainerCallback]:
        """Ends training by its own rows, which are neither trained on nor measured in the result."""
        rows = {recipe.context: self.rows(recipe, recipe.held_out, recipe.context, seed + 2, True)}
        return [StopsWhenLearned(lambda: self.shares(model, recipe, rows), recipe.check)]

    def measure(self, trainer: ByteTrainer, recipe: AnyRowsRecipe, corpus: Corpus, seed: int) -> dict:
        rows = {
            length: self.rows(recipe, recipe.held_out, length, seed + 1, True)
            for length in self.lengths(recipe)
        }
        return {"accuracy": self.shares(trainer.model, recipe, rows)}

    def has_score(self, cell: dict, recipe: AnyRowsRecipe) -> bool:
        shares = cell.get("accuracy")
        names = [n for length in self.lengths(recipe) for n in self.groups(recipe, length).values()]
        return isinstance(shares, dict) and all(isinstance(shares.get(name), int | float) for name in names)

    def check(self, recipe: AnyRowsRecipe) -> None:
        longest = max(recipe.context, *self.lengths(recipe))
        refuse_beyond_memory("rows", recipe.rows, BYTES_A_TOKEN * recipe.context)
        refuse_beyond_memory("held_out", recipe.held_out, BYTES_A_TOKEN * longest)
        refuse_beyond_memory("vocab_size", recipe.vocab_size, 16 * recipe.heads * recipe.head_dim)  # of AdamW
        for length in {recipe.context, *self.lengths(recipe)}:
            groups = len(self.groups(recipe, length))
            if recipe.held_out < groups:
                raise Refusal(f"task {self.name}: held_out {recipe.held_out}: at least {groups}, one a group")
            try:
                self.rows(recipe, 1, length, 0, True)
            except ValueError as error:
                raise Refusal(f"task {self.name}: {error}") from error


class RecallTask(Answers[RecallRecipe]):
    """Multi-query associative recall: the values of all keys of a row."""

    def rows(self, recipe: RecallRecipe, count: int, length: int, seed: int, measured: bool) -> Rows:
        return Recall(count, length, recipe.pairs, recipe.vocab_size, seed)

    def groups(self, recipe: RecallRecipe, length: int) -> dict[int, str]:
        return {pairs: str(pairs) for pairs in recipe.pairs}

    def columns(self, shares: dict[str, float]) -> dict[str, float]:
        return {f"{pairs} pairs": share for pairs, share in shares.items()}


class TrackingTask(Answers[LengthsRecipe]):
    """State tracking in a group. Trained on all products, measured in the last quarter of each length."""

    own_settings = ()

    def __init__(self, name: str, title: str, table: torch.Tensor, width_recipe: LengthsRecipe, width: int):
        self.table = table
        super().__init__(
            name, title, width_recipe=replace(width_recipe, vocab_size=len(table)), widths=(width,)
        )

    def rows(self, recipe: LengthsRecipe, count: int, length: int, seed: int, measured: bool) -> Rows:
        if length < 4:
            raise ValueError(f"length {length} is below 4, and a quarter is measured")
        since = length - length // 4 if measured else 1
        return Products(count, length, self.table, seed, since)


class NeedleTask(Answers[LengthsRecipe]):
    """A needle in a haystack, by length and by depth."""

    DEPTHS = ("0-25%", "25-50%", "50-75%", "75-100%")

    def rows(self, recipe: LengthsRecipe, count: int, length: int, seed: int, measured: bool) -> Rows:
        return Needles(count, length, recipe.vocab_size, seed, len(self.DEPTHS))

    def groups(self, recipe: LengthsRecipe, length: int) -> dict[int, str]:
        return {i: f"{length} tokens, depth {depth}" for i, depth in enumerate(self.DEPTHS)}

    def columns(self, shares: dict[str, float]) -> dict[str, float]:
        """The mean at every length, and at every depth."""
        groups = {}
        for i in (0, 1):
            for name, share in shares.items():
                groups.setdefault(name.split(", ")[i], []).append(share)
        return {name: sum(values) / len(values) for name, values in groups.items()}


# Two layers, as in Zoology. The size of the text models sets the time budget.
MQAR = {
    "tiny": RecallRecipe(
        60_000, 2, 2, 16, 16, 32, 8, 20, 3e-3, 32, vocab_size=32, pairs=(2, 4), rows=160, check=10
    ),
    "small": RecallRecipe(
        200_000, 2, 1, 64, 64, 64, 64, 1000, 3e-3, 1024,
        vocab_size=256, pairs=(4, 8, 16), rows=25_600, check=50,
    ),
    "large": RecallRecipe(
        700_000, 2, 2, 64, 64, 256, 128, 10_000, 3e-3, 1024,
        vocab_size=512, pairs=(4, 8, 16, 32, 64), rows=102_400, check=100,
    ),
}  # fmt: skip

# Of models by their width: heads are set by `recipe`, and MLPs have the width of the configuration. Zoology
# goes 64 times through 100,000 rows of a vocabulary of 8,192, 128 rows a step at 512 tokens.
BY_WIDTH = {"parameters": None, "layers": 2, "heads": 1, "head_dim": HEAD_DIM, "slots": 64}
ZOOLOGY = BY_WIDTH | {
    "vocab_size": 8192, "batch": 128, "rows": 100_000, "steps": 50_000, "check": 500, "held_out": 3000,
    "learning_rate": 1e-3,
}  # fmt: skip
MQAR_512 = RecallRecipe(**ZOOLOGY, context=512, pairs=(64,))
MQAR_256 = RecallRecipe(**ZOOLOGY, context=256, pairs=(4, 8, 16, 32, 64))
TRACKING = LengthsRecipe(
    **BY_WIDTH | {"layers": 1},
    context=64, lengths=(64, 128, 256), batch=64, steps=4000, learning_rate=3e-3, vocab_size=0, rows=256_000,
    check=200, held_out=256,
)  # fmt: skip
NEEDLE = LengthsRecipe(
    **BY_WIDTH,
    context=256, lengths=(128, 256, 512, 1024), batch=64, steps=5000, learning_rate=1e-3, vocab_size=512,
    rows=256_000, check=200, held_out=400,
)  # fmt: skip

RECALLED = (
    "share of right answers at the best learning rate (lr); at each the mean over the numbers of pairs, and "
    "the steps until all were recalled, at most {steps:,}"
)
LEARNED_LENGTH = (
    "at the best learning rate (lr); at each the mean over the columns, and the steps until 99% were right "
    "at {context} tokens, at most {steps:,}"
)
LAST_QUARTER = (
    "share of right products in the last quarter of sequences of so many tokens, trained on {context} "
    f"tokens, {LEARNED_LENGTH}"
)

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Text(),
        RecallTask("mqar", f"Recall (MQAR): {RECALLED}", sizes=MQAR),
        RecallTask(
            "mqar_512",
            f"Recall (MQAR) of {{pairs}} pairs in {{context}} tokens (GSA paper, Fig. 4): {RECALLED}",
            width_recipe=MQAR_512,
            widths=(64, 128, 256, 512),
        ),
        RecallTask(
            "mqar_256",
            f"Recall (MQAR) in {{context}} tokens (CAT paper, Table 5): {RECALLED}",
            width_recipe=MQAR_256,
            widths=(64,),
        ),
        TrackingTask("parity", f"Parity (Z2): {LAST_QUARTER}", cyclic(2), TRACKING, width=64),
        TrackingTask("s3", f"Permutations of 3 (S3): {LAST_QUARTER}", symmetric(3), TRACKING, width=64),
        TrackingTask("s5", f"Permutations of 5 (S5): {LAST_QUARTER}", symmetric(5), TRACKING, width=64),
        NeedleTask(
            "needle",
            "A needle in a haystack of random tokens: share of right answers by length and by depth, trained "
            f"on {{context}} tokens, {LEARNED_LENGTH}",
            width_recipe=NEEDLE,
            widths=(128,),
        ),
    )
}


def parse_label(label: str) -> tuple[Task, str]:
    """The task and the setting of a label, "mqar_256 pairs=4,8"."""
    name, _, setting = label.partition(" ")
    refuse_unknown("task", [name], TASKS)
    return TASKS[name], setting
