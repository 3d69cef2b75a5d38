"""Cursor: an endless order of prompts that can stop anywhere and go on exactly there.

Place in the data flow: prompts with tokens -> `next(n)` -> sampler; its state goes into the checkpoint.
The order of an epoch is a function of (seed, epoch) alone, so the state is a few numbers. Refuses to resume on other
data: the same position would mean other prompts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_daro.errors import CheckpointError, DataError
from megatron_daro.types import Group, Prompt


class PromptSource:
    """Each prompt once per epoch. Two calls of 3 give what one call of 6 gives."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int = 0, shuffle: bool = True) -> None:
        """Start at the first prompt of epoch 0.

        Args:
            prompts: at least one.
            seed: of the order, 0 or more.
            shuffle: a new order per epoch; otherwise the given order, again and again.

        Raises:
            DataError: no prompts, or a negative seed.
        """
        if not prompts:
            raise DataError("PromptSource: got no prompts; give at least one")
        if seed < 0:
            raise DataError(f"PromptSource: seed must be 0 or more, got {seed}")
        self._prompts = tuple(prompts)
        self._seed, self._shuffle = seed, shuffle
        self._fingerprint = fingerprint(self._prompts)
        self._epoch, self._position = 0, 0
        self._order = self._order_of(0)

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def epoch(self) -> int:
        """Whole passes over the data so far."""
        return self._epoch

    @property
    def drawn(self) -> int:
        """Prompts handed out since the beginning."""
        return self._epoch * len(self) + self._position

    def next(self, n: int) -> list[Prompt]:
        """Return the next n prompts; an epoch that ends on the way is followed by the next one.

        Args:
            n: 0 or more. Above the number of prompts, some come twice.

        Returns:
            n prompts.

        Raises:
            DataError: n is negative.
        """
        if n < 0:
            raise DataError(f"PromptSource.next: n must be 0 or more, got {n}")
        taken: list[Prompt] = []
        while len(taken) < n:
            part = self._order[self._position : self._position + n - len(taken)]
            taken += [self._prompts[i] for i in part]
            self._position += len(part)
            if self._position == len(self):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
        return taken

    def observe(self, groups: Sequence[Group]) -> None:
        """Take no notice: the order does not depend on what became of the prompts."""

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, fit for JSON."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "num_prompts": len(self),
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where the state was taken.

        Args:
            state: from `state_dict` of a source with the same prompts, seed and shuffle.

        Raises:
            CheckpointError: the prompts, the seed or the shuffle differ, or the state is torn. The source is unchanged.
        """
        own = self.state_dict()
        if set(state) != set(own):
            raise CheckpointError(
                f"data cursor: state has fields {sorted(state)}, {sorted(own)} are needed; it is torn"
            )
        fixes = {
            "num_prompts": "resume with the same data files, field names and max_prompt_tokens",
            "fingerprint": "the prompts changed (files, order, template or tokenizer); resume with the same ones",
            "seed": "resume with the same trainer.seed",
            "shuffle": "resume with the same data.shuffle",
        }
        for name, fix in fixes.items():
            if state[name] != own[name]:
                raise CheckpointError(f"data cursor: {name} was {state[name]} when saved and is {own[name]} now; {fix}")
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


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Return what changes with the prompts, their order, answers and tokens."""
    digest = hashlib.sha256()
    for prompt in prompts:
        record = repr((prompt.id, prompt.answer, prompt.tokens, *prompt.alternatives))
        digest.update(f"{len(record)}:{record}".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:32]
