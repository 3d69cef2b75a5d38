"""Verdicts on answers to prompts: any of a prompt's gold answers counts as right.

Place in the data flow: (answer text, prompt) -> pairs of text and gold -> Scorer -> one Verdict each. Training and
evaluation both ask here. Refuses a scorer that does not give one verdict a pair.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_daro.errors import RewardError
from megatron_daro.rollout.protocol import Scorer
from megatron_daro.types import Prompt, Verdict


async def judge(scorer: Scorer, answers: Sequence[tuple[str, Prompt]]) -> list[Verdict]:
    """One verdict per (answer text, prompt), in order.

    Where a prompt has alternatives, the verdict is that of the first gold that matches, else that of its first gold.

    Raises:
        RewardError: the scorer gave more or fewer verdicts than it was asked for.
    """
    pairs = [(text, gold, prompt.statement) for text, prompt in answers for gold in prompt.answers]
    verdicts = await scorer.score_async(pairs)
    if len(verdicts) != len(pairs):
        raise RewardError(f"the verifier gave {len(verdicts)} verdicts for {len(pairs)} answers; allowed: one each")
    found = iter(verdicts)
    each = [[next(found) for _ in prompt.answers] for _, prompt in answers]
    return [next((one for one in of_golds if one.correct), of_golds[0]) for of_golds in each]
