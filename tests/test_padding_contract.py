"""The page with the padding contract and the code say the same."""

from __future__ import annotations

from pathlib import Path

from stepgraph.pipeline.padding import PADDING

PAGE = Path(__file__).parent.parent / "docs" / "padding.md"


def test_the_page_lists_every_field_as_the_code_has_it() -> None:
    rows = {}
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `"):
            name, dtype, extent, pad, why = (cell.strip() for cell in line.strip("|").split("|"))
            rows[name.strip("`")] = (dtype, extent, pad, why)
    assert rows == {k: (p.dtype, p.extent, str(p.pad), p.why) for k, p in PADDING.items()}
