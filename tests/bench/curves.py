"""Text, table and figure of conversion.json for a page."""

import os
import textwrap

BASE, CONTROL = "base", "attention"
LABELS = {
    "attention": "attention, trained on",
    "gsa": "replaced by gsa",
    "delta_product": "replaced by delta_product",
}
COLORS = {
    "attention": "black",
    "gsa": "C0",
    "delta_product": "C3",
    "inject constant": "C1",
    "inject gradual": "C2",
    "inject cyclic": "C4",
    "inject learned": "C5",
    "gsa from scratch": "C0",
    "delta_product from scratch": "C3",
}


def converted_runs(result):
    """The runs that follow the training of the Transformer, by name."""
    return {name: run for name, run in result["runs"].items() if name != BASE}


def bits_after(run, share):
    """Bits a byte at the first point after this share of the run's tokens."""
    target = share * run["tokens"][-1]
    return next(
        bits for tokens, bits in zip(run["tokens"], run["bits_per_byte"], strict=True) if tokens >= target
    )


def describe_study(result):
    """How the study was made, with the numbers of the file."""
    runs, settings, corpus = result["runs"], result["settings"], result["corpus"]
    base, first = runs[BASE], next(iter(converted_runs(result).values()))
    devices = dict.fromkeys(run["device"] for run in runs.values())
    versions = dict.fromkeys(run["versions"] for run in runs.values())
    dates = sorted({run["date"] for run in runs.values()})
    text = "Python's standard library" if corpus["name"] == "the standard library" else corpus["name"]
    text = (
        f"A Llama of {base['parameters'] / 1e6:.1f}M parameters, {settings['layers']} layers, "
        f"{settings['heads'] * settings['head_dim']} wide, read {base['tokens'][-1] / 1e6:.2f}M bytes of "
        f"{text}, which has {corpus['train'] / 1e6:.1f}M to train on, in windows of "
        f"{settings['context']}, and came to {base['bits_per_byte'][-1]:.3f} bits a held-out byte. Each line "
        f"goes on from there for {first['tokens'][-1] / 1e6:.2f}M bytes more, those from scratch from random "
        "weights: the same windows in the same order, AdamW, the learning rate up to "
        f"{settings['learning_rate']:g} over the first twentieth of the steps and down to zero by a cosine, "
        f"all weights trained, one seed. {', '.join(devices)}, "
        f"{'bf16 autocast' if 'CPU' not in devices else 'fp32'}; {', '.join(versions)}; "
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}."
    )
    return textwrap.fill(text, 118) + "\n"


def table(result):
    """One row for each run, sorted by its last bits a byte."""
    from report import markdown

    runs = converted_runs(result)
    control = runs.get(CONTROL)
    levels = next((list(run["bits_per_byte_at_weight"]) for run in runs.values() if run["schedule"]), [])
    rows = []
    for name, run in sorted(runs.items(), key=lambda item: item[1]["bits_per_byte"][-1]):
        last = run["bits_per_byte"][-1]
        rows.append(
            [
                LABELS.get(name, name),
                f"{run['parameters']:,}",
                *(f"{bits_after(run, share):.3f}" for share in (0, 0.1, 0.5)),
                f"{last:.3f}",
                f"{last - control['bits_per_byte'][-1]:+.3f}" if control and run is not control else "",
                f"{run['weight'][-1]:.2f}" if run["schedule"] else "",
                *(f"{run['bits_per_byte_at_weight'][m]:.3f}" if run["schedule"] else "" for m in levels),
            ]
        )
    titles = [
        "run",
        "parameters",
        "bits a byte at token 0",
        "a tenth",
        "half",
        "the end",
        "beside attention's",
    ]
    return markdown([*titles, "m in the end", *(f"then at m = {m}" for m in levels)], rows)


def style(name):
    if name.endswith("from scratch"):
        return {"linestyle": ":"}
    return {"linestyle": "--"} if name.startswith("inject") else {}


def spread_labels(values, least):
    """Heights near `values`, in ascending order. Neighbours are at least `least` apart: groups of close
    values are spread around their means."""
    heaps = []
    for value in sorted(values):
        heaps.append([value])
        while len(heaps) > 1:
            means = [sum(heap) / len(heap) for heap in heaps[-2:]]
            reach = least * (len(heaps[-2]) + len(heaps[-1])) / 2
            if means[1] - means[0] >= reach:
                break
            heaps[-2:] = [heaps[-2] + heaps[-1]]
    heights = []
    for heap in heaps:
        mean = sum(heap) / len(heap)
        heights += [mean + least * (i - (len(heap) - 1) / 2) for i in range(len(heap))]
    return heights


def draw(result, file):
    """Held-out bits a byte over tokens: all runs on a log scale, the range near the Transformer beside them,
    and the weight of each mixture below."""
    from matplotlib.figure import Figure

    runs, base = converted_runs(result), result["runs"][BASE]
    figure = Figure(figsize=(12, 6.4), layout="constrained")
    axes = figure.subplot_mosaic([["all", "near"], ["all", "weight"]], height_ratios=[4, 1])
    whole, near, weight = (axes[name] for name in ("all", "near", "weight"))
    for name, run in runs.items():
        line_style = {"color": COLORS[name], "linewidth": 2 if name == CONTROL else 1.4, **style(name)}
        tokens = [n / 1e6 for n in run["tokens"]]
        for panel in (whole, near):
            panel.plot(tokens, run["bits_per_byte"], label=LABELS.get(name, name), **line_style)
        if run["schedule"]:
            steps = "steps-pre" if run["schedule"]["schedule"] == "cyclic" else "default"
            weight.plot(tokens, run["weight"], drawstyle=steps, **line_style)
    start = base["bits_per_byte"][-1]
    for panel in (whole, near):
        panel.axhline(start, color="0.6", linewidth=1, zorder=0)
        panel.grid(alpha=0.3)
    tokens = max(run["tokens"][-1] for run in runs.values()) / 1e6
    whole.set(
        yscale="log", ylabel="held-out bits a byte", xlabel="tokens (bytes) after the checkpoint, millions"
    )
    ticks = [1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8]
    low, high = whole.get_ylim()
    ticks = [tick for tick in ticks if low <= tick <= high]
    whole.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    whole.minorticks_off()
    whole.set_title("from the first token on", fontsize=10)
    whole.legend(loc="upper right", fontsize=8)
    ends = sorted((run["bits_per_byte"][-1], name) for name, run in runs.items())
    converted = [bits for bits, name in ends if not name.endswith("from scratch")]
    bottom, top = min([*converted, start]), max([*converted, start])
    margin = 0.1 * (top - bottom)
    bottom, top = bottom - margin, top + 4 * margin
    near.set(ylim=(bottom, top), title=f"the same between {bottom:.2f} and {top:.2f}")
    near.title.set_fontsize(10)
    near.text(
        0.01 * tokens,
        start,
        f"the checkpoint, {start:.3f}",
        fontsize=8,
        va="center",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8},
    )
    shown = [(bits, name) for bits, name in ends if bits <= top]
    heights = spread_labels([bits for bits, _ in shown], (top - bottom) / 22)
    for (bits, name), height in zip(shown, heights, strict=True):
        text = f"{bits:.3f} {LABELS.get(name, name)}"
        near.annotate(
            text, (tokens, bits), (1.04 * tokens, height), color=COLORS[name], fontsize=8, va="center",
            annotation_clip=False, arrowprops={"arrowstyle": "-", "color": COLORS[name], "linewidth": 0.5},
        )  # fmt: skip
    near.set_xlim(0, tokens)
    near.tick_params(labelbottom=False)
    weight.set(xlim=(0, tokens), ylim=(-0.05, 1.05), yticks=[0, 0.5, 1], ylabel="m of inject")
    weight.set_xlabel("tokens (bytes) after the checkpoint, millions")
    weight.grid(alpha=0.3)
    draft = file.with_name("part-" + file.name)
    figure.savefig(draft, dpi=150)
    os.replace(draft, file)
