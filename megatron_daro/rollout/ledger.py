"""The books of the groups: every admitted group is in exactly one of outstanding, trained, filtered, dropped.

`BatchFiller` admits groups and retries them, `BatchSoFar` filters and drops, the controller marks groups as trained or
dropped; in a replay `ReplaySource` admits, filters and drops. The ledger gives out group ids and attempt numbers, and
decides whether an answer still counts. It keeps no rollouts. Finished groups, those that have an outcome, are only
counted: except in a replay ids are given out in ascending order, so an id below the next one that is not outstanding is
finished, and finishing it again is refused. The outcome of each group is remembered only as long as a checkpoint may
need it (`forget_outcomes`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

from megatron_daro.errors import CheckpointError, EngineError

Outcome = Literal["trained", "filtered", "dropped"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


class Ledger:
    """The counts of groups, and the current attempt of each outstanding one."""

    def __init__(self) -> None:
        self._next_id = 0
        self._admitted = 0
        self._attempts: dict[int, int] = {}
        self._finished: dict[str, int] = dict.fromkeys(OUTCOMES, 0)
        self._outcomes: dict[int, Outcome] = {}
        self._retries = 0
        self._refused = 0

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Ids of the groups that are neither trained nor filtered nor dropped, in order."""
        return tuple(sorted(self._attempts))

    def is_outstanding(self, group_id: int) -> bool:
        """Whether a group is neither trained nor filtered nor dropped."""
        return group_id in self._attempts

    def admit(self, count: int) -> list[int]:
        """Admit `count` new groups; they are outstanding at attempt 0.

        Returns:
            Their ids, consecutive.
        """
        ids = list(range(self._next_id, self._next_id + count))
        self.admit_recorded(ids)
        return ids

    def admit_recorded(self, group_ids: Sequence[int]) -> None:
        """Admit groups under their ids of a recorded run, in any order: a group may be used after later ones."""
        for group_id in group_ids:
            assert group_id not in self._attempts, f"group {group_id} is admitted twice"
            self._attempts[group_id] = 0
            self._next_id = max(self._next_id, group_id + 1)
            self._admitted += 1

    def attempt(self, group_id: int) -> int:
        """Return the current attempt of an outstanding group."""
        return self._attempts[group_id]

    def retry(self, group_id: int) -> None:
        """Start the next attempt of an outstanding group; answers of earlier ones no longer count."""
        self._attempts[group_id] += 1
        self._retries += 1

    def resume(self, group_id: int) -> None:
        """Start the next attempt of an unfinished group. Nothing failed: it is not counted as a retry."""
        self._attempts[group_id] += 1

    def accepts(self, group_id: int, attempt: int) -> bool:
        """Whether an answer counts: its group is outstanding and its attempt is the current one. A late answer is
        counted.

        Raises:
            EngineError: the group was never admitted, or the attempt was never asked for: not late, but invented.
        """
        current = self._attempts.get(group_id)
        if not 0 <= group_id < self._next_id or (current is not None and attempt > current):
            raise EngineError(
                f"engine answered group {group_id} attempt {attempt}, which was never requested; allowed: group ids "
                f"below {self._next_id} at an attempt that was sent. The engine must copy both from the request"
            )
        if current != attempt:
            self._refused += 1
            return False
        return True

    def refuse(self) -> None:
        """Count an answer that was refused for another reason (a second answer for the same index)."""
        self._refused += 1

    def finish(self, group_ids: Iterable[int], outcome: Outcome) -> None:
        """Move outstanding groups to their final state. A group is finished once: nothing is trained twice."""
        for group_id in group_ids:
            assert group_id in self._attempts, f"group {group_id} is not outstanding, so it cannot become {outcome}"
            del self._attempts[group_id]
            self._finished[outcome] += 1
            self._outcomes[group_id] = outcome

    @property
    def outcomes(self) -> Mapping[int, Outcome]:
        """The outcomes of the groups that were finished in this process, without those that were forgotten."""
        return self._outcomes

    def forget_outcomes(self, but: Container[int]) -> None:
        """Forget the outcomes of all groups but these."""
        self._outcomes = {group_id: outcome for group_id, outcome in self._outcomes.items() if group_id in but}

    @property
    def late_refused(self) -> int:
        """Answers that came too late (or twice) and were not used."""
        return self._refused

    @property
    def retries(self) -> int:
        """Attempts after a failed one, over all groups."""
        return self._retries

    def counts(self) -> dict[str, int]:
        """Return groups admitted and in each state; admitted is the sum of the others at all times."""
        counts = {"admitted": self._admitted} | self._finished | {"outstanding": len(self._attempts)}
        assert 2 * counts["admitted"] == sum(counts.values()), f"books do not add up: {counts}"
        return counts

    def state_dict(self) -> dict[str, Any]:
        """Return everything but `outcomes`, as JSON-able plain values; the size grows with the outstanding groups
        only."""
        return {
            "next_id": self._next_id,
            "admitted": self._admitted,
            "outstanding": [[group_id, self._attempts[group_id]] for group_id in sorted(self._attempts)],
            "finished": dict(self._finished),
            "retries": self._retries,
            "late_refused": self._refused,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state.

        Raises:
            CheckpointError: the state does not add up.
        """
        attempts = {int(group_id): int(attempt) for group_id, attempt in state["outstanding"]}
        finished: dict[str, int] = {outcome: int(state["finished"][outcome]) for outcome in OUTCOMES}
        next_id, admitted = int(state["next_id"]), int(state["admitted"])
        if admitted != sum(finished.values()) + len(attempts) or any(not 0 <= i < next_id for i in attempts):
            raise CheckpointError(
                f"ledger state does not add up: {admitted} groups admitted, {sum(finished.values())} finished, "
                f"{len(attempts)} outstanding; allowed: admitted = finished + outstanding. Use an earlier checkpoint"
            )
        self._next_id, self._admitted = next_id, admitted
        self._attempts, self._finished, self._outcomes = attempts, finished, {}
        self._retries, self._refused = int(state["retries"]), int(state["late_refused"])
