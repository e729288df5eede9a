"""Files of results: FOLDER/<op>.json with one entry for each shape, or a file with one entry
for each part."""

import json
import os
from datetime import date
from pathlib import Path

from shapes import SHAPES

FOLDER = Path(__file__).parent / "results"


def write(file, text):
    """Writes the whole file or nothing. An interrupted run leaves the earlier results."""
    draft = file.with_name(file.name + ".part")
    draft.write_text(text)
    os.replace(draft, file)


def entries(folder, op):
    """{name of a shape: entry} of the shapes that have not changed since they were measured."""
    file = folder / f"{op}.json"
    if not file.exists():
        return {}
    known = {shape.name: json.loads(json.dumps(shape.record())) for shape in SHAPES[op]}
    measured = json.loads(file.read_text())["shapes"]
    return {name: entry for name, entry in measured.items() if entry["shape"] == known.get(name)}


def store_entry(folder, shape, entry):
    """Stores an entry in its file. Returns False if the entry has no peers and the stored entry has peers."""
    before = entries(folder, shape.op)
    if before.get(shape.name, {}).get("peers") and not entry["peers"]:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    merged = before | {shape.name: entry}
    ordered = {s.name: merged[s.name] for s in SHAPES[shape.op] if s.name in merged}
    write(folder / f"{shape.op}.json", json.dumps({"op": shape.op, "shapes": ordered}, indent=1) + "\n")
    return True


def store_part(file, part, found, versions):
    """Stores a part of a benchmark in its file, with device and versions. Returns all parts.

    `found` yields the rows of the part after every new row, so a run that fails leaves the rows measured
    before.
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
    """A line of Markdown with device, versions and date."""
    return f"\n- {part['device']}, {part['versions']}, {part['date']}\n"
