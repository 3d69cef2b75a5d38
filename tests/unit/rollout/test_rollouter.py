"""What an engine's answers become: those that count are kept, whatever comes before them in the same answer."""

from __future__ import annotations

from loop_fakes import FAST, make_rollout

from megatron_daro.rollout.ledger import Ledger
from megatron_daro.rollout.rollouter import Pending, RolloutCollector
from megatron_daro.types import Prompt, SamplingParams


def test_a_second_answer_and_a_late_one_are_counted_and_the_others_kept():
    ledger, prompt = Ledger(), Prompt(id="p", answer="2", source="s", tokens=(3, 4))
    collector = RolloutCollector(
        ledger, rollouter=None, sampling=SamplingParams(), rollouts_per_prompt=3, deadlines=FAST, phases=None,
        notices=None,
    )  # fmt: skip
    group, gone = ledger.admit(2)
    ledger.finish([gone], "dropped")
    entry = Pending(prompt)
    answers = [make_rollout(of, 0, index, prompt, 0) for of, index in ((group, 0), (group, 0), (gone, 0), (group, 2))]
    finished = collector.accept(answers, {group: entry})
    assert [rollout.index for rollout in finished] == [0, 2] == sorted(entry.rollouts)
    assert ledger.late_refused == 2
