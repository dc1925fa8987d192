#!/bin/sh
# Compiler launcher of the CUDA files (see CMakeLists.txt): runs its arguments, a call of nvcc, and keeps
# what ptxas says about each kernel, spills included, in <object>.ptxas for scripts/kernel_resources.py.
# Other warnings and errors are shown.
object=
previous=
for argument in "$@"; do
  [ "$previous" = "-o" ] && object=$argument
  previous=$argument
done
log=${object:-nvcc}.log
"$@" 2>"$log"
status=$?
report='^ptxas info|^ptxas warning *: Registers are spilled|^ *[0-9]+ bytes (stack frame|gmem)|^ *[0-9]+ bytes .*spill'
grep -E "$report" "$log" >"${object:-nvcc}.ptxas"
grep -vE "$report" "$log" >&2
rm -f "$log"
exit $status
