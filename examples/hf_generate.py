"""transformers' generate with a paged cache, checked against generate without one."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import vllm_kernels
from vllm_kernels.integrations.transformers import PagedCache, patched_layers, use_paged_attention

folder = Path(vllm_kernels.__file__).parent / "toy_model"  # or your checkpoint's folder
model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
prompts = ["The for statement is used to", "A class definition"]
inputs = tokenizer(prompts, return_tensors="pt", padding=True)
options = {"max_new_tokens": 16, "do_sample": False, "num_beams": 4}
expected = model.generate(**inputs, **options)  # by transformers' own attention and cache

use_paged_attention(model)
num_sequences = len(prompts) * options["num_beams"]  # each beam is a sequence
num_tokens = inputs["input_ids"].shape[1] + options["max_new_tokens"]
blocks = PagedCache.blocks_needed(num_sequences, num_tokens)
with PagedCache(model, blocks) as cache, patched_layers(model), torch.no_grad():
    tokens = model.generate(**inputs, past_key_values=cache, **options)
    print(cache.statistics().shared_blocks, "blocks shared by beams")

for text in tokenizer.batch_decode(tokens, skip_special_tokens=True):
    print(repr(text))
print("the tokens of transformers:", torch.equal(tokens, expected))
