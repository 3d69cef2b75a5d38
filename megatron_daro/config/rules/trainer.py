"""Rules of the run: its steps and evaluations, rewards, the environment, and packages that options need."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

from megatron_daro.config.base import changed
from megatron_daro.config.hardware import Hardware
from megatron_daro.config.problems import Problem, wrong
from megatron_daro.config.sections import Config, EnvironmentSection


def steps(config: Config) -> Iterator[Problem]:
    """Yield a warm-up longer than the run, and evaluations without evaluation sets."""
    if config.actor.optimizer.warmup_steps > config.trainer.steps:
        allowed, fix = f"at most {config.trainer.steps}, the run's steps", "lower it or raise trainer.steps"
        yield wrong(config, "actor.optimizer.warmup_steps", allowed, fix, beside="trainer.steps")
    if config.trainer.eval_every_steps and not config.data.eval:
        allowed, fix = "0 without data.eval", "add a set to data.eval, or set trainer.eval_every_steps=0"
        yield wrong(config, "trainer.eval_every_steps", allowed, fix, beside="data.eval")


def reward(config: Config) -> Iterator[Problem]:
    """Yield rewards that do not tell right from wrong."""
    section = config.reward
    if section.correct_reward <= section.incorrect_reward:
        allowed = "above reward.incorrect_reward"
        fix = "set reward.correct_reward=1 and reward.incorrect_reward=0 (or -1)"
        yield wrong(config, "reward.correct_reward", allowed, fix, beside="reward.incorrect_reward")


def environments(config: Config) -> Iterator[Problem]:
    """Yield what is wrong with each environment, and with several together."""
    several = config.environments
    for i, section in enumerate(config.all_environments):
        yield from _environment(config, f"environments.{i}" if several else "environment", section)
    if config.algorithm.turn_rewards and not any(one.has_turns for one in config.all_environments):
        allowed = "false, or an environment of several turns"
        beside = "environments" if several else "environment.kind"
        yield wrong(config, "algorithm.turn_rewards", allowed, "remove it", beside=beside)
    if several and changed(config.environment):
        allowed, fix = "nothing with environments, which take its place", "remove one of them"
        yield wrong(config, "environment", allowed, fix, got="options", beside="environments")
    names = [one.name for one in several]
    sources = [source for one in several for source in one.sources or (one.name,)]
    for what, values in (("name", names), ("data source", sources)):
        if twice := sorted({value for value in values if values.count(value) > 1}):
            allowed, fix = f"each {what} once", f"give each environment a {what} of its own"
            yield wrong(config, "environments", allowed, fix, got=f"the {what} {', '.join(twice)} twice")
    if several and len({one.weight is None for one in several}) > 1:
        allowed, fix = "a weight for each environment, or for none", "add those that lack, or remove all"
        yield wrong(config, "environments", allowed, fix, got="some without a weight")


def _environment(config: Config, path: str, section: EnvironmentSection) -> Iterator[Problem]:
    """Yield options that cannot be combined with the kind, and an address that agents cannot reach."""
    kind = f"{path}.kind"
    if (section.kind == "agent") != bool(section.command):
        allowed = "a program and its arguments, with kind agent, and only with it"
        yield wrong(config, f"{path}.command", allowed, "set both, or neither", beside=kind)
    if section.sandbox and section.kind != "agent":
        yield wrong(config, f"{path}.sandbox", "false but for programs of kind agent", "remove it", beside=kind)
    if section.kind == "agent" or section.of_verifiers:
        for name in unread_without_step(section):
            allowed = "unset but for environments with `step`"
            yield wrong(config, f"{path}.{name}", allowed, "remove it", beside=kind)
    if section.host in ("0.0.0.0", "::"):
        allowed = "an address that agents reach: it is part of their base URL"
        yield wrong(config, f"{path}.host", allowed, f"set {path}.host=127.0.0.1, or this machine's address")
    if not section.has_turns:
        for name in ("options", "reward_weights"):
            if getattr(section, name):
                allowed = "nothing with single_turn"
                yield wrong(config, f"{path}.{name}", allowed, "remove them", beside=kind)


def unread_without_step(section: EnvironmentSection) -> list[str]:
    """Return the options that are set and that only an environment with `step` reads."""
    return [name for name in changed(section) if name in ("max_turns", "strict", "step_timeout_s")]


def packages(config: Config, hardware: Hardware) -> Iterator[Problem]:
    """Yield options whose package is not installed here, or needs a GPU."""
    if config.observe.wandb.enabled and importlib.util.find_spec("wandb") is None:
        allowed = "true where the package wandb is installed"
        fix = 'run pip install "megatron_daro[wandb]", or set observe.wandb.enabled=false'
        yield Problem("observe.wandb.enabled", "true without the package wandb", allowed, fix)
    triton = config.actor.logprob_kernel == "triton"
    if triton and hardware.kind == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        allowed = "auto, torch (with TRITON_INTERPRET=1 in the environment, for tests, triton too)"
        got = f"triton on {hardware.place}, which has no GPU"
        yield Problem("actor.logprob_kernel", got, allowed, "set actor.logprob_kernel=auto")
    elif triton and importlib.util.find_spec("triton") is None:
        allowed = "triton where the package triton is installed"
        fix = "install a CUDA build of torch, which brings it, or set actor.logprob_kernel=torch"
        yield Problem("actor.logprob_kernel", "triton without the package triton", allowed, fix)
