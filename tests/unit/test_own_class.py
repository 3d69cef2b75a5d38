"""A user's own class: what fits is made, and what does not is refused with the field, the reason and the way out."""

from __future__ import annotations

import sys
import types
from typing import Protocol

import pytest

from megatron_daro.errors import ConfigError, RewardError
from megatron_daro.own_class import import_own_class, make_own


class Judge(Protocol):
    async def judge(self, problem: str, answer: str) -> float: ...

    def close(self) -> None: ...


class Fits:
    def __init__(self, *, size=1):
        if size < 0:
            raise ValueError("size must be positive")
        self.size = size

    async def judge(self, problem, answer): ...

    def close(self): ...


class NotAsync(Fits):
    def judge(self, problem, answer): ...


class AsyncClose(Fits):
    async def close(self): ...


class TooFew(Fits):
    async def judge(self, problem): ...


class TooMany(Fits):
    async def judge(self, problem, answer, gold): ...


class Lacks:
    async def judge(self, problem, answer): ...


class NeedsMore(Fits):
    def __init__(self, *, size, colour): ...


class MoreByDefault(Fits):
    async def judge(self, problem, answer, gold=None, *rest): ...


@pytest.fixture(autouse=True)
def module(monkeypatch):
    """A module `mine` with what stands here."""
    module = types.ModuleType("mine")
    for own in (Fits, NotAsync, AsyncClose, TooFew, TooMany, Lacks, NeedsMore, MoreByDefault):
        setattr(module, own.__name__, own)
    module.number = 3
    monkeypatch.setitem(sys.modules, "mine", module)
    return module


def imported(name, arguments=None):
    return import_own_class(
        "reward.verifier",
        name,
        builtin="math, text",
        protocol=Judge,
        methods={"judge": 2, "close": 0},
        arguments={"size": 4} if arguments is None else arguments,
        options="reward.options",
    )


@pytest.mark.parametrize("own", [Fits, MoreByDefault])
def test_a_class_that_fits_is_given_back_and_made_with_the_users_arguments(own):
    assert imported(f"mine:{own.__name__}") is own
    made = make_own("reward.verifier", "mine:Fits", own, {"size": 4}, options="reward.options", error=RewardError)
    assert type(made) is own and made.size == 4


@pytest.mark.parametrize("name", ["nowhere:Fits", "mine:Absent", "mine:number"])
def test_what_is_no_class_that_can_be_imported_is_refused(name):
    with pytest.raises(ConfigError, match=rf"reward\.verifier.*{name}.*math, text"):
        imported(name)


@pytest.mark.parametrize(
    ("name", "method"),
    [("NotAsync", "judge"), ("TooFew", "judge"), ("TooMany", "judge"), ("AsyncClose", "close"), ("Lacks", "close")],
)
def test_a_method_that_does_not_fit_is_shown_as_it_must_be_written(name, method):
    with pytest.raises(ConfigError, match=rf"reward\.verifier.*mine:{name}\.{method}.*def {method}\(self"):
        imported(f"mine:{name}")


@pytest.mark.parametrize(
    ("name", "arguments", "named"), [("NeedsMore", {"size": 1}, "colour"), ("Fits", {"a": 1, "b": 2}, "'a'")]
)
def test_a_constructor_that_takes_other_arguments_is_refused(name, arguments, named):
    with pytest.raises(ConfigError, match=rf"reward\.verifier.*mine:{name}.*{named}"):
        imported(f"mine:{name}", arguments)


def test_a_constructor_that_raises_is_an_error_of_the_part_that_wanted_it():
    with pytest.raises(RewardError, match=r"mine:Fits.*size must be positive.*reward\.options"):
        make_own("reward.verifier", "mine:Fits", Fits, {"size": -1}, options="reward.options", error=RewardError)
