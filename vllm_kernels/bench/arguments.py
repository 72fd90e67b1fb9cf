"""The arguments of ``python -m vllm_kernels bench engine``; imports nothing of the project."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

CACHES = ("auto", "fp8", "fp8_e5m2", "int8", "int8_per_token", "int4_per_token")

__all__ = ["add_arguments"]


def add_arguments(parser: argparse.ArgumentParser, toy_model: Path) -> None:
    """Those of ``bench engine``."""
    add = parser.add_argument
    add("--model", type=Path, default=toy_model, help="folder of a model of transformers")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    add("--trace", type=Path, metavar="FILE", help="JSON lines of prompt, max_tokens and arrival")
    add("--requests", type=int, default=64, metavar="N", help="of the made trace")
    add("--seed", type=int, default=0, help="of the made trace")
    add("--rate", type=float, default=math.inf, help="requests a second; default: all at once")
    add("--rounds", type=float, default=1.0, help="requests of a conversation, on average")
    add("--prompt-mean", type=float, default=161, help="mean tokens that a request brings")
    add("--output-mean", type=float, default=338, help="mean tokens of an answer")
    add("--max-length", type=int, metavar="N", help="tokens of a sequence; default: the model's")
    add("--max-batch-size", type=int, default=64, metavar="N")
    add("--max-batch-tokens", type=int, default=2048, metavar="N")
    add("--block-size", type=int, default=16, metavar="N")
    add("--num-blocks", type=int, metavar="N", help="of the cache; default: by free memory")
    add("--host-bytes", type=int, default=0, help="memory to swap sequences out to")
    add("--layout", choices=["vllm", "NHD", "HND"], default="vllm")
    add("--cache-dtype", choices=CACHES, default="auto")
    add("--k-scale", type=float, default=1.0, help="of an 8-bit cache: largest |K| / 127 for int8")
    add("--v-scale", type=float, default=1.0, help="likewise, of |V|")
    add("--compile", action="store_true", help="call the model through torch.compile")
    add("--compare", action="store_true", help="run the requests by transformers as well")
    add("--plot", type=Path, metavar="FILE", help="picture of memory and batch size over time")
