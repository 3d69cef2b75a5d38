"""Reads what verl, slime or NeMo-RL logged about a run with DARO, for the report.

A host's own metric files -> `RunData` under the names of docs/metrics.md -> the report. Metrics of the host for which
this package has no name keep their own. Refuses a folder that has no such files, has those of several runs, or in which
DARO logged nothing; the message says which option of the host writes what is missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_daro.errors import ConfigError, DataError
from megatron_daro.workshop.report.run_data import RunData, run_of_rows

Rows = dict[int, dict[str, float | None]]


@dataclass(frozen=True)
class Host:
    """How a host names what it logs.

    prefix: in front of this package's metrics. first_step: number of its first optimizer step. names: its name -> ours.
    jsonl: whether it can write JSON lines. how: the options that make it write files. by_rollout: prefixes of metrics
    that are numbered by rollout; a rollout may have several optimizer steps.
    """

    prefix: str
    first_step: int
    how: str
    jsonl: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    by_rollout: tuple[str, ...] = ()


HOSTS = {
    "verl": Host(
        prefix="actor/",
        first_step=1,
        jsonl=True,
        how='trainer.logger=\'["console","file"]\' or \'["console","tensorboard"]\'',
        names={
            "actor/grad_norm": "loss/grad_norm",
            "actor/lr": "optimizer/learning_rate",
            "critic/score/mean": "reward/mean",
            "response_length/mean": "response/length_mean",
            "response_length/clip_ratio": "response/truncated_fraction",
            "timing_s/step": "timing/step_s",
        },
    ),
    "slime": Host(
        prefix="",
        first_step=0,
        how="--use-tensorboard, with --tb-project-name or TENSORBOARD_DIR",
        by_rollout=("rollout/", "perf/", "eval/"),
        names={
            "train/grad_norm": "loss/grad_norm",
            "train/lr-pg_0": "optimizer/learning_rate",
            "rollout/raw_reward": "reward/mean",
            "rollout/response_len/mean": "response/length_mean",
        },
    ),
    "nemo-rl": Host(
        prefix="train/",
        first_step=1,
        how="logger.tensorboard_enabled=true",
        names={
            "train/grad_norm": "loss/grad_norm",
            "train/lr": "optimizer/learning_rate",
            "train/reward": "reward/mean",
            "train/mean_gen_tokens_per_sample": "response/length_mean",
            "validation/accuracy": "eval/validation/accuracy",
        },
    ),
}
"""Names at the commits and versions of docs/plugins.md."""


def load_host_run(directory: Path, name: str) -> RunData:
    """Read a host's metric files.

    Args:
        directory: that holds them, at any depth.
        name: the host.

    Raises:
        ConfigError: no such host.
        DataError: there are no files of the host, or those of several runs; one is damaged; or DARO logged nothing.
    """
    if name not in HOSTS:
        raise ConfigError(f"--from: got {name!r}, allowed are {', '.join(HOSTS)}")
    host, directory = HOSTS[name], Path(directory)
    lines = _json_lines(directory) if host.jsonl else []
    folders = sorted({path.parent for path in directory.rglob("*.tfevents.*")})
    if len(lines) > 1:
        raise DataError(f"{directory}: {len(lines)} runs ({_shown(lines, directory)}); give a folder of one of them")
    if not lines and not folders:
        raise DataError(_nothing(directory, name, host))
    logged = _read_json_lines(lines[0]) if lines else _read_events(folders, directory)
    logged = _by_optimizer_step(logged, host.by_rollout)
    rows: Rows = {}
    for step, values in sorted(logged.items()):
        row = rows.setdefault(step + 1 - host.first_step, {"step": step + 1 - host.first_step})
        row.update({_our_name(key, host): value for key, value in values.items()})
    if not any(key.startswith("difficulty/weight/") for row in rows.values() for key in row):
        keys = sorted({key for row in rows.values() for key in row if key != "step"})
        raise DataError(
            f"{directory}: {len(keys)} metrics of {name} ({', '.join(keys[:3])}, ...), none is difficulty/weight/...: "
            "DARO was not on in this run (docs/plugins.md says how to see it)"
        )
    return run_of_rows(directory, list(rows.values()))


def _our_name(key: str, host: Host) -> str:
    bare = key.removeprefix(host.prefix)
    return bare if bare.startswith(("difficulty/", "loss/")) else host.names.get(key, key)


def _shown(paths: list[Path], directory: Path) -> str:
    names = [str(path.relative_to(directory)) for path in paths]
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _by_optimizer_step(logged: Rows, by_rollout: tuple[str, ...]) -> Rows:
    """Move the metrics that the host numbers by rollout to the last optimizer step of the rollout."""
    numbers = [step for step, row in sorted(logged.items()) if any(key.startswith(by_rollout[:1]) for key in row)]
    trained = [step for step, row in logged.items() if any(not key.startswith(by_rollout) for key in row)]
    if not by_rollout or not trained or not numbers or numbers != list(range(numbers[0], numbers[-1] + 1)):
        return logged
    each = -(-(max(trained) + 1) // (numbers[-1] + 1))
    rows: Rows = {}
    for step, row in logged.items():
        for key, value in row.items():
            at = min((step + 1) * each - 1, max(trained)) if key.startswith(by_rollout) else step
            rows.setdefault(at, {})[key] = value
    return rows


def _nothing(directory: Path, name: str, host: Host) -> str:
    kinds = "JSON lines or TensorBoard events" if host.jsonl else "TensorBoard events"
    if any(directory.rglob("*.wandb")):
        return (
            f"{directory}: W&B's own files, which only W&B reads; allowed for --from {name} are {kinds}: {host.how} "
            "beside W&B writes them"
        )
    return f"{directory}: no metrics of {name} here, allowed are {kinds}; {host.how} writes them"


def _json_lines(directory: Path) -> list[Path]:
    """Return the files that verl's file logger wrote: their first line has a step and its data."""
    paths = []
    for path in sorted(directory.rglob("*.jsonl")):
        if not path.is_file():  # a pipe may never answer
            continue
        with path.open(encoding="utf-8", errors="replace") as file:
            try:
                first = json.loads(file.readline())
            except ValueError:
                continue
        if isinstance(first, dict) and set(first) == {"step", "data"} and isinstance(first["data"], dict):
            paths.append(path)
    return paths


def _read_json_lines(path: Path) -> Rows:
    rows: Rows = {}
    text = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(text, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            step, data = int(record["step"]), record["data"].items()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number == len(text):
                break  # the host is writing it now
            raise DataError(
                f"{path}:{number}: not a line of verl's file logger ({error}); mend or remove it"
            ) from error
        numbers = {key: float(value) for key, value in data if isinstance(value, int | float)}
        rows.setdefault(step, {}).update(numbers)
    return rows


def _read_events(folders: list[Path], directory: Path) -> Rows:
    """Read the event files of one run. Several folders count as one run if no metric is in two of them.

    A restarted run has several files in one folder. slime's processes, and NeMo-RL's hyperparameters, have folders of
    their own.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows: Rows = {}
    seen: set[str] = set()
    for folder in folders:
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
        events.Reload()
        keys = events.Tags()["scalars"]
        if seen.intersection(keys):
            raise DataError(f"{directory}: {len(folders)} runs ({_shown(folders, directory)}); give the folder of one")
        seen.update(keys)
        for key in keys:
            for event in events.Scalars(key):
                rows.setdefault(event.step, {})[key] = float(event.value)
    return rows
