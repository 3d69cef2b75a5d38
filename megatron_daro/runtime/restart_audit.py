"""What a restart changed: the run as it is now against the one that its checkpoint was made with.

Place in the data flow: `made_with` describes a run (configuration, model, data, packages, machine); each checkpoint
holds that description. On --resume `audit` compares the two before any process starts. Each difference is named and
either takes effect or is refused; config/restart.py says which. It starts nothing and changes no file but
RUN/restarts.txt.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_daro.config import Config, detect
from megatron_daro.config.problems import show
from megatron_daro.config.restart import CLASS_OF, ChangeClass, why_refused
from megatron_daro.errors import CheckpointError, DataError

FILE_NAME = "restarts.txt"
_PACKAGES = ("megatron-daro", "torch", "megatron-core", "transformers", "tokenizers", "numpy", "ray", "math-verify")
# What the checkpoint's tokens and weights belong to, and what only says how answers end and how a chat is written.
_BOUND = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
_FREE = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja")
_NOTES = ("transformers_version", "_name_or_path", "use_cache")  # keys of config.json that no computation reads
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 20
_WIDEST_VALUE = 48
_ABSENT = "(absent)"
_UNKNOWN: Any = object()
_EFFECT = {"runs": "in effect", "trains": "in effect: trains differently from here"}


@dataclass(frozen=True, slots=True)
class Change:
    """One difference. was, now: as shown. kind: its class; why: for a refused one."""

    name: str
    was: str
    now: str
    kind: ChangeClass
    why: str = ""


@dataclass(frozen=True, slots=True)
class Audit:
    """What differs between a checkpoint and the run that goes on from it; kept: how many values are equal."""

    checkpoint: Path
    changes: tuple[Change, ...]
    kept: int

    @property
    def refused(self) -> tuple[Change, ...]:
        """The differences that forbid to go on."""
        return tuple(change for change in self.changes if change.kind == "refused")

    def text(self, width: int = 160) -> str:
        """Return the table: kept, changed and in effect, changed and refused."""
        head = f"restart from {self.checkpoint}: {self.kept} values kept, "
        head += f"{len(self.changes) - len(self.refused)} changed and in effect, {len(self.refused)} refused"
        return "\n".join([head, *(_table(self.changes, width) if self.changes else ())])

    def raise_refused(self) -> None:
        """Raise CheckpointError with every refused difference."""
        if self.refused:
            wrong = "; ".join(f"{c.name} was {c.was}, is {c.now} ({c.why})" for c in self.refused)
            raise CheckpointError(
                f"{self.checkpoint}: belongs to another run: {wrong}. Set these back, or start in a new run_dir"
            )


def made_with(config: Config) -> dict[str, Any]:
    """Return what a run is made of, as plain values fit for JSON.

    Reads the model's small files and the data files whole, and samples of the weights.

    Raises:
        DataError: a file cannot be read.
    """
    path = config.model.path
    packages = {name: _version(name) for name in _PACKAGES}
    return {
        "config": config.model_dump(mode="json"),
        "model": _read_object(path / "config.json"),
        "bound_files": tokenizer_files(path) | weight_files(path),
        "free_files": {name: digest(path / name) for name in _FREE if (path / name).is_file()},
        "train_files": [digest(file) for file in config.data.train],
        "eval_files": {one.name: digest(one.path) for one in config.data.eval},
        "packages": packages | {"python": platform.python_version()},
        "machine": _machine(),
    }


def tokenizer_files(path: Path) -> dict[str, str]:
    """Return the digests of the files that say which text a token is. Raises DataError."""
    return {name: digest(path / name) for name in _BOUND if (path / name).is_file()}


def weight_files(path: Path) -> dict[str, str]:
    """Return digests of samples of the weights."""
    return {file.name: _sampled_digest(file) for file in sorted(path.glob("*.safetensors"))}


def _machine() -> dict[str, Any]:
    """Return what the driver's machine has."""
    found = detect()
    return {name: getattr(found, name) for name in ("kind", "count", "fp8", "memory_bytes")}


def audit(checkpoint: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> Audit:
    """Compare two descriptions of `made_with`.

    Args:
        checkpoint: whose description `saved` is. saved, now: the descriptions.
    """
    pairs = [*_options(saved["config"], now["config"]), *_surroundings(saved, now)]
    changes = [change for change in pairs if change.was != change.now]
    order = {"refused": 0, "trains": 1, "runs": 2}
    changes.sort(key=lambda change: (order[change.kind], change.name))
    return Audit(checkpoint, tuple(changes), kept=len(pairs) - len(changes))


def record(run_dir: Path, text: str) -> None:
    """Append an audit's table to RUN/restarts.txt, with the time."""
    with (run_dir / FILE_NAME).open("a", encoding="utf-8") as file:
        file.write(f"{datetime.now().astimezone().isoformat(timespec='seconds')}  {text}\n\n")


def _options(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    """Every field of the configuration but those that name files; evaluation sets by their names."""
    for path, kind in CLASS_OF.items():
        if kind == "content" or path.startswith("data.eval.") or _at(saved, path) is _UNKNOWN:
            continue  # a checkpoint of an earlier version lacks the options that came later
        why = why_refused(path) if kind == "refused" else ""
        yield Change(path, _shown(_at(saved, path)), _shown(_at(now, path)), kind, why)
    sets = [{one["name"]: one for one in config["data"]["eval"]} for config in (saved, now)]
    for name in sorted({*sets[0], *sets[1]}):
        fields = [path.rpartition(".")[2] for path in CLASS_OF if path.startswith("data.eval.*.")]
        for field in fields:
            was, is_ = (_shown(one[name].get(field)) if name in one else _ABSENT for one in sets)
            if field not in ("path", "name") or _ABSENT in (was, is_):
                yield Change(f"data.eval.{name}.{field}", was, is_, "trains")


def _surroundings(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    """Model, files, packages and machine."""
    bound = "the checkpoint's weights and tokens belong to it"
    for key, was, is_ in _both(saved["model"], now["model"]):
        free = key in _NOTES
        yield Change(f"model config.json {key}", was, is_, "runs" if free else "refused", "" if free else bound)
    for key, was, is_ in _both(saved["bound_files"], now["bound_files"]):
        yield Change(f"model file {key}", was, is_, "refused", bound)
    for key, was, is_ in _both(saved["free_files"], now["free_files"]):
        yield Change(f"model file {key}", was, is_, "trains")
    yield Change(
        "data.train content",
        _shown(saved["train_files"]),
        _shown(now["train_files"]),
        "refused",
        "the prompts would be others",
    )
    for key, was, is_ in _both(saved["eval_files"], now["eval_files"]):
        yield Change(f"data.eval.{key} content", was, is_, "trains")
    for part in ("packages", "machine"):
        for key, was, is_ in _both(saved[part], now[part]):
            yield Change(f"{part} {key}", was, is_, "runs")


def _both(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for key in sorted({*saved, *now}):
        was, is_ = (_shown(one[key]) if key in one else _ABSENT for one in (saved, now))
        yield key, was, is_


def _at(values: object, path: str) -> object:
    for name in path.split("."):
        values = values.get(name, _UNKNOWN) if isinstance(values, Mapping) else _UNKNOWN
    return values


def _shown(value: object) -> str:
    """Return a value as text that differs when the value does: what is cut ends in a digest of the whole."""
    text = json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else show(value)
    if len(text) <= _WIDEST_VALUE:
        return text
    return f"{text[: _WIDEST_VALUE - 12]}... #{hashlib.sha256(repr(value).encode()).hexdigest()[:6]}"


def _table(changes: tuple[Change, ...], width: int) -> Iterator[str]:
    table = Table("what", "was", "is now", "effect", box=box.SIMPLE, pad_edge=False)
    for change in changes:
        effect = _EFFECT.get(change.kind) or f"REFUSED: {change.why}"
        table.add_row(*(Text(text, overflow="fold") for text in (change.name, change.was, change.now, effect)))
    text = io.StringIO()
    Console(file=text, width=width, color_system=None).print(table)
    return (line.rstrip() for line in text.getvalue().splitlines() if line.strip())


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return _ABSENT


def _read_object(file: Path) -> object:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read: {error}; copy or download the complete model again") from error


def digest(file: Path) -> str:
    """Return the start of a file's SHA-256. Raises DataError."""
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()[:16]
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}; check the path and its permissions") from error


def _sampled_digest(file: Path) -> str:
    """Of size, header and 16 MiB spread over the file: weights of many gigabytes are told apart within a second."""
    digest = hashlib.sha256()
    size = file.stat().st_size
    digest.update(str(size).encode())
    with file.open("rb") as opened:
        for index in range(_SAMPLES):
            opened.seek(max(0, size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
            digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
