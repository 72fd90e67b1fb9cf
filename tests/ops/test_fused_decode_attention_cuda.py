"""fused_decode_attention on a GPU: behind a kernel that writes what it guesses its work from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fused_decode_attention_cases import make_case
from helpers import LAYOUTS, needs_cuda_library
from late_indices import STALE, LateIndices

import vllm_kernels

pytestmark = needs_cuda_library


@pytest.mark.parametrize("stale", ["seq_lens", "block_tables", STALE])
@pytest.mark.parametrize("lens", [[900, 33, 4000], [100 + i for i in range(120)]], ids=len)
@pytest.mark.parametrize("stored", [None, torch.float8_e4m3fn], ids=["bf16", "fp8"])
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_behind_a_kernel_that_writes_the_indices(layout, head_size, stored, lens, stale):
    """A batch's work is guessed early, from indices that a long copy replaces at its end."""
    case = make_case(
        "cuda", torch.bfloat16, lens, head_size=head_size, stored=stored, layout=layout
    )
    want = case.copy().run()
    late = LateIndices({"seq_lens": case.seq_lens, "block_tables": case.block_tables})
    old = {name: value.flip(0) for name, value in late.values.items() if name == stale}
    for _ in range(5):
        one = replace(case.copy(), **late.views)
        out = torch.full_like(want, float("nan"))
        late.begin_copy(old or late.garbage())
        vllm_kernels.fused_decode_attention(  # and no kernel in between
            *one.tensors(), **one.options, out=out
        )
        assert torch.equal(out, want)
