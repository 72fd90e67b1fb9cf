#!/usr/bin/env bash
# Builds only the pybind11 module `_C`, for one Python, beside libraries that are there: those use
# libtorch's stable ABI and run under every torch >= 2.11, while `_C` is tied to a Python version.
# Usage: tools/build_c.sh [PYTHON [PYTHON_WITH_PYBIND11]]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
includes="-I$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')"
includes="$includes -I$("${2:-$python}" -c 'import pybind11; print(pybind11.get_include())')"
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
# shellcheck disable=SC2086  # $includes is a list of flags
g++ -std=c++20 -O2 -fPIC -shared -fvisibility=hidden -Icsrc $includes \
  -DVLLM_KERNELS_VERSION="\"$version\"" -DVLLM_KERNELS_TORCH_VERSION='"unknown"' \
  -DVLLM_KERNELS_CUDA_PLAN='"built elsewhere"' \
  csrc/python/*.cpp -o "vllm_kernels/_C$suffix" \
  -Lvllm_kernels -Wl,--no-as-needed -lvllm_kernels -Wl,-rpath,'$ORIGIN'
echo "built vllm_kernels/_C$suffix"
