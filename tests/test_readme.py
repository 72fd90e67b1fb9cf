"""The README's examples run as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
PRINTED = {
    "vk.copy_blocks": r"torch\.Size\(\[25, 8, 64\]\) 3 blocks used",
    "cache.swap_out": r"torch\.Size\(\[2, 8, 64\]\) 1 copied",
    "decoder_layer": "True",
    "CUDAGraph": r"\[True, True(, False){6}\]",
    "Engine": r"(?s).+\n.+\n0 (stop|length)\n1 (stop|length)\n.+",
    "PagedCache": r"[1-9]\d* blocks shared by beams",
}
"""What each example is about, and what it prints."""


@pytest.mark.parametrize("about", PRINTED)
def test_example_runs(about: str, capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"<!-- example:.*?```python\n(.*?)```", README.read_text(), re.S)
    assert len(examples) == len(PRINTED)
    (code,) = [example for example in examples if about in example]
    if "from transformers" in code:
        pytest.importorskip("transformers")
    exec(compile(code, f"README.md, {about}", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out.strip()
    assert re.fullmatch(PRINTED[about], printed), printed
