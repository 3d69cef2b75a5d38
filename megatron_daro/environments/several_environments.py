"""Several environments in one run: each group goes to the one that its prompt's data source belongs to."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence

from megatron_daro.rollout.merged import merged
from megatron_daro.rollout.protocol import Rollouter
from megatron_daro.types import GroupRequest, Prompt, Rollout, Verdict


class Mixed:
    """The Rollouter of several environments."""

    def __init__(self, by_name: Mapping[str, Rollouter], environment_of_source: Mapping[str, str]) -> None:
        """Start nothing."""
        self._by_name, self._names = by_name, environment_of_source

    def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[tuple[Rollout, ...]]:
        """Yield the rollouts of all environments as they come."""
        shares: dict[str, list[GroupRequest]] = {}
        for request in requests:
            shares.setdefault(self._names[request.prompt.source], []).append(request)
        return merged(self._by_name[name].generate(share) for name, share in shares.items())

    async def abort(self, group_ids: Collection[int] | None = None) -> None:
        """Stop these groups (None: all)."""
        for own in self._by_name.values():
            await own.abort(group_ids)

    async def score(self, rollouts: Sequence[tuple[Rollout, Prompt]]) -> list[Verdict]:
        """Return one verdict per rollout, in order, from its environment."""
        verdicts: dict[int, Verdict] = {}
        for name, own in self._by_name.items():
            places = [i for i, (_, prompt) in enumerate(rollouts) if self._names[prompt.source] == name]
            if places:
                verdicts |= zip(places, await own.score([rollouts[i] for i in places]), strict=True)
        return [verdicts[i] for i in range(len(rollouts))]

    def counters(self) -> dict[str, int]:
        """Return the sums over all environments, and each one's own counts under environments/NAME/."""
        sums, each = Counter[str](), dict[str, int]()
        for name, own in self._by_name.items():
            counts = own.counters()
            sums.update(counts)
            each |= {key.replace("environment/", f"environments/{name}/", 1): n for key, n in counts.items()}
        return dict(sums) | each

    def load_counters(self, counters: Mapping[str, int]) -> None:
        """Go on from the counts of each environment."""
        for name, own in self._by_name.items():
            prefix = f"environments/{name}/"
            own.load_counters({
                key.replace(prefix, "environment/", 1): n for key, n in counters.items() if key.startswith(prefix)
            })  # fmt: skip

    async def close(self) -> None:
        """Close all environments."""
        for own in self._by_name.values():
            await own.close()
