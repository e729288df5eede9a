"""Fills the tables of README.md and docs/ from the files of results and from the library: `make docs`.

A page has a table between `<!-- table NAME -->` and `<!-- end -->`. The script rewrites all lines between
these marks. With `--check` nothing is written, and the pages that would change are named.
"""

import json
import sys
import textwrap
from pathlib import Path

from report import draw_speedups, markdown, mib, ms, ratio, read, table
from results import FOLDER, write
from shapes import CALLS, HALF, README_SHAPES, cases

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def read_results(name):
    """The file of results of a benchmark."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def speed():
    """A few shapes, compared with the best public code."""
    found = {(shape.op, shape.name): (shape, entry) for shape, entry in read(FOLDER)}
    cells = []
    for op, name, title in README_SHAPES:
        shape, entry = found[op, name]
        ours, peer = entry["ours"], next(iter(entry["peers"].values()))
        row = [title, " x ".join(str(shape.sizes[letter]) for letter in "BTHD")]
        for measure in shape.measures:
            row += [ms(ours[measure]), ms(peer[measure]), ratio(ours[measure], peer[measure])]
        cells.append([*row, mib(ours["peak_bytes"]), mib(peer["peak_bytes"])])
    return markdown(
        [
            *["operator", "B x T x H x D", "forward, ms", "peer", "speedup"],
            *["forward + backward, ms", "peer", "speedup", "peak MiB", "peer"],
        ],
        cells,
    )


def models():
    """Training and decoding of whole models."""
    found = read_results("model")["models"]
    trained = [
        [
            name,
            f"{entry['parameters'] / 1e6:.0f}M",
            f"{entry['tokens_per_second']:,}",
            str(entry.get("card_ms", "")),
            f"{entry['peak_bytes'] / 2**30:.1f}",
            entry["date"],
            entry["versions"],
        ]
        for name, entry in found.items()
        if "parameters" in entry
    ]
    speeds = ["tokens/s in training", "the card's ms a step"]
    return markdown(["model", "parameters", *speeds, "peak GiB", "date", "with"], trained)


def accelerated_layers():
    """Layers of transformers before and after girih.accelerate."""
    import accelerated

    return accelerated.table(read_results("accelerate"))


def accelerated_sentence():
    """A description of girih.accelerate, with the times of a Qwen3-Next layer."""
    rows = read_results("accelerate")["rows"]
    ours, theirs = (rows["Qwen3-Next layer"][side] for side in ("girih", "transformers"))
    text = (
        "`girih.accelerate(model)` runs the linear layers of transformers' Qwen3-Next, Qwen3.5, OLMo-hybrid, "
        "Mamba-2, Bamba, Falcon-H1, Granite 4, Nemotron-H, Zamba2 and MiniMax on these kernels. Weights stay "
        "the same, and results differ by rounding only. On an H200 the forward pass of a Qwen3-Next layer "
        f"takes {ms(ours['forward'])} ms, with transformers' PyTorch code {ms(theirs['forward'])} ms; "
        f"forward and backward take {ms(ours['forward_backward'])} ms, with transformers' code "
        f"{ms(theirs['forward_backward'])} ms ([accelerate](docs/accelerate.md))."
    )
    return textwrap.fill(text, 118) + "\n"


def bounds(entry):
    least, most = (f"{entry[end]:g}" if end in entry else None for end in ("least", "most"))
    return f"{least} to {most}" if most else f"at least {least}"


def format_option(option):
    text = f"`{option['name']}`"
    if "words" in option:
        text += f" ({', '.join(option['words'])})"
    elif "least" in option:
        text += f" ({bounds(option)})"
    return text + (f" = {option['default']}" if option.get("default") is not None else "")


def arguments():
    """Tensors, options and sizes of every operator, from `girih.ops.describe()`."""
    from girih import ops

    def format_tensors(tensors):
        return ", ".join(
            f"`{t['name'].removeprefix('state_')}`{'?' * t['optional']} {t['shapes']}" for t in tensors
        )

    text = ""
    for name, op in ops.describe().items():
        lines = {
            "tensors": format_tensors(t for t in op["tensors"] if not t["state"]),
            "state": format_tensors(t for t in op["tensors"] if t["state"]),
            "options": ", ".join(map(format_option, op["options"])),
            "sizes": ", ".join(f"{n} {bounds(size)}" for n, size in op["sizes"].items() if "most" in size),
        }
        text += f"**`{name}`** returns `{op['output']['name']}` {op['output']['shapes']}\n\n"
        text += "".join(f"- {title}: {line}\n" for title, line in lines.items() if line) + "\n"
    return text


def explain_on_gpu(case, sizes, dtype):
    """Path and reason of a call on a GPU, from `girih.ops.explain`."""
    from girih import ops

    inputs = case.draw(2, dtype=dtype, **sizes)
    return ops.explain(case.op, **cases.arguments(inputs), device="cuda")


def paths():
    """Paths of calls that differ in their path."""
    several = {case.op for _, case, _, _ in CALLS}
    one = [("all", case, {}, HALF) for case in cases.ONE_EACH if case.op not in several]
    rows = [
        [f"`{case.op}`", title, *explain_on_gpu(case, sizes, dtype)]
        for title, case, sizes, dtype in [*CALLS[:-1], *one, CALLS[-1]]
    ]
    return markdown(["operator", "call", "path", "why"], rows).replace("---:", "---")


def precision():
    """Precision of products, by the dtype of the inputs."""
    on_tensor_cores = dict.fromkeys(
        f"`{case.op}`"
        for _, case, sizes, dtype in CALLS
        if explain_on_gpu(case, sizes, dtype).path == "tensor cores"
    )
    rows = [
        ["fp64", "fp64", "PyTorch's operators, CPU and CUDA"],
        [
            "fp32",
            "3xtf32 on the tensor cores: each number is split into two tf32 parts, and the product of the "
            "two low parts is left out; relative error 2^-22",
            "`delta_product`, and `cat_attention` up to 128 wide (`explain` calls the path of "
            "`delta_product` `fp32`)",
        ],
        ["fp32", "fp32, never tf32", "all other calls: kernels without tensor cores, or PyTorch's operators"],
        [
            "bf16, fp16",
            "16-bit factors, sums in fp32, on the tensor cores",
            f"{', '.join(on_tensor_cores)}, for [the calls that have such kernels](operators.md#paths); "
            "`girih.ops.explain` names the path of a call",
        ],
        ["bf16, fp16", "as with fp32 inputs", "all other calls"],
    ]
    return markdown(["inputs", "products", "where"], rows).replace("---:", "---")


def first_calls():
    """Times of the first call of a process: girih, and the peers that tune themselves."""
    entries = [entry for shape, entry in read(FOLDER) if not shape.is_step]
    ours = max(entry["ours"]["first_call_s"] or 0 for entry in entries)
    tuned = [
        peer["first_call_s"]
        for entry in entries
        for name, peer in entry["peers"].items()
        if name.startswith("chunk_") and peer["first_call_s"]
    ]
    text = (
        f"The first forward and backward of a shape in a new process takes at most {ours:.2f} s, because "
        "nothing is compiled or tuned at run time. fla's kernels in chunk form are tuned at run time: their "
        f"first call takes {min(tuned):.0f} to {max(tuned):.0f} s."
    )
    return textwrap.fill(text, 118) + "\n"


def linear():
    """Growth of the time with the length, on a CPU."""
    rows = read_results("linear_cost")["rows"]
    lengths = list(rows[0]["seconds"])[-3:]  # the lengths that the exponents are fitted to
    most = max(row["exponent"] for row in rows)
    text = (
        f"On the CPU the time of an operator grows at most as its work to the power {most:.2f}, from "
        f"{lengths[0]} to {lengths[-1]} tokens. The work is the number of tokens; for `cat_attention` the "
        "work is the number of pairs of rows whose score is computed (`tests/bench/linear_cost.py`)."
    )
    return textwrap.fill(text, 118, initial_indent="- ", subsequent_indent="  ") + "\n"


def cells_of(folder):
    """Results of `make compare` in this folder, by task."""
    cells = {}
    for file in sorted((FOLDER / folder).glob("*.json")):
        cell = json.loads(file.read_text())
        cells.setdefault(cell["task"], []).append(cell)
    return dict(sorted(cells.items(), key=lambda item: item[0] != "text"))  # text first


def comparison_table(folder):
    from girih.comparison.table import table_of

    return table_of(cells_of(folder))


def draw_comparisons():
    from girih.comparison.table import draw

    for folder in ("compare", "compare-50m"):
        draw(cells_of(folder), FOLDER / folder / "figure.png")


def ahead_of_attention(text):
    """The mixers with fewer bits on text than attention, with their bits."""
    from girih.comparison.results import bits

    mean_bits = {mixer: runs.mean(bits) for mixer, runs in text.items()}
    ahead = sorted(
        (mixer for mixer in mean_bits if mean_bits[mixer] < mean_bits["attention"]), key=mean_bits.get
    )
    return " and ".join(f"`{mixer}` ({mean_bits[mixer]:.2f})" for mixer in ahead)


def best_of_mixers(folder, name):
    """The cells of each mixer at its best learning rate, for one task of this folder."""
    from girih.comparison.results import best_of, rows_of
    from girih.comparison.tasks import TASKS

    rows = rows_of(TASKS[name], cells_of(folder)[name])
    return {row.mixer: runs for row, runs in best_of(TASKS[name], rows).items()}


def quality():
    """Three sentences on the results of the comparison."""
    from girih.comparison.results import bits

    rates = len({cell["settings"]["learning_rate"] for cell in cells_of("compare")["text"]})
    best = {name: best_of_mixers("compare", name) for name in ("text", "mqar")}
    larger = best_of_mixers("compare-50m", "text")
    larger_reference, reference = larger["attention"], best["text"]["attention"]
    recall = best["mqar"]["attention"].settings
    learned = {mixer: runs.steps for mixer, runs in best["mqar"].items() if runs.learned}
    first = min(learned, key=learned.get)
    size = reference.settings["batch"] * reference.settings["context"] * reference.steps
    text = (
        f"In bits per byte of Python source, attention ({reference.mean(bits):.2f}) is behind "
        f"{ahead_of_attention(best['text'])} at {reference.parameters / 1e6:.0f}M parameters, "
        f"{size / 1e6:.1f}M bytes and the best of {rates} rates; at {larger_reference.parameters / 1e6:.0f}M "
        f"attention ({larger_reference.mean(bits):.2f}) is behind {ahead_of_attention(larger)}. "
        f"{len(learned)} of {len(best['mqar'])} mixers learn to recall {recall['pairs'][-1]} pairs in "
        f"{recall['steps']:,} steps, `{first}` in {learned[first]:,} ([comparison](docs/comparison.md))."
    )
    return textwrap.fill(text, 118) + "\n"


def conversions():
    """How the study of conversions was made, and its table."""
    import curves

    result = read_results("conversion")
    return curves.describe_study(result) + "\n" + curves.table(result)


def converted_models():
    """Costs of converted models in training and generation, or a note that they are not measured."""
    import converted_llama

    file = FOLDER / "converted.json"
    return converted_llama.table(json.loads(file.read_text())) if file.exists() else "Not measured yet.\n"


def tokens():
    """Time of a token of generate(), for girih and for others."""
    import generation

    return generation.table_of_tokens(read_results("generation"))


def tokens_of_cat():
    """Time of a token of CAT, compared with attention."""
    import generation

    return generation.table_of_cat(read_results("generation"))


def texts():
    """Generation by CAT, compared with Transformers."""
    import generation

    return generation.table(read_results("generation"))


def draw_conversions():
    import curves

    curves.draw(read_results("conversion"), FOLDER / "conversion.png")


TABLES = {
    "speed": speed,
    "quality": quality,
    "operators": lambda: table(read(FOLDER)),
    "models": models,
    "accelerate": accelerated_layers,
    "accelerated": accelerated_sentence,
    "arguments": arguments,
    "paths": paths,
    "precision": precision,
    "first calls": first_calls,
    "linear": linear,
    "conversion": conversions,
    "converted": converted_models,
    "tokens": tokens,
    "tokens of cat": tokens_of_cat,
    "texts": texts,
    "comparison": lambda: comparison_table("compare"),
    "comparison at 50M": lambda: comparison_table("compare-50m"),
    "papers' tasks": lambda: comparison_table("compare-tasks"),
}


def fill_tables(text):
    """The page with every table rewritten."""
    start, *parts = text.split("<!-- table ")
    for part in parts:
        name, rest = part.split(" -->\n", 1)
        start += f"<!-- table {name} -->\n{TABLES[name]()}<!-- end -->{rest.split('<!-- end -->', 1)[1]}"
    return start


def main(check=False):
    stale = [page for page in PAGES if fill_tables(page.read_text()) != page.read_text()]
    if not check:
        for page in stale:
            write(page, fill_tables(page.read_text()))
        draw_speedups(read(FOLDER), FOLDER / "speedup.png")
        draw_conversions()
        draw_comparisons()
    names = ", ".join(str(page.relative_to(ROOT)) for page in stale)
    print(f"{'stale' if check else 'written'}: {names or 'no page'}")
    return bool(stale) and check


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
