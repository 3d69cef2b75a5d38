"""The report's page: layout, colours and the script that draws; everything in one file, nothing from the network.

Place in the data flow: blocks of escaped HTML and `Section`s -> one HTML document. A content security policy allows
exactly the page's own two scripts (by hash) and no connection at all, so text from a model could do nothing even if
escaping failed.
"""

from __future__ import annotations

import base64
import hashlib
import html
import os
from dataclasses import dataclass
from pathlib import Path

from megatron_daro.errors import DataError
from megatron_daro.observe.escape import script_json
from megatron_daro.observe.report_plots import Section

_ASSETS = Path(__file__).parent / "assets"


@dataclass(frozen=True)
class Page:
    """What a report consists of. `head_html`, `samples_html` and `tail_html` are escaped HTML."""

    title: str
    subtitle: str
    head_html: str
    sections: list[Section]
    samples_html: str
    tail_html: str


def write_page(page: Page, target: Path, *, what: str, option: str) -> None:
    """Write the document whole or not at all; folders are made.

    Args:
        what: it is, and option: that names another place, for the message.

    Raises:
        DataError: it cannot be written.
    """
    text = render(page)
    temporary = target.with_name(f"{target.name}.tmp{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DataError(f"{target}: the {what} could not be written: {error}; give another {option}") from error


def render(page: Page) -> str:
    """Return the whole document as text (UTF-8, about 5 MB, nearly all of it plotly.js)."""
    from plotly.offline import get_plotlyjs

    library = get_plotlyjs()
    script = (_ASSETS / "report.js").read_text(encoding="utf-8")
    style = (_ASSETS / "report.css").read_text(encoding="utf-8")
    body, figures = _sections_html(page.sections)
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; "
        f"script-src {_hash(library)} {_hash(script)}"
    )
    samples = (
        f'<section id="samples"><h2>Sample rollouts</h2>{page.samples_html}</section>' if page.samples_html else ""
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{html.escape(page.title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<header><h1>"
        f"{html.escape(page.title)}</h1><p>{html.escape(page.subtitle)}</p></header>\n<main>\n{page.head_html}\n"
        "<noscript><p>The plots need JavaScript; the tables and samples do not.</p></noscript>\n"
        f"{body}\n{samples}\n{page.tail_html}\n</main>\n"
        f'<script type="application/json" id="figures">{script_json(figures)}</script>\n'
        f"<script>{library}</script>\n<script>{script}</script>\n</body>\n</html>\n"
    )


def table_html(header: list[str], rows: list[list[str]], *, number_columns: int) -> str:
    """Return an HTML table; every cell is escaped here.

    Args:
        header: column names.
        rows: cells as text, one list per row.
        number_columns: how many columns, from the right, are aligned as numbers.
    """
    first_number = len(header) - number_columns

    def cells(row: list[str], tag: str) -> str:
        marks = [' class="number"' if i >= first_number else "" for i in range(len(row))]
        return "".join(f"<{tag}{m}>{html.escape(c)}</{tag}>" for m, c in zip(marks, row, strict=True))

    body = "".join(f"<tr>{cells(r, 'td')}</tr>" for r in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{cells(header, "th")}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _sections_html(sections: list[Section]) -> tuple[str, list[dict]]:
    parts: list[str] = []
    figures: list[dict] = []
    for section in sections:
        if not section.plots:
            continue
        parts.append(f'<section><h2>{html.escape(section.title)}</h2><div class="plots">')
        for plot in section.plots:
            name = f"plot-{len(figures)}"
            figures.append({"id": name, "data": plot.traces, "layout": plot.layout})
            parts.append(
                f'<figure><h3>{html.escape(plot.title)}</h3><div class="plot" id="{name}" role="img" '
                f'aria-label="{html.escape(plot.title)}"></div><figcaption>{html.escape(plot.caption)}</figcaption></figure>'
            )
        parts.append("</div></section>")
    return "\n".join(parts), figures


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
