#!/usr/bin/env bash
# Everything that needs a GPU, for one H100 or H200 without a network. Each block is planned for
# less than 9 minutes:
#     bash results/gpu.sh              # all blocks
#     bash results/gpu.sh train        # one of tests, train, sample, dream, ddp
#     SIZE=toy bash results/gpu.sh     # the same commands on a CPU, about 3 minutes
# Results go to $OUT (default: results/bench): gpu.log has what was printed, gpu-*.json the numbers.
# A block that was stopped goes on: what lies in $OUT is not measured again.
# As they stand here, these blocks have not run on a GPU. README.md has what an older commit showed.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} size=${SIZE:-gpu}

if [ "$size" = toy ]; then
    out=${OUT:-out/gpu-toy} work=${WORK:-out/gpu-toy-work} bench="quick --device=cpu"
    model="--n_layer=1 --n_head=2 --n_embd=32 --n_cond=16 --device=cpu"
else
    out=${OUT:-results/bench} work=${WORK:-out/gpu} bench=gpu
    model="--n_layer=12 --n_head=12 --n_embd=768 --n_cond=128 --device=cuda"
fi
mkdir -p "$out" "$work"

if [ $# != 1 ]; then
    status=0
    for block in ${*:-tests train sample dream ddp}; do
        bash results/gpu.sh "$block" || status=$?  # a block that fails stops no other
    done
    exit $status
fi

run() {  # a command of ours, shown and kept
    echo "+ $*"
    "$python" "$@" 2>&1
}

tests() {  # every test that needs CUDA; on a CPU most of them are skipped, and say so
    [ ! -e "$out/gpu-tests.txt" ] || return 0
    run -m pytest -q -rs -k "cuda or gpu or full_size or compiled" tests | tee "$work/tests.txt"
    mv "$work/tests.txt" "$out/gpu-tests.txt"
}

ddp() {  # SM is on in about half of the updates; two micro-batches each, so no_sync is used
    [ ! -e "$out/gpu-ddp.json" ] || return 0
    local flags="quickstart $model --overwrite --steps=20 --micro_batch=16 --warmup=1 --log_every=1"
    flags="$flags --p_sm=0.5 --omega_s=0.5 --omega_a=1 --omega_b=-2.8 --show=False"
    # train.py takes DDP where there are several processes. Here one process passes for several, so
    # that the same lines run over NCCL on one GPU.
    cat > "$work/ddp.py" <<'PY'
import launch, train
import torch.distributed as dist

class Several(int):
    def __gt__(self, other):
        return True

def machine_of_several(*args):
    here = machine(*args)
    return here._replace(world=Several(here.world))

def wrapped(model, **how):
    backends.append(dist.get_backend())
    return ddp(model, **how)

backends = []
machine, launch.machine = launch.machine, machine_of_several
ddp, train.DistributedDataParallel = train.DistributedDataParallel, wrapped
launch.run(train.train, train.Config, train.PRESETS)
assert backends, "train.py has not taken DDP"
print("DDP over", *backends)
PY
    run train.py $flags --out_dir="$work/alone"
    PYTHONPATH=. run -m torch.distributed.run --standalone --nproc_per_node=1 "$work/ddp.py" \
        $flags --out_dir="$work/ddp"
    # Both runs must have made the same updates, up to the rounding of bf16, which the norm of the
    # gradient shows after some updates.
    local status=0
    "$python" - "$work/alone" "$work/ddp" > "$work/ddp.json" <<'PY' || status=$?
import json, sys
from launch import read_jsonl
alone, ddp = (read_jsonl(f"{folder}/log.jsonl") for folder in sys.argv[1:])
compared = {"loss": 20, "omega_s": 20, "grad_norm": 5}  # over so many updates
worst = {name: max(abs(a[name] / b[name] - 1) for a, b in zip(alone[:n], ddp[:n]))
         for name, n in compared.items()}
print(json.dumps({"largest relative difference": worst, "updates": ddp}, indent=1))
sys.exit(not len(alone) == len(ddp) == 20 or max(worst.values()) > 0.02)
PY
    mv "$work/ddp.json" "$out/gpu-ddp.json"
    return $status
}

block=$1
case $block in
    tests | ddp) $block ;;
    train | dream)
        run lab/bench.py $bench --parts="$block" --repeats=9 --json="$out/gpu-$block.json" ;;
    sample)  # fewer turns: a sample alone takes 20 seconds where it is eager
        run lab/bench.py $bench --parts=sample --repeats=5 --json="$out/gpu-sample.json" ;;
    *) echo "no block of this name: $block (tests, train, sample, dream, ddp)" >&2; exit 2 ;;
esac | tee -a "$out/gpu.log"
echo "$block: $SECONDS s" | tee -a "$out/gpu.log"
