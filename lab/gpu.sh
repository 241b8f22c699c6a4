#!/usr/bin/env bash
# What needs a GPU, for one H100 or H200 without a network. Each block should take under 9 minutes,
# but text three runs of that length:
#     bash lab/gpu.sh              # all blocks (text only if TEXT is given)
#     bash lab/gpu.sh first        # the same numbers as train, dream, sample and tests in 9 minutes
#     bash lab/gpu.sh train        # one of tests, train, sample, dream, ddp
#     TEXT=FOLDER bash lab/gpu.sh text   # does feedback pay on these texts, such as 100 novels?
#     SIZE=toy bash lab/gpu.sh     # the same commands with tiny models, also on a CPU: minutes
# $OUT (default: results/bench) gets all output, in gpu.log, and the numbers, in gpu-*.json.
# What is already there is not measured again, so a block that was stopped can go on.
# As they stand here, these blocks have not run on a GPU. For an older commit, see results/bench.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} size=${SIZE:-gpu}

if [ "$size" = toy ]; then
    out=${OUT:-out/gpu-toy} work=${WORK:-out/gpu-toy-work} bench=quick
    model="--n_layer=1 --n_head=2 --n_embd=32 --n_cond=16 --length=64"
    text="$model --batch_size=8 --micro_batch=8" long=25 short=20 rows=20 samples=2
else
    out=${OUT:-results/bench} work=${WORK:-out/gpu} bench=gpu
    model="--n_layer=12 --n_head=12 --n_embd=768 --n_cond=128 --device=cuda"
    text="--n_layer=10 --n_head=8 --n_embd=512 --n_cond=128 --length=512 --batch_size=64"
    text="$text --micro_batch=64" long=300 short=120 rows=1000 samples=64
fi
mkdir -p "$out" "$work"

if [ $# != 1 ]; then
    status=0
    for block in ${*:-tests train sample dream ddp ${TEXT:+text}}; do
        bash lab/gpu.sh "$block" || status=$?  # if a block fails, the others still run
    done
    exit $status
fi

run() {  # show a command, and run it
    echo "+ $*"
    ${limit:-} "$python" "$@" 2>&1
}

tests() {  # all tests that need CUDA. Without it most of them are skipped, and say so
    [ ! -e "$out/gpu-tests.txt" ] || return 0
    run -m pytest -q -rs -k "cuda or gpu or compiled" tests | tee "$work/tests.txt" &&
        mv "$work/tests.txt" "$out/gpu-tests.txt"
}

noise() {  # random data with GPT-2's vocabulary
    "$python" - "$work/noise" <<'PY'
import json, sys
from pathlib import Path
import numpy as np
folder, V, draw = Path(sys.argv[1]), 50258, np.random.default_rng(0)
folder.mkdir(exist_ok=True)
special = {"name": "gpt2", "vocab_size": V, "mask_id": V - 1, "bos": V - 2, "eos": V - 2}
meta = {"tokenizer": special, "source": "noise"}
for split, n in ("train", 2_000_000), ("val", 200_000):
    np.minimum(draw.zipf(1.2, n) - 1, V - 3).astype(np.uint16).tofile(folder / f"{split}.bin")
    meta[split] = {"documents": 1, "tokens": n, "bytes": n, "sha256": split}
(folder / "meta.json").write_text(json.dumps(meta))
PY
}

ddp() {  # SM in about half of the updates. Each has two micro-batches, so no_sync is used
    [ ! -e "$out/gpu-ddp.json" ] || return 0
    noise
    rm -rf "$work"/alone "$work"/ddp-*
    local flags="--data=$work/noise $model --batch_size=32 --micro_batch=16 --steps=20"
    flags="$flags --eta_bb=1e-4 --warmup=1 --log_every=1 --eval_every=0 --p_sm=0.5 --omega_s=0.5"
    flags="$flags --omega_a=1 --omega_b=-9 --dropout=0"
    # train.py uses DDP if there are several processes. Here one process pretends to be several, so
    # that the same lines run over NCCL on one GPU.
    cat > "$work/ddp.py" <<'PY'
import os, launch, train
import torch
import torch.distributed as dist

class Several(int):
    def __gt__(self, other):
        return True

def machine_of_several(*args):
    here = machine(*args)
    return here._replace(world=Several(here.world))

def wrapped(model, **how):
    torch._dynamo.config.optimize_ddp = os.environ["OPTIMIZE_DDP"] == "on"
    backends.append(dist.get_backend())
    return ddp(model, **how)

backends = []
machine, launch.machine = launch.machine, machine_of_several
ddp, launch.DistributedDataParallel = launch.DistributedDataParallel, wrapped
launch.run(train.train, train.Config, train.PRESETS, True)
assert backends, "train.py has not taken DDP"
print("DDP over", *backends)
PY
    run train.py $flags --out_dir="$work/alone"
    for cuts in off on; do
        OPTIMIZE_DDP=$cuts PYTHONPATH=. run -m torch.distributed.run --standalone \
            --nproc_per_node=1 "$work/ddp.py" $flags --out_dir="$work/ddp-$cuts"
    done
    # All runs must make the same updates, up to bf16 rounding. After a few updates it shows in the
    # gradient norm, so that is compared for fewer of them.
    "$python" - "$work" > "$work/ddp.json" <<'PY' && mv "$work/ddp.json" "$out/gpu-ddp.json"
import json, statistics, sys
from launch import read_jsonl
names = "alone", "ddp-off", "ddp-on"
runs = {name: read_jsonl(f"{sys.argv[1]}/{name}/log.jsonl") for name in names}
compared = {"loss": 20, "omega_s": 20, "grad_norm": 5}  # for the first so many updates
worst = {key: max(abs(a[key] / b[key] - 1) for name in names[1:]
                  for a, b in zip(runs["alone"][:n], runs[name][:n]))
         for key, n in compared.items()}
speed = {name: statistics.median(line["tokens_per_s"] for line in lines[5:])
         for name, lines in runs.items()}
print("largest relative difference:", worst, file=sys.stderr)
print(json.dumps({"largest relative difference": worst, "tokens/s": speed, "runs": runs}, indent=1))
sys.exit(any(len(lines) != 20 for lines in runs.values()) or max(worst.values()) > 0.02)
PY
}

train() {
    run lab/bench.py $bench --parts=train --repeats=9 --json="$out/gpu-train.json"
}

first() {  # in order of worth. After 540 seconds it starts nothing more
    local part status=0
    for part in train dream sample; do
        if [ "$SECONDS" -lt 540 ]; then
            run lab/bench.py $bench --parts=$part --repeats=3 --seconds=$((540 - SECONDS)) \
                --json="$out/first-$part.json" || status=1
        fi
    done
    if [ "$SECONDS" -lt 540 ]; then
        tests || status=1
    fi
    return $status
}

last() {  # a field in the log's line of the update that last.pt holds, or 0
    "$python" - "$work/$1" "$2" <<'PY'
import os, sys
from launch import read_jsonl
from mdlm import MDLM
last = f"{sys.argv[1]}/last.pt"
step = MDLM.load(last).info["step"] if os.path.exists(last) else 0
lines = [line for line in read_jsonl(f"{sys.argv[1]}/log.jsonl") if line["step"] <= step]
print(int(lines[-1][sys.argv[2]]) if lines else 0)
PY
}

train_text() {  # without compiling, which would take a part of the time, and a larger one with SM
    run train.py --data="$work/text" $text --compile=False --eta_bb=5e-4 --warmup=200 --dropout=0 \
        --ema=0.999 --save_every=200 --eval_every=0 --keep_every=0 --resume "$@"
}

timed() {  # train for so many seconds in all, even if this block is stopped and called again
    local left name=$2
    left=$(($1 - $(last "$name" seconds)))
    shift 2
    [ ! -e "$work/$name.timed" ] || return 0
    [ "$left" -le 0 ] ||
        limit="timeout -s TERM $left" train_text --out_dir="$work/$name" "$@" ||
        [ $? = 124 ]  # SIGTERM makes it save last.pt
    [ ! -e "$work/$name/last.pt" ] || touch "$work/$name.timed"
}

measured() {  # spans of 8 tokens in 8, 4, 2 and 1 passes, Eq. 2 in ten ranges of t, and entropy
    local checkpoint="--checkpoint=$work/$1/last.pt" name=$1-$2
    [ -e "$out/text-$name.json" ] || run lab/feedback.py $checkpoint --data="$work/text" \
        --width=8 --passes=8,4,2,1 --rows=$rows --out="$out/text-$name.json"
    run sample.py $checkpoint --count=$samples --steps=128 --compile --out="$work/$name.jsonl"
    # The entropy is written first. Without GPT-2, the rest fails.
    [ -e "$out/text-$name-entropy.json" ] || HF_HUB_OFFLINE=1 run lab/eval_samples.py --data= \
        --samples="$work/$name.jsonl" --out="$out/text-$name-entropy.json" ||
        [ -e "$out/text-$name-entropy.json" ]
}

text() {  # one binary model of bytes, continued without SM and with it: two seeds each
    [ -e "$work/text/meta.json" ] ||
        run data.py "${TEXT:?names a folder of texts}" --tokenizer=bytes --out="$work/text"
    timed $long base --p_sm=0
    local seed from="--init_from=$work/base/last.pt"
    for seed in 1 2; do
        timed $short "binary-$seed" $from --seed=$seed --p_sm=0
        timed $short "sm-$seed" $from --seed=$seed --omega_s=0.5 --omega_a=1 --omega_b=-2.8
        measured "binary-$seed" time
        [ -e "$out/text-sm-$seed-time-entropy.json" ] || measured "sm-$seed" time
        # In this time SM has made fewer updates. Now it makes as many.
        [ "$(last "sm-$seed" step)" -ge "$(last "binary-$seed" step)" ] ||
            train_text --out_dir="$work/sm-$seed" $from --seed=$seed --omega_s=0.5 --omega_a=1 \
                --omega_b=-2.8 --steps="$(last "binary-$seed" step)"
        measured "sm-$seed" updates
    done
}

block=$1
case $block in
    tests | train | first | ddp | text) $block ;;
    dream) run lab/bench.py $bench --parts=dream --repeats=9 --json="$out/gpu-dream.json" ;;
    sample)  # fewer turns: without compiling, one sample takes 20 seconds
        run lab/bench.py $bench --parts=sample --repeats=5 --json="$out/gpu-sample.json" ;;
    *) echo "no block of this name: $block (first, tests, train, sample, dream, ddp, text)" >&2; exit 2 ;;
esac | tee -a "$out/gpu.log"
echo "$block: $SECONDS s" | tee -a "$out/gpu.log"
