"""The benchmark except for its measurements: shapes, files of results, table and figure."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"
sys.path.insert(0, str(BENCH))

import bench
import floor
import inputs
import measure
import report
import results
import torch
from peers import PEERS
from shapes import SHAPES

ALL_SHAPES = [shape for op in SHAPES for shape in SHAPES[op]]


def names(shapes):
    return [f"{shape.op}-{shape.name}" for shape in shapes]


def entry(shape, ours=1.0, peer=3.0, **more):
    """A result with the figure `ours` for girih and the figure `peer` for every peer."""
    keys = [*shape.measures, "first_call_s", *([] if shape.is_step else ["peak_bytes"])]
    return {
        "shape": json.loads(json.dumps(shape.record())),
        "date": "2026-01-01",
        "device": "a card",
        "torch": "2.11.0",
        "floor": dict.fromkeys(shape.measures, 0.5),
        "ours": dict.fromkeys(keys, ours),
        "peers": {name: dict.fromkeys(keys, peer) | {"version": "a peer 1.0"} for name in shape.peers},
    } | more


def test_shapes_have_unique_names_and_known_peers():
    assert len(set(names(ALL_SHAPES))) == len(ALL_SHAPES)
    assert all(peer in PEERS for shape in ALL_SHAPES for peer in shape.peers)


def small(shape):
    small_sizes = {"B": 1, "N": 1, "H": 1, "Q": 1, "X": 8, "T": min(shape.sizes["T"], 32)}
    small_sizes["R"] = small_sizes["T"] * shape.sizes.get("n", 1)
    return replace(shape, sizes={letter: small_sizes.get(letter, n) for letter, n in shape.sizes.items()})


@pytest.mark.parametrize("shape", ALL_SHAPES, ids=names(ALL_SHAPES))
def test_every_shape_runs(shape):
    """At a small size on the CPU: the inputs fit the operator, every input gets a gradient, the floor is
    positive."""
    shape = small(shape)
    keywords = inputs.draw(shape, "cpu")
    runs = measure.Runs(inputs.call(shape), keywords)
    o = runs.forward()
    assert o.isfinite().all()
    least = floor.milliseconds(shape, keywords, o, {"bytes": 1e9, "flops": 1e9})
    assert least.keys() == set(shape.measures) and min(least.values()) > 0
    if not shape.is_step:
        assert all(grad is not None for grad in runs.forward_backward())


TORCH_PEERS = [
    (shape, peer) for shape in ALL_SHAPES for peer in shape.peers if peer in ("girih gsa", "dense sdpa")
]


@pytest.mark.parametrize(
    "shape, peer", TORCH_PEERS, ids=[f"{s.op}-{s.name}-{peer}" for s, peer in TORCH_PEERS]
)
def test_peers_that_need_no_package_run(shape, peer):
    shape = small(shape)
    keywords = inputs.draw(shape, "cpu")
    runs = measure.Runs(*PEERS[peer](shape, keywords))
    assert runs.forward().shape == inputs.call(shape)(**keywords).shape
    assert all(grad is not None for grad in runs.forward_backward())


def test_floor_of_attention_is_products_and_floor_of_gsa_is_bytes():
    """At the H200's rates: 0.055 ms for q, k, v, s, o in bf16 and g in fp32, 0.1 ms for 16384 rows of CAT."""
    rates = {"bytes": 4.28e12, "flops": 690e12}
    for shape, least in ((SHAPES["gsa"][0], 0.0549), (SHAPES["cat_attention"][1], 0.1011)):
        keywords = {
            name: torch.empty(
                [shape.sizes[letter] for letter in letters],
                dtype=torch.float32 if kind == "gate" else torch.bfloat16,
                device="meta",
            )
            for name, (letters, kind) in shape.case.data.items()
        }
        found = floor.milliseconds(shape, keywords, keywords["v"], rates)
        assert found["forward"] == pytest.approx(least, abs=1e-4)


EXPECTED_FLOPS = {
    "gsa": 10_368,  # 48 tokens of a head, 2 memories of 6 x (4 or 5), written and read: 4 6 (4 + 5)
    "gla": 3_840,  # 4 x 5, written and read
    "delta_product": 9_600,  # 4 x 5, twice read and written, and read for the output: 5 2 4 5
    "trellis": 15_552,  # 2 memories, each read, written and read: 6 6 (4 + 5)
    "ttt": 6_912,  # one memory: 6 6 4
    "lattice": 9_216,  # 4 x 6, against k and h, written and read: 8 4 6
    "cat_attention": 2_592,  # on average (2 + 4) / 2 of the rows and headers of chunks of 4: 6 (4 + 5)
    "short_conv": 768,  # 16 tokens, 6 channels, 4 taps
}
LETTERS = {"B": 2, "T": 8, "H": 3, "Q": 3, "D": 4, "V": 5, "M": 6, "n": 2, "R": 16, "X": 6, "W": 4}


@pytest.mark.parametrize("op", EXPECTED_FLOPS)
def test_floor_matches_counts_by_hand(op):
    """First one byte takes a millisecond, then one product."""
    shape = SHAPES[op][0]
    options = {name: 4 if name == "chunk" else value for name, value in shape.case.options.items()}
    shape = replace(shape, case=replace(shape.case, options=options), sizes=LETTERS)
    assert not shape.is_step
    x, o = torch.empty(10, dtype=torch.bfloat16), torch.empty(7, dtype=torch.bfloat16)
    keywords = {"q": x, "state": (x, None, x.float()), "chunk": 4, "scale": 0.5, "feature": "softmax"}
    by_bytes = floor.milliseconds(shape, keywords, o, {"bytes": 1e3, "flops": 1e12})
    assert by_bytes == {"forward": 80 + 14, "forward_backward": 3 * 80 + 2 * 14}
    by_products = floor.milliseconds(shape, keywords, o, {"bytes": 1e12, "flops": 1e3})
    factor = 3.5 if op == "cat_attention" else 3
    assert by_products == {"forward": EXPECTED_FLOPS[op], "forward_backward": factor * EXPECTED_FLOPS[op]}
    step = replace(shape, sizes=LETTERS | {"T": 1})
    if op in ("gsa", "gla"):  # the state is read and written
        assert floor.milliseconds(step, keywords, o, {"bytes": 1e3, "flops": 1e12}) == {"step": 80 + 60 + 14}


def test_entry_replaces_only_its_own_shape(tmp_path):
    first, second = SHAPES["gsa"][:2]
    assert results.store_entry(tmp_path, second, entry(second))
    assert results.store_entry(tmp_path, first, entry(first))
    assert results.store_entry(tmp_path, first, entry(first, ours=2.0))
    found = results.entries(tmp_path, "gsa")
    assert list(found) == [first.name, second.name]
    assert found[first.name]["ours"]["forward"] == 2.0 and found[second.name]["ours"]["forward"] == 1.0


def test_entry_without_peers_does_not_replace_one_with_peers(tmp_path):
    shape = SHAPES["gsa"][0]
    alone = entry(shape, ours=2.0, peers={})
    assert results.store_entry(tmp_path, shape, alone)
    assert results.store_entry(tmp_path, shape, entry(shape))
    assert not results.store_entry(tmp_path, shape, alone)
    assert results.entries(tmp_path, "gsa")[shape.name]["ours"]["forward"] == 1.0


def test_entry_of_another_shape_is_ignored(tmp_path):
    shape = SHAPES["gsa"][0]
    other = replace(shape, sizes=shape.sizes | {"V": 8})
    results.store_entry(tmp_path, shape, entry(shape) | {"shape": other.record()})
    assert results.entries(tmp_path, "gsa") == {}


def test_table_has_ratios_and_blanks(tmp_path):
    for shape in ALL_SHAPES:
        results.store_entry(
            tmp_path, shape, entry(shape, peers={} if shape.op == "gla" else entry(shape)["peers"])
        )
    text = report.table(report.read(tmp_path))
    for shape in ALL_SHAPES:
        measured = [] if shape.op == "gla" else shape.peers
        for peer in measured or [""]:
            row = next(
                line
                for line in text.splitlines()
                if line.startswith(f"| `{shape.op}` {shape.name} | {peer} |")
            )
            assert row.count("3.00x") == (len(shape.measures) if measured else 0)
    assert "a card, torch 2.11.0, a peer 1.0, 2026-01-01" in text


def test_error_of_a_peer_is_shown():
    shape = SHAPES["gsa"][0]
    failed = entry(shape, peers={"chunk_gsa": {"error": "OutOfMemoryError: too large", "version": "1"}})
    assert "OutOfMemoryError: too large" in "\n".join(report.lines(shape, failed))
    assert "3.00x" not in report.table([(shape, failed)])


def test_the_figure_is_drawn(tmp_path):
    shapes = [SHAPES["gsa"][0], SHAPES["cat_attention"][0], SHAPES["gsa"][-1]]
    report.draw([(shape, entry(shape)) for shape in shapes], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def figures(monkeypatch):
    """The saved figures. Their files are empty."""
    from matplotlib.figure import Figure

    saved = []

    def save(figure, file, **options):
        saved.append(figure)
        file.touch()

    monkeypatch.setattr(Figure, "savefig", save)
    return saved


def test_speedups_are_the_time_of_the_peer_over_the_time_of_girih(figures, tmp_path):
    """Time of the peer over the time of girih, from the smallest to the largest over the shapes of an
    operator."""
    first, second = SHAPES["gsa"][:2]
    other = next(shape for shape in SHAPES["cat_attention"] if shape.peers[0] == "dense sdpa")
    rows = [(first, entry(first, 0.5, 2.0)), (second, entry(second, 1.0, 1.5)), (other, entry(other))]
    report.draw_speedups(rows, tmp_path / "speedups.png")
    times, calls = figures[0].axes
    plotted = [line.get_xdata() for line in times.lines]
    # a line and points for each measure, and the line at 1
    assert [list(x) for x in plotted] == [[1.5, 4.0]] * 4 + [[1, 1]]
    assert [text.get_text() for text in times.texts] == ["1.5 to 4.0"] * 2
    longest = [bar.get_width() for bar in calls.patches]  # longest first calls: girih, peer
    assert longest == pytest.approx([1.0, 2.0])
    assert (tmp_path / "speedups.png").exists()


def test_bars_show_milliseconds_and_ratios(figures, tmp_path):
    shape = SHAPES["gsa"][0]
    report.draw([(shape, entry(shape, 0.5, 2.0))], tmp_path / "figure.png")
    for panel in figures[0].axes:
        assert [bar.get_width() for bar in panel.patches] == [0.5, *[2.0] * len(shape.peers)]
        shown = [text.get_text().strip() for text in panel.texts]
        assert shown == ["0.500", *["2.000 (4.00x)"] * len(shape.peers)]


def test_unknown_names_are_refused():
    for arguments in ((["gaussian"], None), (["gsa"], ["4x4"])):
        with pytest.raises(SystemExit) as stop:
            bench.select_shapes(*arguments)
        assert stop.value.code == 2
    assert bench.select_shapes(["gla"], None) == SHAPES["gla"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_error_is_one_line(capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main([])
    assert stop.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("name", ["CAT C=8", "Transformer"])
@torch.no_grad()
def test_measured_decoder_generates_the_text_of_the_model(name):
    """At a small size on the CPU, without graphs: token by token with a preallocated cache, twice."""
    import generation
    from girih.models import GirihConfig, GirihForCausalLM

    small = {"vocab_size": 31, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2}
    small |= {"initializer_range": 0.3}
    if "CAT" in name:
        small |= {"compressor_hidden_size": 16, "compressor_layers": 1}
    torch.manual_seed(0)
    model = GirihForCausalLM(GirihConfig(**generation.models()[name] | small)).eval()
    first, length = torch.tensor([[3], [9]]), 30
    expected = model.generate(first, max_new_tokens=length - 1, do_sample=False)
    decoder = generation.Decoder(model, 2, length)
    chunk_ends = []
    for _ in range(2):
        decoder.go_to(0)
        decoder.token.copy_(first)
        generated = [first]
        for t in range(length - 1):
            chunk_ends.append(decoder.ends(t))
            decoder.step()
            generated.append(decoder.token.clone())
        assert torch.cat(generated, 1).equal(expected)
    assert sum(chunk_ends) == (2 * 3 if "CAT" in name else 0)
    slots = 7 + 16 if "CAT" in name else length
    assert decoder.bytes_of_a_sequence() == 2 * 2 * slots * 32 * 4


def test_table_of_generation_compares_within_a_length():
    import generation

    row = {"parameters": 1, "batch": 2, "cache_bytes": 2**20, "ms_a_step": 1.0, "tokens_per_second": 300}
    slow = row | {"cache_bytes": 8 * 2**20, "tokens_per_second": 100}
    rows = {"1024": {"CAT C=8": row, "Transformer": slow}}
    text = generation.table(
        {"texts": {"rows": rows, "device": "a card", "versions": "torch", "date": "2026-01-01"}}
    )
    assert "| 300 | 3.00x | 1.0 | 8.0x less |" in text


def test_rows_of_generation_are_stored_one_by_one(monkeypatch, tmp_path):
    import generation

    def fail_after_one(make, batches):
        yield batches[0], row
        raise RuntimeError("the program ends early")

    row = {"parameters": 1, "ms_a_token": 2.0, "mean_ms": 2.0}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    for name, value in (
        ("require_gpu", lambda: None),
        ("free_memory", lambda: None),
        ("decoders", lambda: dict.fromkeys(("GSA", "fla GSA"), (None, {}))),
        ("time_of_a_token", lambda *_: row),
        ("PROGRAM", Path(sys.executable)),
        ("IN_CPP", ("GSA",)),
        ("times_in_cpp", fail_after_one),
    ):
        monkeypatch.setattr(generation, name, value)
    with pytest.raises(RuntimeError, match="ends early"):
        generation.main(["--folder", str(tmp_path), "--part", "tokens"])
    rows = json.loads((tmp_path / "generation.json").read_text())["tokens"]["rows"]
    assert rows["1"] == dict.fromkeys(("GSA", "fla GSA", "GSA in C++"), row)
    assert rows["128"] == {"GSA": row}


def test_table_of_tokens_compares_with_the_compiled_llama():
    import generation

    row = {"parameters": 1000, "ms_a_token": 1.5, "mean_ms": 1.75}
    tokens = {"1": {"GSA": row, "Llama, compiled": row | {"ms_a_token": 2.0}}, "128": {"GSA": row}}
    text = generation.table_of_tokens(
        {"tokens": {"rows": tokens, "device": "a card", "versions": "torch", "date": "2026-01-01"}}
    )
    assert (
        "| 1 | GSA | 1,000 | 1.5 | 0.75x | 1.75 |  |" in text
        and "| 128 | GSA | 1,000 | 1.5 |  | 1.75 |  |" in text
    )


def test_output_of_girih_generate_is_parsed(monkeypatch):
    import generation
    from girih.models import GirihConfig, GirihForCausalLM

    if not generation.PROGRAM.exists():
        pytest.skip("the programs were not built here")
    monkeypatch.setattr(generation, "NEW", 5)
    sizes = {"vocab_size": 32000, "hidden_size": 16, "num_heads": 1, "num_hidden_layers": 1, "num_slots": 4}
    rows = dict(generation.times_in_cpp(lambda: GirihForCausalLM(GirihConfig(**sizes)), (1, 2), device="cpu"))
    assert [*rows] == [1, 2]
    for row in rows.values():
        assert 0 < row["ms_a_token"] < 1e4 and 0 < row["start_s"] < 60 and row["parameters"] > 32000 * 16
