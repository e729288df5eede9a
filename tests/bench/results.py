"""The files of results: FOLDER/<op>.json, one entry a shape."""

import json
import os
from pathlib import Path

from shapes import SHAPES

FOLDER = Path(__file__).parent / "results"


def write(file, text):
    """Whole or not at all: a run that is cut off leaves the earlier results."""
    draft = file.with_name(file.name + ".part")
    draft.write_text(text)
    os.replace(draft, file)


def entries(folder, op):
    """{name of a shape: entry} of the shapes that still are what they were when they were measured."""
    file = folder / f"{op}.json"
    if not file.exists():
        return {}
    known = {shape.name: json.loads(json.dumps(shape.record())) for shape in SHAPES[op]}
    measured = json.loads(file.read_text())["shapes"]
    return {name: entry for name, entry in measured.items() if entry["shape"] == known.get(name)}


def keep(folder, shape, entry):
    """Puts an entry into its file. One without peers does not replace one with them: False."""
    before = entries(folder, shape.op)
    if before.get(shape.name, {}).get("peers") and not entry["peers"]:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    merged = before | {shape.name: entry}
    ordered = {s.name: merged[s.name] for s in SHAPES[shape.op] if s.name in merged}
    write(folder / f"{shape.op}.json", json.dumps({"op": shape.op, "shapes": ordered}, indent=1) + "\n")
    return True
