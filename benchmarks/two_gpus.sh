#!/usr/bin/env bash
# Runs everything that two connected GPUs need: tests, a million checked sums, times of sums, and
# decoding with and without connected memory. The package and its CUDA kernels are installed, and
# the current folder is the repository.
#   benchmarks/two_gpus.sh FOLDER
# Each part writes a log to FOLDER and is stopped after its time, so that the next one runs anyway.
set -uo pipefail
out=$1
mkdir -p "$out"
export NCCL_NVLS_ENABLE=0 JAX_PLATFORMS=cuda

part() { # NAME SECONDS COMMAND...
  local name=$1 seconds=$2 begin=$SECONDS
  shift 2
  timeout --kill-after=10 "$seconds" "$@" >"$out/$name.log" 2>&1
  echo "$name: status $?, $((SECONDS - begin)) s"
  tail -n 15 "$out/$name.log"
}

part tests 420 python -P -m pytest -q -n 0 tests/gpu/test_cuda_all_reduce.py
part sums 240 python benchmarks/all_reduce.py --check 1000000
part decoding 540 python benchmarks/decode_parallel.py --layers 16 --batch 1 16 64 \
  --mesh 1x1 1x2 1x2+peers 2x1 2x1+peers --output "$out/decode_parallel.json"
cp benchmarks/results/all_reduce.*.json "$out" || true
