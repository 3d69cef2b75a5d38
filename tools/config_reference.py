"""Write docs/configuration.md from the sections of megatron_daro.config and the fields of Slurm's cluster file; with
--check, say whether it is up to date.

Place in the data flow: none; run by people after a change of the sections, and by a test. Every word of the tables
comes from the field docstrings, annotations and defaults.

    python tools/config_reference.py [--check]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic.fields import FieldInfo

from megatron_daro.config import Config
from megatron_daro.config.base import Section
from megatron_daro.config.loading import ITEM, field_allowed, is_section, section_of, strip
from megatron_daro.workshop.slurm.cluster_file import ClusterFile

TARGET = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

HEAD = """\
# Configuration

<!-- Written by tools/config_reference.py from megatron_daro/config. Change the docstrings there, then run it again. -->

One YAML file with the sections below; only `model.path` and `data.train` are required.

    model:
      path: models/base
    data:
      train: [train.jsonl]
    rollout:
      rollouts_per_prompt: 8

* Options on the command line replace those of the file: `megatron-daro train run.yaml trainer.steps=5
  data.train=[a.jsonl,b.jsonl]`. The value is read as YAML. A mapping is merged key by key, anything else replaces;
  `data.eval.0.path=x` reaches into a list; of two equal keys the last wins. Text that YAML would read otherwise
  needs quotes inside quotes: `'data.template="Q: {prompt}"'`.
* `megatron-daro train run.yaml --dry-run` prints the resolved configuration and the checks, then does what a start does
  before its first process: it looks at the run directory and the servers' interpreter, reads the tokenizer, the
  evaluation sets and both ends of the training files, and ends with the error that the start would end with. It
  starts and writes nothing. The configuration is written to `config.yaml` in the run directory, and gives the same
  configuration when it is read again.
* Every wrong value is reported at once (exit code 2), each with the field, what was got, what is allowed and how to
  fix it. Unknown keys are errors that name the nearest key. A key given twice is an error.
* YAML is read by PyYAML's safe loader with the scalar rules of YAML 1.2: `1e-6` is a number; `yes`, `no`, `010` and
  dates are text. Types are not converted: `"3"` is text, not a number.
* Relative paths start at the working directory; a leading `~` is the home directory.
* One value where a list is due is a list of one: `train: a.jsonl` is `train: [a.jsonl]`.
* Options left `null` that depend on others (`trainer.run_dir`, `engine.seed`, ...) are filled in when the file is
  resolved.
"""

CLUSTER_FILE = """A file of its own, for `megatron-daro submit --cluster FILE` ([Slurm](cluster.md#slurm)); only
`partition` is required. Example: `examples/slurm/cluster.yaml`."""


def reference() -> str:
    """The whole page."""
    parts = [HEAD]
    for path, section in _sections(Config, ""):
        title = f"## {path}" if "." not in path else f"### {path}"
        parts.append("\n".join([title, "", (section.__doc__ or "").strip(), "", *_table(f"{path}.", section)]) + "\n")
    rows = list(_table("", ClusterFile))
    for path, section in _sections(ClusterFile, ""):
        rows += list(_table(f"{path}.", section))[2:]
    parts.append("\n".join(["## The cluster file", "", CLUSTER_FILE, "", *rows]) + "\n")
    return "\n".join(parts)


def _sections(section: type[Section], prefix: str) -> Iterator[tuple[str, type[Section]]]:
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is None:
            continue
        path = f"{prefix}{name}" if is_section(strip(field.annotation)[0]) else f"{prefix}{name}.{ITEM}"
        yield path, inner
        yield from _sections(inner, f"{path}.")


def _table(prefix: str, section: type[Section]) -> Iterator[str]:
    yield "| option | default | allowed | meaning |"
    yield "|---|---|---|---|"
    for name, field in section.model_fields.items():
        if is_section(strip(field.annotation)[0]):
            continue
        cells = [
            f"`{prefix}{name}`",
            _default(field),
            field_allowed(field),
            " ".join((field.description or "").split()),
        ]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return f"`{json.dumps(field.default, default=str)}`"


def main(arguments: list[str]) -> int:
    """Write the page, or compare it."""
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
