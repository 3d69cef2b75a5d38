"""Where an answer may stand in a response with thinking."""

from __future__ import annotations

import pytest

from megatron_daro.reward.base import VerifierSpec
from megatron_daro.reward.factory import verifier_of

FORMS = {"math": r"\boxed{5}", "integer": "Answer: 5", "exact": "#### 5"}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(
    ("text", "behind", "anywhere"),
    [
        ("{}", True, True),
        ("<think>6?</think>{}", True, True),
        ("6?</think>{}", True, True),
        ("<think>so {}", False, True),
        ("<think>so {}\n</think>I do not know", False, True),
        ("<think>a</think>b<think>{}", False, True),
    ],
)
def test_an_answer_stands_behind_the_thinking(name, text, behind, anywhere):
    response = text.format(FORMS[name])
    assert verifier_of(VerifierSpec(name)).verify(response, "5").correct is behind
    assert verifier_of(VerifierSpec(name, after_thinking=False)).verify(response, "5").correct is anywhere
