"""Drawn losses against the transitions of healing alone: what each leads to, whatever else is lost meanwhile."""

from __future__ import annotations

from collections import Counter
from random import Random

from megatron_daro.actor.double_buffer import KINDS_OF_SNAPSHOT
from megatron_daro.errors import WorkerError
from megatron_daro.runtime import healing_states as states
from megatron_daro.runtime.rank_info import RankInfo
from megatron_daro.runtime.snapshot_keepers import peers_of
from megatron_daro.runtime.snapshot_store import SnapshotSerials


class Walk:
    """One run: ranks that keep snapshots of their own and a peer's, whose processes are lost at any moment."""

    def __init__(self, seed):
        self.random = Random(seed)
        self.world = self.random.choice((2, 3, 4))
        hosts = [f"host {rank % self.random.choice((1, 2))}" for rank in range(self.world)]
        self.infos = [RankInfo(r, 0, exports=False, sends=False, reports=True, host=h) for r, h in enumerate(hosts)]
        self.peers, self.per_hour = peers_of(self.infos), self.random.choice((2, 100))
        self.own = {rank: set() for rank in range(self.world)}
        self.copies = {rank: {} for rank in range(self.world)}
        self.state, self.now_s, self.replaced_s = states.State(self.per_hour), 0.0, []
        self.trained, self.contents = [], {}

    def take(self, event):
        self.state, action = states.after(self.state, event)
        return action

    def loses(self, chance):
        """Lose a rank or two with this chance; whether any was."""
        if self.random.random() > chance:
            return False
        ranks = frozenset(self.random.sample(range(self.world), self.random.choice((1, 1, 1, 2))))
        news, training = not ranks <= self.state.lost, self.state.phase == "training"
        assert (self.take(states.Lost(ranks)) == states.Abort()) == (news and training)
        for rank in ranks:
            self.own[rank], self.copies[rank] = set(), {}
        return True

    def snapshot(self, chance):
        """Take one, unless a rank is lost meanwhile; whether it was committed."""
        before = self.state.committed
        self.take(states.SnapshotBegun())
        number = self.state.begun
        self.contents[number] = list(self.trained)
        for rank in range(self.world):
            self.loses(chance / self.world)
            if rank in self.state.lost:
                continue
            self.own[rank] = {before, number} & ({number} | self.own[rank])
            if self.peers[rank] not in self.state.lost:
                copies = self.copies[self.peers[rank]]
                copies[rank] = {before, number} & ({number} | copies.get(rank, set()))
        if self.state.lost:
            return False
        self.take(states.SnapshotCommitted(number))
        return True

    def kept(self):
        living = [rank for rank in range(self.world) if rank not in self.state.lost]
        return {
            rank: SnapshotSerials(tuple(self.own[rank]), {r: tuple(c) for r, c in self.copies[rank].items()})
            for rank in living
        }

    def common(self):
        """Snapshots that may be gone back to: each rank's state is in some process."""
        held = {rank: set(numbers) for rank, numbers in self.own.items()}
        for copies in self.copies.values():
            for rank, numbers in copies.items():
                held[rank] |= numbers
        return set.intersection(*held.values()) & {self.state.begun, self.state.committed}

    def heal(self):
        while action := self.take(states.Stopped()):
            while action and not isinstance(action, states.Report):
                action = self.take(getattr(self, type(action).__name__.lower())(action))
            assert not action or (self.state.phase == "training" and action.ranks)

    def leave(self, action):
        self.loses(0.1)
        self.now_s += self.random.choice((1.0, 1.0, 4000.0))
        self.lost = self.state.lost
        return states.Left(self.kept(), self.infos, range(self.world), self.now_s)

    def replace(self, action):
        assert set(action.ranks) == self.lost and not self.state.lost
        assert action.snapshot == max(self.common())
        self.replaced_s += [self.now_s] * len(self.lost)
        assert sum(self.now_s - at_s <= 3600 for at_s in self.replaced_s) <= self.per_hour
        for rank in range(self.world):
            sources = action.sources.get(rank, ())
            assert (action.snapshot in self.own[rank]) != bool(sources)
            assert not sources or sorted(kind for s in sources for kind in s.kinds) == sorted(KINDS_OF_SNAPSHOT)
            assert all(source.worker not in self.lost for source in sources)
        if self.loses(0.2):
            return states.Failed(WorkerError("lost meanwhile"))
        for rank in action.sources:
            self.own[rank] = {action.snapshot}
        return states.Restored(action.snapshot)

    def repeat(self, action):
        assert len(action.steps) <= 1
        if self.loses(0.1):
            return states.Failed(WorkerError("lost meanwhile"))
        restored = self.trained[: len(self.trained) - len(action.steps)]
        assert [step for _, _, step in action.steps] == self.trained[len(restored) :]
        assert restored in (self.contents[self.state.begun], self.contents[self.state.committed])
        if not self.snapshot(0.1):
            return states.Failed(WorkerError("lost meanwhile"))
        return states.Repeated(len(action.steps))

    def run(self):
        """Train a few steps; returns how it went."""
        self.snapshot(0.0)
        for step in range(1, 6):
            self.loses(0.2)
            self.heal()
            if self.state.failure:
                return self.ended()
            self.trained.append(step)
            self.take(states.Trained(None, step))
            self.snapshot(0.2)
        return "healed" if self.replaced_s else "quiet"

    def ended(self):
        text, lost = str(self.state.failure), self.state.lost
        if "trainer.max_replacements" in text:
            recent = sum(self.now_s - at_s <= 3600 for at_s in self.replaced_s)
            assert recent + len(lost) > self.per_hour
            return "too often"
        assert "nobody has the state" in text and not self.common()
        assert text.startswith(f"rank {', '.join(map(str, sorted(lost)))} died"), text
        assert self.take(states.Stopped()) is None, "what is over stays over"
        return "nobody"


def test_three_thousand_walks_replace_what_is_lost_or_end_for_a_reason():
    ends = Counter(Walk(seed).run() for seed in range(3_000))
    assert min(ends[how] for how in ("quiet", "healed", "too often", "nobody")) > 100, ends


def test_a_failure_that_is_no_loss_ends_it():
    state, _ = states.after(states.State(8), states.Lost(frozenset({1})))
    state, action = states.after(state, states.Stopped())
    assert action == states.Leave()
    state, action = states.after(state, states.Failed(RuntimeError("the disk is full")))
    assert state.phase == "over" and action is None and "the disk is full" in str(state.failure)
