#!/usr/bin/env bash
# Checks pagedinfer on this machine's GPU: builds, runs the tests that need a GPU, compute-sanitizer on one
# call of every op (memcheck, racecheck and synccheck), and a small model. Once the GPU can be used at all,
# every step runs, whatever became of the ones before; a table at the end tells how each went, and the exit
# status is 0 if none failed.
#
#   scripts/check_gpu.sh [--skip-build] [-- arguments for pytest]
#
# PYTHON names the interpreter (python3 by default). Logs go to $OUT, or to build/check-gpu.
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
logs=${OUT:-build/check-gpu}
build=yes
while [ $# -gt 0 ]; do
  case $1 in
    --skip-build) build=no ;;
    --) shift && break ;;
    *) echo "check_gpu.sh: unknown argument $1; known are --skip-build, --" >&2 && exit 2 ;;
  esac
  shift
done
mkdir -p "$logs"

rows=()
failed=0
note() { # name, outcome, seconds, detail
  rows+=("$(printf '%-12s %-8s %6s  %s' "$@")")
}

# run NAME COMMAND...: the command's output goes to the terminal and to a log; its last line into the table.
run() {
  local name=$1 log=$logs/$1.log start=$SECONDS
  shift
  echo "== $name"
  if "$@" 2>&1 | tee "$log"; then
    note "$name" ok "$((SECONDS - start)) s" "$(last_line "$log")"
  else
    note "$name" FAILED "$((SECONDS - start)) s" "$(last_line "$log")"
    failed=1
  fi
}
last_line() { grep -v '^[[:space:]]*$' "$1" | tail -n 1 | cut -c 1-200; }

sanitizer() {
  command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null
}

# Every tensor gets an allocation of its own, so that an access past its end is seen as one. Errors that CUDA
# calls return are not counted: torch probes for features that way, and the ops check their own.
sanitize() {
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$(sanitizer)" --tool "$1" --error-exitcode 1 --report-api-errors no \
    "$python" -m tests.every_op && echo "$1: clean"
}

[ $build = yes ] && run build "$python" scripts/build_kernels.py
run device "$python" -c "
import torch
from pagedinfer.device_check import check_cuda_device
from pagedinfer.errors import DeviceError
try:
    check_cuda_device()
except DeviceError as error:
    raise SystemExit(str(error))
print(torch.cuda.get_device_name(), 'under torch', torch.__version__)"
if [ $failed = 0 ]; then
  run tests "$python" -m pytest -q -m gpu "$@"
  for tool in memcheck racecheck synccheck; do
    if [ -n "$(sanitizer)" ]; then
      run "$tool" sanitize "$tool"
    else
      note "$tool" skipped - "compute-sanitizer is not on the PATH: it comes with the CUDA toolkit"
    fi
  done
  run smoke "$python" -m tests.smoke_run --device cuda
fi

echo
printf '%s\n' "${rows[@]}"
echo "logs: $logs"
exit $failed
