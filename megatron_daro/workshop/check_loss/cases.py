"""Cases of the oracle: what a case is, which are tried, and which are simpler than one that fails.

First cases with one axis, then with several, then random ones. A Case is plain data, written into a script as JSON.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Case:
    """One layout and one set of samples.

    schedule: for each data-parallel rank its micro-batches, each a list of sample numbers; every rank has equally many
    micro-batches. prompts, responses: tokens of each sample. holes: (sample, response position) that are not trained.
    masked: samples without a trained token. group: rollouts per prompt; samples are grouped in order. per_token:
    calculate_per_token_loss. poison: whether masked positions hold NaN. padding: padded positions of each micro-batch.
    changed: the input of `search.INPUTS` whose values are changed; empty: none. expert: expert-parallel ranks; 0: the
    model has no experts. whole: whether a context-parallel rank sees whole samples. on_policy: old log-probs are the
    policy's own. precise: what the function computes in a shorter type is computed in float64.
    """

    tensor: int
    pipeline: int
    context: int
    schedule: tuple[tuple[tuple[int, ...], ...], ...]
    prompts: tuple[int, ...]
    responses: tuple[int, ...]
    holes: tuple[tuple[int, int], ...] = ()
    masked: tuple[int, ...] = ()
    group: int = 2
    per_token: bool = True
    poison: bool = False
    padding: int = 0
    changed: str = ""
    seed: int = 0
    expert: int = 0
    whole: bool = False
    on_policy: bool = False
    precise: bool = False

    @property
    def data(self) -> int:
        """Number of data-parallel ranks."""
        return len(self.schedule)

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches on each rank."""
        return len(self.schedule[0])

    @property
    def axes(self) -> dict[str, int]:
        """Size of each axis that has more than one part."""
        sizes = {
            "micro-batches": self.num_micro_batches,
            "data": self.data,
            "context": self.context,
            "tensor": self.tensor,
            "pipeline": self.pipeline,
            "expert": self.expert,
        }
        return {name: size for name, size in sizes.items() if size > 1}

    def reference(self) -> Case:
        """Return the case of the same samples on one process, in one micro-batch, without padding or NaN."""
        everything = tuple(sorted(i for rank in self.schedule for micro_batch in rank for i in micro_batch))
        return replace(
            self,
            schedule=((everything,),),
            tensor=1,
            pipeline=1,
            context=1,
            poison=False,
            padding=0,
            whole=False,
            expert=min(self.expert, 1),
        )

    def describe(self) -> str:
        """Return one line for people."""
        sizes = {"TP": self.tensor, "PP": self.pipeline, "CP": self.context, "DP": self.data, "EP": self.expert}
        layout = " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one process"
        micro_batches = " | ".join(
            " ".join("+".join(map(str, mb)) or "nothing" for mb in rank) for rank in self.schedule
        )
        flag = "on" if self.per_token else "off"
        parts = [f"{layout}, per-token flag {flag}, samples of each micro-batch: {micro_batches}"]
        parts += [f"masked samples {list(self.masked)}"] if self.masked else []
        parts += [f"{len(self.holes)} holes in masks"] if self.holes else []
        parts += ["NaN under the mask"] if self.poison else []
        parts += [f"{self.padding} padded positions"] if self.padding else []
        parts += ["whole samples on each rank"] if self.whole and self.context > 1 else []
        used = self.reference().schedule[0][0]
        lengths = ", ".join(f"{i}: {self.responses[i]}" for i in used)
        return f"{', '.join(parts)}, response lengths {lengths}"


def from_json(data: Mapping[str, Any]) -> Case:
    """Return a case from its `asdict` that went through JSON, which turned tuples into lists."""
    return Case(**{name: _frozen(value) for name, value in data.items()})  # type: ignore[arg-type]


def _frozen(value: object) -> object:
    return tuple(_frozen(v) for v in value) if isinstance(value, list | tuple) else value


PROMPTS, RESPONSES, GROUP = (3, 2, 4, 2, 5, 3, 2, 4), (5, 2, 9, 3, 4, 7, 1, 6), 4
_BASE = Case(
    tensor=1, pipeline=1, context=1, schedule=(((0, 1, 2, 3, 4, 5, 6, 7),),), prompts=PROMPTS, responses=RESPONSES,
    group=GROUP,
)  # fmt: skip
_SPLIT = (((0, 1, 2, 3), (4,), (5, 6, 7)),)
_RANKS = (((0, 1, 2, 3, 4),), ((5, 6, 7),))
_BOTH = (((0, 1, 2), (3, 4)), ((5,), (6, 7)))
ANOTHER_ORDER = replace(_BASE, schedule=(((3, 6, 0, 7, 1, 5, 2, 4),),))
HOLES = ((0, 1), (2, 0), (2, 4), (5, 3), (5, 6), (7, 0))

AXES: dict[str, Case] = {
    "micro-batches": replace(_BASE, schedule=_SPLIT),
    "data parallel": replace(_BASE, schedule=_RANKS),
    "context parallel": replace(_BASE, context=2),
    "tensor parallel": replace(_BASE, tensor=2),
    "pipeline parallel": replace(_BASE, pipeline=2),
    "masks with holes, micro-batches": replace(_BASE, schedule=_SPLIT, holes=HOLES),
    "masks with holes, context parallel": replace(_BASE, context=2, holes=HOLES),
    "padding": replace(_BASE, padding=3),
    "NaN under the mask": replace(_BASE, holes=HOLES, poison=True),
    "a micro-batch without trained tokens": replace(_BASE, schedule=_SPLIT, masked=(4,)),
    "a rank without trained tokens": replace(_BASE, schedule=_RANKS, masked=(5, 6, 7)),
    "order of samples": ANOTHER_ORDER,
    "data parallel, micro-batches": replace(_BASE, schedule=_BOTH, holes=HOLES),
    "data and context parallel": replace(_BASE, schedule=_RANKS, context=2, holes=HOLES),
    "context parallel, micro-batches": replace(_BASE, schedule=_SPLIT, context=2),
    "tensor and pipeline parallel": replace(_BASE, schedule=_SPLIT, tensor=2, pipeline=2),
    "tensor and data parallel": replace(_BASE, schedule=_BOTH, tensor=2, masked=(5,)),
    "pipeline and data parallel": replace(_BASE, schedule=_BOTH, pipeline=2, padding=1),
    "pipeline and context parallel": replace(_BASE, schedule=_SPLIT, pipeline=2, context=2),
    "expert parallel": replace(_BASE, schedule=_BOTH, holes=HOLES, expert=2),
    "expert and context parallel": replace(_BASE, schedule=_SPLIT, context=2, expert=2),
    "expert, data and context parallel": replace(_BASE, schedule=_RANKS, context=2, expert=2),
}
"""In the order in which they are tried."""


def base(*, per_token: bool) -> Case:
    """Return the case of all samples on one process, in one micro-batch."""
    return replace(_BASE, per_token=per_token)


def axes(*, per_token: bool, whole: bool = False) -> Iterator[tuple[str, Case]]:
    """Yield the named cases. whole: whether context-parallel ranks see whole samples."""
    for name, case in AXES.items():
        yield name, replace(case, per_token=per_token, whole=whole)


def random_case(seed: int, *, per_token: bool) -> Case:
    """Return a random case of up to four processes."""
    rng = random.Random(seed)
    ranges = itertools.product((1, 2), (1, 2), (1, 2, 4), (1, 2, 3, 4))
    sizes = [(t, p, c, d) for t, p, c, d in ranges if t * p * c * d <= 4]
    tensor, pipeline, context, data = rng.choice(sizes)
    number = rng.randint(1, 3)
    count = max(GROUP * rng.randint(1, 3), data * number)
    order = rng.sample(range(count), count)
    cuts = sorted(rng.sample(range(1, count), data * number - 1))
    parts = [tuple(order[a:b]) for a, b in zip([0, *cuts], [*cuts, count], strict=True)]
    responses = tuple(rng.randint(1, 12) for _ in range(count))
    return Case(
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        schedule=tuple(tuple(parts[r * number : (r + 1) * number]) for r in range(data)),
        prompts=tuple(rng.randint(1, 6) for _ in range(count)),
        responses=responses,
        holes=tuple((i, r) for i in range(count) for r in range(responses[i]) if rng.random() < 0.15),
        masked=tuple(i for i in range(count) if rng.random() < 0.1),
        group=GROUP,
        per_token=per_token,
        poison=rng.random() < 0.2,
        padding=rng.choice((0, 0, 1, 5)),
        seed=seed,
        expert=2 if tensor == 1 and context * data % 2 == 0 and rng.random() < 0.3 else 0,
    )


def simpler(case: Case) -> Iterator[Case]:
    """Yield simpler cases, the largest simplifications first."""
    if case.expert:
        yield replace(case, expert=0)
    for smaller in _simpler(case):
        fits = case.expert <= 1 or smaller.context * smaller.data % case.expert == 0
        yield smaller if fits else replace(smaller, expert=1)


def _simpler(case: Case) -> Iterator[Case]:
    yield from (c for c in (replace(case, tensor=1), replace(case, pipeline=1), replace(case, context=1)) if c != case)
    if case.data > 1:
        yield replace(case, schedule=case.schedule[:-1])
        merged = tuple(tuple(i for mb in rank for i in mb) for rank in zip(*case.schedule, strict=True))
        yield replace(case, schedule=(merged,))
    if case.num_micro_batches > 1:
        yield replace(case, schedule=tuple((tuple(i for mb in rank for i in mb),) for rank in case.schedule))
        yield replace(case, schedule=tuple(rank[:-1] for rank in case.schedule))
    emptied = (replace(case, poison=False), replace(case, padding=0), replace(case, holes=()), replace(case, masked=()))
    yield from (c for c in emptied if c != case)
    yield from _fewer_samples(case)
    for i, length in enumerate(case.responses):
        if length > 1:
            for shorter in {1, length // 2, length - 1} - {0, length}:
                yield replace(case, responses=(*case.responses[:i], shorter, *case.responses[i + 1 :]))


def _fewer_samples(case: Case) -> Iterator[Case]:
    for r, rank in enumerate(case.schedule):
        for m, micro_batch in enumerate(rank):
            for i in micro_batch if len(micro_batch) > 1 else ():
                left = tuple(j for j in micro_batch if j != i)
                ranks = list(case.schedule)
                ranks[r] = (*rank[:m], left, *rank[m + 1 :])
                yield replace(case, schedule=tuple(ranks))
