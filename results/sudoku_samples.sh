#!/usr/bin/env bash
# How many grids each run of sudoku.sh gets right, cell by cell of results/README.md, as
# out/sudoku/NAME.CELL.json. A cell that is there is skipped.
#
#     bash results/sudoku_samples.sh sm-1 binary-1     # runs that are finished
#     bash results/sudoku_samples.sh shipped exact     # the model that comes along; the ceiling
#     bash results/sudoku_samples.sh placebo-1         # sm-1, with the feedback of another mask
#     CELLS="*-36-*" bash results/sudoku_samples.sh sm-1        # some cells only
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
step=${STEP:+.step-$STEP}                     # the cells of another step have other names
out=${OUT:-out/sudoku}; mkdir -p "$out"
empty=....................................

cell() {  # NAME of the cell, then flags of sample.py
    local result=$out/$run.$1$step.json samples=$out/$run.$1$step.jsonl
    [[ -e "$result" || $1 != ${CELLS:-*} ]] && return
    python $wrapper sample.py --checkpoint="$checkpoint" --given=$empty --top_p=1 \
        --count="${COUNT:-1000}" --batch_size=250 --out="$samples" "${@:2}" > /dev/null
    python eval.py sudoku --samples="$samples" --label="$run" --out="$result" | sed -n 1p
}

for run in "$@"; do
    wrapper="" checkpoint=$out/$run/step-${STEP:-6000}.pt feedback=""
    case $run in
        shipped) checkpoint=results/sudoku.safetensors feedback="on off" ;;
        exact)   checkpoint=results/sudoku.safetensors wrapper=results/exact.py ;;
        tied-*)  wrapper=results/tied.py feedback="on off" ;;
        placebo-*) checkpoint=$out/sm-${run#*-}/step-${STEP:-6000}.pt
                   wrapper=results/permuted.py feedback=on ;;
        binary-*|deep-*|cont-binary-*) ;;
        *)       feedback="on off" ;;
    esac
    for soft in ${feedback:-off}; do
        flag=--soft=$([ $soft = on ] && echo true || echo false)
        for order in random entropy; do
            for steps in 36 18; do
                cell $order-$steps-$soft --order=$order --steps=$steps $flag
            done
            cell $order-36-p90-$soft --order=$order --steps=36 --top_p=0.9 $flag
        done
        for steps in 5 10 20 39 156; do
            cell mdlm-$steps-$soft --steps=$steps $flag
            cell remdm-$steps-$soft --sampler=remdm-cap --steps=$steps $flag
        done
    done
    case $run in exact|tied-*|placebo-*) continue ;; esac
    for given in 12 18 24; do
        result=$out/$run.given-$given$step.json
        [[ -e $result || given-$given != ${CELLS:-*} ]] || python results/puzzles.py \
            --checkpoint="$checkpoint" --given=$given --count="${COUNT:-1000}" --out=$result
    done
    [ "$feedback" ] || continue
    for passes in 2 4; do
        cell random-36-passes$passes --order=random --steps=36 --passes=$passes
    done
done
