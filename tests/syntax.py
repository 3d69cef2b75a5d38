"""Syntax trees of source files, for the tests that read code."""

from __future__ import annotations

import ast


def parsed(source: str) -> ast.Module:
    """The syntax tree; asked for again where a finalizer that ran meanwhile confused Python 3.11.

    Its counter of recursion is one for all: an exception that a finalizer raises is printed with `ast`, and the tree
    that was being made ends with "AST constructor recursion depth mismatch".
    """
    for _ in range(5):
        try:
            return ast.parse(source)
        except SystemError:
            continue
    return ast.parse(source)
