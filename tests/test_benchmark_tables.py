"""The result pages are what `python -m benchmarks tables` writes, and stay short."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks import page_tables, tables

FILES = sorted((tables.HERE / "results").glob("*.json"))
FIELDS = ["section", "title", "note", "machine", "versions", "command", "commit", "date", "unit"]


@pytest.mark.parametrize("page", tables.pages(), ids=lambda page: page.name)
def test_results_are_generated(page: Path) -> None:
    text = page.read_text()
    assert text == tables.pages()[page]
    assert len(text.splitlines()) <= 250


@pytest.mark.parametrize("page", page_tables.PAGES, ids=lambda page: page.name)
def test_tables_of_pages_are_generated(page: Path) -> None:
    text = page.read_text()
    assert text == page_tables.filled(text)
    assert len(page_tables.BLOCK.findall(text)) == text.count("<!-- table ")


def test_every_table_is_on_a_page() -> None:
    marks = [mark["name"] for page in page_tables.PAGES
             for mark in page_tables.BLOCK.finditer(page.read_text())]  # fmt: skip
    assert sorted(marks) == sorted(page_tables.TABLES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_results_file_is_complete(path: Path) -> None:
    table = json.loads(path.read_text(), parse_float=str)
    assert list(table) == [*FIELDS, "columns", "rows"]
    assert {len(row) for row in table["rows"]} == {len(table["columns"])}
    assert tables.dump(table) == path.read_text()


def test_a_run_replaces_rows_and_keeps_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = {"wl": "b1_c1k", "kv_bytes": 4.34e6, "peer": "ours_pa", "us": 2.0}
    run, into = tmp_path / "run.json", tmp_path / "table.json"
    run.write_text(json.dumps([record, {**record, "peer": "fa3", "us": 3.0}]))
    into.write_text(FILES[0].read_text())
    for name in ("RESULTS", "RESULTS_OTHER", "RESULTS_GPUS", "RESULTS_CPU"):
        monkeypatch.setattr(tables, name, tmp_path / f"{name}.md")
    tables.main([str(run), "--into", str(into), "--commit", "abc"])
    table = json.loads(into.read_text())
    assert table["rows"] == [["b1_c1k", 4.3, 1.0, 2.0, 3.0, 2170, 50, 1.5]]
    assert table["commit"] == "abc"
    assert table["title"] == json.loads(FILES[0].read_text())["title"]


def test_each_program_has_its_table() -> None:
    layer = {"candidate": "ours_fused", "batch": 1, "bytes": 4.34e6, "right": True, "us": 2.0}
    assert tables.from_run([layer])[1] == [["1", "4.3", "1.0", "2.00", "2170", "50", None]]
    small = {"T": 16, "op": "rope", "peer": "ours", "us": 1.0, "bytes": 1e6, "gbps": 1000.0}
    columns, rows = tables.from_run([small, {**small, "peer": "vllm", "us": 2.0}])
    assert rows == [["16", "rope", "1.00", "1.00", "1000", "23", "2.00", None]]
    assert len(columns) == len(rows[0])
