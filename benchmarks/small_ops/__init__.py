"""The rows of benchmarks.bench_small_ops: a module per kind of op."""
