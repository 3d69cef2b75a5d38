"""Options that are set although nothing reads them, because of how another option is set.

They are refused if the run would not train what they ask for, or not in the way that they describe. They are only a
warning if the other option is a switch that people change on the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import NamedTuple

from megatron_daro.config.algorithm import READ_BY_REGION
from megatron_daro.config.base import changed
from megatron_daro.config.problems import Problem, wrong
from megatron_daro.config.rules.algorithm import may_have_critic, may_learn_weights
from megatron_daro.config.sections import Config


class _Options(NamedTuple):
    """paths: of options, or of sections, which stand for all their options. are_read: returns whether this run reads
    them. reader: what reads them, for messages. switch: the setting with which they are read."""

    paths: str
    are_read: Callable[[Config], bool]
    reader: str
    switch: str


def _of_region(name: str) -> _Options:
    readers = [region for region, options in READ_BY_REGION.items() if name in options]

    def is_read(run: Config) -> bool:
        return run.algorithm.trust_region in readers or not _has_trust_region(run)

    return _Options(
        f"algorithm.{name}", is_read, f"trust_region {' or '.join(readers)}", f"algorithm.trust_region={readers[0]}"
    )


def _has_trust_region(run: Config) -> bool:
    return run.algorithm.traits is None or not run.algorithm.traits.own_surrogate


def _of_regions(paths: str) -> _Options:
    return _Options(paths, _has_trust_region, "an algorithm that has a trust region", "algorithm.name=grpo")


_REFUSED = (
    _Options(
        "algorithm.critic trainer.export_critic",
        may_have_critic,
        "an algorithm that has a critic",
        "algorithm.name=ppo",
    ),
    _Options("algorithm.daro", may_learn_weights, "an algorithm that learns DARO's weights", "algorithm.name=daro"),
    _Options(
        "algorithm.distill",
        lambda run: bool(run.algorithm.distill.urls),
        "a teacher's servers",
        "algorithm.distill.urls",
    ),
    _of_regions("algorithm.dual_clip"),
    _of_region("dual_clip"),
    _Options(
        "algorithm.kl.mean",
        lambda run: run.algorithm.kl.place == "loss",
        "a KL term in the loss",
        "algorithm.kl.place=loss",
    ),
    _Options("lora trainer.export_adapter", lambda run: run.lora.rank > 0, "adapters", "lora.rank"),
    _Options("engine.options", lambda run: run.engine.is_own, "an engine of your own", "engine.kind=module:Class"),
    _Options("engine.sglang", lambda run: run.engine.kind == "sglang", "SGLang servers", "engine.kind=sglang"),
)
_WARNED = (
    _Options(
        "engine.embedded", lambda run: run.engine.kind == "embedded", "the embedded engine", "engine.kind=embedded"
    ),
    _Options("data.shuffle", lambda run: run.data.order == "epochs", "that order", "data.order=epochs"),
    _Options("data.curriculum", lambda run: run.data.order == "curriculum", "that order", "data.order=curriculum"),
    _Options("data.prioritised", lambda run: run.data.order == "prioritised", "that order", "data.order=prioritised"),
    _of_regions("algorithm.sapo algorithm.clip_low algorithm.clip_high"),
    *map(_of_region, ("sapo", "clip_low", "clip_high")),
    _Options(
        "algorithm.correction",
        lambda run: run.algorithm.correction.kind != "none",
        "a correction",
        "algorithm.correction.kind=tis",
    ),
    _Options(
        "actor.fp8_recipe actor.fp8_format actor.num_layers_at_start_in_bf16 actor.num_layers_at_end_in_bf16",
        lambda run: run.actor.precision == "fp8",
        "fp8",
        "actor.precision=fp8",
    ),
    _Options(
        "trainer.snapshot_gib trainer.max_replacements",
        lambda run: run.trainer.replace_lost_ranks,
        "ranks that are replaced",
        "trainer.replace_lost_ranks=true",
    ),
    _Options(
        "trainer.hung_rank_s",
        lambda run: run.trainer.replace_lost_ranks or run.engine.kind == "embedded",
        "ranks that are replaced, or embedded engines",
        "trainer.replace_lost_ranks=true",
    ),
)


def refused(config: Config) -> Iterator[Problem]:
    """Yield options that nothing reads and that are refused."""
    return _unread(config, _REFUSED)


def warned(config: Config) -> Iterator[Problem]:
    """Yield options that nothing reads, but that may stay for another run."""
    return _unread(config, _WARNED)


def _unread(config: Config, table: Iterable[_Options]) -> Iterator[Problem]:
    for options in table:
        for path in options.paths.split() if not options.are_read(config) else ():
            section, _, name = path.rpartition(".")
            if name in changed(attrgetter(section)(config) if section else config):
                fix, beside = f"set {options.switch}, or remove it", options.switch.partition("=")[0]
                yield wrong(config, path, f"only with {options.reader}", fix, beside=beside)
