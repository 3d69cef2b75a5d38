"""Write docs/configuration.md from the sections of megatron_daro.config and the fields of Slurm's cluster file; with
--check, say whether it is up to date.

Run by people after a change of the sections, and by a test. Every word of the lists comes from the field docstrings,
annotations and defaults, and from those of the constructors of algorithms.

    python tools/config_reference.py [--check]
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Literal, get_origin

from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the sections of this checkout, whichever one is installed

from megatron_daro.algo.algorithm import Common  # noqa: E402
from megatron_daro.algo.weighting import ALGORITHMS, WITH_CRITIC  # noqa: E402
from megatron_daro.config import Config  # noqa: E402
from megatron_daro.config.base import Section  # noqa: E402
from megatron_daro.config.loading import ITEM, choices, field_allowed, is_section, section_of, strip  # noqa: E402
from megatron_daro.options import Option, allowed, options_of  # noqa: E402
from megatron_daro.reward.base import OPTIONS  # noqa: E402
from megatron_daro.workshop.slurm.cluster_file import ClusterFile  # noqa: E402

TARGET = ROOT / "docs" / "configuration.md"

HEAD = """\
# Configuration

<!-- Written by tools/config_reference.py from megatron_daro/config. Change the docstrings there, then run it again. -->

One YAML file with the sections below; only `model.path` and `data.train` are required. Each entry is `option` (default;
allowed values): meaning. Ranges include both ends; a default shows the type.

* Options on the command line replace those of the file: `megatron-daro train run.yaml trainer.steps=5
  data.train=[a.jsonl,b.jsonl]`. Values are read as YAML; a mapping is merged key by key; `data.eval.0.path=x` reaches
  into a list. Text that YAML would read otherwise needs quotes inside quotes: `'data.template="Q: {prompt}"'`.
* `megatron-daro train run.yaml --dry-run` prints the resolved configuration and runs every check of a start.
* All wrong values and unknown keys are reported at once (exit code 2). Many an option that nothing reads as the
  others are set (`lora.alpha` without `lora.rank`) is refused, or a warning.
* YAML 1.2 scalars: `1e-6` is a number; `yes`, `no` and dates are text; so are `010`, `0o17` and `0x1F`. Types are not
  converted: `"3"` is text.
* Relative paths start at the working directory; a leading `~` is the home directory. A single value where a list is
  expected is a list of one. Unset options are filled in when the file is resolved.
"""

_SHORTER = (
    (r"true or false", "boolean"),
    (r"\ban? (?=integer|number|path|mapping|list)", ""),
    (r">= (\S+) and <= ", r"\1 to "),
    (r" and <", ", <"),
    (r"< 9223372036854775808", "< 2^63"),
    (r"list of at least 1, each path", "list of paths"),
    (r"list of 2: (number.*), \1$", r"list of 2, each \1"),
    (r"text, not empty", "text"),
    (r"text that matches (\S+)", r"text matching `\1`"),
)
"""What error messages say of a field's range, and how the page says it."""

CLUSTER_FILE = """A file of its own, for `megatron-daro submit --cluster FILE` ([Slurm](cluster.md#slurm)); only
`partition` is required. Example: `examples/slurm/cluster.yaml`."""


def reference() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for name, field in Config.model_fields.items():
        if (section := section_of(field.annotation)) is not None:
            own = BY_NAME[name]() if name in BY_NAME else ()
            if is_section(strip(field.annotation)[0]):
                options = list(_list(f"{name}.", section))
            else:
                options = ["A list; each has the options of `environment`, and:", ""]
                options += _list(f"{name}.{ITEM}.", section, only=section.__annotations__)
            parts.append("\n".join([f"## {name}", "", *options, *own]))
    parts.append("\n".join(["## The cluster file", "", CLUSTER_FILE, "", *_list("", ClusterFile)]))
    return "\n\n".join([part.rstrip("\n") for part in parts]) + "\n"


def _list(prefix: str, section: type[Section], only: Collection[str] = ()) -> Iterator[str]:
    """Yield the section's own options, then for each of its sections a line that names it, and its options."""
    for name, field in section.model_fields.items():
        if not is_section(strip(field.annotation)[0]) and (not only or name in only):
            description = " ".join((field.description or "").split())
            yield f"* `{prefix}{name}` ({'; '.join(filter(None, [_default(field), _allowed(field)]))}): {description}"
    for name, field in section.model_fields.items():
        if (inner := section_of(field.annotation)) is not None:
            path = f"{prefix}{name}" if is_section(strip(field.annotation)[0]) else f"{prefix}{name}.{ITEM}"
            yield from ("", f"**{path.replace('*', chr(92) + '*')}**: {' '.join((inner.__doc__ or '').split())}", "")
            yield from _list(f"{path}.", inner)


def _options_of_algorithms() -> Iterator[str]:
    """Yield what `algorithm.options` may hold, by `algorithm.name`; names with the same options share a list."""
    with_options = {
        name: found
        for name, own in {**ALGORITHMS, **WITH_CRITIC}.items()
        if (found := options_of(own, without=Common.__annotations__))
    }
    for _, same in groupby(with_options, key=lambda name: list(with_options[name].values())):
        names = list(same)
        yield from ("", f"**algorithm.options** with name {' or '.join(names)}:", "")
        yield from _constructor("algorithm.options", with_options[names[0]])


def _options_of_verifiers() -> Iterator[str]:
    """Yield what `reward.options` may hold, by the verifiers that take it."""
    known = {name: option for options in OPTIONS.values() for name, option in options.items()}
    takers = {name: " or ".join(verifier for verifier in OPTIONS if name in OPTIONS[verifier]) for name in known}
    for verifiers, names in groupby(known, key=takers.__getitem__):
        yield from ("", f"**reward.options** with verifier {verifiers}:", "")
        yield from _constructor("reward.options", {name: known[name] for name in names})


BY_NAME = {"algorithm": _options_of_algorithms, "reward": _options_of_verifiers}
"""Sections whose mapping `options` holds arguments of the class that the section names."""


def _constructor(path: str, options: Mapping[str, Option]) -> Iterator[str]:
    for name, option in options.items():
        kinds = allowed(option.annotation).removeprefix("one of ") if get_origin(option.annotation) is Literal else ""
        value = "; ".join(filter(None, [f"`{json.dumps(option.default)}`", kinds]))
        yield f"* `{path}.{name}` ({value}): {option.meaning[:1].upper()}{option.meaning[1:]}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return f"`{json.dumps(field.default, default=str)}`"


def _allowed(field: FieldInfo) -> str:
    """Return what a field allows, shorter than in error messages: the default shows the type, and whether null is."""
    if section_of(field.annotation) is not None:
        return "list of the mappings below"
    names = choices(field.annotation, field.metadata)
    if names and all(f"{name}:" in (field.description or "") for name in names):
        return ""
    text = field_allowed(field).removesuffix(", or null").removeprefix("one of ")
    for pattern, short in _SHORTER:
        text = re.sub(pattern, short, text)
    if field.default is None or field.is_required():
        return text
    return re.sub(r"^(boolean|mapping|text$|list, each text$|integer ?|number ?)", "", text)


def main(arguments: list[str]) -> int:
    """Write the page, or compare it with the file."""
    text = reference()
    if "--check" in arguments:
        if TARGET.exists() and TARGET.read_text(encoding="utf-8") == text:
            return 0
        print(f"{TARGET} is out of date; run: python tools/config_reference.py", file=sys.stderr)
        return 1
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
