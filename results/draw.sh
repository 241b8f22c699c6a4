#!/usr/bin/env bash
# Tables and figures of results/README.md about novels and Python, from logs/, ppl/ and samples/
# alone: a minute, without a run or a model.
#
#     bash results/draw.sh               # needs `pip install matplotlib`
set -euo pipefail
cd "$(dirname "$0")/.."
logs=results/logs ppl=results/ppl figures=results/figures
mkdir -p $figures

for group in scratch cont stdlib; do
    python lab/plot.py --table="$ppl/$group-*.json"
    echo
done > results/tables.md

# The same from the logs. They have fewer rows, but need no checkpoint at half the updates.
PYTHONPATH=.:lab python - $logs >> results/tables.md <<'PY'
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
python lab/plot.py --logs="$logs/*.jsonl" >> results/tables.md
python lab/plot.py --table="results/samples/*.json" --out=results/samples.md

continued="$logs/cont-binary-*.jsonl,$logs/cont-sm-*.jsonl,$logs/cont-paper-*.jsonl"
ablation="$ppl/cont-seed-11--[kp]*.json,$ppl/cont-SM-iso-update-*.json"
python lab/plot.py --runs="$logs/scratch-*-?.jsonl" --out=$figures/scratch.png
python lab/plot.py --runs="$continued" --out=$figures/continuation.png
python lab/plot.py --runs="$logs/stdlib-*.jsonl" --out=$figures/stdlib.png
python lab/plot.py --ablation="$ablation" --out=$figures/ablation.png
