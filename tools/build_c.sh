#!/usr/bin/env bash
# Builds only the pybind11 module `_C`, for this machine's Python, beside libraries that were built
# elsewhere: those use libtorch's stable ABI and run under every torch >= 2.11, while `_C` is tied to
# one Python version. Usage: tools/build_c.sh [python3]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
includes=$("$python" -m pybind11 --includes)
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
rm -f vllm_kernels/_C.*.so
# shellcheck disable=SC2086  # $includes is a list of flags
g++ -std=c++20 -O2 -fPIC -shared -fvisibility=hidden -Icsrc $includes \
  -DVLLM_KERNELS_VERSION="\"$version\"" -DVLLM_KERNELS_TORCH_VERSION='"unknown"' \
  -DVLLM_KERNELS_CUDA_PLAN='"built elsewhere"' \
  csrc/python/*.cpp -o "vllm_kernels/_C$suffix" \
  -Lvllm_kernels -Wl,--no-as-needed -lvllm_kernels -Wl,-rpath,'$ORIGIN'
echo "built vllm_kernels/_C$suffix"
