"""Many prompts through Engine: texts, samples, and how much of the prompts was found cached."""

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import vllm_kernels
from vllm_kernels.integrations.transformers import Engine, SamplingParams

folder = Path(vllm_kernels.__file__).parent / "toy_model"  # or your checkpoint's folder
model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
tokenizer = AutoTokenizer.from_pretrained(folder)

preamble = "The following sections describe statements. A simple statement is comprised within "
prompts = [preamble + end for end in ("a single logical line", "one suite", "a class", "a module")]
greedy = SamplingParams(max_tokens=16)
sampled = SamplingParams(max_tokens=16, temperature=0.8, top_p=0.9, seed=1, n=2)

with Engine(model, tokenizer, max_length=256) as engine:
    for prompt, output in zip(prompts, engine.generate(prompts, greedy)):
        print(repr(prompt[len(preamble) :] + output.completions[0].text))
    for completion in engine.generate(prompts[:1], sampled)[0].completions:
        print(completion.index, completion.finish_reason.value, repr(completion.text))
    statistics = engine.statistics().scheduler
    print(statistics.num_cached_tokens, "of", statistics.num_prompt_tokens, "prompt tokens cached")
