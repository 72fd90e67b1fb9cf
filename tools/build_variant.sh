#!/usr/bin/env bash
# The CUDA library with some of its objects compiled otherwise, beside a finished build: all files of
# csrc/cuda as before Hopper take 14 minutes of a core, a few for racecheck a minute each.
# Usage: tools/build_variant.sh DIRECTORY "-DVLLM_KERNELS_RACECHECK" SOURCE...   (none: all of csrc/cuda)
# A SOURCE is a path below csrc/cuda, such as attention/decode/instantiations/bf16.
# Writes DIRECTORY/libvllm_kernels_cuda.so; JOBS compilers at a time (default 1).
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p "$1"
out=$(cd "$1" && pwd) flags=$2
shift 2
cd build/cmake-*
ninja -t commands libvllm_kernels_cuda.so > "$out/all.txt"
link=$(grep -- '-soname,libvllm_kernels_cuda.so' "$out/all.txt" | tail -1)
link=$(sed -E "s#-o [^ ]*libvllm_kernels_cuda.so#-o $out/libvllm_kernels_cuda.so#" <<< "$link")
[ $# -gt 0 ] || set -- $(cd ../../csrc/cuda && find . -name "*.cu" -printf "%P\n" | sed "s/\.cu$//")
for source in "$@"; do
  object="/csrc/cuda/$source\\.cu\\.o" variant="$out/${source//\//-}.cu.o"
  grep -E -- "-o [^ ]*$object" "$out/all.txt" | sed -E "s#-o [^ ]*$object#$flags -o $variant#; s# -M(D|[TF] [^ ]+)##g"
  link=$(sed -E "s#[^ ]*$object#$variant#" <<< "$link")
done > "$out/commands.txt"
xargs -P "${JOBS:-1}" -d '\n' -I{} bash -c '{}' < "$out/commands.txt"
bash -c "$link"
ls -l "$out/libvllm_kernels_cuda.so"
