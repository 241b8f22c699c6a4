#!/usr/bin/env bash
# What needs a GPU, for one H100 or H200 without a network. Each block should take under 9 minutes:
#     bash lab/gpu.sh              # all blocks
#     bash lab/gpu.sh train        # one of tests, train, sample, ddp
#     SIZE=toy bash lab/gpu.sh     # the same commands on a CPU, about 3 minutes
# $OUT (default: results/bench) gets gpu.log, which is what was printed, and gpu-*.json. A block whose
# result is there is skipped. As they stand here, these blocks have not run on a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} size=${SIZE:-gpu}

if [ "$size" = toy ]; then
    out=${OUT:-out/gpu-toy} work=${WORK:-out/gpu-toy-work} bench="quick --device=cpu"
    model="--n_layer=1 --n_head=2 --n_embd=32 --n_cond=16 --length=64 --device=cpu"
else
    out=${OUT:-results/bench} work=${WORK:-out/gpu} bench=gpu
    model="--n_layer=12 --n_head=12 --n_embd=768 --n_cond=128 --device=cuda"
fi
mkdir -p "$out" "$work"

if [ $# != 1 ]; then
    status=0
    for block in ${*:-tests train sample ddp}; do
        bash lab/gpu.sh "$block" || status=$?  # the other blocks still run
    done
    exit $status
fi

run() {  # show a command, and run it
    echo "+ $*"
    "$python" "$@" 2>&1
}

tests() {  # without CUDA, most of these tests are skipped, and say so
    run -m pytest -q -rs -k "cuda or gpu or full_size or compiled" tests | tee "$work/tests.txt"
    mv "$work/tests.txt" "$out/gpu-tests.txt"
}

measure() {  # name of the result, flags
    local name=$1; shift
    run lab/bench.py $bench --json="$out/gpu-$name.json" "$@"
}

ddp() {  # a run over NCCL must make the updates of a run without it
    local flags="--data=data/stdlib $model --overwrite --batch_size=32 --micro_batch=16 --steps=20"
    flags="$flags --eta_bb=1e-4 --warmup=1 --log_every=1 --eval_every=0 --p_sm=0.5 --omega_s=0.5"
    flags="$flags --omega_a=1 --omega_b=-9 --dropout=0"
    # train.py uses DDP where there are several processes. So that one GPU is enough, the only
    # process counts as several.
    cat > "$work/ddp.py" <<'PY'
import launch, train
import torch.distributed as dist

class Several(int):
    def __gt__(self, other):
        return True

def machine_of_several(*args):
    here = machine(*args)
    return here._replace(world=Several(here.world))

def wrapped(model, **options):
    backends.append(dist.get_backend())
    return ddp(model, **options)

backends = []
machine, launch.machine = launch.machine, machine_of_several
ddp, train.DistributedDataParallel = train.DistributedDataParallel, wrapped
launch.run(train.train, train.Config, train.PRESETS)
assert backends, "train.py did not use DDP"
print("DDP over", *backends)
PY
    run train.py $flags --out_dir="$work/alone"
    PYTHONPATH=. run -m torch.distributed.run --standalone --nproc_per_node=1 "$work/ddp.py" \
        $flags --out_dir="$work/ddp"
    "$python" - "$work" > "$work/ddp.json" <<'PY'
import json, sys
from launch import read_jsonl
alone, ddp = (read_jsonl(f"{sys.argv[1]}/{name}/log.jsonl") for name in ("alone", "ddp"))
worst = max(abs(a[key] / b[key] - 1) for a, b in zip(alone, ddp) for key in ("loss", "omega_s"))
print(json.dumps({"largest relative difference": worst, "alone": alone, "ddp": ddp}, indent=1))
sys.exit(len(ddp) != 20 or worst > 0.02)  # bf16 rounds
PY
    mv "$work/ddp.json" "$out/gpu-ddp.json"
}

if [ -e "$out/gpu-$1.json" ] || [ -e "$out/gpu-$1.txt" ]; then
    echo "$1: its result is already in $out"
    exit
fi
case $1 in
    tests | ddp) $1 ;;
    train) measure train --parts=train --repeats=9 ;;
    sample)
        measure sample-eager --parts=sample --compile=False
        measure sample --parts=sample ;;
    *) echo "no block of this name: $1 (tests, train, sample, ddp)" >&2; exit 2 ;;
esac | tee -a "$out/gpu.log"
echo "$1: $SECONDS s" | tee -a "$out/gpu.log"
