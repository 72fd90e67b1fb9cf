"""The command ``vllm_kernels``: ``info``, ``selftest``, ``demo``, ``bench`` and ``vllm-check``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import _version
from ._requirements import install_line
from .bench.arguments import add_arguments

TOY_MODEL = Path(__file__).parent / "toy_model"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vllm_kernels")
    parser.add_argument("--version", action="store_true", help="the version, with the commit")
    commands = parser.add_subparsers(dest="command")
    demo = commands.add_parser(
        "demo",
        help="a language model writes text through the kernels, checked against transformers",
    )
    demo.add_argument("--model", type=Path, default=TOY_MODEL, help="folder of a Llama-like model")
    demo.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    demo.add_argument("--prompt", nargs="+", metavar="TEXT", help="one text or more to continue")
    demo.add_argument("--max-new-tokens", type=int, default=48, metavar="N")
    bench = commands.add_parser("bench", help="requests through the engine, measured")
    benches = bench.add_subparsers(dest="bench", required=True)
    engine = benches.add_parser("engine", help="replays a trace of requests")
    add_arguments(engine, TOY_MODEL)
    info = commands.add_parser("info", help="versions, build, libraries, CPU level, GPU")
    info.add_argument("--json", action="store_true", help="everything, for a bug report")
    commands.add_parser(
        "selftest", help="each group of ops against PyTorch, on the CPU and each GPU, in seconds"
    )
    commands.add_parser(
        "vllm-check", help="a small model through the installed vLLM, without and with our kernels"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.version:
        print(f"vllm_kernels {_version.version} (commit {_version.commit or 'unknown'})")
        return 0
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return 2
    if arguments.command == "info":
        from .info import print_info

        print_info(arguments.json)
        return 0
    if arguments.command == "selftest":
        from .selftest import run_selftest

        return run_selftest()
    if arguments.command == "vllm-check":
        from .integrations.vllm.check import run_check

        return run_check()
    try:
        if arguments.command == "bench":
            return _bench(arguments)
        return _demo(arguments)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("vllm_kernels"):
            raise
        print(
            f"The {arguments.command} needs {error.name.split('.')[0]}: {install_line('demo')}",
            file=sys.stderr,
        )
        return 2


def _demo(arguments: argparse.Namespace) -> int:
    from .demo import DemoError, run_demo

    try:
        return run_demo(
            arguments.model, arguments.device, arguments.prompt, arguments.max_new_tokens
        )
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2


def _bench(arguments: argparse.Namespace) -> int:
    from .bench.command import BenchError, run_bench

    try:
        return run_bench(arguments)
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
