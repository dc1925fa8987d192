#!/usr/bin/env bash
# Tensor parallelism on two GPUs, in about three minutes: all-reduce times, Llama-3-8B's shape (compare with
# benchmarks/bench_engine.py on one), a shape of 70B, and the tests that need two GPUs. Each part has a time limit,
# and what it finds is printed and kept before the next begins; a part that fails stops no other.
#
#   scripts/check_two_gpus.sh [FOLDER]      # where logs and JSON go; ./results by default
#
# SECONDS_LEFT is what it may take in all, 175 by default.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=${1:-results}
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
started=$SECONDS
ends=$((SECONDS + ${SECONDS_LEFT:-175}))

part() { # part NAME MOST_SECONDS COMMAND...
  local name=$1 limit=$2 left=$((ends - SECONDS))
  shift 2
  limit=$((left < limit ? left : limit))
  if ((limit < 10)); then
    echo "== $name: no time is left for it"
    return
  fi
  timeout -k 3 "$limit" "$@" > "$OUT/$name.log" 2>&1
  local code=$?
  echo "== $name: exit code $code, $((SECONDS - started)) s since the start"
  grep -v -e '^\[' -e '^$' -e 'INFO' -e PASSED "$OUT/$name.log" | tail -n "${LINES_SHOWN:-12}"
}
engine() { # engine NAME MOST_SECONDS WORKLOADS ARGUMENTS...
  local name=$1 limit=$2 workloads=$3
  shift 3
  part "$name" "$limit" "$PYTHON" benchmarks/bench_engine.py --workloads "$workloads" --repeats 1 \
    --tensor-parallel-size 2 --json "$OUT/$name.json" "$@"
}

# The tests side by side, each process with an engine or two of tiny models, those that kill a rank last.
tests() {
  local file=tests/distributed/test_gpu.py
  {
    echo "$file::test_families_on_two_gpus"
    printf "$file::test_two_gpus[%s]\n" "swap, peer memory" "swap, eager" "graphs, peer memory" "graphs"
    echo "$file::test_two_ranks_share_a_gpu_through_gloo"
    printf "$file::test_a_rank_of_two_gpus_ends[%s]\n" 0-19 1-9
  } | xargs -d '\n' -P 6 -n 1 timeout 60 "$PYTHON" -m pytest -v -m gpu --durations=3 -p no:cacheprovider
}
export -f tests
export PYTHON

nvidia-smi topo -m > "$OUT/topology.log" 2>&1
part all-reduce 35 "$PYTHON" benchmarks/bench_distributed.py all-reduce --ranks 2 --json "$OUT/all-reduce.json"
engine 8b 45 W3,W2,W1 --model llama-3-8b
CUDA_VISIBLE_DEVICES=0 part 8b-one-gpu 45 "$PYTHON" benchmarks/bench_engine.py --workloads W3,W2,W1 --repeats 1 \
  --json "$OUT/8b-one-gpu.json" --model llama-3-8b
LINES_SHOWN=40 part tests 80 bash -c tests
engine 70b 50 1x128x64,32x128x32 --model llama-3-70b --max-num-seqs 64
part processes-left 10 bash -c 'pgrep -af rank_process || echo none'
