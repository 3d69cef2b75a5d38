"""Orders of the training prompts: passes over all of them, easy to hard, and by how often the run failed lately.

`next(n)` hands prompts to the sampler, `observe` takes the outcomes of finished groups, and the state goes into the
checkpoint. Every draw is a function of (seed, number of the draw, state) in integers, so a resumed run draws what an
uninterrupted one would have drawn. Rejects resuming on other data or with other settings: the same position would mean
other prompts.
"""

from __future__ import annotations

import base64
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megatron_daro.errors import CheckpointError, DataError
from megatron_daro.types import Group, Prompt

if TYPE_CHECKING:
    from megatron_daro.config.sections import CurriculumSection, PrioritisedSection


_FIXES = {
    "order": "resume with the same data.order",
    "num_prompts": "resume with the same data files, field names, max_prompt_tokens and environment.kind",
    "fingerprint": "the prompts changed (files, order, template, tokenizer, environment.kind); resume with the same",
    "seed": "resume with the same trainer.seed",
    "shuffle": "resume with the same data.shuffle",
    "settings": "resume with the same data.curriculum or data.prioritised, and pass rates in the files",
}
"""Fields of a state that must be as they were when it was saved -> how to achieve that."""


class _Order(ABC):
    """What all orders share: one draw after the other, and a state from which they continue exactly."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        if not prompts:
            raise DataError("data.order: got no prompts; give at least one")
        if seed < 0:
            raise DataError(f"data.order: seed must be 0 or more, got {seed}")
        self._prompts, self._seed = tuple(prompts), seed
        self._fingerprint = fingerprint(self._prompts)

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    @abstractmethod
    def drawn(self) -> int:
        """Prompts handed out since the beginning."""

    def next(self, n: int) -> list[Prompt]:
        """Return the next n prompts. Raises DataError: n is negative."""
        if n < 0:
            raise DataError(f"data.order: n must be 0 or more, got {n}")
        return [self._prompts[self._draw()] for _ in range(n)]

    def observe(self, groups: Sequence[Group]) -> None:  # noqa: B027
        """Learn the outcomes of groups; does nothing where the order does not depend on them."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain values, fit for JSON."""
        return {"seed": self._seed, "num_prompts": len(self), "fingerprint": self._fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was taken.

        Raises:
            CheckpointError: prompts, seed, order or its settings differ, or the state is torn. Nothing is changed then.
        """
        own = self.state_dict()
        if set(state) != set(own):
            raise CheckpointError(
                f"data cursor: state has fields {sorted(state)}, {sorted(own)} are needed; it is torn, or of another "
                "data.order"
            )
        for name, fix in _FIXES.items():
            if name in own and state[name] != own[name]:
                raise CheckpointError(f"data cursor: {name} was {state[name]} when saved and is {own[name]} now; {fix}")
        self._go_on(state)

    @abstractmethod
    def _draw(self) -> int:
        """Draw the next prompt. Returns its place in the list of prompts."""

    @abstractmethod
    def _go_on(self, state: Mapping[str, Any]) -> None:
        """Take over the rest of a state, once its prompts and settings are known to be the same. Raises
        CheckpointError: it is torn."""


class Epochs(_Order):
    """Each prompt once per epoch, which is a pass over all prompts here, and not over a batch as elsewhere."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int = 0, shuffle: bool = True) -> None:
        """Start at the first prompt of epoch 0.

        Args:
            prompts: at least one.
            seed: of the order, 0 or more.
            shuffle: a new order per epoch; otherwise the given order, again and again.

        Raises:
            DataError: no prompts, or a negative seed.
        """
        super().__init__(prompts, seed)
        self._shuffle = shuffle
        self._epoch, self._position = 0, 0
        self._order = self._order_of(0)

    @property
    def drawn(self) -> int:
        """See `_Order`."""
        return self._epoch * len(self) + self._position

    def state_dict(self) -> dict[str, Any]:
        """See `_Order`."""
        return {**super().state_dict(), "epoch": self._epoch, "position": self._position, "shuffle": self._shuffle}

    def _draw(self) -> int:
        place = self._order[self._position]
        self._position += 1
        if self._position == len(self):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        return place

    def _go_on(self, state: Mapping[str, Any]) -> None:
        epoch, position = state["epoch"], state["position"]
        if not (type(epoch) is int and type(position) is int and epoch >= 0 and 0 <= position < len(self)):
            raise CheckpointError(f"data cursor: epoch {epoch!r}, position {position!r} of {len(self)} is torn")
        self._epoch, self._position = epoch, position
        self._order = self._order_of(epoch)

    def _order_of(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(len(self)))
        # numpy fixes the raw stream of PCG64 for ever, but not that of Generator.permutation (NEP 19).
        keys = np.random.PCG64(np.random.SeedSequence([self._seed, epoch])).random_raw(len(self))
        return np.argsort(keys, kind="stable").tolist()


class Mix:
    """Several sources at once: the next prompt comes from the one that lags most behind its share of the draws."""

    def __init__(self, sources: Mapping[str, _Order], weights: Mapping[str, float]) -> None:
        """Begin. Args: sources: by name of environment. weights: by name of environment, above 0."""
        total = sum(weights.values())
        self._sources, self._shares = sources, {name: weights[name] / total for name in sources}

    def next(self, n: int) -> list[Prompt]:
        """Return the next n prompts."""
        return [self._behind().next(1)[0] for _ in range(n)]

    def observe(self, groups: Sequence[Group]) -> None:
        """Tell each source; it recognises its own groups."""
        for source in self._sources.values():
            source.observe(groups)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all sources, by name of environment."""
        return {name: source.state_dict() for name, source in self._sources.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was taken. Raises CheckpointError: it is of other environments, or a source refuses its
        own."""
        if state.keys() != self._sources.keys():
            raise CheckpointError(
                f"data cursor: state of {sorted(state)}, this run has environments {sorted(self._sources)}; resume "
                "with the same environments"
            )
        for name, source in self._sources.items():
            source.load_state_dict(state[name])

    def _behind(self) -> _Order:
        drawn = sum(source.drawn for source in self._sources.values()) + 1
        return max(self._sources.items(), key=lambda one: self._shares[one[0]] * drawn - one[1].drawn)[1]


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Return a digest that changes with the prompts, their order, answers and tokens."""
    digest = hashlib.sha256()
    for prompt in prompts:
        record = repr((prompt.id, prompt.answer, prompt.tokens, *prompt.alternatives))
        digest.update(f"{len(record)}:{record}".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:32]


_UNIT = 1 << 20
_ROUNDING = 1e-9


class _Draws(_Order):
    """What curriculum and prioritised orders share."""

    kind: Literal["curriculum", "prioritised"]

    def __init__(self, prompts: Sequence[Prompt], seed: int, settings: Mapping[str, float | str | None]) -> None:
        super().__init__(prompts, seed)
        self._settings = dict(settings)
        self._drawn = 0

    @property
    def drawn(self) -> int:
        """See `_Order`."""
        return self._drawn

    def state_dict(self) -> dict[str, Any]:
        """See `_Order`."""
        return {
            **super().state_dict(),
            "order": self.kind,
            "drawn": self._drawn,
            "settings": dict(self._settings),
            "columns": {name: _packed(column) for name, column in self._columns().items()},
        }

    def _draw(self) -> int:
        random = int(np.random.PCG64(np.random.SeedSequence([self._seed, 1, self._drawn])).random_raw())
        chosen = self._choose(random)
        self._drawn += 1
        return chosen

    def _go_on(self, state: Mapping[str, Any]) -> None:
        if type(state["drawn"]) is not int or state["drawn"] < 0:
            raise CheckpointError(f"data cursor: {state['drawn']!r} prompts drawn; it is torn")
        columns = {name: _unpacked(name, state["columns"], like) for name, like in self._columns().items()}
        self._drawn = state["drawn"]
        self._set_columns(columns)

    @abstractmethod
    def _choose(self, random: int) -> int:
        """Return the place of the next prompt. random: 64 random bits."""

    @abstractmethod
    def _columns(self) -> dict[str, np.ndarray]:
        """Return the columns of the state, with an entry for each prompt."""

    @abstractmethod
    def _set_columns(self, columns: dict[str, np.ndarray]) -> None:
        """Take the columns of a state."""


class Curriculum(_Draws):
    """Easy to hard: at first only the easiest share of the prompts is open, later all of them. Each draw takes one of
    the open prompts that were drawn least often.

    Source: the pacing function of Hacohen and Weinshall, On The Power of Curriculum Learning (arXiv 1904.03626).
    """

    kind = "curriculum"

    def __init__(
        self,
        prompts: Sequence[Prompt],
        pass_rates: Mapping[str, float],
        section: CurriculumSection,
        *,
        seed: int,
        ramp: int,
    ) -> None:
        """Start with the easiest.

        Args:
            prompts: at least one. pass_rates: prompt id -> rate in [0, 1], of every prompt.
            section: the configuration's. seed: 0 or more. ramp: how many prompts are drawn until all are open, unless
                the section or a loaded state says it.

        Raises:
            DataError: a prompt without a pass rate.
        """
        rates_N = np.array([pass_rates.get(prompt.id, np.nan) for prompt in prompts], dtype=np.float64)
        if missing := int(np.isnan(rates_N).sum()):
            raise DataError(
                f"data.order: got curriculum, but {missing} of {len(prompts)} problems have no pass rate; allowed: "
                "files with the field pass_rate in every row; fix: measure them with megatron-daro curate FILE "
                "--hf MODEL --samples 8 --out DIR and train on DIR/curated.parquet, or set data.order=epochs"
            )
        self._first = math.ceil(section.start * len(prompts) - _ROUNDING)
        self._ramp = section.ramp_prompts or max(1, ramp)
        self._by_ease_N = np.argsort(-rates_N, kind="stable")
        self._times_N = np.zeros(len(prompts), np.int64)
        rates = hashlib.sha256(rates_N.astype("<f8").tobytes()).hexdigest()[:16]
        settings = {"start": section.start, "ramp_prompts": section.ramp_prompts, "pass_rates": rates}
        super().__init__(prompts, seed, settings)

    def state_dict(self) -> dict[str, Any]:
        """See `_Order`. The ramp is part of it, so it stays the same if a run is resumed with another number of
        steps."""
        return {**super().state_dict(), "ramp": self._ramp}

    def _go_on(self, state: Mapping[str, Any]) -> None:
        if type(state["ramp"]) is not int or state["ramp"] < 1:
            raise CheckpointError(f"data cursor: a ramp of {state['ramp']!r} prompts; it is torn")
        super()._go_on(state)
        self._ramp = state["ramp"]

    @property
    def open(self) -> int:
        """How many prompts can be drawn now, counted from the easiest."""
        return min(len(self), self._first + (len(self) - self._first) * self.drawn // self._ramp)

    def _choose(self, random: int) -> int:
        candidates = self._by_ease_N[: self.open]
        times = self._times_N[candidates]
        least = candidates[times == times.min()]
        chosen = int(least[random % len(least)])
        self._times_N[chosen] += 1
        return chosen

    def _columns(self) -> dict[str, np.ndarray]:
        return {"times": self._times_N}

    def _set_columns(self, columns: dict[str, np.ndarray]) -> None:
        self._times_N = columns["times"]


class Prioritised(_Draws):
    """Each draw takes a prompt with a probability proportional to its priority, which follows from how often the run
    failed on it lately. A prompt is not drawn twice for one batch while others are left.

    Source: prioritised sampling of Kimi k1.5 (arXiv 2501.12599, section 2.3.4), by 1 - success rate.
    """

    kind = "prioritised"

    def __init__(
        self, prompts: Sequence[Prompt], pass_rates: Mapping[str, float], section: PrioritisedSection, *, seed: int
    ) -> None:
        """Start with the stored pass rates.

        Args:
            prompts: at least one. pass_rates: prompt id -> rate in [0, 1], where a file has one; a prompt without one
                has priority 1 until it has been tried.
            section: the configuration's. seed: 0 or more.
        """
        self._section = section
        failure = [1.0 - pass_rates.get(prompt.id, np.nan) for prompt in prompts]
        self._failure_N = np.array(failure, dtype=np.float64)
        self._since_N = np.zeros(len(prompts), np.bool_)
        self._place = {prompt.id: index for index, prompt in enumerate(prompts)}
        self._weights_N = self._weights(self._failure_N)
        super().__init__(prompts, seed, {"by": section.by, "floor": section.floor})

    def observe(self, groups: Sequence[Group]) -> None:
        """Learn the pass rates of groups, and let every prompt be drawn again."""
        for group in groups:
            place = self._place.get(group.prompt.id)
            if place is not None and group.verdicts:
                known, failure = self._failure_N[place], 1 - group.pass_rate
                self._failure_N[place] = failure if np.isnan(known) else (known + failure) / 2
        self._since_N[:] = False
        self._weights_N = self._weights(self._failure_N)

    def _weights(self, failure_N: np.ndarray) -> np.ndarray:
        """Return priorities as whole numbers, whose sums are exact: at least 1, but 0 with a floor of 0 where nothing
        is left to learn."""
        section = self._section
        need_N = {
            "failure": lambda: failure_N,
            "signal": lambda: 4 * failure_N * (1 - failure_N),
            "gaussian": lambda: np.exp(-(((failure_N - 0.5) / 0.1) ** 2) / 2),
        }[section.by]()
        need_N = np.where(np.isnan(failure_N), 1.0, need_N)  # what was never tried
        weights_N = ((section.floor + (1 - section.floor) * need_N) * _UNIT).astype(np.int64)
        return np.where((section.floor == 0) & (need_N == 0), 0, np.maximum(1, weights_N))

    def _choose(self, random: int) -> int:
        if self._since_N.all():
            self._since_N[:] = False
        ends_N = np.cumsum(np.where(self._since_N, 0, self._weights_N))
        if ends_N[-1] == 0:  # nothing is left to learn of the prompts that are left
            ends_N = np.cumsum(~self._since_N)
        chosen = int(np.searchsorted(ends_N, random % int(ends_N[-1]), side="right"))
        self._since_N[chosen] = True
        return chosen

    def _columns(self) -> dict[str, np.ndarray]:
        return {"failure": self._failure_N, "since": self._since_N}

    def _set_columns(self, columns: dict[str, np.ndarray]) -> None:
        self._failure_N, self._since_N = columns["failure"], columns["since"]
        self._weights_N = self._weights(self._failure_N)


def _packed(column: np.ndarray) -> str:
    return base64.b64encode(column.astype(column.dtype.newbyteorder("<")).tobytes()).decode("ascii")


def _unpacked(name: str, columns: object, like: np.ndarray) -> np.ndarray:
    """Return a column of the state. Raises CheckpointError where it does not fit."""
    try:
        content = base64.b64decode(columns[name], validate=True)  # type: ignore[index]
        column = np.frombuffer(content, like.dtype.newbyteorder("<")).astype(like.dtype)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"data cursor: column {name} cannot be read ({error}); it is torn") from error
    if len(column) != len(like):
        raise CheckpointError(
            f"data cursor: column {name} has {len(column)} entries, {len(like)} are needed; it is torn"
        )
    return column
