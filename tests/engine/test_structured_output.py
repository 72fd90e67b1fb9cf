"""Text that follows a grammar, by xgrammar's masks."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("transformers", reason="needs transformers: pip install 'vllm_kernels[demo]'")

from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_kernels.__main__ import TOY_MODEL
from vllm_kernels.engine.engine import Engine
from vllm_kernels.engine.request import FinishReason, SamplingParams

xgrammar = pytest.importorskip("xgrammar", reason="needs xgrammar: make test installs it")

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["class", "function"]}, "nested": {"type": "boolean"}},
    "required": ["kind", "nested"],
}


def test_json_and_regex(overlap: bool, device: str) -> None:
    """Sampled at a high temperature, beside a request without a grammar."""
    model = AutoModelForCausalLM.from_pretrained(TOY_MODEL, dtype="float32").eval().to(device)
    tokenizer = AutoTokenizer.from_pretrained(TOY_MODEL)
    info = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer,
        vocab_size=model.get_output_embeddings().out_features,
        stop_token_ids=[model.generation_config.eos_token_id],
    )
    compiler = xgrammar.GrammarCompiler(info)
    schema = compiler.compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)
    date = compiler.compile_regex(r"20[0-9]{2}-[01][0-9]")
    hot = {"max_tokens": 80, "temperature": 1.5, "n": 3, "seed": 1}
    params = [
        SamplingParams(**hot, logits_mask=lambda: xgrammar.GrammarMatcher(schema)),
        SamplingParams(**hot, logits_mask=lambda: xgrammar.GrammarMatcher(date)),
        SamplingParams(max_tokens=20),
    ]
    texts = ["A class definition", "Functions are", "The for statement"]
    with Engine(model, tokenizer, max_length=128, num_blocks=160, overlap=overlap) as engine:
        plain = engine.generate(texts[2:], params[2])
        outputs = engine.generate(texts, params)
    for one in outputs[0].completions:
        assert one.finish_reason is FinishReason.STOP
        found = json.loads(one.text)
        assert found["kind"] in ("class", "function") and isinstance(found["nested"], bool)
    for one in outputs[1].completions:
        assert re.fullmatch(r"20[0-9]{2}-[01][0-9]", one.text)
    assert outputs[2].completions == plain[0].completions
