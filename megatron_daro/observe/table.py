"""Tables for a terminal, no wider than the terminal or 100 columns; columns that do not fit follow in a table below."""

from __future__ import annotations

import io
import shutil
import textwrap
from collections.abc import Sequence
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_daro.observe.logs import safe_text

_MOST_COLUMNS = 100
_GAP = 2


def _width() -> int:
    return min(shutil.get_terminal_size((_MOST_COLUMNS, 24)).columns, _MOST_COLUMNS)


def prose(text: str) -> str:
    """Return a line wrapped between words; an indented line stays indented."""
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    return textwrap.fill(text, _width(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def table_text(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> str:
    """Return a table as text.

    Args:
        head: names of the columns; long names are wrapped between words.
        rows: cells, which are never wrapped.
        left: how many columns, from the left, are not numbers. If the table is split, each part has the first column.
    """
    width = _width()
    cells = [[safe_text(cell, 60, one_line=True) for cell in row] for row in rows]
    widths = [
        max(map(cell_len, [*name.split(), *(row[number] for row in cells)]), default=0)
        for number, name in enumerate(head)
    ]
    parts = [[0]]
    for number in range(1, len(head)):
        taken = [*parts[-1], number]
        if sum(widths[one] + _GAP for one in taken) > width and len(parts[-1]) > 1:
            taken = [0, number]
            parts.append(taken)
        parts[-1] = taken
    text = io.StringIO()
    console = Console(file=text, width=width, color_system=None)
    for part in parts:
        table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, _GAP - 1, 0, 0))
        for number in part:
            justify: Literal["left", "right"] = "left" if number < left else "right"
            table.add_column(Text(head[number]), justify=justify, min_width=widths[number])
        for row in cells:
            table.add_row(*(Text(row[number]) for number in part))
        console.print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines() if line.strip())
