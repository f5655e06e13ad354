"""What `search` and `emit` print of schedules on machines that are not as planned."""

from __future__ import annotations

from textwrap import wrap

from mercurygen.cli import words
from mercurygen.search.robust import Robustness, Row
from mercurygen.search.why import label

WIDTH = 100


def shown(found: Robustness, most: int) -> list[Row]:
    """The schedules to show: the most robust, then the winners of the scenarios, then the next."""
    rows = dict.fromkeys([id(found.best), *map(id, found.winners), *map(id, found.rows)])
    by_id = {id(row): row for row in found.rows}
    return [by_id[each] for each in rows][:most]


def lines(found: Robustness, rows: list[Row]) -> list[str]:
    """A line for each scenario: ms of each schedule, and what keeping it loses there.

    Args:
        found: of a search.
        rows: which schedules, the columns A, B, C, ...
    """
    letters = [chr(ord("A") + i) for i in range(len(rows))]
    head = ["scenario", "best ms"]
    for letter in letters:
        head += [f"{letter} ms", "loses"]
    table = [head]
    for i, scenario in enumerate(found.scenarios):
        cells = [scenario.name, words.ms(found.winners[i].times[i])]
        for row in rows:
            cells += [words.ms(row.times[i]), f"{row.regrets[i]:.1%}"]
        table.append(cells)
    worst = ["at most", ""]
    for row in rows:
        worst += ["", f"{row.worst:.1%}"]
    table.append(worst)
    legend = [
        f"{letter}  {label(row.candidate)}" for letter, row in zip(letters, rows, strict=True)
    ]
    return [*words.table(table, right=range(1, len(head))), *legend]


def changed(found: Robustness) -> list[str]:
    """What each scenario changes, in words."""
    width = max(len(scenario.name) for scenario in found.scenarios)
    made = []
    for scenario in found.scenarios:
        first, *more = wrap(scenario.what, WIDTH - width - 2)
        made += [f"{scenario.name:{width}}  {first}", *(f"{'':{width}}  {line}" for line in more)]
    return made
