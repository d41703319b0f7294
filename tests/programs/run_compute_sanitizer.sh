#!/usr/bin/env bash
# Run compute-sanitizer's four tools over sanitize_cuda.py, on a machine with a GPU.
#
#   bash tests/programs/run_compute_sanitizer.sh [LOG_FOLDER [PART ...]]
#
# Names of parts select calls: see PARTS in sanitize_cuda.py. All parts run by default.
# Every buffer is an allocation of its own (the platform allocator), so that the end of each one is
# guarded, and no kernel hides inside a CUDA graph. Exit status 0: all four tools saw no error.
set -u
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH=$here/..${PYTHONPATH:+:$PYTHONPATH}
logs=${1:-$(mktemp -d)}
mkdir -p "$logs"
[ $# -gt 0 ] && shift
parts=${*:+--parts $*}
export XLA_PYTHON_CLIENT_ALLOCATOR=platform XLA_PYTHON_CLIENT_PREALLOCATE=false
export XLA_FLAGS="--xla_gpu_autotune_level=0 --xla_gpu_enable_command_buffer="
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
report='^=====\|^Traceback\|^ \|Error'  # all other lines are calls
failed=0
for tool in memcheck racecheck initcheck synccheck; do
  log=$logs/$tool.log
  "$sanitizer" --tool "$tool" --error-exitcode 9 --print-limit 20 \
    "${PYTHON:-python3}" "$here/sanitize_cuda.py" $parts >"$log" 2>&1
  status=$?
  echo "$tool: exit $status, $(grep -vc "$report" "$log") calls," \
    "$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | tail -1)"
  if [ $status -ne 0 ]; then
    failed=1
    grep "$report" "$log" | tail -40
  fi
done
exit $failed
