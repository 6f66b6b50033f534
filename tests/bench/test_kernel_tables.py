"""docs/kernels.md: its tables are what the CSV files hold."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from minillm.bench import common
from peer_rows import decode_rows

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("fill_kernel_tables", ROOT / "tools/fill_kernel_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_what_the_committed_files_hold(tool) -> None:
    page = tool.PAGE.read_text()
    assert tool.filled(page, tool.RESULTS) == page, "run python tools/fill_kernel_tables.py"


def test_every_table_of_the_page_is_known_and_every_known_table_is_on_it(tool) -> None:
    names = [match[2] for match in tool.MARKED.finditer(tool.PAGE.read_text())]
    assert sorted(names) == sorted(tool.SECTIONS)


def test_a_table_is_replaced_between_its_markers_and_stays_without_its_file(tool, tmp_path: Path) -> None:
    page = "a\n<!-- table: decode_peers -->\nold\n<!-- end -->\nb\n<!-- table: swap -->\nkept\n<!-- end -->\n"
    common.write_csv(tmp_path / "decode_peers.csv", decode_rows(0.8))
    new = tool.filled(page, tmp_path)
    assert "old" not in new and "| 32/8, 128 | 64 x 4,096 |" in new and "- met: best peer's time over ours" in new
    assert "torch cudnn (14/2, 16/8, 32/8)" in new
    assert new.endswith("b\n<!-- table: swap -->\nkept\n<!-- end -->\n")
    assert tool.filled(new, tmp_path) == new
