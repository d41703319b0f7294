#!/usr/bin/env bash
# Runs what two connected GPUs need, in parts that each take less than nine minutes. The package and
# its CUDA kernels are installed, and the current folder is the repository.
#   [COMMIT=...] benchmarks/two_gpus.sh FOLDER [PART...]
# Parts, in the order in which they run by default:
#   sums      times of sums, and a million checked ones
#   tests     tests/gpu/test_cuda_all_reduce.py, up to the first failure
#   tensor    decoding with and without connected memory, sharded along `tensor`
#   experts   the same along `expert`
#   few       expert layers that share few tokens, with and without connected memory
#   qwen36    Qwen3.6-35B-A3B on one GPU, and with connected memory along each axis
#   deepseek  the same with 8 layers of DeepSeek-V3
#   whole     all layers of Qwen3-30B-A3B along each axis, with prompts of 2048 and 8192 tokens too
# Each call begins with the topology of the machine and a few sums, and ends if these fail. Each part
# writes a log to FOLDER and is stopped after its time. COMMIT is the commit to record, where git
# does not know it. `tensor` and `experts` share a checkpoint in the folder of temporary files. The
# parts after them make random weights on the GPUs.
set -uo pipefail
. "$(dirname "$0")/parts.sh"
((${#parts[@]})) || parts=(sums tests tensor experts few qwen36 deepseek whole)
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

decode_random() { # NAME MODEL OPTION...
  local name=$1 model=$2
  shift 2
  part "$name" 520 python3 benchmarks/decode_parallel.py --model "$model" --batch 1 16 64 "$@" \
    --commit "$commit" --output "$out/decode_parallel.$name.json"
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
    few)
      for peers in "" --peers; do
        part "few$peers" 260 python3 benchmarks/parallel.py --devices 2 --form psum tensor all_to_all \
          --tokens 1 16 64 256 $peers --commit "$commit" --output "$out/parallel$peers.json"
      done
      ;;
    qwen36) decode_random qwen36 qwen3.6-35b-a3b --mesh 1x1 1x2+peers 2x1+peers ;;
    deepseek)
      decode_random deepseek deepseek-v3-4-layers --layers 8 --mesh 1x1 1x2+peers 2x1+peers
      ;;
    whole)
      decode_random whole qwen3-30b-a3b --mesh 1x1 1x2 1x2+peers 2x1+peers --prefill 2048 8192
      ;;
    *) unknown_part "$name" ;;
  esac
done
exit "$failed"
