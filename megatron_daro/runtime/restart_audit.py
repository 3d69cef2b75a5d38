"""What a restart changed: compares the run as it is now with the run that wrote its checkpoint.

On --resume `audit` compares the two descriptions (runtime/provenance.py) before any process starts; each difference is
named, and either takes effect or is refused. One table says which. An option without a row fails the import, so that
none is applied, ignored or refused by accident.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_daro.config import Config
from megatron_daro.config.loading import ITEM, section_of, walk
from megatron_daro.config.problems import show
from megatron_daro.errors import CheckpointError
from megatron_daro.runtime.provenance import ABSENT, FREE_FILES

FILE_NAME = "restarts.txt"
_WIDEST_VALUE = 48

ChangeClass = Literal["runs", "trains", "refused", "content"]
"""runs: where and how the run computes; training stays the same except for rounding and order. trains: what is trained
or measured; changes it from the resumed step on. refused: the checkpoint depends on it. content: a file, which may have
moved; its content is compared."""

_NO_COMPUTATION_READS = ("transformers_version", "_name_or_path", "use_cache")
_PROMPTS, _ORDER = "the prompts would be others", "the order of the prompts would be another"
_REPLAY = "--replay RUN content"
_STEPS = "the checkpoint counts batches of that many steps"
_ALGORITHM = (
    "the checkpoint holds the state of that algorithm, and a critic or none; export the weights and start a new run "
    "from them to change it"
)
_TURNS = "environment environments.*"
_MAY_CHANGE: tuple[tuple[str, str, ChangeClass, str], ...] = (
    ("model", "path", "content", ""),
    ("model", "trust_remote_code", "runs", ""),
    ("model", "megatron_weights", "refused", "the reference policy starts from it"),
    ("data", "train", "content", ""),
    ("data", "eval.*", "trains", ""),
    ("data", "shuffle order curriculum.* prioritised.*", "refused", _ORDER),
    ("data", "answer_field", "refused", "the right answers would be others"),
    ("data", "*", "refused", _PROMPTS),
    ("rollout", "rollouts_per_prompt", "refused", "groups that wait, and DARO's weights, belong to K"),
    ("rollout", "prompts_per_batch", "refused", "groups that wait in the checkpoint belong to batches of that size"),
    ("rollout", "*", "trains", ""),
    ("algorithm", "name", "refused", _ALGORITHM),
    ("algorithm", "options std filter trust_region clip_low clip_high dual_clip entropy_coefficient", "trains", ""),
    ("algorithm", "old_logprobs repetition_penalty turn_rewards", "trains", ""),
    ("algorithm.sapo", "positive negative", "trains", ""),
    ("algorithm.kl", "coefficient estimator place mean", "trains", ""),
    ("algorithm.correction", "kind level cap low high", "trains", ""),
    ("algorithm.overlong", "kind max_tokens cache_tokens", "trains", ""),
    ("algorithm.length_reward", "weight start_step", "trains", ""),
    ("algorithm.daro", "parameter", "refused", "the saved weights are in that unit"),
    ("algorithm.daro", "weights_by", "refused", "the saved weights are by that"),
    ("algorithm.daro", "half_life", "refused", "the saved weights and averages were made with it"),
    ("algorithm.daro", "learning_rate betas magnitude normalizer scale clamp", "trains", ""),
    ("algorithm.critic", "path", "refused", "the saved critic began as that model"),
    ("algorithm.critic", "learning_rate warmup_steps grad_clip value_clip pretrain_steps", "trains", ""),
    ("algorithm.critic", "offload", "runs", ""),
    ("algorithm.distill", "urls coefficient reward_weight", "trains", ""),
    ("actor", "tensor_parallel pipeline_parallel virtual_pipeline_parallel context_parallel", "runs", ""),
    ("actor", "data_parallel expert_parallel expert_tensor_parallel sequence_parallel", "runs", ""),
    ("actor", "recompute micro_batch_tokens logprob_chunk_tokens logprob_kernel", "runs", ""),
    ("actor", "precision", "refused", "the saved weights and optimizer state belong to that precision"),
    ("actor", "fp8_recipe fp8_format num_layers_at_start_in_bf16 num_layers_at_end_in_bf16", "trains", ""),
    ("actor", "routing_replay megatron", "trains", ""),
    ("actor.optimizer", "distributed", "refused", "the saved optimizer state is laid out for it"),
    ("actor.optimizer", "learning_rate weight_decay betas eps grad_clip warmup_steps", "trains", ""),
    ("actor.optimizer", "schedule min_learning_rate_ratio", "trains", ""),
    ("lora", "*", "refused", "the saved adapters are those"),
    ("engine", "seed", "trains", ""),
    ("engine", "*", "runs", ""),
    (_TURNS, "kind command sandbox options timeout_s step_timeout_s memory_mib", "trains", ""),
    (_TURNS, "max_turns max_turn_tokens reward_weights host strict", "trains", ""),
    (_TURNS, "workers", "runs", ""),
    ("environments.*", "name sources weight", "refused", _ORDER),
    ("reward", "verifier options timeout_s memory_mib correct_reward incorrect_reward", "trains", ""),
    ("reward", "workers", "runs", ""),
    ("trainer", "seed", "refused", "order of prompts and sampling come from it"),
    ("trainer", "minibatches_per_batch epochs_per_batch", "refused", _STEPS),
    ("trainer", "steps on_nonfinite", "trains", ""),
    ("trainer", "run_dir save_every_steps keep_checkpoints keep_every_steps eval_every_steps", "runs", ""),
    ("trainer", "export_hf export_critic export_adapter deadline_scale", "runs", ""),
    ("trainer", "replace_lost_ranks snapshot_gib max_replacements hung_rank_s", "runs", ""),
    ("cluster observe", "*", "runs", ""),
)
"""Sections, options in them, what a change does, and why it is refused. The first row that matches counts. `*` matches
every other option: a section has such a row if any further option would be of that class; otherwise each option is
named."""
_NO_OPTION: tuple[tuple[str, ChangeClass, str], ...] = (
    (_REPLAY, "refused", "a replay goes on with the recording that it began with, any other run without one"),
    *((f"model config.json {key}", "runs", "") for key in _NO_COMPUTATION_READS),
    *((f"model file {name}", "trains", "") for name in FREE_FILES),
    ("model *", "refused", "the checkpoint's weights and tokens belong to it"),
    ("packages *", "runs", ""),
    ("machine *", "runs", ""),
)
_ROWS = (
    *(
        (f"{section}.{name}", kind, why)
        for sections, names, kind, why in _MAY_CHANGE
        for section in sections.split()
        for name in names.split()
    ),
    *_NO_OPTION,
)


def _class_and_reason(name: str) -> tuple[ChangeClass, str]:
    found = next(((kind, why) for pattern, kind, why in _ROWS if fnmatchcase(name, pattern)), None)
    assert found, f"_MAY_CHANGE has no row for {name}: say what it does that a resumed run has another value of it"
    return found


def classes_of(config: type[Config]) -> dict[str, ChangeClass]:
    """Return the class of each option, by dotted path (`*` for a position in a list)."""
    paths = (path for path, field in walk(config) if section_of(field.annotation) is None)
    return {path: _class_and_reason(path)[0] for path in paths}


CLASS_OF = classes_of(Config)
_EFFECT = {"runs": "in effect", "trains": "in effect: trains differently from here"}


@dataclass(frozen=True, slots=True)
class Change:
    """One difference. was, now: the values as shown. kind: its class. why: the reason, if it is refused."""

    name: str
    was: str
    now: str
    kind: ChangeClass
    why: str = ""


@dataclass(frozen=True, slots=True)
class Audit:
    """What differs between a checkpoint and the run that resumes from it. kept: how many values are equal."""

    checkpoint: Path
    changes: tuple[Change, ...]
    kept: int

    @property
    def refused(self) -> tuple[Change, ...]:
        """The differences that rule out a resume."""
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


def audit(checkpoint: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> Audit:
    """Compare two descriptions of `provenance`.

    Args:
        checkpoint: whose description `saved` is. saved, now: the descriptions.
    """
    was, is_now = _values(saved), _values(now)
    # An evaluation set that both have may have moved: only its file's content is compared.
    names = [name for name in {*was, *is_now} if not (name in was and name in is_now and _only_names_a_set(name))]
    changes = [
        Change(name, was.get(name, ABSENT), is_now.get(name, ABSENT), *_class_and_reason(name))
        for name in names
        if was.get(name, ABSENT) != is_now.get(name, ABSENT)
    ]
    order = {"refused": 0, "trains": 1, "runs": 2}
    changes.sort(key=lambda change: (order[change.kind], change.name))
    return Audit(checkpoint, tuple(changes), kept=len(names) - len(changes))


def record(run_dir: Path, text: str) -> None:
    """Append an audit's table to RUN/restarts.txt, with the time."""
    with (run_dir / FILE_NAME).open("a", encoding="utf-8") as file:
        file.write(f"{datetime.now().astimezone().isoformat(timespec='seconds')}  {text}\n\n")


def _values(description: Mapping[str, Any]) -> dict[str, str]:
    """Return everything that is compared, as text, by the name that a person reads."""
    config = description["config"]
    listed = {"data.eval": config["data"]["eval"], "environments": config.get("environments", [])}
    values: dict[str, str] = {}
    for path, kind in CLASS_OF.items():
        section, _, field = path.partition(f".{ITEM}.")
        if field:
            values |= {f"{section}.{one['name']}.{field}": _at(one, field) for one in listed[section]}
        elif kind != "content":
            values[path] = _at(config, path)
    values["data.train content"] = _shown(description["train_files"])
    values |= {f"data.eval.{name} content": _shown(digest) for name, digest in description["eval_files"].items()}
    if recording := description.get("recording"):
        values[_REPLAY] = _shown(recording)
    parts = {"model": "model config.json", "bound_files": "model file", "free_files": "model file"}
    for part, what in (parts | {"packages": "packages", "machine": "machine"}).items():
        values |= {f"{what} {key}": _shown(value) for key, value in description[part].items()}
    return values


def _only_names_a_set(name: str) -> bool:
    return name.startswith("data.eval.") and name.endswith((".path", ".name"))


def _at(values: object, path: str) -> str:
    """Return the value at a dotted path, as text."""
    for name in path.split("."):
        if not isinstance(values, Mapping) or name not in values:
            return ABSENT
        values = values[name]
    return _shown(values)


def _shown(value: object) -> str:
    """Return a value as text that differs when the value does: a text that is cut ends in a digest of the value."""
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
