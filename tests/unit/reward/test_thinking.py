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
        ("[THINK]so {}", False, True),
        ("[THINK]so[/THINK]{}", True, True),
        ("<thinking>so {}", False, True),
        ("<thinking>so</thinking>{}", True, True),
        ("<thinking>so {}\n</thinking>I do not know", False, True),
        ("<seed:think>so {}", False, True),
        ("<seed:think>so</seed:think>{}", True, True),
        ("<mm:think>so {}", False, True),
        ("◁think▷so {}", False, True),
        ("◁think▷so◁/think▷{}", True, True),
        ("<|inner_prefix|>so {}", False, True),
        ("<|channel|>analysis<|message|>so {}", False, True),
        ("<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>{}", True, True),
        ("<think>so [THINK] or <thinking></think>{}", True, True),
        ("<think>so[/THINK]{}", True, True),
    ],
)
def test_an_answer_stands_behind_the_thinking(name, text, behind, anywhere):
    response = text.format(FORMS[name])
    assert verifier_of(VerifierSpec(name)).verify(response, "5").correct is behind
    assert verifier_of(VerifierSpec(name, after_thinking=False)).verify(response, "5").correct is anywhere
