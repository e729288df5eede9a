"""Operators and the best public code, in one process: `make bench [OP=gsa] [SHAPE=name] [PEER=no]`.

The benchmark measures forward, forward + backward, a decoding step, peak memory and the first call, at the
shapes of shapes.py. A result is one entry of FOLDER/<op>.json. An entry is written when it is complete and
replaced when its shape is measured again. Ratios compare figures of one entry only. table.md and figure.png
contain all entries.

`OP=model` measures training and decoding of whole models (train_speed.py; SHAPE: names of models, CONTEXT:
tokens of a row). `OP=accelerate` measures layers of transformers before and after `girih.accelerate`
(accelerated.py). `OP=generation` measures generation by CAT and by a Transformer, and tokens of `generate()`
(generation.py; SHAPE: tokens, cat or texts). `OP=converted` measures a Llama before and after its conversion
(converted_llama.py).
"""

import argparse
import gc
import sys
from datetime import date
from pathlib import Path

import torch
from device import free_memory, require_gpu
from results import FOLDER, store_entry, write
from shapes import SHAPES


def refuse(message):
    print(f"bench: {message}", file=sys.stderr)
    sys.exit(2)


def select_shapes(ops, names):
    """All shapes of these operators (None: all operators), or those with these names."""
    for op in ops or []:
        if op not in SHAPES:
            refuse(
                f"op {op}: unknown; expected one of {', '.join(SHAPES)}, model, accelerate, generation, "
                "converted"
            )
    shapes = [shape for op in ops or SHAPES for shape in SHAPES[op]]
    for name in names or []:
        if name not in {shape.name for shape in shapes}:
            refuse(f"shape {name}: unknown; expected one of {', '.join(shape.name for shape in shapes)}")
    return [shape for shape in shapes if names is None or shape.name in names]


def list_measurements(card, shape, runs):
    """The measurements of one side: pairs of a figure and the function that measures it."""
    from measure import peak_bytes

    for name in shape.measures:
        yield name, lambda name=name: card.milliseconds(runs.timed_function(name))
    if not shape.is_step:
        yield "peak_bytes", lambda: peak_bytes(runs.forward_backward)


def measure_peer(card, shape, runs, first):
    """The figures of a peer. If a measurement fails, "error" is recorded beside the other figures."""
    from measure import first_call

    run = runs.forward if shape.is_step else runs.forward_backward
    figures = {}
    for name, part in [
        ("first_call_s", lambda: first_call(run) if first else None),
        *list_measurements(card, shape, runs),
    ]:
        try:
            figures[name] = part()
        except Exception as error:
            figures.setdefault("error", f"{type(error).__name__}: {error}".splitlines()[0])
    return figures


def measure(card, shape, with_peers, called):
    """The entry of a shape. `called`: packages that this process has already called. The first call of a peer
    is measured only for other packages."""
    import floor
    import girih
    import inputs
    from measure import Runs, first_call_in_new_process
    from peers import PEERS, version_of

    keywords, call = inputs.draw(shape), inputs.call(shape)
    ours = {name: part() for name, part in list_measurements(card, shape, Runs(call, keywords))}
    ours["first_call_s"] = first_call_in_new_process(shape.op, shape.name)
    ours["version"] = girih.__version__
    with torch.no_grad():
        floor_ms = floor.milliseconds(shape, keywords, call(**keywords), card.rates)
    peers = {}
    for name in shape.peers if with_peers else ():
        try:
            peer, peer_keywords = PEERS[name](shape, keywords)
        except ImportError as error:
            print(f"  {name}: its columns stay empty: {error} (dependency group `bench` of pyproject.toml)")
            continue
        version = version_of(name)
        peers[name] = measure_peer(card, shape, Runs(peer, peer_keywords), version not in called)
        peers[name]["version"] = version
        called.add(version)
        del peer, peer_keywords
        gc.collect()
    return {
        "shape": shape.record(),
        "date": date.today().isoformat(),
        "device": card.name,
        "torch": torch.__version__,
        "copy_TB_per_s": round(card.rates["bytes"] / 1e12, 3),
        "product_TFLOP_per_s": round(card.rates["flops"] / 1e12, 1),
        "floor": floor_ms,
        "ours": ours,
        "peers": peers,
    }


def main(argv=None):
    parser = argparse.ArgumentParser(prog="bench", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--op",
        help=f"names with commas (default: all operators): {', '.join(SHAPES)}; or one of model, accelerate, "
        "generation, converted",
    )
    parser.add_argument("--shape", help="names with commas (default: all)")
    parser.add_argument("--context", type=int, help="of models: tokens of a row")
    parser.add_argument("--peer", choices=["yes", "no"], default="yes", help="no: ours alone")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the results are")
    options = parser.parse_args(argv)
    require_gpu()
    ops = options.op.split(",") if options.op else None
    if ops == ["model"]:
        import train_speed

        values = {"models": options.shape, "context": options.context}
        words = [word for name, value in values.items() if value for word in (f"--{name}", str(value))]
        return train_speed.main(["--folder", str(options.folder), "--peer", options.peer, *words])
    if ops == ["accelerate"]:
        import accelerated

        return accelerated.main(["--folder", str(options.folder)])
    if ops == ["generation"]:
        import generation

        words = [] if options.shape is None else ["--part", options.shape]
        return generation.main(["--folder", str(options.folder), *words])
    if ops == ["converted"]:
        import converted_llama

        return converted_llama.main(["--folder", str(options.folder)])
    shapes = select_shapes(ops, options.shape.split(",") if options.shape else None)

    from measure import Card
    from report import draw, lines, read, table

    card, called = Card(), set()
    print(
        f"{card.name}: copy {card.rates['bytes'] / 1e12:.2f} TB/s, bf16 product "
        f"{card.rates['flops'] / 1e12:.0f} TFLOP/s"
    )
    for shape in shapes:
        entry = measure(card, shape, options.peer == "yes", called)
        print("\n".join(lines(shape, entry)), flush=True)
        if not store_entry(options.folder, shape, entry):
            print("  measured without the peer: the file keeps the entry that has one")
        free_memory()
    results = read(options.folder)
    write(options.folder / "table.md", table(results))
    draw(results, options.folder / "figure.png")
    print(f"{options.folder / 'table.md'}\n{options.folder / 'figure.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
