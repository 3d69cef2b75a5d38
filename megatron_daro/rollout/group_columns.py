"""Groups of rollouts as Parquet columns and back: the only form in which groups are written.

Recorder (a step's groups) and checkpoints (groups that wait) -> rows of SCHEMA -> the same groups. One row is one
rollout with its prompt and its verdict, so that people can read the file with pandas or DuckDB; a group without a
rollout is one row without an index. Everything but `Rollout.verdict` comes back bit for bit. Columns are built from
numpy arrays and encoded by pyarrow without the interpreter's lock. This module opens no files, and refuses rows that
contradict themselves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa

from megatron_daro.data.prompts import prompt_text
from megatron_daro.rollout.ledger import OUTCOMES, Outcome
from megatron_daro.routed_experts import Part, StoredExperts
from megatron_daro.types import RESPONSE_COLUMNS, FinishReason, Group, Prompt, Rollout, TurnReport, Verdict

FORMAT = {"megatron_daro.rollouts": "2"}
"""In the metadata of every file."""
BLOCK_TOKENS = 1 << 20
"""Response tokens of a row group: enough to compress well, few enough that a reader holds little at once."""


def _list(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind, nullable=False))


_SPAN = pa.struct([pa.field("weight_version", pa.int64(), False), pa.field("tokens", pa.int64(), False)])
_EXPERTS = pa.struct(
    [pa.field("file", pa.string(), False), pa.field("first", pa.int64(), False), pa.field("rows", pa.int64(), False)]
)
_TURN = pa.struct([pa.field("observed", pa.int64(), False), pa.field("generated", pa.int64(), False)])
_REPORT = pa.struct(
    [
        pa.field("reward", pa.float64(), False),
        pa.field("tool_calls", pa.int64(), False),
        pa.field("tool_errors", pa.int64(), False),
        pa.field("seconds", pa.float64(), False),
    ]
)
_REWARD = pa.struct([pa.field("name", pa.string(), False), pa.field("value", pa.float64(), False)])
_RAGGED = ("prompt_tokens", "tokens", *RESPONSE_COLUMNS)
_REPEATED = (
    *("used", "prompt_id", "source", "category", "prompt", "messages", "answer", "alternatives"),
    *("finish_reason", "reason"),
)
SCHEMA = pa.schema(
    [
        pa.field("group_id", pa.int64(), False),
        pa.field("used", pa.string()),
        pa.field("prompt_id", pa.string(), False),
        pa.field("source", pa.string(), False),
        pa.field("category", pa.string(), False),
        pa.field("prompt", pa.string()),
        pa.field("messages", pa.string()),
        pa.field("answer", pa.string(), False),
        pa.field("alternatives", pa.string()),
        pa.field("prompt_tokens", _list(pa.int32()), False),
        pa.field("index", pa.int32()),
        pa.field("attempt", pa.int32()),
        pa.field("text", pa.string()),
        pa.field("tokens", _list(pa.int32()), False),
        pa.field("logprobs", _list(pa.float32()), False),
        pa.field("loss_mask", _list(pa.uint8())),
        pa.field("length", pa.int32()),
        pa.field("finish_reason", pa.string()),
        pa.field("weight_version", pa.int64()),
        pa.field("version_spans", _list(_SPAN), False),
        pa.field("correct", pa.bool_()),
        pa.field("reward", pa.float64()),
        pa.field("reason", pa.string()),
        pa.field("lone_surrogates", pa.string()),
        pa.field("experts", _list(_EXPERTS)),
        pa.field("experts_shape", _list(pa.int32())),
        pa.field("turns", _list(_TURN)),
        pa.field("reports", _list(_REPORT)),
        pa.field("rewards", _list(_REWARD)),
        pa.field("teacher_logprobs", _list(pa.float32())),
        pa.field("contexts", _list(pa.int64())),
    ]
)
"""The columns; docs/data.md says what each holds."""
WRITER_OPTIONS: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": [*_REPEATED, "loss_mask.list.element"],
    "column_encoding": {
        f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in ("tokens", *RESPONSE_COLUMNS) if name != "loss_mask"
    },
    "write_statistics": False,
    "write_page_checksum": True,
    "store_schema": False,
}
"""Options of pyarrow.parquet.ParquetWriter."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedGroup:
    """A group with its outcome. used: None while it still waits. partial: rollouts without a verdict."""

    group: Group
    used: Outcome | None = None
    partial: tuple[Rollout, ...] = ()


def blocks(
    groups: Iterable[RecordedGroup], block_tokens: int = BLOCK_TOKENS, run_dir: Path | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the groups as row groups of about `block_tokens` response tokens, in order; a group is never split."""
    waiting: list[RecordedGroup] = []
    tokens = 0
    for entry in groups:
        waiting.append(entry)
        tokens += sum(r.response_length for r in (*entry.group.rollouts, *entry.partial))
        if tokens >= block_tokens:
            yield encode(waiting, run_dir)
            waiting, tokens = [], 0
    if waiting:
        yield encode(waiting, run_dir)


def encode(groups: Sequence[RecordedGroup], run_dir: Path | None = None) -> pa.RecordBatch:
    """Return the groups as rows of SCHEMA; `decode` gives exactly the same groups back.

    Args:
        run_dir: files of experts inside it are named relative to it, so that it can be moved; None: absolute names.
    """
    rows: list[tuple[RecordedGroup, Rollout | None, Verdict | None]] = []
    for entry in groups:
        finished = zip(entry.group.rollouts, entry.group.verdicts, strict=True)
        own = [(entry, r, v) for r, v in finished] + [(entry, r, None) for r in entry.partial]
        rows += own or [(entry, None, None)]
    prompts = [entry.group.prompt for entry, _, _ in rows]
    rollouts = [rollout for _, rollout, _ in rows]
    verdicts = [verdict for _, _, verdict in rows]
    plain: dict[str, list[Any]] = {
        "group_id": [entry.group.group_id for entry, _, _ in rows],
        "used": [entry.used for entry, _, _ in rows],
        "prompt_id": [p.id for p in prompts],
        "source": [p.source for p in prompts],
        "category": [p.category for p in prompts],
        "prompt": [p.text if p.messages is None else prompt_text(p) for p in prompts],
        "messages": [None if p.messages is None else json.dumps([dict(m) for m in p.messages]) for p in prompts],
        "answer": [p.answer for p in prompts],
        "alternatives": [json.dumps(p.alternatives) if p.alternatives else None for p in prompts],
        "index": _of(rollouts, lambda r: r.index),
        "attempt": _of(rollouts, lambda r: r.attempt),
        "text": _of(rollouts, lambda r: r.text),
        "length": _of(rollouts, lambda r: r.response_length),
        "finish_reason": _of(rollouts, lambda r: r.finish_reason),
        "weight_version": _of(rollouts, lambda r: r.weight_version),
        "version_spans": [
            [{"weight_version": version, "tokens": count} for version, count in (r.version_spans if r else ())]
            for r in rollouts
        ],
        "turns": [
            [{"observed": seen, "generated": generated} for seen, generated in r.turns] if r and r.turns else None
            for r in rollouts
        ],
        "contexts": [list(r.contexts) if r and r.contexts else None for r in rollouts],
        "reports": [[asdict(one) for one in r.reports] if r and r.reports else None for r in rollouts],
        "rewards": [
            [{"name": name, "value": value} for name, value in v.rewards] if v and v.rewards else None for v in verdicts
        ],
        "correct": _of(verdicts, lambda v: v.correct),
        "reward": _of(verdicts, lambda v: v.reward),
        "reason": _of(verdicts, lambda v: v.reason),
        "experts": _of(rollouts, lambda r: r.routed_experts and _stored(r.routed_experts, run_dir)),
        "experts_shape": _of(rollouts, lambda r: r.routed_experts and list(r.routed_experts.shape[1:])),
    }
    columns: dict[str, pa.Array] = _with_exact_texts(plain)
    prompt_tokens = {entry.group.group_id: np.asarray(entry.group.prompt.tokens, dtype=np.int32) for entry in groups}
    lists: dict[str, list[Any]] = {name: _of(rollouts, attrgetter(name)) for name in RESPONSE_COLUMNS} | {
        "prompt_tokens": [prompt_tokens[entry.group.group_id] for entry, _, _ in rows],
        "tokens": _of(rollouts, lambda r: r.tokens[r.prompt_length :]),
        "loss_mask": _of(rollouts, lambda r: None if r.loss_mask.all() else r.loss_mask),
    }
    columns |= {name: _ragged(name, values) for name, values in lists.items()}
    return pa.RecordBatch.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def _stored(experts: StoredExperts, run_dir: Path | None) -> list[dict[str, Any]]:
    def name(path: Path) -> str:
        return str(path.relative_to(run_dir) if run_dir and path.is_relative_to(run_dir) else path)

    return [{"file": name(Path(part.path)), "first": part.first, "rows": part.rows} for part in experts.parts]


def decode(batches: Iterable[pa.RecordBatch], run_dir: Path = Path()) -> Iterator[RecordedGroup]:
    """Yield the groups that were encoded, over all record batches of a file: adjacent rows of one group id are one
    group.

    Raises:
        ValueError: the rows of a group contradict each other; the message has the number of its first row, from 1.
    """
    number = 0

    def numbered() -> Iterator[dict[str, Any]]:
        nonlocal number
        for batch in batches:
            for row in _rows(batch):
                number += 1
                yield row

    for _, rows in groupby(numbered(), key=lambda row: row["group_id"]):
        first = number
        try:
            yield _group(list(rows), run_dir)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"the group in row {first} cannot be: {error}") from error


def _rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Yield one mapping per row. Lists of numbers are views of the batch's memory; a null list is None."""
    names = [name for name in SCHEMA.names if name not in _RAGGED]
    plain = [batch.column(name).to_pylist() for name in names]
    ragged = {name: _views(batch.column(name)) for name in _RAGGED}
    for i, values in enumerate(zip(*plain, strict=True)):
        row = dict(zip(names, values, strict=True)) | {name: views[i] for name, views in ragged.items()}
        if row["lone_surrogates"]:
            exact = json.loads(row["lone_surrogates"]).items()
            row |= {name: bytes.fromhex(text).decode("utf-8", "surrogatepass") for name, text in exact}
        yield row


def _group(rows: list[dict[str, Any]], run_dir: Path) -> RecordedGroup:
    first = rows[0]
    messages = first["messages"] and json.loads(first["messages"])
    prompt = Prompt(
        id=first["prompt_id"],
        answer=first["answer"],
        source=first["source"],
        text=first["prompt"] if messages is None else None,
        messages=None if messages is None else tuple(dict(message) for message in messages),
        tokens=tuple(first["prompt_tokens"].tolist()),
        category=first["category"],
        alternatives=tuple(json.loads(first["alternatives"] or "[]")),
    )
    if first["used"] not in (*OUTCOMES, None):
        raise ValueError(f"used is {first['used']!r}; allowed: {', '.join(OUTCOMES)}")
    if len(rows) == 1 and first["index"] is None:
        rows = []
    prefix = np.asarray(prompt.tokens, dtype=np.int32)
    pairs = [(_rollout(row, prompt, prefix, run_dir), row) for row in rows]
    done = [(rollout, row) for rollout, row in pairs if row["correct"] is not None]
    group = Group(
        first["group_id"],
        prompt,
        tuple(rollout for rollout, _ in done),
        tuple(_verdict(row) for _, row in done),
    )
    return RecordedGroup(group, first["used"], tuple(rollout for rollout, row in pairs if row["correct"] is None))


def _verdict(row: dict[str, Any]) -> Verdict:
    rewards = tuple((one["name"], one["value"]) for one in row["rewards"] or ())
    return Verdict(row["correct"], row["reward"], row["reason"], rewards)


def _rollout(row: dict[str, Any], prompt: Prompt, prefix: np.ndarray, run_dir: Path) -> Rollout:
    """Return one rollout in memory of its own: a view would keep the whole row group alive."""
    length = row["length"]
    columns: dict[str, Any] = {name: row[name].copy() for name in RESPONSE_COLUMNS if row[name] is not None}
    columns.setdefault("loss_mask", np.ones(length, np.uint8))
    lists = {"tokens": row["tokens"], **columns}
    if wrong := [name for name, values in lists.items() if len(values) != length]:
        raise ValueError(f"rollout {row['index']}: {' and '.join(wrong)} should be {length} long")
    if row["finish_reason"] not in get_args(FinishReason):
        raise ValueError(f"finish_reason is {row['finish_reason']!r}; allowed: {', '.join(get_args(FinishReason))}")
    turns = tuple((turn["observed"], turn["generated"]) for turn in row["turns"] or ())
    if turns and sum(map(sum, turns)) != length:
        raise ValueError(f"rollout {row['index']}: the turns {turns} are not {length} tokens long")
    contexts = tuple(row["contexts"] or ())
    if contexts and sum(contexts) != len(prefix) + length:
        raise ValueError(f"rollout {row['index']}: the contexts {contexts} are not {len(prefix) + length} tokens long")
    return Rollout(
        prompt_id=prompt.id,
        group_id=row["group_id"],
        attempt=row["attempt"],
        index=row["index"],
        tokens=np.concatenate([prefix, row["tokens"]]),
        prompt_length=len(prefix),
        finish_reason=row["finish_reason"],
        weight_version=row["weight_version"],
        text=row["text"],
        version_spans=tuple((span["weight_version"], span["tokens"]) for span in row["version_spans"]),
        routed_experts=_experts(row, len(prefix) + length, run_dir),
        turns=turns,
        contexts=contexts,
        reports=tuple(TurnReport(**one) for one in row["reports"] or ()),
        **columns,
    )


def _experts(row: dict[str, Any], tokens: int, run_dir: Path) -> StoredExperts | None:
    if row["experts"] is None:
        return None
    layers, chosen = row["experts_shape"]
    parts = tuple(Part(str(run_dir / part["file"]), part["first"], part["rows"]) for part in row["experts"])
    if sum(part.rows for part in parts) > tokens:
        raise ValueError(f"rollout {row['index']}: experts of more rows than its {tokens} tokens: {parts}")
    return StoredExperts(parts, (tokens, layers, chosen))


def _of(values: Sequence[Any], read: Callable[[Any], Any]) -> list[Any]:
    return [None if value is None else read(value) for value in values]


def _ragged(name: str, lists: Sequence[Any]) -> pa.Array:
    """Return a column of lists of numbers. None becomes null if the column is nullable, else an empty list."""
    field = SCHEMA.field(name)
    arrays = [np.asarray(() if values is None else values, field.type.value_type.to_pandas_dtype()) for values in lists]
    offsets = np.zeros(len(arrays) + 1, dtype=np.int32)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    mask = pa.array([values is None for values in lists]) if field.nullable else None
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(arrays)), type=field.type, mask=mask)


def _views(column: pa.ListArray) -> list[np.ndarray | None]:
    values, offsets = column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy().tolist()
    if column.values.null_count:
        raise ValueError("a list of numbers holds a null")
    valid = column.is_valid().to_pylist()
    return [values[offsets[i] : offsets[i + 1]] if valid[i] else None for i in range(len(valid))]


def _with_exact_texts(plain: dict[str, list[Any]]) -> dict[str, pa.Array]:
    """Return Arrow columns. Lone surrogates, which UTF-8 cannot encode, become U+FFFD; `lone_surrogates` keeps the
    text."""
    exact: list[dict[str, str]] = [{} for _ in plain["group_id"]]
    columns = {}
    for name, values in plain.items():
        try:
            columns[name] = pa.array(values, SCHEMA.field(name).type)
        except UnicodeEncodeError:
            for i, text in enumerate(values):
                if text is not None and _shown(text) != text:
                    exact[i][name] = text.encode("utf-8", "surrogatepass").hex()
            columns[name] = pa.array([text and _shown(text) for text in values], SCHEMA.field(name).type)
    columns["lone_surrogates"] = pa.array([json.dumps(texts) if texts else None for texts in exact], pa.string())
    return columns


def _shown(text: str) -> str:
    return "".join("\ufffd" if "\ud800" <= character <= "\udfff" else character for character in text)
