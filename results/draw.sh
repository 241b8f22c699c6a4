#!/usr/bin/env bash
# Tables and figures of results/README.md, from the lines of JSON beside it alone: a minute, without
# a run or a model.
#
#     bash results/draw.sh               # needs `pip install matplotlib`
set -euo pipefail
cd "$(dirname "$0")/.."
figures=results/figures
files=$(mktemp -d)
trap 'rm -rf "$files"' EXIT
for name in sudoku text; do
    python results/add.py --into="$files/$name" results/$name.jsonl
    python results/add.py --into="$files/$name" results/${name}_logs.jsonl
done

# ---- Sudoku

runs=$files/sudoku
python results/sudoku_table.py > results/sudoku.md
python results/sudoku_table.py $figures/sudoku_cells.svg
python results/sudoku_table.py $figures/completable.svg
python lab/plot.py --runs="$runs/binary-?.jsonl,$runs/sm-?.jsonl,$runs/deep-?.jsonl,$runs/tied-?.jsonl" \
    --out=$figures/sudoku_runs.svg

# ---- novels and Python

runs=$files/text
{
    for group in scratch cont stdlib; do
        python lab/plot.py --table="$runs/$group-*.json"
        echo
    done
    # The same from the logs. They have fewer rows, but need no checkpoint at half the updates.
    PYTHONPATH=.:lab python - "$runs" <<'PY'
import glob, sys
from launch import read_jsonl
from plot import markdown, mean_sd
columns = ["256 rows of the logs", "seeds", "SM, nats below binary", "after half the updates",
           "feedback on, nats below off: first", "last"]
rows = []
for group in "scratch", "cont", "stdlib":
    pairs = []
    for path in sorted(glob.glob(f"{sys.argv[1]}/{group}-binary-*.jsonl")):
        binary, sm = ([line for line in read_jsonl(file) if line["step"] and "val_plain" in line]
                      for file in (path, path.replace("binary", "sm")))
        half, = (line for line in sm if 2 * line["step"] == sm[-1]["step"])
        end = binary[-1]["val_plain"]
        pairs.append([end - sm[-1]["val_soft"], end - half["val_soft"],
                      *(line["val_plain"] - line["val_soft"] for line in (sm[0], sm[-1]))])
    cells = [mean_sd(values, "+.4f") for values in zip(*pairs)]
    rows.append(dict(zip(columns, (group, str(len(pairs)), *cells))))
print(markdown(rows, columns) + "\n")
PY
    python lab/plot.py --logs="$runs/*.jsonl"
    echo
    python lab/plot.py --table="$runs/samples-*.json"
    python results/when_table.py
} > results/text.md

continued="$runs/cont-binary-*.jsonl,$runs/cont-sm-*.jsonl,$runs/cont-paper-*.jsonl"
python lab/plot.py --runs="$runs/scratch-*-?.jsonl" --out=$figures/scratch.png
python lab/plot.py --runs="$continued" --out=$figures/continuation.png
python lab/plot.py --runs="$runs/stdlib-*.jsonl" --out=$figures/stdlib.png
python lab/plot.py --ablation="$runs/cont-seed-11--[kp]*.json,$runs/cont-SM-iso-update-*.json" \
    --out=$figures/ablation.png
