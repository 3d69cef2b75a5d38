"""Packages that a host imports and that these tests do not use: found, and empty."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterable
from typing import Any
from unittest.mock import MagicMock


class _Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Iterable[str]) -> None:
        self.names = set(names)

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Only those of the names, and after everybody else."""
        found = name.split(".")[0] in self.names
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec: Any) -> Any:
        """Every attribute is there."""
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        return module

    def exec_module(self, module: Any) -> None:
        """Nothing."""


def stand_in_for(names: Iterable[str]) -> None:
    """Let packages of these names be imported where they are not installed."""
    sys.meta_path.append(_Empty(names))
