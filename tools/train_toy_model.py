"""Trains the toy language model of the demo and the tests: vllm_kernels/toy_model.

A Llama of 1.8 million parameters, trained on Python's language reference as it comes with every
CPython (``pydoc_data.topics``, licensed by the PSF). No download; a few minutes on two cores. The
budget is a number of steps and the seed is fixed, so that a run can be repeated; the last bits
depend on the machine's matrix products, and the text on the Python version.

    python tools/train_toy_model.py [--steps N] [--output DIR]
"""

from __future__ import annotations

import argparse
import math
import platform
from pathlib import Path
from pydoc_data.topics import topics

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 0
STEPS = 1000
BATCH_SIZE = 8
SEQUENCE_LENGTH = 256
PEAK_LEARNING_RATE = 3e-3
WARMUP_STEPS = 50
VOCABULARY_SIZE = 1024
END = "<|end|>"
PAD = "<|pad|>"
HELD_OUT_EVERY = 13  # of the topics in alphabetical order

DEFAULT_OUTPUT = Path(__file__).parents[1] / "vllm_kernels" / "toy_model"

README = """\
# A toy language model

A Llama of {parameters:,} parameters, for the demo and the tests of vllm_kernels. It was trained on
the language reference in Python {python} (`pydoc_data.topics`, {kilobytes} kB of English) and on
nothing else: it writes text that looks like Python's documentation and means little. Do not use it
for anything but trying the kernels.

- Made by `python tools/train_toy_model.py --steps {steps}` (seed {seed}; {before:.2f} bits a byte
  on held-out topics before training, {after:.2f} after).
- Licence of the text: Python Software Foundation License Version 2, (c) Python Software Foundation
  (https://docs.python.org/3/license.html); the weights are distributed under the same licence.
"""


def split_topics() -> tuple[list[str], list[str]]:
    """The texts to train on and the held-out texts."""
    texts = [topics[name] for name in sorted(topics)]
    held_out = texts[::HELD_OUT_EVERY]
    return [text for text in texts if text not in held_out], held_out


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE: every text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    """int64 [tokens]: all texts, each ended by END."""
    tokens: list[int] = []
    for text in texts:
        tokens += [*tokenizer(text, verbose=False)["input_ids"], tokenizer.eos_token_id]
    return torch.tensor(tokens)


@torch.no_grad()
def bits_per_byte(model: LlamaForCausalLM, tokens: Tensor, num_bytes: int) -> float:
    """Cross entropy over ``tokens`` in windows of SEQUENCE_LENGTH, per byte of text."""
    model.eval()
    nats = 0.0
    for start in range(0, len(tokens) - 1, SEQUENCE_LENGTH):
        window = tokens[start : start + SEQUENCE_LENGTH + 1]
        logits = model(window[None, :-1]).logits[0]
        nats += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
    return nats / math.log(2) / num_bytes


def learning_rate(step: int, steps: int) -> float:
    if step < WARMUP_STEPS:
        return PEAK_LEARNING_RATE * (step + 1) / WARMUP_STEPS
    return PEAK_LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * step / steps))


def train(model: LlamaForCausalLM, tokens: Tensor, steps: int, console: Console) -> None:
    """AdamW on random windows of ``tokens``."""
    model.train()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    offsets = torch.arange(SEQUENCE_LENGTH + 1)
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
    ]
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=steps, loss=float("nan"))
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps)
            starts = torch.randint(len(tokens) - SEQUENCE_LENGTH - 1, (BATCH_SIZE, 1))
            windows = tokens[starts + offsets]
            logits = model(windows[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            progress.update(task, advance=1, loss=loss.item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    arguments = parser.parse_args()
    console = Console()
    torch.manual_seed(SEED)

    training_texts, held_out_texts = split_topics()
    tokenizer = train_tokenizer(training_texts)
    training_tokens = encode(tokenizer, training_texts)
    held_out_tokens = encode(tokenizer, held_out_texts)
    held_out_bytes = sum(len(text.encode()) for text in held_out_texts)
    console.print(f"{len(training_tokens):,} tokens to train on, {len(held_out_tokens):,} held out")

    model = make_model(tokenizer)
    before = bits_per_byte(model, held_out_tokens, held_out_bytes)
    console.print(f"{model.num_parameters():,} parameters; held-out {before:.3f} bits a byte")
    train(model, training_tokens, arguments.steps, console)
    after = bits_per_byte(model, held_out_tokens, held_out_bytes)
    console.print(f"held-out {after:.3f} bits a byte after {arguments.steps} steps")

    arguments.output.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    readme = README.format(
        parameters=model.num_parameters(),
        python=platform.python_version(),
        kilobytes=sum(len(text.encode()) for text in topics.values()) // 1000,
        steps=arguments.steps,
        seed=SEED,
        before=before,
        after=after,
    )
    (arguments.output / "README.md").write_text(readme)
    size = sum(file.stat().st_size for file in arguments.output.iterdir())
    console.print(f"{arguments.output}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
