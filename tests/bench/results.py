"""The files of results: FOLDER/<op>.json, one entry a shape; or one a part, each measured by itself."""

import json
import os
from datetime import date
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


def keep_part(file, part, found, versions):
    """Puts a part of a benchmark into its file, with where it was measured; returns all parts. `found`: the
    part's rows, again with each further one: what a run that fails has measured is there.
    """
    import torch

    parts = json.loads(file.read_text()) if file.exists() else {}
    place = {"date": date.today().isoformat(), "device": torch.cuda.get_device_name(), "versions": versions}
    file.parent.mkdir(parents=True, exist_ok=True)
    for rows in found:
        parts[part] = {"rows": rows} | place
        write(file, json.dumps(parts, indent=1) + "\n")
    return parts


def origin(part):
    """A line of Markdown."""
    return f"\n- {part['device']}, {part['versions']}, {part['date']}\n"
