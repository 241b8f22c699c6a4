#!/usr/bin/env bash
# Everything that results/README.md prints, from the runs of run.sh: bounds, samples, their scores, thinned logs, figures, tables.
#     bash results/measure.sh            # what is there already is not made again
# Needs `pip install transformers mauve-text matplotlib` and a causal LM in data/smollm2 (README.md says how it got there).
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
out=${OUT:-out/evidence} here=results novels=${DATA:-data/novels-bytes} stdlib=${STDLIB:-data/stdlib}
mkdir -p $here/{logs,ppl,samples,figures}

for log in "$out"/*/log.jsonl; do
    python - "$log" > "$here/logs/$(basename "$(dirname "$log")").jsonl" <<'PY'
import json, sys
keep = ("step", "loss", "ce_per_mask", "lam", "omega_s", "omega_a", "omega_b", "tokens_per_s", "seconds", "val_soft", "val_plain")
for line in map(json.loads, open(sys.argv[1])):
    if line["step"] % 100 == 0:
        print(json.dumps({k: round(line[k], 5) for k in keep if k in line}))
PY
done

# The continuations were logged with masks that went by the seed of the run (EVAL_SEED came after them): their held-out
# lines are measured again, from the checkpoints of the same updates, so that seeds are compared on the same 256 rows and masks.
python - "$out" "$here" "$novels" <<'PY'
import glob, json, os, sys
import torch
import data, train
from eval import val_ppl
from mdlm import MDLM
out, here, novels = sys.argv[1:]
tokens = data.open_split(novels, "val")[0]
n = data.n_rows(tokens, 128)
rows = data.rows(tokens, torch.arange(256) * n // 256, 128)
for path in sorted(glob.glob(f"{here}/logs/cont-*.jsonl")):
    name = os.path.basename(path).removesuffix(".jsonl")
    lines, cache = [json.loads(line) for line in open(path)], f"{out}/{name}.val.json"
    again = json.load(open(cache)) if os.path.exists(cache) else {}
    for line in lines:
        step = str(line["step"])
        ckpt = f"{out}/{name}/step-{step}.pt"
        if "val_plain" in line and step not in again and os.path.exists(ckpt):
            model = MDLM.load(ckpt)
            with torch.autocast("cpu", torch.bfloat16):
                found = {name: val_ppl(model, rows, soft, train.EVAL_SEED, batch_size=32)
                         for name, soft in (("val_soft", True), ("val_plain", False)) if model.sm or not soft}
            again[step] = {name: round(nll / tokens, 5) for name, (nll, tokens) in found.items()}
            json.dump(again, open(cache, "w"))
        line |= again.get(step, {})
    with open(path, "w") as f:
        f.writelines(json.dumps(line) + "\n" for line in lines)
PY

# SM's tokens/s over binary's, of the two runs of seed 1: they started together, so what slowed one slowed the other
speed=$(python - "$out"/scratch-{binary,sm}-1/log.jsonl <<'PY'
import json, statistics, sys
binary, sm = (statistics.median(json.loads(line)["tokens_per_s"] for line in open(path)) for path in sys.argv[1:])
print(sm / binary)
PY
)
isoflop() { python -c "print(int($1 * min(1, $speed)) // $2 * $2)"; }  # binary's updates, spacing of checkpoints
echo "SM / binary tokens/s: $speed; iso-FLOP: $(isoflop 10000 500) of 10,000, $(isoflop 2000 200) of 2,000"

ppl() {  # group, label, seed, checkpoint, [what it is compared with, [data]]
    local file="$here/ppl/$1-$(tr ' ,' '--' <<< "$2")-$3.json"
    [ -e "$4" ] && [ ! -e "$file" ] || return 0
    python eval.py ppl --checkpoint="$4" --data="${6:-$novels}" --rows=2048 --batch_size=32 --dtype=bfloat16 --label="$2" \
        --out="$file" ${5:+--against="$5"}
}

compare() {  # group, updates, spacing of checkpoints, seeds
    local flop; flop=$(isoflop "$2" "$3")
    for seed in $4; do
        local b=$out/$1-binary-$seed/step-$2.pt s=$out/$1-sm-$seed
        [ -e "$b" ] || continue
        ppl "$1" "binary" "$seed" "$b"
        ppl "$1" "SM iso-update" "$seed" "$s/step-$2.pt" "$b"
        ppl "$1" "SM iso-compute" "$seed" "$s/step-$(($2 / 2)).pt" "$b"
        ppl "$1" "SM iso-FLOP" "$seed" "$s/step-$flop.pt" "$b"
    done
}

compare scratch 10000 500 "1 2 3"
ppl scratch "SM start of the paper" 1 $out/scratch-paper-1/step-10000.pt $out/scratch-binary-1/step-10000.pt
compare cont 2000 200 "11 12 13"
for name in p05 p10 k1 k5 kV kV2 paper; do
    ppl cont "seed 11, $name" 11 $out/cont-$name-11/step-2000.pt $out/cont-binary-11/step-2000.pt
done
ppl cont "seed 11, default" 11 $out/cont-sm-11/step-2000.pt $out/cont-binary-11/step-2000.pt
for seed in 1 2 3; do
    ppl stdlib "binary" $seed $out/stdlib-binary-$seed/step-2000.pt "" "$stdlib"
    ppl stdlib "SM iso-update" $seed $out/stdlib-sm-$seed/step-2000.pt $out/stdlib-binary-$seed/step-2000.pt "$stdlib"
done
python results/tables.py | tee $here/tables.md

for model in scratch-binary-1/step-10000 scratch-sm-1/step-10000; do
    case $model in *sm*) label="SM iso-update" ;; *) label="binary" ;; esac
    for T in 16 32 64 128; do
        for sampler in mdlm remdm-cap; do
            [ $sampler$T != remdm-cap128 ] || sampler=remdm-loop      # App. B.1: for T >= L
            name=${model/\//-}-$sampler-$T
            [ ! -e "$here/samples/$name.mauve.json" ] || continue
            python sample.py --checkpoint=$out/$model.pt --count=128 --batch_size=64 --steps=$T --sampler=$sampler --dtype=bfloat16 \
                --out="$out/samples/$name.jsonl" > /dev/null
            python eval.py gen_ppl --samples="$out/samples/$name.jsonl" --scorer=data/smollm2 --label="$label" --out="$here/samples/$name.gen_ppl.json"
            python eval.py mauve --samples="$out/samples/$name.jsonl" --data="$novels" --scorer=data/smollm2 --label="$label" \
                --out="$here/samples/$name.mauve.json"
        done
    done
done
python eval.py table --results="$here/samples/*.json" --out=$here/samples.md
python sample.py --checkpoint=$out/scratch-sm-1/step-10000.pt --length=24 --steps=16 --trace=$here/logs/trajectory.json --out=$out/samples/trajectory.jsonl

for kind in png svg; do
    python plot.py --runs="$here/logs/scratch-*-?.jsonl" --out=$here/figures/scratch.$kind
    python plot.py --runs="$here/logs/cont-binary-*.jsonl,$here/logs/cont-sm-*.jsonl,$here/logs/cont-paper-*.jsonl" --out=$here/figures/continuation.$kind
    python plot.py --runs="$here/logs/stdlib-*.jsonl" --out=$here/figures/stdlib.$kind
    python plot.py --ablation="$here/logs/cont-*-11.jsonl" --out=$here/figures/ablation.$kind
    python plot.py --trajectory=$here/logs/trajectory.json --out=$here/figures/trajectory.$kind
done
