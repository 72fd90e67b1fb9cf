#!/usr/bin/env bash
# One scripted visit to a GPU machine: builds `_C` beside the carried libraries unless that travelled,
# too (tools/build_c.sh), then runs the steps named on the command line. Usage: tools/gpu_session.sh cuda_tests|memcheck|peers_small|compare|... [...]
# Results go to $OUT (default /tmp/out). Each step prints a summary.
set -uo pipefail
cd "$(dirname "$0")/.."
export OUT=${OUT:-/tmp/out} PYTHONUNBUFFERED=1 PYTHONPATH=$PWD
mkdir -p "$OUT"
nvidia-smi --query-gpu=name,driver_version,clocks.sm,temperature.gpu --format=csv,noheader
lscpu | sed -n 's/^Model name: *//p'
[ -e vllm_kernels/_C.cpython-312-*.so ] || tools/build_c.sh python3 || exit 1
python3 -c 'import vllm_kernels, torch; from vllm_kernels import _C, _library
print("torch", torch.__version__, "level", _C.cpu_level(), "cuda", _library.cuda_loaded, _library.cuda_reason)' || exit 1

step_cuda_tests() {  # a thread a process: their parallel regions would wait for each other
  OMP_NUM_THREADS=1 python3 -m pytest -v --no-header -p no:cacheprovider --tb=short --durations=20 \
    -n 14 --dist worksteal ${TESTS:-tests} -k cuda > "$OUT/cuda_tests.log" 2>&1
  echo "cuda_tests rc=$? $(tail -1 "$OUT/cuda_tests.log")"
  grep -E "^(FAILED|ERROR)" "$OUT/cuda_tests.log" | head -20
}
step_random_points() {  # 5 minutes; to repeat a point: random_points.py POINT
  OMP_NUM_THREADS=1 python3 tests/ops/random_points.py --seconds "${RANDOM_SECONDS:-300}" --processes 8 \
    ${RANDOM_ARGS:-} 2>&1 | tee "$OUT/random_points.log" | tail -5
}
step_cpu_tests() { python3 -m pytest -q --no-header -p no:cacheprovider tests/ops -k cpu -rf 2>&1 | tail -15; }
step_memcheck() {
  compute-sanitizer --tool memcheck --error-exitcode 9 python3 tools/one_shape_each.py > "$OUT/memcheck.log" 2>&1
  echo "memcheck rc=$? $(grep -E 'ERROR SUMMARY|not supported' "$OUT/memcheck.log" | tail -1)"
}
RACECHECK=${RACECHECK:-/tmp/racecheck}  # a tree that is built for racecheck
step_racecheck_build() {  # 2 minutes on 16 cores
  rm -rf "$RACECHECK" && mkdir -p "$RACECHECK"
  cp -r csrc cmake tools vllm_kernels vllm_kernels_plugin.py CMakeLists.txt setup.py pyproject.toml MANIFEST.in README.md LICENSE "$RACECHECK"
  (cd "$RACECHECK" && rm -f vllm_kernels/*.so \
    && VLLM_KERNELS_RACECHECK=1 VLLM_KERNELS_CUDA=on TORCH_CUDA_ARCH_LIST=9.0a CXX=/usr/bin/g++ CUDAHOSTCXX=/usr/bin/g++ MAX_JOBS=$(nproc) \
      python3 setup.py build_ext --inplace > "$OUT/racecheck_build.log" 2>&1)
  echo "racecheck_build rc=$?"
}
step_racecheck() {  # a process a dtype and group. More than 5 on a GPU take turns and end later
  local groups gpus
  gpus=$(nvidia-smi -L | wc -l)
  groups=${RACECHECK_GROUPS:-$(sed -n '/groups = (/,/^    )/s/^ *\([a-z0-9_]*\),$/\1/p' tools/one_shape_each.py)}
  export RACECHECK
  for dtype in ${RACECHECK_DTYPES:-bfloat16 float16 float32}; do
    for group in $groups; do echo "$dtype $group"; done
  done | xargs -P $((5 * gpus)) -L 1 bash -c 'log=$OUT/racecheck_$0_$1.log
    export CUDA_VISIBLE_DEVICES=$((RANDOM % $(nvidia-smi -L | wc -l)))
    PYTHONPATH=$RACECHECK nice -n 19 compute-sanitizer --tool racecheck --error-exitcode 9 \
      python3 tools/one_shape_each.py "$0" "$1" > "$log" 2>&1
    echo "racecheck $0 $1 rc=$? $(grep -E "RACECHECK SUMMARY|not supported" "$log" | tail -1)"'
}
step_peers_small() {
  # shellcheck disable=SC1091
  (. .peers/env.sh; export LD_PRELOAD=/usr/local/nvidia/lib64/libcuda.so.1 PYTHONPATH=$PYTHONPATH:$PWD
   OURS=benchmarks/peers_ours.py python3 "$KIT/small.py" --out "$OUT/small.json" ${SMALL_ARGS:-} 2>&1 | tee "$OUT/small.log" | tail -80)
}
step_peers_decode() {
  # shellcheck disable=SC1091
  (. .peers/env.sh; export LD_PRELOAD=/usr/local/nvidia/lib64/libcuda.so.1 PYTHONPATH=$PYTHONPATH:$PWD
   OURS=benchmarks/peers_ours.py python3 "$KIT/bench.py" --out "$OUT/decode.json" ${DECODE_ARGS:-} 2>&1 | tee "$OUT/decode.log" | tail -120)
}
step_peers_prefill() {
  # shellcheck disable=SC1091
  (. .peers/env.sh; export LD_PRELOAD=/usr/local/nvidia/lib64/libcuda.so.1 PYTHONPATH=$PYTHONPATH:$PWD
   OURS=benchmarks/peers_ours.py python3 "$KIT/prefill.py" --out "$OUT/prefill.json" ${PREFILL_ARGS:-} 2>&1 | tee "$OUT/prefill.log" | tail -80)
}
step_peers_rounds() {  # the same rows, candidates in turns
  # shellcheck disable=SC1091
  (. .peers/env.sh; export LD_PRELOAD=/usr/local/nvidia/lib64/libcuda.so.1 PYTHONPATH=$PYTHONPATH:$PWD
   OURS=benchmarks/peers_ours.py python3 benchmarks/peers_rounds.py --out "$OUT/rounds.json" ${ROUNDS_ARGS:-} 2>&1 | tee "$OUT/rounds.log" | tail -200)
}
step_peers_layer() {  # a layer's ops as one graph; a candidate that hangs ends the step, not the visit
  # shellcheck disable=SC1091
  (. .peers/env.sh; export LD_PRELOAD=/usr/local/nvidia/lib64/libcuda.so.1 PYTHONPATH=$PYTHONPATH:$PWD
   timeout 400 python3 -m benchmarks.bench_layer --out "$OUT/layer.json" ${LAYER_ARGS:-} 2>&1 | tee "$OUT/layer.log" | tail -90)
}
# Two builds in turns, row by row: what differs by 1% shows only so. OLD: a tree with its libraries.
step_compare() {
  KIT=${KIT:-.peers} python3 -m benchmarks.compare_builds "${OLD:-.stage/old}" . ${COMPARE_ARGS:-} 2>&1 \
    | tee "$OUT/compare.log" | tail -60
}
step_axes() { python3 -m benchmarks.bench_paged_attention_axes ${AXES_ARGS:-} 2>&1 | tee "$OUT/axes.log" | tail -200; }
step_ladder() {  # docs/learn; examples/learn/ladder_report.py fills the pages from the file
  python3 examples/learn/ladder.py --json "$OUT/ladder.json" ${LADDER_ARGS:-} 2>&1 | tee "$OUT/ladder.log" | tail -40
}
step_script() { python3 .stage/script.py 2>&1 | tail -60; }  # whatever was staged for this visit
for step in "$@"; do
  echo "== $step"
  SECONDS=0
  "step_$step"
  echo "-- $step took ${SECONDS}s"
done
