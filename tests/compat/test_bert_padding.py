"""bert_padding: rows of a batch without its padding, and back."""

from __future__ import annotations

import pytest
import torch

from vllm_kernels.compat import bert_padding
from vllm_kernels.errors import InvalidType

ONES = torch.ones(1, 1, dtype=torch.int64)


def test_padding():
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 0], [1, 1, 1, 1]])
    rows = torch.randn(3, 4, 2, 8)
    tokens, indices, starts, longest, used = bert_padding.unpad_input(rows, mask)
    assert starts.tolist() == [0, 3, 5, 9] and longest == 4 and used.tolist() == [3, 2, 4]
    assert starts.dtype == torch.int32 and torch.equal(tokens, rows[mask.bool()])
    back = bert_padding.pad_input(tokens, indices, 3, 4)
    assert torch.equal(back, rows * mask[..., None, None])


@pytest.mark.parametrize(
    ("name", "arguments", "argument"),
    [
        ("unpad_input", ([1], ONES), "hidden_states"),
        ("unpad_input", (ONES, [1]), "attention_mask"),
        ("unpad_input", (ONES, ONES, [1]), "unused_mask"),
        ("pad_input", ([1], ONES, 1, 1), "hidden_states"),
        ("pad_input", (ONES, [0], 1, 1), "indices"),
        ("index_first_axis", ([1], ONES), "rows"),
        ("index_first_axis", (ONES, [0]), "indices"),
        ("index_put_first_axis", ([1], ONES, 1), "values"),
        ("index_put_first_axis", (ONES, [0], 1), "indices"),
    ],
)
def test_padding_of_what_is_no_tensor(name, arguments, argument):
    with pytest.raises(InvalidType, match=f"^{name}: {argument}: expected a tensor, got list$"):
        getattr(bert_padding, name)(*arguments)
