#!/usr/bin/env bash
# Builds bindings, manager and CPU kernels with ASan and UBSan, and runs tests on them.
# Usage: tools/sanitize.sh [PYTHON] [PYTEST ARGUMENTS]. The package's copy is build/sanitized.
# SANITIZE_LEVEL=baseline: that CPU level only, at -O0, beside objects of the finished build: a fifth of
# the time to build, and slower tests.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
shift || true
build=build/sanitize-cmake site=build/sanitized
bin=$(dirname "$(command -v "$python")")
PATH=$bin:$PATH
levels="baseline;avx2" objects="" optimization=-O1
if [ -n "${SANITIZE_LEVEL:-}" ]; then
  levels=$SANITIZE_LEVEL objects=$(ls -d "$PWD"/build/cmake-* | head -n 1) optimization=-O0
  export VLLM_KERNELS_ISA=$SANITIZE_LEVEL
fi
cmake -S . -B "$build" -G Ninja -DPython_EXECUTABLE="$(command -v "$python")" \
  -DSANITIZED_LEVELS="$levels" -DSANITIZED_OPTIMIZATION="$optimization" -DVLLM_KERNELS_OBJECTS="$objects" \
  -DVLLM_KERNELS_CUDA=off -DVLLM_KERNELS_SANITIZE=address,undefined > /dev/null
cmake --build "$build" --parallel "${MAX_JOBS:-2}" > build/sanitize.log 2>&1 || { cat build/sanitize.log; exit 1; }
rm -rf "$site" && mkdir -p "$site"
cp -r vllm_kernels "$site/" && rm -f "$site"/vllm_kernels/*.so
cmake --install "$build" --prefix "$site/vllm_kernels" > /dev/null
# Leaks: Python and torch keep memory on purpose. Interposed __cxa_throw needs libstdc++ preloaded.
LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so) $(g++ -print-file-name=libstdc++.so)" \
ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:allocator_may_return_null=1:max_allocation_size_mb=4096 UBSAN_OPTIONS=print_stacktrace=1 \
VLLM_KERNELS_ISA=${VLLM_KERNELS_ISA:-avx2} OMP_WAIT_POLICY=passive PYTHONPATH=$PWD/$site \
  "$bin/pytest" -p no:cacheprovider -q "$@"
