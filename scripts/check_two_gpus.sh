#!/usr/bin/env bash
# Tensor parallelism on two GPUs, in about five minutes: all-reduce times, Llama-3-8B's shape on two GPUs (sums
# over peer memory, and by NCCL) and on one, a shape of 70B, and the tests that need two GPUs. Each part has a time
# limit, and what it finds is printed and kept before the next begins; a part that fails stops no other.
#
#   scripts/check_two_gpus.sh [FOLDER]      # where logs and JSON go; ./results by default
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=${1:-results}
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
started=$SECONDS

part() { # part NAME SECONDS COMMAND...
  local name=$1 limit=$2
  shift 2
  timeout -k 5 "$limit" "$@" > "$OUT/$name.log" 2>&1
  local code=$?
  echo "== $name: exit code $code, $((SECONDS - started)) s since the start"
  grep -v -e '^\[' -e '^$' -e 'INFO' "$OUT/$name.log" | tail -n "${LINES_SHOWN:-12}"
}
engine() { # engine NAME SECONDS WORKLOADS ARGUMENTS...
  local name=$1 limit=$2 workloads=$3
  shift 3
  part "$name" "$limit" "$PYTHON" benchmarks/bench_engine.py --workloads "$workloads" --repeats 1 \
    --json "$OUT/$name.json" "$@"
}

nvidia-smi topo -m > "$OUT/topology.log" 2>&1
part all-reduce 40 "$PYTHON" benchmarks/bench_distributed.py all-reduce --ranks 2 --json "$OUT/all-reduce.json"

export PAGEDINFER_PEER_ALL_REDUCE_BYTES=8388608
engine 8b-two-peers 60 W3,W2,W1 --model llama-3-8b --tensor-parallel-size 2
unset PAGEDINFER_PEER_ALL_REDUCE_BYTES
engine 8b-one 60 W3,W2,W1 --model llama-3-8b
LINES_SHOWN=40 part tests 130 "$PYTHON" -m pytest -q -m gpu tests/distributed --durations=8 \
  -p no:cacheprovider
engine 70b-two 60 1x128x32,32x128x64 --model llama-3-70b --max-num-seqs 64 --tensor-parallel-size 2
left=$((292 - SECONDS + started))
if ((left > 15)); then
  export PAGEDINFER_PEER_ALL_REDUCE_BYTES=0
  engine 8b-two-nccl "$left" W3,W2 --model llama-3-8b --tensor-parallel-size 2
fi
part processes-left 5 bash -c 'pgrep -af rank_process || echo none'
