#!/usr/bin/env bash
# Every run of results/README.md, by name. Each takes one core. A run that is finished is skipped,
# and one that was stopped goes on where it was saved.
#
#     bash results/run.sh scratch-sm-1
#     bash results/run.sh list | xargs -P2 -n1 bash results/run.sh     # all of them, two at a time
#
# They need two sets of data:
#
#     python data.py novels.jsonl.xz --val_docs=300 --tokenizer=bytes --out=data/novels-bytes
#     python data.py stdlib --out=data/stdlib
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
out=${OUT:-out/evidence}; mkdir -p "$out"

if [ "$1" = list ]; then
    echo scratch-{binary,sm}-1                # first: the continuations start from one of them
    for seed in 11 12 13; do echo cont-{binary,sm}-$seed; done
    echo cont-{paper,p05,p10,k1,k5,kV,kV2}-11
    for seed in 1 2 3; do echo stdlib-{binary,sm}-$seed; done
    echo scratch-{binary,sm}-2 scratch-{binary,sm}-3 scratch-paper-1
    exit
fi

seed=${1##*-}
model="--n_layer=4 --n_head=4 --n_embd=256 --n_cond=64 --length=128 --dropout=0.0"
model="$model --data=${DATA:-data/novels-bytes} --dtype=bfloat16 --batch_size=8 --micro_batch=8"
model="$model --eta_bb=1e-3 --warmup=200 --ema=0.999 --log_every=50 --eval_rows=256"
model="$model --save_every=500"
scratch="$model --steps=10000 --eval_every=500 --keep_every=500"
cont="$model --steps=2000 --eval_every=200 --keep_every=200"
cont="$cont --init_from=$out/scratch-binary-1/last.pt"
stdlib="stdlib --data=${STDLIB:-data/stdlib} --dtype=bfloat16 --overwrite=False --show=False"
stdlib="$stdlib --eval_every=200"
ours="--omega_s=0.5 --omega_a=1.0 --omega_b=-2.8"                     # as in train.py stdlib

case $1 in
    scratch-binary-*) flags="$scratch --p_sm=0" ;;
    scratch-sm-*)     flags="$scratch $ours" ;;
    scratch-paper-*)  flags="$scratch" ;;                             # ω as in App. B.2
    cont-binary-*)    flags="$cont --p_sm=0" ;;
    cont-sm-*)        flags="$cont $ours" ;;
    cont-paper-*)     flags="$cont" ;;
    cont-p05-*)       flags="$cont $ours --p_sm=0.5" ;;
    cont-p10-*)       flags="$cont $ours --p_sm=1.0" ;;
    cont-k1-*)        flags="$cont $ours --k=1" ;;
    cont-k5-*)        flags="$cont $ours --k=5" ;;
    cont-kV-*)        flags="$cont $ours --k=none" ;;
    cont-kV2-*)       flags="$cont $ours --k=none --two_updates" ;;
    stdlib-binary-*)  flags="$stdlib --p_sm=0" ;;
    stdlib-sm-*)      flags="$stdlib" ;;
    *) echo "no run of this name: $1 (list names them)" >&2; exit 2 ;;
esac
steps=$(grep -o -- '--steps=[0-9]*' <<< "$flags" || echo =2000)
[ -e "$out/$1/step-${steps#*=}.pt" ] && exit
if [[ $1 = cont-* && ! -e $out/scratch-binary-1/step-10000.pt ]]; then
    echo "$1 starts from scratch-binary-1, which is not finished: run it first" >&2
    exit 2
fi
[ -e "$out/$1/last.pt" ] && flags="$flags --resume"
python train.py $flags --seed="$seed" --out_dir="$out/$1" >> "$out/$1.out" 2>&1
