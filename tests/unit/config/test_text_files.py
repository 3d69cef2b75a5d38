"""Text is read as UTF-8 (or ASCII) whatever the locale of the machine."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import megatron_daro.config

MODULES = sorted(Path(megatron_daro.config.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_whoever_reads_text_names_its_encoding(module):
    tree = ast.parse(module.read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    reads = [call for call in calls if call.func.attr == "read_text"]
    assert [ast.unparse(call) for call in reads if not any(word.arg == "encoding" for word in call.keywords)] == []
