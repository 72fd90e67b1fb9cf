"""``python -m vllm_kernels demo`` and ``python -m vllm_kernels info``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

TOY_MODEL = Path(__file__).parent / "toy_model"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m vllm_kernels")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo",
        help="a language model writes text through the kernels, checked against transformers",
    )
    demo.add_argument("--model", type=Path, default=TOY_MODEL, help="folder of a Llama-like model")
    demo.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    demo.add_argument("--prompt", nargs="+", metavar="TEXT", help="one text or more to continue")
    demo.add_argument("--max-new-tokens", type=int, default=48, metavar="N")
    commands.add_parser("info", help="versions, build, libraries, CPU level, GPU")
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.command == "info":
        from vllm_kernels.info import print_info

        print_info()
        return 0
    try:
        from vllm_kernels.demo import DemoError, run_demo
    except ModuleNotFoundError as error:
        print(f"The demo needs {error.name}: pip install 'vllm_kernels[demo]'", file=sys.stderr)
        return 2
    try:
        return run_demo(
            arguments.model, arguments.device, arguments.prompt, arguments.max_new_tokens
        )
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
