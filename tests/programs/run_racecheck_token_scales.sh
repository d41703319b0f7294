#!/usr/bin/env bash
# Look for hazards in shared memory where rows have scales of their own, kernel by kernel.
#
#   bash tests/programs/run_racecheck_token_scales.sh [LOG_FOLDER] [REPEATS, 20] [AT_ONCE, 2] [KERNELS, all]
#
# Each kernel has a process of its own. Racecheck follows that kernel alone, in each of the repeated
# calls, and prints every hazard with its address. AT_ONCE processes run at a time: racecheck keeps
# records on the GPU, and eight processes at once ran out of its memory. Exit status 0: no hazard.
set -u
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH=$here/..${PYTHONPATH:+:$PYTHONPATH}
logs=${1:-$(mktemp -d)}
repeats=${2:-20}
at_once=${3:-2}
kernels=${4:-QuantizeRows SortScales SortByExpert GroupTiles ExpertGemmSm80 ExpertGemmSm90 PlainGemm
  Combine}
mkdir -p "$logs"
export XLA_PYTHON_CLIENT_ALLOCATOR=platform XLA_PYTHON_CLIENT_PREALLOCATE=false
export XLA_FLAGS="--xla_gpu_autotune_level=0 --xla_gpu_enable_command_buffer="
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
# The option that chooses kernels has had three names.
help=$("$sanitizer" --help 2>&1)
case $help in
  *--kernel-regex*) choose="--kernel-regex kns" ;;
  *--kernel-name*) choose="--kernel-name kns" ;;
  *) choose="--filter kns" ;;
esac
check() { # KERNEL: exit status into a file beside its log
  # $choose holds two words.
  # shellcheck disable=SC2086
  "$sanitizer" --tool racecheck --racecheck-report all --print-limit 1000 --error-exitcode 9 \
    $choose="$1" ${PYTHON:-python3} "$here/sanitize_cuda.py" --token-scales "$repeats" \
    >"$logs/$1.log" 2>&1
  echo $? >"$logs/$1.status"
}
for kernel in $kernels; do
  while [ "$(jobs -rp | wc -l)" -ge "$at_once" ]; do wait -n; done
  check "$kernel" &
done
wait
failed=0
for kernel in $kernels; do
  status=$(cat "$logs/$kernel.status")
  log=$logs/$kernel.log
  echo "$kernel: exit $status, $(grep -c '^layer\|^product' "$log") calls," \
    "$(grep 'RACECHECK SUMMARY' "$log" | tail -1)"
  if [ "$status" -ne 0 ] || ! grep -q 'RACECHECK SUMMARY' "$log"; then
    failed=1
    grep -vE '^layer|^product' "$log" | head -60
  fi
done
echo "logs: $logs"
exit $failed
