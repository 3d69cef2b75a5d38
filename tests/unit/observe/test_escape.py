"""Text of unknown origin made safe."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_run import HOSTILE_TEXTS

from megatron_daro.observe.logs import safe_text
from megatron_daro.workshop.report.page import script_json


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("plain\n\ttext", "plain\n\ttext"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("\x9b31m", "\\x9b31m"),
        ("a\rb\x00\x7f", "a\\rb\\x00\\x7f"),
        ("\u202eevil\u2066", "\\u202eevil\\u2066"),
        ("line\u2028end\ud800", "line\\u2028end\\ud800"),
        ("tag\U000e0041", "tag\\U000e0041"),
        ("naïve 東京 ≤ π 👩‍🔬", "naïve 東京 ≤ π 👩‍🔬"),
        ("[red]<b>&", "[red]<b>&"),
    ],
)
def test_control_characters_become_visible_and_nothing_else_changes(raw, clean):
    assert safe_text(raw) == clean


def test_one_line_and_limit():
    assert safe_text("a\nb\tc", one_line=True) == "a\\nb\\tc"
    assert safe_text("x" * 12, 10) == "x" * 10 + "… (+2 characters)"


@given(st.text(st.characters(codec=None)))
def test_no_acting_character_is_left_in_any_text(raw):
    clean = safe_text(raw)
    acting = [
        c for c in clean if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c not in "\n\t\u200c\u200d"
    ]
    assert acting == []
    clean.encode()


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
def test_json_for_a_script_element_cannot_leave_it(text):
    encoded = script_json({"text": text})
    assert not set(encoded) & set("<>&\u2028")
    assert json.loads(encoded) == {"text": text}
