#!/usr/bin/env bash
# The moving picture and the page to step through, drawn from the shipped model.
#
#     bash results/pictures.sh           # needs `pip install matplotlib`
set -euo pipefail
cd "$(dirname "$0")/.."
files=$(mktemp -d)
trap 'rm -rf "$files"' EXIT
model="--checkpoint=results/sudoku.safetensors --sampler=entropy --top_p=1"

python sample.py $model --given=.................................... --out="$files/grid.jsonl" --trace="$files/trace.jsonl"
python lab/plot.py --sudoku="$files/trace.jsonl" --out=results/figures/sudoku.svg

# Puzzle 5 of `python sudoku.py`, on which models with feedback and without it differ.
puzzle="$model --given=.5...1...5..5243..1.....6321........"
python sample.py $puzzle --out="$files/on.jsonl" --trace="$files/with-feedback.jsonl"
python sample.py $puzzle --out="$files/off.jsonl" --soft=False --trace="$files/without-feedback.jsonl"
note="Puzzle 5 of python sudoku.py, picked because feedback decides it: with feedback it ends right, without it 5 stands twice in row 4."
python lab/plot.py --page="$files/with-feedback.jsonl,$files/without-feedback.jsonl" --note="$note" \
    --out=results/trajectory.html
