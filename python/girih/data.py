"""The data that language models are trained on: bytes of text, and rows made by rule.

Text is its own alphabet (256 bytes, no tokenizer), so bits per byte compare across models and corpora. The
rows made by rule are those of associative recall, of state tracking and of a needle in a haystack.
"""

import hashlib
import itertools
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import Dataset

STRETCH = 64 * 1024  # bytes
HELD_OUT = 20  # one stretch of every HELD_OUT is never trained on
IGNORED = -100  # the label that the loss leaves out


class CorpusError(ValueError):
    """The corpus cannot be trained on; the message is one line for a person."""


@dataclass(frozen=True)
class Corpus:
    name: str
    train: torch.Tensor  # uint8 [bytes]
    held_out: torch.Tensor  # uint8 [bytes]
    digest: str  # of all bytes in order: two equal digests are the same corpus with the same split


def standard_library() -> list[Path]:
    """The sources of the running Python's standard library, sorted. Its tests are left out: some systems
    ship without them, and the corpus should not depend on it."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    return [p for p in sorted(root.rglob("*.py")) if not left_out & set(p.relative_to(root).parts)]


def text_files(path: Path) -> list[Path]:
    """`path` itself, or every file below it, sorted; hidden files, links and the folders of runs are passed
    over."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise CorpusError(f"corpus {path}: no such file or folder")
    visible = (p for p in path.rglob("*") if not any(s.startswith(".") for s in p.relative_to(path).parts))
    runs = {p.parent for p in path.rglob("arguments.json")} - {path}
    return sorted(p for p in visible if p.is_file() and not p.is_symlink() and not runs & set(p.parents))


def read_corpus(path: Path | None = None, context: int = 256) -> Corpus:
    """Read a file or a folder of text; None is the standard library of the running Python.

    Files are joined in the order of their names and cut into stretches of 64 KiB, or a twentieth of a
    smaller corpus; every twentieth stretch is held out. A second copy of a file is dropped, for it could
    stand on both sides of the split. Files with a zero byte are not text and are passed over.

    Raises CorpusError when there is nothing to read or less than `context` bytes on a side of the split.
    """
    name = "the standard library" if path is None else str(path)
    parts, digests, digest = [], set(), hashlib.sha256()
    try:
        for file in standard_library() if path is None else text_files(path):
            data = file.read_bytes()
            file_digest = hashlib.sha256(data).digest()
            if file_digest in digests or b"\0" in data:
                continue
            digests.add(file_digest)
            parts.append(data)
            digest.update(data)
    except OSError as error:
        raise CorpusError(f"corpus {error.filename}: {error.strerror}") from error
    data = b"".join(parts)
    if not data:
        raise CorpusError(f"corpus {name}: no text in it")
    if len(data) < HELD_OUT * context:
        raise CorpusError(
            f"corpus {name}: {len(data):,} bytes are too short, {HELD_OUT * context:,} or more are needed"
        )
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    stretches = text.split(min(STRETCH, len(data) // HELD_OUT))
    held_out = stretches[HELD_OUT - 1 :: HELD_OUT]
    train = [s for i, s in enumerate(stretches) if i % HELD_OUT != HELD_OUT - 1]
    return Corpus(name, torch.cat(train), torch.cat(held_out), digest.hexdigest())


class Windows(Dataset):
    """Windows of `context` bytes that begin at `starts`.

    Labels are the same bytes (the model shifts them) but for the first, which nothing before it predicts.
    """

    def __init__(self, text: torch.Tensor, starts: torch.Tensor, context: int):
        self.text, self.starts, self.context = text, starts, context

    @classmethod
    def drawn(cls, text: torch.Tensor, count: int, context: int, seed: int) -> "Windows":
        """`count` windows at places drawn by `seed`: the whole run's data is known before its first step."""
        draw = torch.Generator().manual_seed(seed)
        return cls(text, torch.randint(len(text) - context + 1, (count,), generator=draw), context)

    @classmethod
    def spread(cls, text: torch.Tensor, count: int, context: int) -> "Windows":
        """At most `count` windows that do not overlap, evenly spread over the text."""
        count = min(count, len(text) // context)
        return cls(text, torch.arange(count) * (len(text) // context) // count * context, context)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        start = int(self.starts[i])
        window = self.text[start : start + self.context].long()
        labels = window.clone()
        labels[0] = IGNORED
        return {"input_ids": window, "labels": labels}


class Rows(Dataset):
    """Rows of tokens with labels, filled by a rule: the base of the classes below.

    input_ids, labels: int32 `[rows, tokens]`; the model predicts label t from the tokens before t, and labels
    of IGNORED do not count. group: int64 `[rows]`, what the answers of a row are counted under.
    """

    def __init__(self, rows: int, length: int):
        self.input_ids = torch.zeros(rows, length, dtype=torch.int32)
        self.labels = torch.full((rows, length), IGNORED, dtype=torch.int32)
        self.group = torch.zeros(rows, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.input_ids[i].long(), "labels": self.labels[i].long()}


class Recall(Rows):
    """Multi-query associative recall (MQAR; Arora et al. 2023, "Zoology", section 4 and appendix E).

    A row holds `pairs` keys, each followed by its value, then every key once more as a query; the label
    after a query is its value, all other labels are ignored. Keys come from the lower half of the
    vocabulary, values from the upper half, both without repetition; token 0 fills the rest. How far after
    the last pair a query stands follows a power law with density distance^(power - 1).

    count: number of rows. length: tokens in a row, at least 4 * max(pairs). pairs: a list of numbers of
    pairs; row i has pairs[i % len(pairs)], which is its group.
    Row for row the same for the same seed.
    """

    def __init__(
        self, count: int, length: int, pairs: list[int], vocab_size: int, seed: int, power: float = 0.01
    ):
        if 4 * max(pairs) > length:
            raise ValueError(f"length {length} is below the {4 * max(pairs)} tokens of {max(pairs)} pairs")
        if max(pairs) >= vocab_size // 2:
            raise ValueError(f"vocab_size {vocab_size} has too few keys for {max(pairs)} pairs")
        super().__init__(count, length)
        draw = torch.Generator().manual_seed(seed)
        self.group = torch.tensor(pairs)[torch.arange(count) % len(pairs)]
        for number in sorted(set(pairs)):
            rows = (self.group == number).nonzero()[:, 0]
            for part in rows.split(4096):  # bounds the memory that drawing without repetition takes
                self._fill(part, number, vocab_size, power, draw)

    def _fill(self, rows: torch.Tensor, pairs: int, vocab_size: int, power: float, draw: torch.Generator):
        half, length = vocab_size // 2, self.input_ids.shape[1]
        keys = 1 + torch.rand(len(rows), half - 1, generator=draw).topk(pairs, dim=1).indices
        values = half + torch.rand(len(rows), half, generator=draw).topk(pairs, dim=1).indices
        # Gumbel's trick: the largest of log-weight + Gumbel noise are draws without repetition.
        spots = (length - 2 * pairs) // 2
        weight = (power - 1) * torch.log(torch.arange(1, spots + 1, dtype=torch.float64))
        noise = torch.rand(len(rows), spots, generator=draw, dtype=torch.float64).clamp_min(1e-300)
        spot = (weight - torch.log(-torch.log(noise))).topk(pairs, dim=1).indices
        query = 2 * pairs + 2 * spot
        rows = rows[:, None]
        place = torch.arange(pairs)
        self.input_ids[rows, 2 * place] = keys.int()
        self.input_ids[rows, 2 * place + 1] = values.int()
        self.input_ids[rows, query] = keys.int()
        self.labels[rows, query + 1] = values.int()


def cyclic(order: int) -> torch.Tensor:
    """The multiplication table `[order, order]` of the cyclic group, by the numbers of its elements."""
    element = torch.arange(order)
    return (element[:, None] + element) % order


def symmetric(points: int) -> torch.Tensor:
    """The multiplication table of the permutations of points, in lexicographic order: a b applies b first."""
    elements = list(itertools.permutations(range(points)))
    number = {element: i for i, element in enumerate(elements)}
    return torch.tensor([[number[tuple(a[i] for i in b)] for b in elements] for a in elements])


class Products(Rows):
    """State tracking in a finite group (the word problem; Grazzi et al. 2025, Siems et al. 2025).

    A row is `length` elements x_0, x_1, ... of the group, drawn uniformly; label t is their product before t,
    x_{t-1} ... x_1 x_0, from t = 1 on. Element 0 is the identity.

    table: the group's multiplication table, as `cyclic` and `symmetric` make it. since: the first label that
    counts. A row's group is its length. Row for row the same for the same seed.
    """

    def __init__(self, count: int, length: int, table: torch.Tensor, seed: int, since: int = 1):
        if not 0 < since < length:
            raise ValueError(f"since is {since}; expected a place from 1 to {length - 1}")
        super().__init__(count, length)
        draw = torch.Generator().manual_seed(seed)
        elements = torch.randint(len(table), (count, length), generator=draw)
        self.input_ids.copy_(elements)
        self.group.fill_(length)
        product = elements[:, 0]
        for t in range(1, length):
            if t >= since:
                self.labels[:, t] = product.int()
            product = table[elements[:, t], product]


class Needles(Rows):
    """A needle in a haystack of random tokens: one key and its value, and the key again at the end.

    The label of the last token is the value, all other labels are ignored. Keys are the tokens of the lower
    quarter of the vocabulary, values those of the second quarter, hay those of the upper half; the last token
    itself is token 0, which is no key.

    count: number of rows. length: tokens in a row, at least 4 + depths. depths: into how many equal parts the
    places of the needle are divided; row i has its needle in part i % depths, at a place drawn uniformly,
    and that part, from 0 on, is its group. Row for row the same for the same seed.
    """

    def __init__(self, count: int, length: int, vocab_size: int, seed: int, depths: int = 4):
        if length < 4 + depths:
            raise ValueError(f"length {length} is below the {4 + depths} tokens of {depths} depths")
        if vocab_size < 8:
            raise ValueError(f"vocab_size {vocab_size} is below 8")
        super().__init__(count, length)
        draw = torch.Generator().manual_seed(seed)
        quarter = vocab_size // 4

        def drawn(least: int, end: int, *shape: int) -> torch.Tensor:
            return torch.randint(least, end, shape, generator=draw, dtype=torch.int32)

        self.input_ids[:] = drawn(2 * quarter, vocab_size, count, length)
        key, value = drawn(1, quarter, count), drawn(quarter, 2 * quarter, count)
        self.group = torch.arange(count) % depths
        places = length - 3  # of the first of the needle's two tokens
        edge = torch.arange(depths + 1) * places // depths
        width = edge.diff()[self.group]
        share = torch.rand(count, generator=draw, dtype=torch.float64)
        place = edge[self.group] + (share * width).long()
        row = torch.arange(count)
        self.input_ids[row, place], self.input_ids[row, place + 1] = key, value
        self.input_ids[:, -2], self.input_ids[:, -1] = key, 0
        self.labels[:, -1] = value
