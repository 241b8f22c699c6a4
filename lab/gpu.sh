#!/usr/bin/env bash
# What needs a GPU, for one H100 or H200 without a network. Each block should take under 9 minutes:
#     bash lab/gpu.sh              # all blocks
#     bash lab/gpu.sh train        # one of tests, train, sample
#     SIZE=toy bash lab/gpu.sh     # the same commands on a CPU, about 2 minutes
# $OUT (default: results/bench) gets all output, in gpu.log, and the numbers, in gpu-*.json. A block
# whose result is there is skipped. As they stand here, these blocks have not run on a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} bench=gpu out=${OUT:-results/bench}
if [ "${SIZE:-gpu}" = toy ]; then
    bench="quick --device=cpu" out=${OUT:-out/gpu-toy}
fi
mkdir -p "$out"

if [ $# != 1 ]; then
    status=0
    for block in ${*:-tests train sample}; do
        bash lab/gpu.sh "$block" || status=$?  # the other blocks still run
    done
    exit $status
fi

run() {  # show a command, and run it
    echo "+ $*"
    "$python" "$@" 2>&1
}

measure() {  # name of the result, flags
    local name=$1; shift
    run lab/bench.py $bench --json="$out/gpu-$name.json" "$@"
}

if [ -e "$out/gpu-$1.json" ] || [ -e "$out/gpu-$1.txt" ]; then
    echo "$1: its result is already in $out"
    exit
fi
case $1 in
    tests)  # without CUDA, most of these tests are skipped, and say so
        run -m pytest -q -rs -k "cuda or gpu or full_size or compiled" tests | tee "$out/tests.tmp"
        mv "$out/tests.tmp" "$out/gpu-tests.txt" ;;
    train) measure train --parts=train --repeats=9 ;;
    sample)
        measure sample-eager --parts=sample --compile=False
        measure sample --parts=sample ;;
    *) echo "no block of this name: $1 (tests, train, sample)" >&2; exit 2 ;;
esac | tee -a "$out/gpu.log"
echo "$1: $SECONDS s" | tee -a "$out/gpu.log"
