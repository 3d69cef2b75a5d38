"""Count the package: files, code lines, imports and untyped names, the core apart from what stands beside it.

A code line holds a token that is neither a comment nor part of a docstring. The core is what a training run needs;
beside it stand workshop/, plugins/, commands/ and the command line.

    python benchmarks/code_size.py [--units]      # --units: a row for each folder and top-level module
    python benchmarks/code_size.py --docs docs/architecture.md      # put the table into this page
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "megatron_daro"
BESIDE = {"workshop", "plugins", "commands", "cli", "__main__"}
MARKS = ("<!-- size: python benchmarks/code_size.py --docs docs/architecture.md -->", "<!-- end of size -->")
AIMS = {"core": "130 files, 20,000 lines", "all": "220 files, 29,000 lines, 7 %, 15"}
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(slots=True)
class Size:
    """What some files hold. untyped: uses of the name `Any` that stand alone as an annotation."""

    files: int = 0
    code_lines: int = 0
    import_lines: int = 0
    untyped: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(
            self.files + other.files,
            self.code_lines + other.code_lines,
            self.import_lines + other.import_lines,
            self.untyped + other.untyped,
        )


def size_of(text: str) -> Size:
    """Count one file."""
    tree = ast.parse(text)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [n.body[0] for n in ast.walk(tree) if isinstance(n, documented) and ast.get_docstring(n) is not None]
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    return Size(1, len(code - _lines(docstrings)), len(_lines(imports) & code), _untyped(tree))


def _lines(nodes: Iterable[ast.stmt]) -> set[int]:
    return {line for node in nodes for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def _untyped(tree: ast.Module) -> int:
    annotations: list[ast.expr | None] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            annotations.append(node.returns)
        elif isinstance(node, (ast.arg, ast.AnnAssign)):
            annotations.append(node.annotation)
    return sum(isinstance(annotation, ast.Name) and annotation.id == "Any" for annotation in annotations)


def write_docs(page: Path, rows: Mapping[str, Size]) -> None:
    """Put the rows of the core and of all between the marks of a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(MARKS[0])
    table = ["| | files | code lines | share of imports | bare `Any` | aim |", "|---|---|---|---|---|---|"]
    for name, aim in AIMS.items():
        size = rows[name]
        share = f"{100 * size.import_lines / size.code_lines:.1f} %"
        table.append(f"| {name} | {size.files} | {size.code_lines:,} | {share} | {size.untyped} | {aim} |")
    after = rest.partition(MARKS[1])[2]
    page.write_text("\n".join([f"{before}{MARKS[0]}", *table, f"{MARKS[1]}{after}"]), encoding="utf-8")


def main() -> int:
    """Print the table, or put it into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", action="store_true", help="a row for each folder and top-level module")
    parser.add_argument("--docs", type=Path, help="put the table into this page")
    options = parser.parse_args()
    units: dict[str, Size] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        unit = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        units[unit] = units.get(unit, Size()) + size_of(path.read_text(encoding="utf-8"))
    rows = dict(units) if options.units else {}
    rows["core"] = sum((size for unit, size in units.items() if unit not in BESIDE), Size())
    rows["all"] = sum(units.values(), Size())
    print(f"{'':16}{'files':>8}{'code lines':>12}{'imports':>9}{'bare Any':>10}")
    for name, size in rows.items():
        share = size.import_lines / size.code_lines
        print(f"{name:16}{size.files:8,}{size.code_lines:12,}{share:9.1%}{size.untyped:10}")
    if options.docs:
        write_docs(options.docs, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
