"""Calls every op once on the GPU, one shape per kernel: what compute-sanitizer watches.

With names of dtypes as arguments: for those only. With names of the groups below: those only. A
group is a function of the folder one_shape.
"""

from __future__ import annotations

import torch
from one_shape.attention import (
    appended_tokens,
    attention,
    contiguous_keys,
    decode_steps,
    eight_bit_queries,
    general_attention,
    lines_of_heads,
    prompts,
    ragged_batches,
    shards,
    split_prompts,
    tree_masks,
)
from one_shape.caches import cache, gathers, int4_caches, mla, per_token_quant
from one_shape.common import ASKED
from one_shape.norms_and_activations import (
    fused_rope,
    norms,
    rotary_and_activations,
    scaled_quant,
)
from one_shape.pages import pages
from one_shape.sampling import sampled_logprobs, sampling
from one_shape.token_scales import token_scales, token_zeros


def main() -> None:
    groups = (
        general_attention,
        lines_of_heads,
        ragged_batches,
        token_scales,
        token_zeros,
        tree_masks,
        shards,
        prompts,
        split_prompts,
        eight_bit_queries,
        contiguous_keys,
        decode_steps,
        appended_tokens,
        sampling,
        sampled_logprobs,
        norms,
        rotary_and_activations,
        scaled_quant,
        fused_rope,
        cache,
        per_token_quant,
        int4_caches,
        gathers,
        pages,
        mla,
        attention,
    )
    for group in [group for group in groups if group.__name__ in ASKED] or groups:
        group()
        torch.cuda.synchronize()
        print(group.__name__, "done", flush=True)


if __name__ == "__main__":
    main()
