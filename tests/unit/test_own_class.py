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


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nowhere:Fits", r"\(ModuleNotFoundError: No module named 'nowhere'\)"),
        ("mine:Absent", r"\(AttributeError: module 'mine' has no attribute 'Absent'\)"),
    ],
)
def test_what_cannot_be_imported_says_why_and_what_else_is_allowed(name, reason):
    with pytest.raises(ConfigError, match=rf"^reward.verifier: got '{name}', which cannot be imported {reason}; ") as e:
        imported(name)
    assert "allowed are math, text, or module:Class" in str(e.value) and "PYTHONPATH" in str(e.value)
    assert isinstance(e.value.__cause__, (ImportError, AttributeError))


def test_what_is_no_class_is_refused():
    with pytest.raises(ConfigError, match=r"got 'mine:number', which is no class; allowed: a class that offers Judge$"):
        imported("mine:number")


JUDGE, CLOSE = (
    r"write it as `async def judge\(self, problem: 'str', answer: 'str'\) -> 'float'`",
    r"write it as `def close\(self\) -> 'None'`",
)


@pytest.mark.parametrize(
    ("name", "method", "text"),
    [
        ("NotAsync", "judge", JUDGE),
        ("TooFew", "judge", JUDGE),
        ("TooMany", "judge", JUDGE),
        ("AsyncClose", "close", CLOSE),
        ("Lacks", "close", CLOSE),
    ],
)
def test_a_method_that_does_not_fit_is_shown_as_it_must_be_written(name, method, text):
    with pytest.raises(ConfigError, match=rf"^reward.verifier: mine:{name}.{method} does not fit Judge; {text}$"):
        imported(f"mine:{name}")


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("NeedsMore", {"size": 1}, r"missing a required argument: 'colour'; its constructor must take size by keyword"),
        (
            "Fits",
            {"a": 1, "b": 2},
            r"got an unexpected keyword argument 'a'; its constructor must take a, b by keyword",
        ),
        ("NeedsMore", {}, r"missing a required argument: 'size'; its constructor must need no arguments"),
    ],
)
def test_a_constructor_that_takes_other_arguments_is_refused(name, arguments, text):
    with pytest.raises(ConfigError, match=rf"^reward.verifier: mine:{name}: {text}; fix: correct the class or reward"):
        imported(f"mine:{name}", arguments)


def test_a_constructor_that_raises_is_an_error_of_the_part_that_wanted_it():
    with pytest.raises(RewardError) as error:
        make_own("reward.verifier", "mine:Fits", Fits, {"size": -1}, options="reward.options", error=RewardError)
    assert str(error.value) == (
        "reward.verifier: mine:Fits cannot be made (ValueError: size must be positive); fix: correct the class or "
        "reward.options"
    )
    assert isinstance(error.value.__cause__, ValueError)
