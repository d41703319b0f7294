#!/usr/bin/env bash
# Runs what two connected GPUs need, in parts that each take less than nine minutes. The package and
# its CUDA kernels are installed, and the current folder is the repository.
#   [COMMIT=...] benchmarks/two_gpus.sh FOLDER [PART...]
# Parts, in the order in which they run by default:
#   sums      times of sums, and a million checked ones
#   tests     tests/gpu/test_cuda_all_reduce.py, up to the first failure
#   tensor    decoding with and without connected memory, sharded along `tensor`
#   experts   the same along `expert`
# Each call begins with the topology of the machine and a few sums, and ends if these fail. Each part
# writes a log to FOLDER and is stopped after its time. COMMIT is the commit to record, where git
# does not know it. The parts for decoding share a checkpoint in the folder of temporary files.
set -uo pipefail
. "$(dirname "$0")/parts.sh"
((${#parts[@]})) || parts=(sums tests tensor experts)
checkpoint=${TMPDIR:-/tmp}/two_gpus_checkpoint
# CUDA must not load a kernel while a GPU waits in a sum for another one.
export CUDA_MODULE_LOADING=EAGER
export NCCL_NVLS_ENABLE=0

decode() { # NAME MESH...
  local name=$1
  shift
  part "$name" 520 python3 benchmarks/decode_parallel.py --layers 16 --batch 1 16 64 --mesh "$@" \
    --commit "$commit" --folder "$checkpoint" --output "$out/decode_parallel.$name.json" ||
    rm -rf "$checkpoint" # it may not be complete
}

{
  nvidia-smi topo -m
  nvidia-smi topo -p2p rw
} >"$out/topology.log" 2>&1
cat "$out/topology.log"
part smoke 90 python3 tests/programs/peer_sums.py smoke 0 || exit 1
for name in "${parts[@]}"; do
  case $name in
    sums)
      part sums 400 python3 benchmarks/all_reduce.py --check 1000000 --commit "$commit"
      cp benchmarks/results/all_reduce.*.json "$out" || failed=1
      ;;
    tests)
      part tests 500 python3 -P -m pytest -x -v -n 0 --must-run several_gpus \
        tests/gpu/test_cuda_all_reduce.py
      ;;
    tensor) decode tensor 1x1 1x2 1x2+peers ;;
    experts) decode experts 1x1 2x1 2x1+peers ;;
    *) unknown_part "$name" ;;
  esac
done
exit "$failed"
