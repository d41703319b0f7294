# Sourced by one_gpu.sh and two_gpus.sh, with the arguments FOLDER [PART...]. Sets `out` to FOLDER
# and `parts` to the parts that are given. `failed` is 1 if one of them has failed.
if (($# == 0)); then
  echo "$(basename "$0"): expected FOLDER [PART...]" >&2
  exit 2
fi
out=$(realpath -m "$1")
shift
parts=("$@")
mkdir -p "$out"
# The commit to record; git may be missing.
commit=${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}
export JAX_PLATFORMS=cuda PYTHONUNBUFFERED=1
failed=0

part() { # NAME SECONDS COMMAND...
  local name=$1 seconds=$2 begin=$SECONDS status
  shift 2
  timeout --kill-after=10 "$seconds" "$@" >"$out/$name.log" 2>&1
  status=$?
  echo "$name: status $status, $((SECONDS - begin)) s"
  tail -n 15 "$out/$name.log"
  ((status == 0)) || failed=1
  return "$status"
}

unknown_part() { # PART
  echo "$(basename "$0"): expected parts that its first comment lists, got $1" >&2
  exit 2
}
