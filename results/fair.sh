#!/usr/bin/env bash
# The runs of fair.md: train, decode into results/fair.jsonl, keep the weights in results/fair/.
#
#     bash results/fair.sh history                                  # decode the weights of 112e5e7
#     bash results/fair.sh ours-31                                  # one run: train and decode
#     bash results/fair.sh list | xargs -n1 bash results/fair.sh    # all runs, one after the other
#
# Each takes one core. What is finished is skipped, and a training that was stopped goes on where it
# was saved. A run is finished once its weights are in results/fair/ and its lines in fair.jsonl.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
PYTHON=${PYTHON:-python}
out=${OUT:-out/fair}; mkdir -p "$out/history" results/fair

case $1 in
list)
    echo ours-31; echo binary-31; echo constant-31; echo latin-binary-1; echo latin-ours-1
    echo ours-32; echo binary-32; echo latin-binary-2; echo latin-ours-2; echo constant-32
    echo ours-33; echo binary-33; echo constant-33; echo low-31
    exit ;;
history)
    weights() {  # FILE-AT-112e5e7 NAME
        local file=$out/history/$2.safetensors
        [ -s "$file" ] || git show "112e5e7:results/$1.safetensors" > "$file"
        $PYTHON results/fair.py --checkpoint="$file" --name="$2"
    }
    for seed in 1 2 3 4 5; do
        case $seed in 1) sm=sudoku ;; *) sm=sudoku/weights/sm-$seed ;; esac
        weights $sm sm-$seed
        weights sudoku/weights/binary-$seed binary-$seed
    done
    for seed in 1 2 3; do
        weights sudoku/weights/ours-$seed ours-$seed
        weights sudoku/weights/constant3-$seed constant-$seed
    done
    for seed in 1 2 3 4 5; do weights sudoku/weights/deep-$seed deep-$seed; done
    exit ;;
esac

name=$1 seed=${1##*-} run=train.py data=sudoku rate=5e-4 flags=
case $name in
    latin-*) data=latin; [ -e data/latin/meta.json ] || $PYTHON results/latin.py ;;
    *)       [ -e data/sudoku/meta.json ] || $PYTHON data.py sudoku ;;
esac
case $name in
    *ours-*)   flags="--omega_s=0.5 --omega_a=1 --omega_b=-2.8" ;;
    *binary-*) flags="--p_sm=0" ;;
    low-*)     flags="--p_sm=0" rate=2.5e-4 ;;
    constant-*) flags="--omega_s=0.3" run="results/constant.py train.py" ;;
    *) echo "no run of this name: $name (list names them)" >&2; exit 2 ;;
esac
ends=6000
# 4,500 updates of SM take about the CPU time of 6,000 of binary (1.33 to 1.36 times an update's).
case $name in ours-*|latin-ours-*) ends="4500 6000" ;; esac

last=results/fair/$name.safetensors
if [ ! -e "$last" ] && [ ! -e "$out/$name/step-6000.pt" ]; then
    $PYTHON $run owt --data=data/$data --n_layer=2 --n_head=8 --n_embd=128 --n_cond=32 \
        --length=39 --dropout=0 --batch_size=32 --micro_batch=32 --eta_bb=$rate --warmup=200 \
        --ema=0.995 --log_every=50 --eval_every=1500 --eval_rows=512 --save_every=250 \
        --keep_every=1500 --steps=6000 --seed="$seed" $flags --out_dir="$out/$name" \
        --resume=auto >> "$out/$name.out" 2>&1
fi
for end in $ends; do
    label=$name file=$last
    case $end in 6000) ;; *) label=${name%-*}$end-$seed file=results/fair/$label.safetensors ;; esac
    from=$out/$name/step-$end.pt
    if [ ! -e "$from" ]; then from=$file; fi
    $PYTHON results/fair.py --checkpoint="$from" --name="$label"
    [ -e "$file" ] || $PYTHON results/fair.py --checkpoint="$from" --keep="$file"
done
cp -n "$out/$name/log.jsonl" "results/fair/$name.log.jsonl" 2>/dev/null || true
