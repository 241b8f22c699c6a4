# SPDX-License-Identifier: MIT
"""Evidence as lines of JSON: many results, or logs of many runs, in one file.

    python results/add.py results/sudoku.jsonl out/sudoku/*.json               # results, by name
    python results/add.py results/sudoku_logs.jsonl out/sudoku/*/log.jsonl     # logs, by run
    python results/add.py --into=out/files results/sudoku.jsonl                # files again

A result or a log replaces what has its name. Of logs only what tables and figures need is kept.
Not here: measuring (sudoku.sh, measure.sh) and tables (sudoku_table.py, draw.sh).
"""

import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from launch import read_json, read_jsonl, write_text  # noqa: E402

OF_A_LOG = ("step", "loss", "lam", "omega_s", "omega_a", "omega_b", "tau", "val_soft", "val_plain",
            "tokens_per_s", "seconds")


def shorter(number):
    return float(f"{number:.7g}") if isinstance(number, float) else number


def lines_of(path):
    """[line] of a result or of a log, each with the name of the result or of the run."""
    if not path.endswith(".jsonl"):
        return [{"name": os.path.basename(path).removesuffix(".json"), **read_json(path)}]
    run = os.path.basename(os.path.dirname(path))
    return [{"name": run} | {key: shorter(line[key]) for key in OF_A_LOG if key in line}
            for line in read_jsonl(path)]


def add(file, paths):
    lines = [line for path in paths for line in lines_of(path)]
    names = {line["name"] for line in lines}
    old = read_jsonl(file) if os.path.exists(file) else []
    lines += [line for line in old if line["name"] not in names]
    lines.sort(key=lambda line: line["name"])  # stable: a log stays in order
    write_text(file, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def unpack(file, folder):
    """Writes NAME.json for each result, or NAME.jsonl for each log."""
    found = {}
    for line in read_jsonl(file):
        found.setdefault(line.pop("name"), []).append(line)
    os.makedirs(folder, exist_ok=True)
    for name, lines in found.items():
        end = "jsonl" if "step" in lines[0] else "json"
        text = "".join(json.dumps(line) + "\n" for line in lines)
        write_text(os.path.join(folder, f"{name}.{end}"), text)


if __name__ == "__main__":
    first, file, *more = sys.argv[1:]
    if first.startswith("--into="):
        unpack(file, first.removeprefix("--into="))
    else:
        add(first, [file, *more])
