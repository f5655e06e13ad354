"""The paper's grid: formulas by hand beside plans and search, and what is off is said."""

from __future__ import annotations

from dataclasses import replace

import by_hand
import paper_grid
import pytest
from paper_grid import Cell, machine

from mercurygen.search.search import search

CELLS = (
    Cell("H100", 1, 8, "GQA", 1, 32768),
    Cell("A100", 2, 4, "MHA", 1, 32768),
    Cell("L4", 2, 8, "GQA", 2, 16384),
)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_by_hand_as_by_plan(cell: Cell) -> None:
    """Bytes of every design are the same, and times but for ranks that are not even."""
    where = machine(cell.box, cell.nodes, cell.each)
    group = tuple(level.size for level in where.levels)
    figures, compared = by_hand.designs(by_hand.Machine(where, group), cell.problem), 0
    for name in paper_grid.DESIGNS:
        if not any(name == known for known, _ in figures):
            continue
        result = search("attention", cell.problem, where, design=name)
        for one in result.ranked:
            hand = figures.get((name, paper_grid._heads(one)))
            if hand is not None:
                compared += 1
                assert {x.name: x.port for x in one.cost.links if x.port} == hand.sent, name
                assert 0.94 < hand.seconds / one.cost.time < 1.01, (name, one.cost.time)
    assert compared >= 4


def test_what_is_off_is_said(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """A choice that is slower than a design, and bytes that are others; nothing if all is well."""
    cell, real = CELLS[0], paper_grid.search
    good = paper_grid.predict(cell)
    assert good.off == () and min(good.faster.values()) > 0.98
    assert paper_grid.report({cell: good}) == 0

    def slower(*args, **options):
        result = real(*args, **options)
        return replace(result, ranked=result.ranked[-1:])

    monkeypatch.setattr(paper_grid, "search", slower)
    bad = paper_grid.predict(cell)
    assert any("by hand takes" in text for text in bad.off)
    monkeypatch.setattr(paper_grid, "search", real)
    monkeypatch.setattr(by_hand.Machine, "ring_sent", lambda *_: {"gpu": 1.0})
    assert any(text.startswith("ring over gpu") for text in paper_grid.predict(cell).off)
    capsys.readouterr()
    assert (
        paper_grid.report({cell: bad}) == len(bad.off) and "OFF 1x8 H100" in capsys.readouterr()[0]
    )


def test_two_million_tokens() -> None:
    """Of the paper's case of memory: with batch 5 no design of the four fits, and a plan does."""
    lines = paper_grid.memory_case(5, "MHA")
    assert "fits none of the four; choice ulysses-chunked on all=8" in lines[0]
    assert lines[1].startswith("  no flat design fits") and "75 GiB" in lines[-1]
