#!/usr/bin/env bash
# How many grids each run of sudoku.sh gets right, cell by cell of results/README.md, as
# out/sudoku/NAME.CELL.json. A cell that is there is skipped.
#
#     bash results/sudoku_samples.sh sm-1 binary-1     # runs that are finished
#     bash results/sudoku_samples.sh shipped exact     # the model that comes along; the ceiling
#     bash results/sudoku_samples.sh placebo-1         # sm-1, with the feedback of another mask
#     CELLS="*-36-*" bash results/sudoku_samples.sh sm-1        # some cells only
#     WEIGHTS=out/results/sudoku/weights bash results/sudoku_samples.sh sm-1   # those of 112e5e7
set -euo pipefail
cd "$(dirname "$0")/.."
shopt -s extglob
export OMP_NUM_THREADS=1
step=${STEP:+.step-$STEP}                     # the cells of another step have other names
out=${OUT:-out/sudoku}; mkdir -p "$out"
empty=....................................

wanted() { [[ ! -e $out/$run.$1$step.json && $1 = ${CELLS:-*} ]]; }

cell() {  # NAME of the cell, then flags of sample.py
    wanted "$1" || return 0
    local result=$out/$run.$1$step.json samples=$out/$run.$1$step.jsonl
    python $wrapper sample.py --checkpoint="$checkpoint" --given=$empty --top_p=1 \
        --count="${COUNT:-1000}" --batch_size=250 --out="$samples" "${@:2}" > /dev/null
    python eval.py sudoku --samples="$samples" --label="$run" --out="$result" | sed -n 1p
}

surest() {  # NAME of the cell, then flags of surest.py, which decodes with feedback and without
    wanted "$1" || return 0
    python $wrapper results/surest.py --checkpoint="$checkpoint" --count="${COUNT:-1000}" \
        --out="$out/$run.$1$step.json" "${@:2}"
}

for run in "$@"; do
    wrapper="" feedback="on off" checkpoint=$out/$run/step-${STEP:-6000}.pt
    [ ! "${WEIGHTS:-}" ] || checkpoint=$WEIGHTS/${run/placebo/sm}.safetensors
    case ${run#six-} in
        shipped)    checkpoint=results/sudoku.safetensors ;;
        exact)      checkpoint=results/sudoku.safetensors wrapper=results/exact.py feedback=off ;;
        tied-*)     wrapper=results/tied.py ;;
        selfcond-*) wrapper=results/selfcond.py ;;
        placebo-*)  wrapper=results/permuted.py feedback=on
                    checkpoint=${checkpoint/placebo/sm} ;;
        binary-*|deep-*|cont-binary-*) feedback=off ;;
    esac
    surest surest-36
    surest surest-18 --calls=18
    surest surest-p9 --top_p=0.9
    for soft in $feedback; do
        flag=--soft=$([ $soft = on ] && echo true || echo false)
        cell random-36-$soft --sampler=random --steps=36 $flag
        cell random-18-$soft --sampler=random --steps=18 $flag
        for steps in 5 10 20 39 156; do
            cell mdlm-$steps-$soft --steps=$steps $flag
            cell remdm-$steps-$soft --sampler=remdm-cap --steps=$steps $flag
        done
    done
    case $run in exact|tied-*|placebo-*) continue ;; esac
    for given in 12 18 24; do surest given-$given --given=$given; done
done
