"""One long sequence over two processes: neither has blocks for it, both together do.

Each process has the whole model, half of the query heads, and every second token of the cache. Its
manager makes the same calls as the other one, and fills tables and slots for its own tokens. The
tokens equal those of transformers' generate in one process, so the last line is True.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import embedding, linear
from transformers import AutoModelForCausalLM, AutoTokenizer

import vllm_kernels as vk
from vllm_kernels.distributed import ContextParallel
from vllm_kernels.kv_cache import BatchBuffers, KVCacheManager, OutOfBlocks
from vllm_kernels.kv_cache.tensors import KVCache, KVShape

FOLDER = Path(vk.__file__).parent / "toy_model"
NUM_BLOCKS, NEW_TOKENS, CHUNK = 30, 24, 128


class Rank:
    """The forward pass of one process, over chunks of one sequence."""

    def __init__(self, model, length):
        config = model.config
        self.model, self.parallel = model, ContextParallel(dist.group.WORLD)
        self.rank = dist.get_rank()
        self.heads = [config.num_attention_heads] + 2 * [config.num_key_value_heads]
        self.head_size, self.epsilon = config.head_dim, config.rms_norm_eps
        shape = KVShape(config.num_hidden_layers, self.heads[1], self.head_size, torch.float32)
        self.cache = KVCache(shape, NUM_BLOCKS)
        try:
            KVCacheManager(NUM_BLOCKS, shape.block_size).allocate(0, length)
        except OutOfBlocks as error:
            if self.rank == 0:
                print(f"one process: {error}")
        self.manager = KVCacheManager(
            NUM_BLOCKS, shape.block_size, shards=self.parallel.size, shard=self.rank
        )
        self.manager.allocate(0, 0)
        self.buffers = BatchBuffers.zeros(1, NUM_BLOCKS, CHUNK)

    def forward(self, tokens):
        """Computes the next tokens. Returns the logits of the last one."""
        decoder, parallel, buffers = self.model.model, self.parallel, self.buffers
        before = torch.tensor([self.manager.num_local_tokens(0)], dtype=torch.int32)
        self.manager.step([0], [len(tokens)], buffers)
        positions, slots = (x[: len(tokens)] for x in (buffers.positions, buffers.slot_mapping))
        x = embedding(tokens, decoder.embed_tokens.weight)
        cos, sin = decoder.rotary_emb(x, torch.arange(2048)[None])
        half = self.head_size // 2
        cos_sin = torch.cat([cos[0, :, :half], sin[0, :, :half]], -1).contiguous()
        residual = torch.zeros_like(x)
        for index, layer in enumerate(decoder.layers):
            attention, mlp = layer.self_attn, layer.mlp
            vk.fused_add_rms_norm(x, residual, layer.input_layernorm.weight, self.epsilon)
            qkv = [linear(x, one.weight) for one in (
                attention.q_proj, attention.k_proj, attention.v_proj,
            )]  # fmt: skip
            query, key, value = (heads.unflatten(1, (-1, self.head_size)) for heads in qkv)
            vk.rotary_embedding(positions, query, key, self.head_size, cos_sin, True)
            self.cache.write(index, key, value, slots)
            mine = query.chunk(parallel.size, 1)[self.rank]
            out = parallel.attend(
                mine, self.cache.key_caches[index], self.cache.value_caches[index],
                buffers.block_tables, before, key=key, value=value,
                query_start_loc=buffers.query_start_loc,
            )  # fmt: skip
            weight = attention.o_proj.weight.chunk(parallel.size, 1)[self.rank]
            x = linear(out.flatten(1), weight)
            dist.all_reduce(x)
            vk.fused_add_rms_norm(x, residual, layer.post_attention_layernorm.weight, self.epsilon)
            x = mlp(x)
        vk.fused_add_rms_norm(x, residual, decoder.norm.weight, self.epsilon)
        return self.model.lm_head(x[-1])


def generate(model, prompt):
    """The prompt in chunks, then one token at a time, greedily."""
    rank = Rank(model, len(prompt) + NEW_TOKENS)
    tokens = list(prompt)
    computed = 0
    while len(tokens) < len(prompt) + NEW_TOKENS:
        chunk = tokens[computed : computed + CHUNK]
        logits = rank.forward(torch.tensor(chunk))
        computed += len(chunk)
        if computed == len(tokens):
            tokens.append(int(logits.argmax()))
    return tokens


def main():
    torch.set_num_threads(1)
    # Loaded first: transformers keeps a process group that it finds, past the end of the program.
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="float32").eval()
    dist.init_process_group("gloo")
    text = "The for statement is used to iterate over the elements of a sequence. " * 100
    prompt = AutoTokenizer.from_pretrained(FOLDER)(text)["input_ids"][:700]
    with torch.inference_mode():
        tokens = generate(model, prompt)
        if dist.get_rank() == 0:
            whole = model.generate(
                torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False,
                eos_token_id=None,
            )  # fmt: skip
            print("the tokens of one process:", tokens == whole[0].tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*launcher, "--nproc-per-node", "2", __file__]
        print(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout, end="")
