"""What the two ways to fill a batch share: rounds.py, which repeats exactly, and early.py, which waits for nobody.

Place in the data flow: the composition root makes a RolloutContext and chooses one BatchFiller over it; the sampler
asks that one to fill its batches. Holds no behaviour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_daro.config.sections import RolloutSection
from megatron_daro.rollout.collector import RolloutCollector
from megatron_daro.rollout.deadlines import Deadlines
from megatron_daro.rollout.ledger import Ledger
from megatron_daro.rollout.partial_batch import PartialBatch
from megatron_daro.rollout.pending import PartialGroup
from megatron_daro.rollout.protocol import Engine, Notices, PromptSource


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext:
    """What groups are made of.

    section: the configuration's rollout section. engine: generates. source: gives prompts. ledger: the books.
    collector: takes answers in and has them verified. notices: told about dropped groups. max_attempts: times that a
    group's missing rollouts are requested before the group is dropped.
    """

    section: RolloutSection
    engine: Engine
    source: PromptSource
    ledger: Ledger
    collector: RolloutCollector
    notices: Notices
    deadlines: Deadlines
    max_attempts: int = 3


class BatchFiller(Protocol):
    """One way to fill a batch."""

    keeps_unfinished: bool
    """Whether groups may be unfinished when their batch is full, and go on in the next one."""

    async def fill(self, batch: PartialBatch, waiting: Sequence[PartialGroup]) -> tuple[PartialGroup, ...]:
        """Add groups to the batch until it is full, or until the bound on prompts is reached and all have ended.

        Args:
            batch: the batch so far.
            waiting: outstanding groups kept unfinished; they go on before new prompts are admitted.

        Returns:
            The groups that are unfinished now, by id, still outstanding. None of them is generated any more.

        Raises:
            DataError: no prompts. EngineError, RewardError, DeadlineError: the engine or the verifiers failed.
        """
        ...
