#!/usr/bin/env bash
# Everything that needs a GPU, for one H100 or H200 without a network. Planned for 25 minutes and
# not yet run on a GPU:
#     bash results/gpu.sh              # all blocks; one whose result is there is skipped
#     bash results/gpu.sh train        # one of tests, train, sample, dream, learn: 9 minutes
#     SIZE=toy bash results/gpu.sh     # the same commands on a CPU, about 2 minutes
# Results go to $OUT (default: results/bench): gpu.log has what was printed, gpu-*.json the numbers,
# gpu-learn.tar.gz logs and bounds, gpu-samples-NAME.jsonl texts, which eval.py scores on any machine.
# Text to learn from: $TEXT, what data.py takes (default: Python's own library).
# A block that was stopped starts again, except for the runs of `learn`, which go on in $WORK.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} size=${SIZE:-gpu} text=${TEXT:-stdlib}

if [ "$size" = toy ]; then
    out=${OUT:-out/gpu-toy} work=${WORK:-out/gpu-toy-work} bench="quick --device=cpu"
    model="--n_layer=1 --n_head=2 --n_embd=32 --n_cond=16 --length=64 --device=cpu"
    model="$model --batch_size=8 --micro_batch=8 --warmup=20 --log_every=20 --save_every=100"
    updates=64 more=16 rows=16 count=2 steps=16 device=cpu
else
    out=${OUT:-results/bench} work=${WORK:-out/gpu} bench=gpu
    # 29M parameters, 98M bytes of input: some epochs of 10 to 50 MB of text
    model="--n_layer=8 --n_head=8 --n_embd=512 --n_cond=128 --length=256 --device=cuda"
    model="$model --batch_size=64 --micro_batch=64 --warmup=200 --log_every=50 --save_every=1000"
    updates=6000 more=2000 rows=2048 count=128 steps=256 device=cuda
fi
mkdir -p "$out" "$work"

if [ $# != 1 ]; then
    status=0
    for block in ${*:-tests train sample dream learn}; do
        bash results/gpu.sh "$block" || status=$?  # a block that fails stops no other
    done
    exit $status
fi

run() {  # a command of ours, shown and kept
    echo "+ $*"
    "$python" "$@" 2>&1
}

tests() {  # every test that needs CUDA; on a CPU most of them are skipped, and say so
    run -m pytest -q -rs -k "cuda or gpu or full_size or compiled" tests | tee "$result"
}

train() {
    run lab/bench.py $bench --parts=train,profile,attention --repeats=9 --json="$out/gpu-train.json"
}

sample() {
    run lab/bench.py $bench --parts=sample --json="$out/gpu-sample.json"
}

dream() {
    run lab/bench.py $bench --parts=dream --json="$out/gpu-dream.json"
}

learn_one() {  # name, updates, other flags: a run, or the rest of one that was stopped
    local dir=$work/$1 flags="--steps=$2 ${*:3}"
    [ ! -e "$dir/step-$2.pt" ] || return 0
    [ ! -e "$dir/last.pt" ] || flags="$flags --resume"
    run train.py $model $flags --data="$work/data" --out_dir="$dir" \
        --dropout=0 --eta_bb=1e-3 --ema=0.999 --keep_every=0 --eval_rows=$rows \
        --eval_every=$(($2 / 8))
}

measure() {  # name, updates, the run it is compared with: bounds on held-out rows, and texts
    local against=${3:+--against=$work/$3/step-$2.pt}
    run eval.py ppl --checkpoint="$work/$1/step-$2.pt" $against --data="$work/data" --rows=$rows \
        --batch_size=32 --device=$device --label="$1" --out="$work/$1.ppl.json"
    run sample.py --checkpoint="$work/$1/step-$2.pt" --count=$count --batch_size=$count \
        --steps=$steps --device=$device --out="$out/gpu-samples-$1.jsonl"
}

learn() {  # the paper's ω; continuations start from the binary run and see other batches
    [ -e "$work/data/meta.json" ] || run data.py "$text" --tokenizer=bytes --out="$work/data"
    # The log then says when a run compiles again. SM does it once: its first pass has no gradient.
    export TORCH_LOGS=recompiles
    learn_one binary $updates --p_sm=0
    learn_one sm $updates
    learn_one cont-binary $more --p_sm=0 --seed=2 --init_from="$work/binary/last.pt"
    learn_one cont-sm $more --seed=2 --init_from="$work/binary/last.pt"
    measure binary $updates
    measure sm $updates binary
    measure cont-binary $more
    measure cont-sm $more cont-binary
    tar -czf "$work/learn.tar.gz" -C "$work" $(cd "$work" && echo *.ppl.json */log.jsonl)
    mv "$work/learn.tar.gz" "$out/gpu-learn.tar.gz"
}

block=$1
case $block in
    tests) result=$out/gpu-tests.txt ;;
    train | sample | dream) result=$out/gpu-$block.json ;;
    learn) result=$out/gpu-learn.tar.gz ;;
    *) echo "no block of this name: $block (tests, train, sample, dream, learn)" >&2; exit 2 ;;
esac
[ ! -e "$result" ] || { echo "$block: $result is there"; exit; }
$block | tee -a "$out/gpu.log"
echo "$block: $SECONDS s" | tee -a "$out/gpu.log"
