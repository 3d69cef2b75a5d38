"""Classes of a user's own, named `module:Class` in the configuration: imported, compared with their Protocol, made.

Used wherever a field takes one (`engine.kind`, `reward.verifier`, `environment.kind`), before any process is started.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from megatron_daro.errors import ConfigError, DaroError

_Own = TypeVar("_Own")


def import_own_class(
    field: str,
    name: str,
    *,
    builtin: str,
    protocol: type,
    methods: Mapping[str, int],
    arguments: Mapping[str, Any],
    options: str,
) -> type[Any]:
    """Import a class and compare its signatures with those of its Protocol; make nothing.

    Args:
        field: of the configuration, for messages. name: module:Class. builtin: the other names that the field takes.
        protocol: what it must offer. methods: method -> number of positional arguments, `self` aside; a method must be
            a coroutine exactly if it is one in the Protocol.
        arguments: keyword arguments of its constructor. options: the field that holds the user's part of them.

    Raises:
        ConfigError: it cannot be imported, is no class, lacks a method, or takes other arguments.
    """
    module, _, attribute = name.partition(":")
    try:
        own = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(
            f"{field}: got {name!r}, which cannot be imported ({type(error).__name__}: {error}); allowed are "
            f"{builtin}, or module:Class of your own; fix: put the folder of the module into PYTHONPATH"
        ) from error
    if not isinstance(own, type):
        raise ConfigError(
            f"{field}: got {name!r}, which is no class; allowed are {builtin}, or a class that offers "
            f"{protocol.__name__}; fix: name one"
        )
    for method, count in methods.items():
        function, declared = getattr(own, method, None), getattr(protocol, method)
        asynchronous = inspect.iscoroutinefunction(declared)
        if inspect.iscoroutinefunction(function) != asynchronous or not _accepts(function, count + 1):
            text = f"{'async ' if asynchronous else ''}def {method}{inspect.signature(declared)}"
            raise ConfigError(f"{field}: {name}.{method} does not fit {protocol.__name__}; write it as `{text}`")
    try:
        inspect.signature(own).bind(**arguments)
    except (TypeError, ValueError) as error:
        taken = f"must take {', '.join(arguments)} by keyword" if arguments else "must need no arguments"
        raise ConfigError(
            f"{field}: {name}: {error}; its constructor {taken}; fix: correct the class or {options}"
        ) from None
    return own


def make_own(
    field: str, name: str, own: type[_Own], arguments: Mapping[str, Any], *, options: str, error: type[DaroError]
) -> _Own:
    """Make the object of a class that `import_own_class` found.

    Args:
        field, name, options: see `import_own_class`. error: raised if the constructor raises.
    """
    try:
        return own(**arguments)
    except Exception as raised:  # a user's constructor may raise anything
        raise error(
            f"{field}: {name} cannot be made ({type(raised).__name__}: {raised}); fix: correct the class or {options}"
        ) from raised


def _accepts(function: Callable[..., Any] | None, count: int) -> bool:
    try:
        assert function is not None
        inspect.signature(function).bind(*range(count))
    except (AssertionError, TypeError, ValueError):
        return False
    return True
