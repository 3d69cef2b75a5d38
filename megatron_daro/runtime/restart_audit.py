"""What a restart changed: the run as it is now against the one that its checkpoint was made with.

`provenance` describes a run (configuration, model, data, packages, machine), and each checkpoint holds that
description. On --resume `audit` compares the two before any process starts; each difference is named and either takes
effect or is rejected. Every field of the configuration has a class here that says which; a field without one makes a
test red, because an option that is applied, ignored or rejected by accident is what the audit exists to prevent.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_daro.config import Config, detect
from megatron_daro.config.problems import show
from megatron_daro.errors import CheckpointError, DataError

ChangeClass = Literal["runs", "trains", "refused", "content"]

_RUNS = """
model.trust_remote_code
rollout.finish_batch
actor.tensor_parallel actor.pipeline_parallel actor.virtual_pipeline_parallel actor.context_parallel actor.data_parallel
actor.sequence_parallel
actor.expert_parallel actor.expert_tensor_parallel
actor.recompute actor.micro_batch_tokens actor.logprob_chunk_tokens actor.logprob_chunk_vocab actor.logprob_kernel
engine.kind engine.options engine.replicas engine.colocate engine.embedded.batch_size engine.embedded.threads
engine.embedded.max_restarts engine.embedded.hung_s
engine.sglang.python engine.sglang.urls engine.sglang.arguments engine.sglang.env engine.sglang.tensor_parallel
engine.sglang.nodes engine.sglang.fp8_blocks
engine.sglang.sync engine.sglang.shards_over engine.sglang.sync_dir engine.sglang.bucket_mib engine.sglang.verify
engine.sglang.max_tokens_in_flight engine.sglang.start_timeout_s engine.sglang.request_timeout_s
engine.sglang.answer_workers engine.sglang.stall_timeout_s engine.sglang.sync_timeout_s engine.sglang.max_restarts
algorithm.critic.offload algorithm.distill.timeout_s reward.workers environment.workers
trainer.run_dir trainer.save_every_steps trainer.keep_checkpoints trainer.keep_every_steps trainer.eval_every_steps
trainer.deadline_scale trainer.export_hf trainer.export_critic
trainer.replace_lost_ranks trainer.snapshot_gib trainer.max_replacements trainer.hung_rank_s
cluster.nodes cluster.gpus_per_node cluster.gpu
observe.progress observe.tensorboard observe.save_rollouts
observe.wandb.enabled observe.wandb.project observe.wandb.name
"""
# Where and how the run computes: in effect at once, the training stays the same but for rounding and order.

_TRAINS = """
data.eval.*.name data.eval.*.format data.eval.*.problem_field data.eval.*.answer_field
data.eval.*.rollouts_per_prompt data.eval.*.temperature data.eval.*.max_prompts
data.eval.*.drop_unusable data.eval.*.top_p data.eval.*.template data.eval.*.rows
rollout.temperature rollout.top_p rollout.max_response_tokens rollout.stop rollout.stop_token_ids rollout.max_staleness
rollout.oversampling rollout.max_refill_rounds rollout.keep_surplus
rollout.segment_tokens rollout.repetition.tokens rollout.repetition.period algorithm.repetition_penalty
algorithm.options algorithm.std algorithm.filter algorithm.clip_low algorithm.clip_high algorithm.dual_clip
algorithm.entropy_coefficient
algorithm.old_logprobs algorithm.kl.coefficient algorithm.kl.estimator
algorithm.kimi.tau algorithm.kimi.reset_optimizer algorithm.length_reward.weight algorithm.length_reward.start_step
algorithm.length_reward.fade_steps algorithm.dapo.denominator
algorithm.kl.place algorithm.kl.mean algorithm.dgpo.deviation algorithm.ha_dw.every
algorithm.correction.kind algorithm.correction.level algorithm.correction.cap algorithm.correction.low
algorithm.correction.high algorithm.overlong.kind algorithm.overlong.max_tokens algorithm.overlong.cache_tokens
algorithm.daro.learning_rate algorithm.daro.betas algorithm.daro.magnitude algorithm.daro.normalizer
algorithm.daro.scale algorithm.daro.clamp
algorithm.dgpo.temperature algorithm.f_grpo.gamma algorithm.ha_dw.rate algorithm.ha_dw.scale algorithm.ha_dw.window
algorithm.mgpo.strength
algorithm.mgpo.target algorithm.ppo.gamma algorithm.ppo.gae_lambda algorithm.ppo.critic_lambda
algorithm.ppo.length_factor algorithm.ppo.bootstrap_truncated algorithm.ppo.whiten
algorithm.critic.learning_rate algorithm.critic.warmup_steps algorithm.critic.grad_clip algorithm.critic.value_clip
algorithm.critic.pretrain_steps algorithm.distill.urls algorithm.distill.coefficient algorithm.distill.reward_weight
algorithm.turn_rewards
algorithm.sapo.negative algorithm.sapo.positive algorithm.trust_region
actor.optimizer.learning_rate actor.optimizer.weight_decay actor.optimizer.betas actor.optimizer.eps
actor.optimizer.grad_clip actor.optimizer.warmup_steps actor.optimizer.schedule
actor.optimizer.min_learning_rate_ratio
actor.routing_replay actor.megatron
actor.fp8_recipe actor.fp8_format actor.num_layers_at_start_in_bf16 actor.num_layers_at_end_in_bf16
engine.seed engine.sglang.pause
reward.verifier reward.timeout_s reward.memory_mib reward.strict reward.marker reward.correct_reward
reward.incorrect_reward reward.refuse_restated reward.after_thinking reward.options
environment.kind environment.options environment.timeout_s environment.step_timeout_s environment.memory_mib
environment.max_turns environment.max_turn_tokens environment.strict environment.reward_weights
trainer.steps trainer.on_nonfinite
"""
# What is trained or measured: in effect from the resumed step on, so the run is not the one that was begun.

_REFUSED = {
    "model.megatron_weights": "the reference policy starts from it",
    "data.format": "the prompts would be others",
    "data.problem_field": "the prompts would be others",
    "data.template_date": "the prompts would be others",
    "data.answer_field": "the right answers would be others",
    "data.prompt_template": "the prompts would be others",
    "data.template": "the prompts would be others",
    "data.max_prompt_tokens": "the prompts would be others",
    "data.pass_rates": "the prompts would be others",
    "data.prioritised.center": "the order of the prompts would be another",
    "data.prioritised.width": "the order of the prompts would be another",
    "data.shuffle": "the order of the prompts would be another",
    "data.order": "the order of the prompts would be another",
    "data.curriculum.start": "the order of the prompts would be another",
    "data.curriculum.ramp_prompts": "the order of the prompts would be another",
    "data.prioritised.by": "the order of the prompts would be another",
    "data.prioritised.exponent": "the order of the prompts would be another",
    "data.prioritised.floor": "the order of the prompts would be another",
    "data.prioritised.memory": "the order of the prompts would be another",
    "rollout.rollouts_per_prompt": "DARO's weights belong to K",
    "rollout.prompts_per_step": "groups that wait in the checkpoint belong to batches of that size",
    "algorithm.name": "the checkpoint holds the state of that algorithm, and a critic or none; export the weights and "
    "start a new run from them to change it",
    "algorithm.critic.path": "the saved critic began as that model",
    "algorithm.daro.parameter": "the saved weights are in that unit",
    "algorithm.daro.half_life": "the saved weights are averages with it, and Adam's without",
    "actor.precision": "the saved weights and optimizer state belong to that precision",
    "actor.optimizer.distributed": "the saved optimizer state is laid out for it",
    "trainer.seed": "order of prompts and sampling come from it",
    "trainer.updates_per_batch": "the checkpoint counts batches of that many steps",
    "trainer.epochs_per_batch": "the checkpoint counts batches of that many steps",
}
"""Fields that a checkpoint is bound to, each with the reason."""

_CONTENT = ("model.path", "data.train", "data.eval.*.path")
# Files: a path may be another one; what the files hold is compared (and belongs to the classes of restart_audit.py).

CLASS_OF: dict[str, ChangeClass] = {
    **dict.fromkeys(_RUNS.split(), "runs"),
    **dict.fromkeys(_TRAINS.split(), "trains"),
    **dict.fromkeys(_REFUSED, "refused"),
    **dict.fromkeys(_CONTENT, "content"),
}
"""The class of each field, by dotted path (`*` for a position in a list)."""


FILE_NAME = "restarts.txt"
_PACKAGES = ("megatron-daro", "torch", "megatron-core", "transformers", "tokenizers", "numpy", "ray", "math-verify")
# What the checkpoint's tokens and weights belong to, and what only says how answers end and how a chat is written.
_BOUND = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
_FREE = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja")
_NOTES = ("transformers_version", "_name_or_path", "use_cache")  # keys of config.json that no computation reads
_BELONGS = "the checkpoint's weights and tokens belong to it"
_RULES: tuple[tuple[str, ChangeClass, str], ...] = (
    *((f"model config.json {key}", "runs", "") for key in _NOTES),
    *((f"model file {name}", "trains", "") for name in _FREE),
    ("model config.json *", "refused", _BELONGS),
    ("model file *", "refused", _BELONGS),
    ("data.train content", "refused", "the prompts would be others"),
    ("data.eval.*", "trains", ""),
    ("packages *", "runs", ""),
    ("machine *", "runs", ""),
)
"""Class of what is no single option, and why where it is refused: the first that fits counts."""

_SAMPLES, _SAMPLE_BYTES = 16, 1 << 20
_WIDEST_VALUE = 48
_ABSENT = "(absent)"
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


def provenance(config: Config) -> dict[str, Any]:
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
    hardware = detect()
    return {name: getattr(hardware, name) for name in ("kind", "count", "fp8", "memory_bytes")}


def audit(checkpoint: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> Audit:
    """Compare two descriptions of `provenance`.

    Args:
        checkpoint: whose description `saved` is. saved, now: the descriptions.
    """
    was, is_now = _values(saved), _values(now)
    # A set that both have may lie elsewhere: what its file holds is compared.
    names = [name for name in {*was, *is_now} if not (name in was and name in is_now and _only_names_a_set(name))]
    changes = [
        Change(name, was.get(name, _ABSENT), is_now.get(name, _ABSENT), *_class_and_reason(name))
        for name in names
        if was.get(name, _ABSENT) != is_now.get(name, _ABSENT)
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
    values = {
        path: _at(config, path)
        for path, kind in CLASS_OF.items()
        if kind != "content" and not path.startswith("data.eval.")
    }
    for one in config["data"]["eval"]:
        fields = [path.rpartition(".")[2] for path in CLASS_OF if path.startswith("data.eval.*.")]
        values |= {f"data.eval.{one['name']}.{field}": _shown(one.get(field)) for field in fields}
    values["data.train content"] = _shown(description["train_files"])
    values |= {f"data.eval.{name} content": _shown(digest) for name, digest in description["eval_files"].items()}
    parts = {"model": "model config.json", "bound_files": "model file", "free_files": "model file"}
    for part, what in (parts | {"packages": "packages", "machine": "machine"}).items():
        values |= {f"{what} {key}": _shown(value) for key, value in description[part].items()}
    return values


def _only_names_a_set(name: str) -> bool:
    return name.startswith("data.eval.") and name.endswith((".path", ".name"))


def _class_and_reason(name: str) -> tuple[ChangeClass, str]:
    if name in CLASS_OF:
        return CLASS_OF[name], _REFUSED.get(name, "")
    return next((kind, why) for start, kind, why in _RULES if fnmatchcase(name, start))


def _at(values: object, path: str) -> str:
    """Return what stands at a path, as text."""
    for name in path.split("."):
        if not isinstance(values, Mapping) or name not in values:
            return _ABSENT
        values = values[name]
    return _shown(values)


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
