import pytest
import torch
from girih.data import IGNORED, CorpusError, Recall, Windows, read_corpus


@pytest.fixture
def numbered(tmp_path):
    """Two files of lines that are all different, longer than the stretches that a corpus is cut into."""
    for name, first in (("a.txt", 0), ("b.txt", 10_000)):
        (tmp_path / name).write_text("".join(f"{first + i:07d}\n" for i in range(10_000)))
    return tmp_path


def lines(text: torch.Tensor) -> set[bytes]:
    return {line for line in bytes(text.tolist()).split(b"\n") if len(line) == 7}


def test_no_held_out_line_is_in_the_training_text(numbered):
    corpus = read_corpus(numbered)
    assert len(corpus.train) + len(corpus.held_out) == 160_000
    assert len(lines(corpus.held_out)) > 900
    assert not lines(corpus.train) & lines(corpus.held_out)


def test_a_corpus_is_the_same_however_the_files_were_made(numbered, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    for name in ("b.txt", "a.txt"):
        (other / name).write_bytes((numbered / name).read_bytes())
    first, second = read_corpus(numbered), read_corpus(other)
    assert first.digest == second.digest and torch.equal(first.train, second.train)


def test_copies_hidden_files_links_binaries_and_runs_are_left_out(numbered):
    before = read_corpus(numbered).digest
    (numbered / "copy.txt").write_bytes((numbered / "a.txt").read_bytes())
    (numbered / ".hidden").write_text("x" * 5000)
    (numbered / "run" / "model").mkdir(parents=True)
    (numbered / "run" / "arguments.json").write_text("{}")
    (numbered / "run" / "model" / "config.json").write_text("y" * 5000)
    (numbered / "binary").write_bytes(b"\0" * 5000)
    (numbered / "link").symlink_to("a.txt")
    assert read_corpus(numbered).digest == before


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
    drawn = Windows.drawn(text, 500, 10, seed=1)
    assert torch.equal(drawn.starts, Windows.drawn(text, 500, 10, seed=1).starts)
    assert drawn.starts.min() == 0 and drawn.starts.max() == 90
    for i in range(500):
        ids, labels = drawn[i]["input_ids"], drawn[i]["labels"]
        assert torch.equal(ids, torch.arange(10) + drawn.starts[i])
        assert labels[0] == IGNORED and torch.equal(labels[1:], ids[1:])
    spread = Windows.spread(text, 6, 10)
    assert spread.starts.tolist() == [0, 10, 30, 50, 60, 80]


PAIRS = (2, 5, 8)


@pytest.fixture(scope="module")
def recall():
    return Recall(300, 64, PAIRS, 128, seed=3)


def test_every_answer_can_be_read_off_the_row_before_its_query(recall):
    for i in range(len(recall)):
        ids, labels = recall[i]["input_ids"], recall[i]["labels"]
        pairs = PAIRS[i % 3]
        memory = dict(zip(ids[: 2 * pairs : 2].tolist(), ids[1 : 2 * pairs : 2].tolist(), strict=True))
        assert len(memory) == pairs and all(0 < k < 64 <= v < 128 for k, v in memory.items())
        asked = (labels != IGNORED).nonzero()[:, 0]
        assert sorted(ids[asked - 1].tolist()) == sorted(memory)
        assert labels[asked].tolist() == [memory[k] for k in ids[asked - 1].tolist()]
        assert (asked > 2 * pairs).all() and (ids[2 * pairs :] > 0).sum() == pairs


def test_recall_is_drawn_by_seed(recall):
    same, other = Recall(300, 64, PAIRS, 128, seed=3), Recall(300, 64, PAIRS, 128, seed=4)
    assert torch.equal(same.input_ids, recall.input_ids) and torch.equal(same.labels, recall.labels)
    assert not torch.equal(other.input_ids, recall.input_ids)


def test_more_queries_stand_near_the_pairs_than_far_from_them(recall):
    rows = recall.labels[recall.pairs == 2]
    assert (rows[:, :24] != IGNORED).sum() > 2 * (rows[:, 40:] != IGNORED).sum()


@pytest.mark.parametrize("wrong", [{"length": 31}, {"vocab_size": 16}])
def test_rows_that_cannot_hold_the_pairs_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Recall(**{"count": 1, "length": 32, "pairs": (8,), "vocab_size": 128, "seed": 0} | wrong)
