"""Tables for a terminal, no wider than it or 100 columns; what does not fit beside the rest stands below it."""

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
    """Return a line broken between its words; what is indented stays so."""
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    return textwrap.fill(text, _width(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def table_text(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> str:
    """Return a table as text.

    Args:
        head: names of the columns; a long one is broken between its words.
        rows: cells, none of which is broken.
        left: columns, from the left, that are not numbers; where the table is cut, the first stands in each part.
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
