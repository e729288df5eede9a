"""Results as lines on the terminal, a Markdown table and a figure.

python tests/bench/report.py [FOLDER] writes table.md and figure.png from the results in FOLDER.
"""

import os
import sys
from pathlib import Path

from results import FOLDER, entries, write
from shapes import SHAPES

TITLES = {"forward": "forward", "forward_backward": "forward + backward", "step": "step, in a CUDA graph"}


def read(folder):
    """[(shape, entry)] of all results, in the order of the list of shapes."""
    return [
        (shape, found[shape.name])
        for op in SHAPES
        if (found := entries(folder, op))
        for shape in SHAPES[op]
        if shape.name in found
    ]


def ms(value):
    return "" if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def mib(value):
    return "" if value is None else f"{value / 2**20:,.0f}"


def seconds(value):
    return "" if value is None else f"{value:.2f}"


def ratio(ours, peer):
    """Time of the peer over the time of girih."""
    return "" if peer is None else f"{peer / ours:.2f}x"


def lines(shape, entry):
    """Lines on the terminal for one shape."""
    ours, peers = entry["ours"], entry["peers"]
    head = f"{shape.op} {shape.name}".ljust(36) + "floor".rjust(10) + "ours".rjust(10)
    result = [head + "".join(name.rjust(28) + "ratio".rjust(9) for name in peers)]

    def line(title, floor, show, key):
        row = "  " + title.ljust(34) + floor.rjust(10) + show(ours.get(key)).rjust(10)
        for peer in peers.values():
            other = peer.get(key)
            row += show(other).rjust(28) + (ratio(ours[key], other) if key in ours else "").rjust(9)
        result.append(row)

    for measure in shape.measures:
        line(f"{TITLES[measure]}, ms", ms(entry["floor"][measure]), ms, measure)
    if not shape.is_step:
        line("peak memory, MiB", "", mib, "peak_bytes")
    line("first call, s", "", seconds, "first_call_s")
    result += [f"  {name}: {peer['error']}" for name, peer in peers.items() if "error" in peer]
    return result


def rows(shape, entry):
    """Markdown cells: one row for every peer, or one row without a peer."""
    ours = entry["ours"]
    for name, peer in entry["peers"].items() or [("", {})]:
        cells = [f"`{shape.op}` {shape.name}", name]
        for measure in shape.measures:
            cells += [ms(entry["floor"][measure]), ms(ours[measure]), ms(peer.get(measure))]
            cells.append(ratio(ours[measure], peer.get(measure)))
        if not shape.is_step:
            cells += [mib(ours["peak_bytes"]), mib(peer.get("peak_bytes"))]
        yield [*cells, seconds(ours["first_call_s"]), seconds(peer.get("first_call_s"))]


def markdown(heads, cells):
    align = ["---", "---"] + ["---:"] * (len(heads) - 2)
    return "".join("| " + " | ".join(row) + " |\n" for row in (heads, align, *cells))


def origins(results):
    """Device and versions of the figures, one line for each combination."""
    found = {}
    for _, entry in results:
        versions = sorted({peer["version"] for peer in entry["peers"].values()} - {f"torch {entry['torch']}"})
        key = ", ".join([entry["device"], f"torch {entry['torch']}", *versions])
        found.setdefault(key, set()).add(entry["date"])
    return "".join(f"- {key}, {', '.join(sorted(dates))}\n" for key, dates in found.items())


def table(results):
    """Markdown of sequences, then of steps. Times are in milliseconds, memory in MiB, first
    calls in seconds."""

    def four(title):
        return [f"{title}: floor", "ours", "peer", "ratio"]

    sequences = [cells for shape, entry in results if not shape.is_step for cells in rows(shape, entry)]
    steps = [cells for shape, entry in results if shape.is_step for cells in rows(shape, entry)]
    first = ["first call, s: ours", "peer"]
    text = ""
    if sequences:
        heads = ["shape", "peer", *four("forward, ms"), *four("forward + backward, ms")]
        text += markdown([*heads, "peak MiB: ours", "peer", *first], sequences) + "\n"
    if steps:
        text += markdown(["shape", "peer", *four("step, ms"), *first], steps) + "\n"
    return text + origins(results)


def draw(results, file):
    """Times of girih and of the peers at every shape of a sequence, with the floor, on a log scale."""
    from matplotlib.figure import Figure

    results = [(shape, entry) for shape, entry in results if not shape.is_step]
    if not results:
        return
    figure = Figure(figsize=(11, 1.3 + 0.62 * len(results)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, measure in zip(panels, ("forward", "forward_backward"), strict=True):
        for i, (_, entry) in enumerate(results):
            ours = entry["ours"][measure]
            peers = [peer[measure] for peer in entry["peers"].values() if measure in peer]
            height = 0.8 / (1 + len(peers))
            axes.barh(i - 0.4 + height / 2, ours, height, color="C0")
            axes.text(ours, i - 0.4 + height / 2, f" {ms(ours)}", va="center", fontsize=8)
            for j, time in enumerate(peers, 1):
                y = i - 0.4 + (j + 0.5) * height
                axes.barh(y, time, height, color="0.6" if j == 1 else "0.8")
                axes.text(time, y, f" {ms(time)} ({ratio(ours, time)})", va="center", fontsize=8)
            least = entry["floor"][measure]
            axes.plot([least, least], [i - 0.42, i + 0.42], color="black", linewidth=1.5)
        axes.set(xscale="log", xlabel=f"{TITLES[measure]}, ms")
        left, right = axes.get_xlim()
        axes.set_xlim(left, right * 6)  # room for the numbers beside the bars
        axes.spines[["top", "right"]].set_visible(False)
    names = [
        "\n".join([f"{shape.op} {shape.name}", ", ".join(entry["peers"])]).rstrip()
        for shape, entry in results
    ]
    panels[0].set(yticks=range(len(results)), yticklabels=names)
    panels[0].set_ylim(len(results) - 0.4, -0.6)
    device = ", ".join(sorted({entry["device"] for _, entry in results}))
    figure.suptitle(f"blue: girih, grey: peers (times slower), black line: floor; {device}", fontsize=10)
    draft = file.with_name("part-" + file.name)
    figure.savefig(draft, dpi=100)  # the figure is long
    os.replace(draft, file)


def draw_speedups(results, file):
    """Speedups over the closest public code at every shape, and times of first calls."""
    from matplotlib.figure import Figure

    compared, labels = [], {}
    for shape, entry in results:
        name, peer = next(iter(entry["peers"].items()), ("", {}))
        # Softmax attention is another operator.
        if not shape.is_step and "forward_backward" in peer and name != "dense sdpa":
            compared.append((shape.op, entry["ours"], peer))
            labels.setdefault(shape.op, f"{shape.op}\n{name}")
    ops = list(labels)
    figure = Figure(figsize=(9, 0.9 + 0.75 * len(ops)), layout="constrained")
    times, first = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
    for i, op in enumerate(ops):
        rows = [(ours, peer) for name, ours, peer in compared if name == op]
        for y, color, measure in ((i - 0.17, "C0", "forward"), (i + 0.17, "C1", "forward_backward")):
            ratios = sorted(peer[measure] / ours[measure] for ours, peer in rows)
            times.plot([ratios[0], ratios[-1]], [y, y], color=color, linewidth=2, alpha=0.4)
            times.plot(ratios, [y] * len(ratios), "o", color=color, label=TITLES[measure] if i == 0 else None)
            times.text(ratios[-1] * 1.06, y, f"{ratios[0]:.1f} to {ratios[-1]:.1f}", va="center", fontsize=8)
        for y, color, calls in (
            (i - 0.17, "C2", [ours.get("first_call_s") for ours, _ in rows]),
            (i + 0.17, "0.5", [peer.get("first_call_s") for _, peer in rows]),
        ):
            if worst := max(filter(None, calls), default=None):
                first.barh(y, worst, 0.3, left=1e-3, color=color)
                first.text(
                    worst * 1.2,
                    y,
                    f"{worst:.3f} s" if worst < 1 else f"{worst:.0f} s",
                    va="center",
                    fontsize=8,
                )
    times.axvline(1, color="black", linewidth=1)
    times.set(xscale="log", xlabel="times as fast as public code, every shape measured")
    ticks = [1, 2, 3, 5, 10, 20]
    times.set(xticks=ticks, xticklabels=map(str, ticks), xlim=(0.8, 50))
    times.minorticks_off()
    times.set(yticks=range(len(ops)), yticklabels=labels.values(), ylim=(len(ops) - 0.5, -0.5))
    times.legend(loc="lower right", fontsize=8)
    first.set(xscale="log", xlim=(1e-3, 3e3), xlabel="first call of a process, s")
    first.set_title("green: girih, grey: public code", fontsize=9)
    for axes in (times, first):
        axes.spines[["top", "right"]].set_visible(False)
    draft = file.with_name("part-" + file.name)
    figure.savefig(draft, dpi=150)
    os.replace(draft, file)


def main(folder=FOLDER):
    results = read(Path(folder))
    if results:
        write(Path(folder) / "table.md", table(results))
        draw(results, Path(folder) / "figure.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
