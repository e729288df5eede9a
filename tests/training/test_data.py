import itertools

import pytest
import torch
from girih.data import (
    IGNORED,
    CorpusError,
    Needles,
    Products,
    Recall,
    Windows,
    cyclic,
    read_corpus,
    symmetric,
)


@pytest.fixture
def numbered_corpus(tmp_path):
    """Two files of distinct lines, longer than the parts into which a corpus is split."""
    for name, first in (("a.txt", 0), ("b.txt", 10_000)):
        (tmp_path / name).write_text("".join(f"{first + i:07d}\n" for i in range(10_000)))
    return tmp_path


def lines(text: torch.Tensor) -> set[bytes]:
    return {line for line in bytes(text.tolist()).split(b"\n") if len(line) == 7}


def test_no_held_out_line_is_in_the_training_text(numbered_corpus):
    corpus = read_corpus(numbered_corpus)
    assert len(corpus.train) + len(corpus.held_out) == 160_000
    assert len(lines(corpus.held_out)) > 900
    assert not lines(corpus.train) & lines(corpus.held_out)


def test_corpus_does_not_depend_on_the_order_of_file_creation(numbered_corpus, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    for name in ("b.txt", "a.txt"):
        (other / name).write_bytes((numbered_corpus / name).read_bytes())
    first, second = read_corpus(numbered_corpus), read_corpus(other)
    assert first.digest == second.digest and torch.equal(first.train, second.train)


def test_copies_hidden_files_links_binaries_and_runs_are_left_out(numbered_corpus):
    before = read_corpus(numbered_corpus).digest
    (numbered_corpus / "copy.txt").write_bytes((numbered_corpus / "a.txt").read_bytes())
    (numbered_corpus / ".hidden").write_text("x" * 5000)
    (numbered_corpus / "run" / "model").mkdir(parents=True)
    (numbered_corpus / "run" / "arguments.json").write_text("{}")
    (numbered_corpus / "run" / "model" / "config.json").write_text("y" * 5000)
    (numbered_corpus / "binary").write_bytes(b"\0" * 5000)
    (numbered_corpus / "link").symlink_to("a.txt")
    assert read_corpus(numbered_corpus).digest == before


def test_the_standard_library_is_the_corpus_when_none_is_named():
    corpus = read_corpus()
    assert len(corpus.train) > 5_000_000 and b"import" in bytes(corpus.held_out[:10_000].tolist())


@pytest.mark.parametrize("content", [None, "", "too short"])
def test_a_corpus_that_cannot_be_used_is_refused(tmp_path, content):
    file = tmp_path / "corpus.txt"
    if content is not None:
        file.write_text(content)
    with pytest.raises(CorpusError, match=r"corpus\.txt"):
        read_corpus(file)


def test_windows_are_drawn_by_seed_and_stay_in_the_text():
    text = torch.arange(100, dtype=torch.uint8)
    windows = Windows.drawn(text, 500, 10, seed=1)
    assert torch.equal(windows.starts, Windows.drawn(text, 500, 10, seed=1).starts)
    assert windows.starts.min() == 0 and windows.starts.max() == 90
    for i in range(500):
        ids, labels = windows[i]["input_ids"], windows[i]["labels"]
        assert torch.equal(ids, torch.arange(10) + windows.starts[i])
        assert labels[0] == IGNORED and torch.equal(labels[1:], ids[1:])
    spread = Windows.spread(text, 6, 10)
    assert spread.starts.tolist() == [0, 10, 30, 50, 60, 80]


PAIRS = (2, 5, 8)


@pytest.fixture(scope="module")
def recall():
    return Recall(300, 64, PAIRS, 128, seed=3)


def test_every_answer_is_in_the_row_before_its_query(recall):
    for i in range(len(recall)):
        ids, labels = recall[i]["input_ids"], recall[i]["labels"]
        pairs = PAIRS[i % 3]
        memory = dict(zip(ids[: 2 * pairs : 2].tolist(), ids[1 : 2 * pairs : 2].tolist(), strict=True))
        assert len(memory) == pairs and all(0 < k < 64 <= v < 128 for k, v in memory.items())
        queries = (labels != IGNORED).nonzero()[:, 0]
        assert sorted(ids[queries - 1].tolist()) == sorted(memory)
        assert labels[queries].tolist() == [memory[k] for k in ids[queries - 1].tolist()]
        assert (queries > 2 * pairs).all() and (ids[2 * pairs :] > 0).sum() == pairs


def test_recall_is_drawn_by_seed(recall):
    same, other = Recall(300, 64, PAIRS, 128, seed=3), Recall(300, 64, PAIRS, 128, seed=4)
    assert torch.equal(same.input_ids, recall.input_ids) and torch.equal(same.labels, recall.labels)
    assert not torch.equal(other.input_ids, recall.input_ids)


def test_most_queries_are_near_the_pairs(recall):
    rows = recall.labels[recall.group == 2]
    assert (rows[:, :24] != IGNORED).sum() > 2 * (rows[:, 40:] != IGNORED).sum()


@pytest.mark.parametrize("wrong", [{"length": 31}, {"vocab_size": 16}])
def test_rows_that_cannot_hold_the_pairs_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Recall(**{"count": 1, "length": 32, "pairs": (8,), "vocab_size": 128, "seed": 0} | wrong)


def test_labels_of_parity_are_the_parity_of_the_tokens_before():
    data = Products(50, 20, cyclic(2), seed=0)
    for i in range(len(data)):
        ids, labels = data[i]["input_ids"].tolist(), data[i]["labels"].tolist()
        assert labels[0] == IGNORED and set(ids) <= {0, 1}
        assert labels[1:] == [sum(ids[:t]) % 2 for t in range(1, 20)]


@pytest.mark.parametrize("points", [3, 5])
def test_labels_of_permutations_are_products_of_the_tokens_before(points):
    """The test applies one permutation after the other to the points."""
    elements = list(itertools.permutations(range(points)))
    data = Products(20, 30, symmetric(points), seed=0)
    for i in range(len(data)):
        ids, labels = data[i]["input_ids"].tolist(), data[i]["labels"].tolist()
        places = list(range(points))
        for t in range(1, 30):
            places = [elements[ids[t - 1]][place] for place in places]
            assert elements[labels[t]] == tuple(places)
    assert set(data.input_ids.unique().tolist()) <= set(range(len(elements)))
    assert data.input_ids.unique().numel() > 0.9 * len(elements)


@pytest.mark.parametrize("table", [cyclic(2), cyclic(5), symmetric(3), symmetric(4)])
def test_multiplication_tables_are_of_groups(table):
    every = torch.arange(len(table))
    assert torch.equal(table[0], every) and torch.equal(table[:, 0], every)
    assert all(torch.equal(row.sort().values, every) for row in (*table, *table.t()))
    assert torch.equal(table[table], table[every[:, None, None], table])  # (a b) c = a (b c)


def test_products_start_at_since_and_are_independent_of_later_tokens():
    every, last = (Products(40, 16, symmetric(3), seed=5, since=since) for since in (1, 12))
    assert torch.equal(every.input_ids, last.input_ids)
    assert (last.labels[:, :12] == IGNORED).all() and torch.equal(last.labels[:, 12:], every.labels[:, 12:])
    assert every.group.unique().tolist() == [16]
    # A product and the token at its position are independent: each is uniform given the other.
    data = Products(40_000, 3, symmetric(3), seed=1)
    pairs = torch.stack((data.labels[:, 2], data.input_ids[:, 2]), 1)
    _, times = pairs.unique(dim=0, return_counts=True)
    assert len(times) == 36 and (times.float() / (40_000 / 36) - 1).abs().max() < 0.2


def test_label_of_a_needle_is_the_value_after_its_key():
    data = Needles(200, 40, 64, seed=2)
    for i in range(len(data)):
        ids, labels = data[i]["input_ids"].tolist(), data[i]["labels"].tolist()
        assert set(labels[:-1]) == {IGNORED} and ids[-1] == 0
        key, haystack = ids[-2], ids[:-2]
        assert 0 < key < 16 and haystack.count(key) == 1
        place = haystack.index(key)
        assert haystack[place + 1] == labels[-1] and 16 <= labels[-1] < 32
        assert all(32 <= token < 64 for token in haystack[:place] + haystack[place + 2 :])


def test_needles_are_at_every_place():
    data = Needles(4000, 20, 64, seed=0)
    places = ((data.input_ids[:, :-2] > 0) & (data.input_ids[:, :-2] < 16)).nonzero()[:, 1]
    assert places.bincount().numel() == 17 and places.bincount().min() > 150
    assert torch.equal(data.group, torch.arange(4000) % 4)
    for depth in range(4):
        depth_places = places[data.group == depth]
        assert depth_places.min() == 17 * depth // 4 and depth_places.max() == 17 * (depth + 1) // 4 - 1


@pytest.mark.parametrize("kind", ["products", "needles"])
def test_rows_are_drawn_by_seed(kind):
    def draw_rows(seed):
        return Products(50, 16, symmetric(3), seed) if kind == "products" else Needles(50, 16, 64, seed)

    assert torch.equal(draw_rows(3).input_ids, draw_rows(3).input_ids)
    assert torch.equal(draw_rows(3).labels, draw_rows(3).labels)
    assert not torch.equal(draw_rows(3).input_ids, draw_rows(4).input_ids)


@pytest.mark.parametrize(
    "make, word",
    [
        (lambda: Products(1, 8, cyclic(2), 0, since=8), "since is 8"),
        (lambda: Products(1, 8, cyclic(2), 0, since=0), "since is 0"),
        (lambda: Needles(1, 7, 64, 0), "length 7"),
        (lambda: Needles(1, 64, 7, 0), "vocab_size 7"),
    ],
)
def test_invalid_rows_are_refused(make, word):
    with pytest.raises(ValueError, match=word):
        make()
