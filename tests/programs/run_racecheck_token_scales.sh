#!/usr/bin/env bash
# Look for hazards in shared memory where rows have scales of their own, kernel by kernel.
#
#   bash tests/programs/run_racecheck_token_scales.sh [LOG_FOLDER] [REPEATS, 20 where none]
#
# One process for each kernel, all at once: racecheck follows that kernel alone, in each of the
# repeated calls, and prints every hazard with its address. Exit status 0: no kernel has one.
set -u
here=$(cd "$(dirname "$0")" && pwd)
logs=${1:-$(mktemp -d)}
repeats=${2:-20}
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
kernels="QuantizeRows SortScales SortByExpert GroupTiles ExpertGemmSm80 ExpertGemmSm90 PlainGemm
  Combine"
running=
for kernel in $kernels; do
  # $choose holds two words.
  # shellcheck disable=SC2086
  "$sanitizer" --tool racecheck --racecheck-report all --print-limit 1000 --error-exitcode 9 \
    $choose="$kernel" ${PYTHON:-python3} "$here/sanitize_cuda.py" --token-scales "$repeats" \
    >"$logs/$kernel.log" 2>&1 &
  running="$running $kernel:$!"
done
failed=0
for one in $running; do
  kernel=${one%%:*}
  wait "${one##*:}"
  status=$?
  log=$logs/$kernel.log
  echo "$kernel: exit $status, $(grep -c '^layer\|^product' "$log") calls," \
    "$(grep 'RACECHECK SUMMARY' "$log" | tail -1)"
  if [ $status -ne 0 ] || ! grep -q 'RACECHECK SUMMARY' "$log"; then
    failed=1
    grep -vE '^layer|^product' "$log" | head -60
  fi
done
echo "logs: $logs"
exit $failed
