#!/usr/bin/env bash
# The runs of the third question (questions.md), by name, on one core each. What is there is kept.
#
#     python data.py novels.jsonl.xz --val_docs=300 --tokenizer=bytes --out=data/novels-bytes
#     bash results/when.sh pilot-binary-2e-3      # gradient norms: seed 9; also pilot-ours-RATE
#     ETA=1e-3 bash results/when.sh binary-21     # first: the next three start inside of it
#     ETA=1e-3 bash results/when.sh last50-21     # last25, last10, last25-p05, last25-p10; ours, paper
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
out=${OUT:-out/when}; mkdir -p "$out"
name=$1 arm=${1%-*} seed=${1##*-} folder=$out/$1
flags="stdlib --data=data/novels-bytes --show=False --dtype=float32 --save_every=500"

train() { python train.py $flags --seed="$seed" --out_dir="$folder" --resume=auto "$@" >> "$folder.out" 2>&1; }

if [[ $name = pilot-* ]]; then
    seed=9 arm=${name#pilot-} flags="$flags --log_every=1 --steps=1000 --eta_bb=${name#pilot-*-}"
    [[ $arm != binary-* ]] || flags="$flags --p_sm=0"
    train
    python - "$folder/log.jsonl" <<'PY'
import sys
from launch import read_jsonl
lines = [line for line in read_jsonl(sys.argv[1]) if "grad_norm" in line and line["step"] > 100]
norms = [line["grad_norm"] for line in lines]
print(sys.argv[1], "largest norm", max(norms), "over 3:", sum(x > 3 for x in norms),
      "last loss", sum(line["loss"] for line in lines[-100:]) / 100)
PY
    exit
fi

flags="$flags --eta_bb=$ETA"
# Updates in the time of 5,000 binary ones; and where SM begins.
case $arm in
    binary)     steps=5000 from=5000 p=0.8 ;;
    paper|ours) steps=3850 from=0 p=0.8 ;;
    last50)     steps=4425 from=2500 p=0.8 ;;
    last25)     steps=4710 from=3750 p=0.8 ;;
    last10)     steps=4885 from=4500 p=0.8 ;;
    last50-p05) steps=4600 from=2500 p=0.5 ;;
    last25-p05) steps=4800 from=3750 p=0.5 ;;
    last10-p05) steps=4920 from=4500 p=0.5 ;;
    last50-p10) steps=4320 from=2500 p=1 ;;
    last25-p10) steps=4660 from=3750 p=1 ;;
    last10-p10) steps=4865 from=4500 p=1 ;;
    *) echo "no run of this name: $name" >&2; exit 2 ;;
esac
if [ "$arm" = paper ]; then
    flags="$flags --omega_s=1e-6 --omega_a=6.666666666666667 --omega_b=-0.75"
fi
if [ "$arm" = binary ]; then
    for step in 2500 3750 4500; do  # what the other arms start from
        [ -e "$out/at-$step-$seed" ] || {
            train --sm_from=5000 --steps=$step
            cp -r "$folder" "$out/at-$step-$seed"
        }
    done
elif [ "$from" -gt 0 ] && [ ! -e "$folder" ]; then
    cp -r "$out/at-$from-$seed" "$folder"
    rm -f "$folder"/step-*.pt
fi
[ -e "$folder/step-$steps.pt" ] || train --sm_from=$from --p_sm=$p --steps=$steps
python eval.py ppl --checkpoint="$folder/step-$steps.pt" --data=data/novels-bytes --rows=2048 \
    --repeats=2 --floor=0 --batch_size=32 --label="$arm" --out="$out/$name.json" >> "$folder.out" 2>&1
