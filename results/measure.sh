#!/usr/bin/env bash
# Everything that results/README.md prints of novels and Python, from the runs of run.sh: bounds,
# samples and their scores, as out/evidence/*.json. The last lines keep them, and draw.
#
#     bash results/measure.sh            # makes only what is not there yet
#
# Needs `pip install transformers mauve-text matplotlib`, and a causal LM in data/smollm2, which
# README.md says how to get.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
out=${OUT:-out/evidence}
novels=${DATA:-data/novels-bytes} stdlib=${STDLIB:-data/stdlib}
mkdir -p "$out/samples"

# ---- bounds

# SM's tokens/s over those of binary, in the two runs of seed 1. They started together, so whatever
# slowed one of them slowed the other.
speed=$(python - "$out"/scratch-{binary,sm}-1/log.jsonl <<'PY'
import statistics, sys
from launch import read_jsonl
binary, sm = (statistics.median(line["tokens_per_s"] for line in read_jsonl(path) if line["step"])
              for path in sys.argv[1:])
print(sm / binary)
PY
)

isoflop() {  # updates of binary, spacing of checkpoints
    python -c "print(int($1 * min(1, $speed)) // $2 * $2)"
}

ppl() {  # group, label, seed, checkpoint, [data]
    local file
    file="$out/$1-$(tr ' ,' '--' <<< "$2")-$3.json"
    [ -e "$4" ] && [ ! -e "$file" ] || return 0
    python eval.py ppl --checkpoint="$4" --data="${5:-$novels}" --rows=2048 --batch_size=32 \
        --dtype=bfloat16 --label="$2" --out="$file"
}

compare() {  # group, updates, spacing of checkpoints, seeds
    local flop
    flop=$(isoflop "$2" "$3")
    echo "$1: SM / binary tokens/s $speed, iso-FLOP after $flop of $2 updates"
    for seed in $4; do
        local binary=$out/$1-binary-$seed/step-$2.pt sm=$out/$1-sm-$seed
        [ -e "$binary" ] || continue
        ppl "$1" "binary" "$seed" "$binary"
        ppl "$1" "SM iso-update" "$seed" "$sm/step-$2.pt"
        ppl "$1" "SM iso-compute" "$seed" "$sm/step-$(($2 / 2)).pt"
        ppl "$1" "SM iso-FLOP" "$seed" "$sm/step-$flop.pt"
    done
}

compare scratch 10000 500 "1 2 3"
ppl scratch "SM start of the paper" 1 "$out/scratch-paper-1/step-10000.pt"
compare cont 2000 200 "11 12 13"
ppl cont "seed 11, default" 11 "$out/cont-sm-11/step-2000.pt"
for name in p05 p10 k1 k5 kV kV2 paper; do
    ppl cont "seed 11, $name" 11 "$out/cont-$name-11/step-2000.pt"
done
for seed in 1 2 3; do
    ppl stdlib "binary" $seed "$out/stdlib-binary-$seed/step-2000.pt" "$stdlib"
    ppl stdlib "SM iso-update" $seed "$out/stdlib-sm-$seed/step-2000.pt" "$stdlib"
done

# ---- samples and their scores

for model in scratch-{binary,sm}-1/step-10000; do
    case $model in *sm*) label="SM iso-update" ;; *) label="binary" ;; esac
    for T in 16 32 64 128; do
        for sampler in mdlm remdm-cap; do
            [ $sampler$T != remdm-cap128 ] || sampler=remdm-loop      # App. B.1: for T >= L
            name=${model/\//-}-$sampler-$T
            samples=$out/samples/$name.jsonl result=$out/samples-$name
            [ ! -e "$result.json" ] || continue
            python sample.py --checkpoint="$out/$model.pt" --count=128 --batch_size=64 \
                --steps=$T --sampler=$sampler --out="$samples" > /dev/null
            python eval.py samples --samples="$samples" --scorer=data/smollm2 --data="$novels" \
                --label="$label" --out="$result.json"
        done
    done
done

python results/add.py results/text.jsonl "$out"/*.json
python results/add.py results/text_logs.jsonl "$out"/*/log.jsonl
bash results/draw.sh
