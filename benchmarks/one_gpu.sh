#!/usr/bin/env bash
# Runs what a change of the GPU kernels needs on one GPU, in parts that each take less than nine
# minutes. The package and its CUDA kernels are installed, and the current folder is the repository.
#   [COMMIT=...] benchmarks/one_gpu.sh FOLDER [PART...]
# Parts, in the order in which they run by default:
#   tests     tests/gpu without the tests of machine code, with a worker for each core
#   steps     decoding of Qwen3-30B-A3B, without and with guessed drafts
#   linears   the forms of linear layers with few rows, which forms.h chooses from
#   drafts    how many texts change because a kernel reads several tokens at once
#   train     training steps of LoRA with the sizes of Qwen3-30B-A3B, 4096 tokens
#   gradient  the backward pass of expert layers
#   load      loading 17 GB from files in memory
#   models    logits of the checkpoints of the tests (docs/measure.py)
# Each part writes a log to FOLDER and is stopped after its time. Results are written to FOLDER, but
# for those of `models`, which are in docs/results.json. COMMIT is the commit to record, where git
# does not know it.
set -uo pipefail
. "$(dirname "$0")/parts.sh"
((${#parts[@]})) || parts=(tests steps linears drafts train gradient load models)
for name in "${parts[@]}"; do
  case $name in
    tests)
      # Workers share the memory of the GPU.
      part tests 520 env XLA_PYTHON_CLIENT_PREALLOCATE=false python3 -P -m pytest -q -n "$(nproc)" \
        --dist loadscope --must-run gpu -p no:benchmark --ignore-glob='*test_sass*' tests/gpu
      ;;
    steps)
      part steps 200 python3 benchmarks/decode.py --format nvfp4 --cells 1x128 16x128 \
        --commit "$commit" --output "$out/decode.json"
      part guesses 320 python3 benchmarks/decode.py --format nvfp4 --cells 1x128 16x128 \
        --draft guess --commit "$commit" --output "$out/decode_drafts.json"
      ;;
    linears)
      part linears 120 python3 benchmarks/linear_forms.py --commit "$commit" \
        --output "$out/linear_forms.json"
      ;;
    drafts)
      part drafts 520 env XLA_PYTHON_CLIENT_PREALLOCATE=false python3 \
        tests/programs/drafting_sweep.py --dtype bfloat16 --seconds 450 --jobs "$(nproc)"
      ;;
    train)
      part train 520 python3 benchmarks/train.py --commit "$commit" \
        --output "$out/train.json"
      ;;
    gradient)
      part gradient 300 python3 benchmarks/backward.py --commit "$commit" \
        --output "$out/backward.json"
      ;;
    load)
      folder=$(mktemp -d /dev/shm/one_gpu.XXXXXX)
      part load 400 python3 benchmarks/load.py --gigabytes 17 --folder "$folder" \
        --commit "$commit" --output "$out/load.json"
      rm -rf "$folder"
      ;;
    models) part models 520 python3 docs/measure.py --gpu ;;
    *) unknown_part "$name" ;;
  esac
done
exit "$failed"
