"""A choice put into a recipe: the options are set in the YAML file, whose comments and order stay.

Options of a choice -> recipe file, whole or not at all.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

from ruamel.yaml import YAML

from megatron_daro.errors import ConfigError


def write_options(recipe: Path, options: Mapping[str, object]) -> None:
    """Set dotted options in a YAML file; sections that are missing are added at its end.

    Raises:
        ConfigError: a section of an option is no mapping in the file.
    """
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 4096
    yaml.indent(mapping=2, sequence=4, offset=2)
    tree = yaml.load(recipe.read_text(encoding="utf-8"))
    for path, value in options.items():
        *sections, leaf = path.split(".")
        place = tree
        for name in sections:
            if place.get(name) is None:
                place[name] = {}
            place = place[name]
            if not isinstance(place, dict):
                raise ConfigError(
                    f"{recipe}: got {name}: {place!r}; allowed: options below {name}; fix: {path}={value}"
                )
        place[leaf] = value
    text = io.StringIO()
    yaml.dump(tree, text)
    beside = recipe.with_name(recipe.name + ".new")
    beside.write_text(text.getvalue(), encoding="utf-8")
    beside.replace(recipe)
