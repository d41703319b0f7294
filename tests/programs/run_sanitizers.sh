#!/usr/bin/env bash
# Builds the CPU kernels with AddressSanitizer and UBSan, and runs their edge cases.
#   run_sanitizers.sh BUILD_FOLDER
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?usage: run_sanitizers.sh BUILD_FOLDER}
g++ -std=c++17 -O1 -g1 -pthread -fno-omit-frame-pointer -w \
  -fsanitize=address,undefined -fno-sanitize-recover=all \
  "$here"/../cpp/sanitize_main.cc "$here"/../../ffi/cpu/*.cc -o "$out/sanitize_cpu"
ASAN_OPTIONS=detect_stack_use_after_return=0 "$out/sanitize_cpu"
