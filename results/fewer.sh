#!/usr/bin/env bash
# One run of "Fewer calls" (questions.md): train, then decode into results/fewer.jsonl. Or all runs:
#
#     bash results/fewer.sh list | xargs -P2 -n1 bash results/fewer.sh
#
# Each takes one core. What is finished is skipped, and what was stopped goes on.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
if [ "$1" = list ]; then
    for seed in 31 32 33 34 35 36; do
        for arm in binary ours constant3 selfcond deep; do echo $arm-$seed; done
    done
    exit
fi
out=${OUT:-out/sudoku}
STEPS=6000 bash results/sudoku.sh "six-$1"
wrapper=""
case $1 in selfcond-*) wrapper=results/selfcond.py ;; esac
python $wrapper results/fewer.py --checkpoint="$out/six-$1/step-6000.pt" --name="$1"
rm -f "$out/six-$1"/*.pt
