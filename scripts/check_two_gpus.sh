#!/usr/bin/env bash
# Tensor parallelism on two GPUs, in about five minutes: all-reduce times, Llama-3-8B's shape on one GPU and on
# two, a shape of 70B, the tests that need two GPUs, and a rank that is killed. Each part has a time limit, and
# what it finds is printed and kept before the next begins; a part that fails stops no other.
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
  grep -v -e '^\[' -e '^$' "$OUT/$name.log" | tail -n "${LINES_SHOWN:-14}"
}

nvidia-smi topo -m > "$OUT/topology.log" 2>&1
part all-reduce 40 "$PYTHON" benchmarks/bench_distributed.py all-reduce --ranks 2 --json "$OUT/all-reduce.json"
part 8b-on-two 65 "$PYTHON" benchmarks/bench_engine.py --model llama-3-8b --workloads W3,W1,W2 --repeats 1 \
  --tensor-parallel-size 2 --json "$OUT/8b-on-two.json"
part 8b-on-one 60 "$PYTHON" benchmarks/bench_engine.py --model llama-3-8b --workloads W3,W1,W2 --repeats 1 \
  --json "$OUT/8b-on-one.json"
part 8b-peer-memory 30 env PAGEDINFER_PEER_ALL_REDUCE_BYTES=262144 "$PYTHON" benchmarks/bench_engine.py \
  --model llama-3-8b --workloads W3 --repeats 2 --tensor-parallel-size 2 --json "$OUT/8b-peer-memory.json"
# The tests want little of the GPUs, and the 70B shape is not timed to the last percent.
part 70b-on-two 75 "$PYTHON" benchmarks/bench_engine.py --model llama-3-70b --workloads 1x128x32,32x128x64 \
  --repeats 1 --max-num-seqs 64 --tensor-parallel-size 2 --json "$OUT/70b-on-two.json"
LINES_SHOWN=40 part tests $((295 - SECONDS + started)) "$PYTHON" -m pytest -q -m gpu tests/distributed \
  --durations=8 -p no:cacheprovider
part processes-left 5 bash -c 'pgrep -af rank_process || echo none'
