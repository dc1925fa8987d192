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

nvidia-smi topo -m > "$OUT/topology.log" 2>&1
part all-reduce 35 "$PYTHON" benchmarks/bench_distributed.py all-reduce --ranks 2 --json "$OUT/all-reduce.json"
PAGEDINFER_PEER_ALL_REDUCE_BYTES=0 engine 8b-nccl 50 W3,W2,W1 --model llama-3-8b
LINES_SHOWN=40 part tests 80 "$PYTHON" -m pytest -v -m gpu tests/distributed/test_gpu.py --durations=8 \
  -p no:cacheprovider
PAGEDINFER_PEER_ALL_REDUCE_BYTES=0 engine 70b-nccl 50 1x128x16,32x128x32 --model llama-3-70b --max-num-seqs 64
PAGEDINFER_PEER_ALL_REDUCE_BYTES=8388608 engine 8b-peers 45 W3,W2 --model llama-3-8b
part processes-left 10 bash -c 'pgrep -af rank_process || echo none'
