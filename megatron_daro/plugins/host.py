"""What an adapter does with its host at the start: look names up, check that options go with DARO, log one line.

An adapter holds one `Host`. It calls `look_up` before anything else, `check` on the host's parsed options, and
`announce` once DARO is on. Options are allowed by name. An option that the adapter does not know must have its default,
so a new option of the host is refused where it is set, and never ignored.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import logging
import operator
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import megatron_daro
from megatron_daro.config.problems import Problem, config_error, show
from megatron_daro.errors import ConfigError
from megatron_daro.plugins.core import DifficultyStep
from megatron_daro.plugins.options import VARIABLE, PluginSection

logger = logging.getLogger(__name__)

ANY = object()
"""In an allow-list: the option goes with DARO whatever its value."""
_OFF: tuple[object, ...] = (None, False, 0, "", (), [], {})
"""Values that count as off for an option whose default is not known."""


@dataclass(frozen=True)
class Host:
    """A framework that DARO runs inside.

    name: as its users write it. package: as Python imports it. tested: versions that this adapter's tests ran with; an
    unreleased one with its commit, such as "main at 624b824a8".
    """

    name: str
    package: str
    tested: tuple[str, ...]

    @property
    def version(self) -> str:
        """The imported package's `__version__`, else the installed version, else the commit of its checkout."""
        module = sys.modules.get(self.package)
        stated = getattr(module, "__version__", None)
        if stated:
            return str(stated)
        try:
            return importlib.metadata.version(self.package.replace("_", "-"))
        except importlib.metadata.PackageNotFoundError:
            folders = list(getattr(module, "__path__", ()))
            return _commit(folders[0]) if folders else "of unknown version"

    def look_up(self, names: Iterable[str]) -> dict[str, Any]:
        """Import every name that the adapter needs, so that a missing one is found here and not in the first step.

        Args:
            names: each `module` or `module:attribute`; the attribute may have dots.

        Returns:
            {name: module or attribute}.

        Raises:
            ConfigError: lists every missing name, the host's version and the tested versions.
        """
        objects, missing = {}, []
        for name in names:
            module, _, attribute = name.partition(":")
            try:
                imported = importlib.import_module(module)
                objects[name] = operator.attrgetter(attribute)(imported) if attribute else imported
            except (ImportError, AttributeError) as error:
                missing.append(f"{name} ({error})")
        if missing:
            raise ConfigError(
                f"{self.name} {self.version} does not have {', '.join(missing)}, which DARO's adapter needs; it was "
                f"tested with {self.name} {' and '.join(self.tested)}: use one of them, or a megatron-daro for this one"
            )
        return objects

    def problems(
        self,
        given: Mapping[str, object],
        allowed: Mapping[str, object],
        *,
        defaults: Mapping[str, object],
        options: PluginSection,
        prefix: str = "",
    ) -> list[Problem]:
        """Return the host's options that DARO would ignore, or with which another loss than DARO's would be trained.

        Args:
            given: option of the host -> value.
            allowed: option -> ANY, or the tuple of values that go with DARO. Others must have their default.
            defaults: option -> the host's default; an option that is not here must be off (None, False, 0, empty).
            options: its `allow_host_options` names further options that may have any value.
            prefix: in front of the names, as the host's users write them, such as "--" or "actor.".
        """
        problems = []
        for name, value in given.items():
            values = allowed.get(name)
            if values is ANY or (isinstance(values, tuple) and value in values):
                continue
            if values is None and (value == defaults[name] if name in defaults else value in _OFF):
                continue
            if values is None and name in options.allow_host_options:
                continue
            problems.append(_problem(f"{prefix}{name}", name, value, values, defaults))
        return problems

    def check(
        self,
        given: Mapping[str, object],
        allowed: Mapping[str, object],
        *,
        defaults: Mapping[str, object],
        options: PluginSection,
        prefix: str = "",
        further: Sequence[Problem] = (),
    ) -> None:
        """Refuse the host's options that `problems` returns.

        Args:
            further: problems that the adapter found itself; they are reported together with these.

        Raises:
            ConfigError: lists every problem.
        """
        problems = [*further, *self.problems(given, allowed, defaults=defaults, options=options, prefix=prefix)]
        if problems:
            raise self.refusal(problems)

    def refusal(self, problems: Sequence[Problem]) -> ConfigError:
        """Return one error with every problem of the host's options."""
        return config_error(f"options of {self.name} {self.version} that do not go with DARO", problems)

    def announce(self, step: DifficultyStep, options: PluginSection) -> None:
        """Log the one line that says that DARO is on: versions, K, and every option."""
        version = self.version.split("+")[0]
        known = any(version == words.split()[0] or version.startswith(words.split()[-1]) for words in self.tested)
        note = "" if known else f" (tested: {', '.join(self.tested)})"
        words = [f"{name}={value}" for name, value in _flat(options.model_dump())]
        logger.warning(
            "DARO is on: %s %s%s, megatron_daro %s, %d rollouts per prompt, %s",
            *(self.name, self.version, note, megatron_daro.__version__, step.rollouts_per_prompt, " ".join(words)),
        )


def _commit(folder: str) -> str:
    """Return the commit of the checkout that contains a folder, or else words that name the folder."""
    command = ["git", "-C", folder, "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return f"of unknown version in {folder}"


def _problem(field: str, name: str, value: object, values: object, defaults: Mapping[str, object]) -> Problem:
    if isinstance(values, tuple):
        return Problem(field, show(value), " or ".join(map(show, values)), "set it so, or remove it")
    default = f"its default, {show(defaults[name])}" if name in defaults else "off"
    fix = f"remove it, or, where it changes neither loss nor batch, name it in allow_host_options of {VARIABLE}"
    return Problem(field, show(value), f"{default}: DARO does not know this option", fix)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, object]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def fields_of(config: object) -> tuple[dict[str, object], dict[str, object]]:
    """Return the values and the defaults of a host's dataclass of options; a plain namespace has no defaults."""
    values: dict[str, object] = {}
    defaults: dict[str, object] = {}
    if not dataclasses.is_dataclass(config):
        return dict(vars(config)), defaults
    for field in dataclasses.fields(config):
        values[field.name] = getattr(config, field.name)
        if field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
    return values, defaults
