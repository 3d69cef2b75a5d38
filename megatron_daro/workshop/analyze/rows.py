"""Recorded rollouts of several frameworks as rows of four numbers.

A file or folder becomes Rows, file by file (a file is a step). Nothing that a .pt file names is run.
Rejects a dump whose columns it cannot name, and says which are there.

| format | group | length | right |
|---|---|---|---|
| this package, Parquet | group_id | length, in tokens | correct |
| verl, `STEP.jsonl` of trainer.rollout_data_dir | input | characters of output | acc, else score |
| slime, .pt of --save-debug-rollout-data | group_index | response_length, in tokens | reward, or reward[--reward-key] |
| NeMo-RL, `train_data_stepN.jsonl` | tokens of the prompt | trained tokens | filtered_rewards, else rewards |
| ROLL, `rollout_dump_data.step_N.jsonl` | messages, else prompt or id | characters of responses | scores |
| other JSONL or Parquet | --columns | --columns; len(NAME) for a text or a chat | --columns |

In NeMo-RL's lines (in its log directory) each value is a list of one, and the prompt stands only among the token ids,
in front of the first token that is trained. ROLL's (in rollout_dump_dir) hold a step each, with a list for each
column.

Files of `torch.save` from other programs are read without running anything that they name: classes stand for inert
records.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import math
import pickle
import re
import types
import zipfile
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import cast

from megatron_daro.errors import ConfigError, DataError
from megatron_daro.workshop.analyze.behaviour import reflects

_TORCH = {("torch._utils", "_rebuild_tensor_v2"), ("torch", "Size")}
_NUMPY = {
    *(("numpy.core.multiarray", name) for name in ("scalar", "_reconstruct")),
    *(("numpy._core.multiarray", name) for name in ("scalar", "_reconstruct")),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),  # numpy's bytes in protocol 2
}
_BUILT_IN: dict[tuple[str, str], object] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "bytearray"): bytearray,
    ("builtins", "complex"): complex,
}


class Placeholder:
    """Stands for an object of a class that was not loaded."""

    def __new__(cls, *args: object, **options: object) -> Placeholder:
        """Ignore what it would be made of."""
        return super().__new__(cls)

    def __init__(self, *args: object, **options: object) -> None:
        """Ignore what it would be made of."""

    def __setstate__(self, state: object) -> None:
        """Ignore its state."""

    def __setitem__(self, key: object, value: object) -> None:
        """Ignore an entry, where the class is a kind of dict."""

    def append(self, value: object) -> None:
        """Ignore an element, where the class is a kind of list."""

    def extend(self, values: object) -> None:
        """Ignore elements, where the class is a kind of list."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) in _BUILT_IN:
            return _BUILT_IN[module, name]
        if (module, name) in _TORCH | _NUMPY:
            return super().find_class(module, name)
        return type(name.rpartition(".")[2] or "Placeholder", (Placeholder,), {})


def load_torch_file(path: Path) -> object:
    """Return what a file of `torch.save` holds, tensors on the CPU.

    Raises:
        DataError: it is no such file, or damaged.
    """
    import torch

    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError) as error:
        raise DataError(
            f"dump: {path} is no file of torch.save ({error}); allowed is its zip format, of torch 1.6 and newer"
        ) from None
    if any(name.rpartition("/")[2] == "constants.pkl" for name in names):
        raise DataError(f"dump: {path} is a TorchScript program, which is not run; allowed is a file of torch.save")
    reader = types.SimpleNamespace(Unpickler=_Unpickler, __name__="pickle")
    try:
        return torch.load(path, map_location="cpu", pickle_module=reader, weights_only=False)
    except Exception as error:  # a damaged pickle raises anything
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"dump: {path} cannot be read ({type(error).__name__}: {first}); the file is torn") from None


NEMO_RL = {"group": "prompt_tokens", "length": "trained_tokens", "right": "reward"}
ROLL = {"group": "prompt", "length": "responses", "right": "scores"}
_ROLL_GROUPS = ("messages", "prompt", "id")


def rollouts_of(record: Mapping[str, object], where: str) -> Iterator[Mapping[str, object]]:
    """Yield the rollouts of one object.

    Args:
        record: a line; one of another framework is yielded as it is.
        where: file and line, for errors.

    Raises:
        DataError: columns of a line have different lengths.
    """
    if {"rewards", "token_ids", "token_loss_mask"} <= record.keys():
        yield _nemo_rl(record)
    elif {"global_step", "responses", "scores"} <= record.keys() and isinstance(record["responses"], list):
        yield from _roll(record, where)
    else:
        yield record


def _nemo_rl(record: Mapping[str, object]) -> Mapping[str, object]:
    """Return the rollout. With dynamic sampling `rewards` may be of others; `filtered_rewards` is of those trained."""
    tokens, mask = _only(record["token_ids"]), _only(record["token_loss_mask"])
    reward = _only(record.get("filtered_rewards", record["rewards"]))
    if not isinstance(tokens, list) or not isinstance(mask, list):
        return {}
    trained = [bool(value) for value in mask]
    end = trained.index(True) if True in trained else _tokens(_only(record.get("input_lengths", len(tokens))))
    if end is None:
        return {}
    prompt = hashlib.blake2b(repr(tokens[: int(end)]).encode(), digest_size=16).hexdigest()
    return {"prompt_tokens": prompt, "trained_tokens": sum(trained), "reward": reward}


def _only(value: object) -> object:
    """Return the one element of a list of one, as NeMo-RL writes each value; anything else as it is."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _roll(record: Mapping[str, object], where: str) -> Iterator[Mapping[str, object]]:
    group = next((name for name in _ROLL_GROUPS if isinstance(record.get(name), list)), None)
    names = [name for name in (group, "responses", "scores") if name]
    columns = [cast(list[object], record[name]) for name in names]
    if len({len(column) for column in columns}) > 1:
        sizes = ", ".join(f"{name} {len(column)}" for name, column in zip(names, columns, strict=True))
        raise DataError(f"dump: {where}: columns of different lengths ({sizes}); the file is not as ROLL writes it")
    for values in zip(*columns, strict=True):
        found = dict(zip(names, values, strict=True))
        if group:
            found["prompt"] = str(found[group])
        yield found


SUFFIXES = (".parquet", ".jsonl", ".pt")
_KNOWN: tuple[Mapping[str, str], ...] = (
    {"group": "group_id", "length": "length", "right": "correct"},
    {"group": "input", "length": "output", "right": "acc"},
    {"group": "input", "length": "output", "right": "score"},
    {"group": "group_index", "length": "response_length", "right": "reward"},
    NEMO_RL,
    ROLL,
)
_NO_TRAINING = ("skipped_", "eval_", "val_data_step")
"""How files begin that hold other rollouts: this package's, and NeMo-RL's of its validation."""


_TURNS, _REPORTS, _PARTS = "turns", "reports", {"observed", "generated"}
"""The columns of this package's conversations, and what a turn has."""
_TEXTS = ("output", "responses")
"""Lengths that are given as a text, whose characters count."""
_ANSWERS = ("text", "output", "response", "responses")
"""Columns of answers as text: of this package, verl, slime and ROLL."""


@dataclass(frozen=True, slots=True)
class Row:
    """One rollout. right: None where the dump has no verdict for it. length: generated tokens, or characters of a text
    or of a chat's assistant messages. turns: of a conversation, observed and generated tokens of each turn. reports:
    what its environment said of each answer. reflects: whether its text has a word of self-reflection; None where texts
    are not read."""

    group: Hashable
    length: float
    right: bool | None
    turns: Sequence[Mapping[str, int]] = ()
    reports: Sequence[Mapping[str, float]] = ()
    reflects: bool | None = None


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns are read. is_text: lengths are texts, whose characters count. correct_above: the number above which
    an answer is right. reward_key: of verdicts that are mappings. text: of answers, where they are read."""

    group: str
    length: str
    right: str
    is_text: bool = False
    correct_above: float | None = None
    reward_key: str | None = None
    text: str | None = None

    @property
    def names(self) -> list[str]:
        """All of them."""
        return [self.group, self.length, self.right, *([self.text] if self.text else [])]

    @property
    def unit(self) -> str:
        """What lengths are counted in, for a reader."""
        return "characters" if self.is_text else "tokens"


def files_of(path: Path) -> list[Path]:
    """Return the files of a dump in the order of their numbers; of a run directory those of its rollouts.

    Raises:
        DataError: there are none.
    """
    folder = path / "rollouts" if (path / "rollouts").is_dir() else path
    files = [folder] if folder.is_file() else [p for p in folder.rglob("*") if p.suffix in SUFFIXES]
    files = [p for p in files if not p.name.startswith(_NO_TRAINING)]
    if not files:
        raise DataError(f"dump: {path} has no file of {', '.join(SUFFIXES)}, allowed is a file or a folder with some")
    return sorted(files, key=lambda p: ([int(n) for n in re.findall(r"\d+", p.name)], str(p)))


def named_columns(option: str) -> dict[str, str]:
    """Return the columns that --columns names, by what they hold.

    Raises:
        ConfigError: a part of it is none of group=A, length=B and right=C, or names the same thing again.
    """
    given: dict[str, str] = {}
    for part in option.split(",") if option.strip() else ():
        holds, _, name = (word.strip() for word in part.partition("="))
        if holds not in ("group", "length", "right") or not name or holds in given:
            raise ConfigError(
                f"--columns: got {part.strip()!r}, allowed are group=A, length=B (or length=len(B)) and right=C, each "
                "once, with the name of a column; separate them by commas"
            )
        given[holds] = name
    return given


def choose_columns(
    path: Path,
    given: Mapping[str, str],
    correct_above: float | None,
    reward_key: str | None = None,
    texts: bool = False,
) -> Columns:
    """Return the columns of a file, from its first record and what the user says of them.

    Args:
        given: as `named_columns` returns them; a length `len(NAME)` counts the characters of a text or a chat.
        texts: whether answers are read, too.

    Raises:
        DataError: a column is not there; the message has those that are, and which views would remain.
    """
    return _columns_named(path, set(_first_names(path)), given, correct_above, reward_key, texts)


def _columns_named(
    path: Path,
    names: set[str],
    given: Mapping[str, str],
    correct_above: float | None,
    reward_key: str | None,
    texts: bool,
) -> Columns:
    given, answer = dict(given), next((name for name in _ANSWERS if name in names), None)
    if texts and answer is None:
        raise DataError(
            f"dump: {path} has the columns {', '.join(sorted(names)) or 'none'}; --reflection needs answers as text: "
            f"one of {', '.join(_ANSWERS)}"
        )
    text = re.fullmatch(r"len\((.+)\)", given.get("length", ""))
    if text:
        given["length"] = text[1]
    for known in [{**k, **given} for k in _KNOWN]:
        if set(known.values()) <= names:
            is_text = bool(text) or ("length" not in given and known["length"] in _TEXTS)
            text_column = answer if texts else None
            return Columns(
                **known, is_text=is_text, correct_above=correct_above, reward_key=reward_key, text=text_column
            )
    raise DataError(
        f"dump: {path} has the columns {', '.join(sorted(names)) or 'none'}; needed are a group (group_id, input or "
        "group_index), a length (length, output or response_length) and a verdict (correct, acc, score or reward): "
        "name them with --columns group=...,length=...,right=...; without verdicts nothing but lengths could be shown"
    )


def open_dump(
    files: Sequence[Path],
    given: Mapping[str, str],
    correct_above: float | None = None,
    reward_key: str | None = None,
    texts: bool = False,
) -> Iterator[tuple[Columns, Iterator[Row | None]]]:
    """Yield the columns and the rollouts of each file, which is opened when its turn comes, and read once.

    Args:
        given: as `choose_columns` takes it, of every file.

    Raises:
        DataError: as `choose_columns` and `rows_of` do, or files of one dump count in different units.
    """
    first: Columns | None = None
    for path in files:
        if path.suffix == ".parquet":  # its names stand in a part of their own
            columns = choose_columns(path, given, correct_above, reward_key, texts)
            rows = rows_of(path, columns)
        else:
            records = _records(path)
            head = list(islice(records, 1))
            names = set(head[0]) if head else set()
            columns = _columns_named(path, names, given, correct_above, reward_key, texts)
            rows = _rows(path, chain(head, records), columns)
        first = first or columns
        if columns.unit != first.unit:
            raise DataError(
                f"dump: {files[0]} has lengths in {first.unit}, {path} in {columns.unit}; allowed is one unit: "
                "analyze the files of each framework by themselves"
            )
        yield columns, rows


def _first_names(path: Path) -> list[str]:
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet as parquet

        try:
            return list(parquet.read_schema(path).names)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"dump: {path} cannot be read as Parquet ({error})") from None
    return list(next(_records(path), {}))


def rows_of(path: Path, columns: Columns) -> Iterator[Row | None]:
    """Yield the rollouts of one file; None for a record that has no group or no length.

    Raises:
        DataError: the file is torn, a length is none, or a verdict is neither 0/1 nor -1/1 and no threshold was given.
    """
    yield from _rows(path, _records(path, [*columns.names, _TURNS, _REPORTS]), columns)


def _rows(path: Path, records: Iterable[Mapping[str, object]], columns: Columns) -> Iterator[Row | None]:
    for number, record in enumerate(records, 1):
        if record.get("used") == "dropped":
            continue
        try:
            row = _row(path, record, columns)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:  # such as a list nested without end
            raise DataError(
                f"dump: {path}, record {number}: {', '.join(columns.names)} cannot be read ({type(error).__name__}: "
                f"{error!s:.80}); allowed are a group, a length and a verdict: repair the record or leave it out"
            ) from None
        yield row


def _row(path: Path, record: Mapping[str, object], columns: Columns) -> Row | None:
    length, group = _plain(record.get(columns.length)), _plain(record.get(columns.group))
    if length is None or group is None:
        return None
    right, size = _right(_plain(record.get(columns.right)), columns, path), _size(length, columns, path)
    turns = _turns(record.get(_TURNS)) if columns.length == "length" else ()
    reports = cast("list[Mapping[str, float]]", record.get(_REPORTS) or []) if turns else []
    observed = sum(turn["observed"] for turn in turns)
    text = record.get(columns.text) if columns.text else None
    reflecting = reflects(text) if isinstance(text, str) else None
    return Row(_key(group), size - observed, right, turns, reports, reflecting)


def _plain(value: object) -> object:
    """Return the numbers of a tensor, an array or one of their scalars; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _turns(value: object) -> Sequence[Mapping[str, int]]:
    """Return the turns of this package's conversations; nothing where the dump has no such column, or another one."""
    if not isinstance(value, list) or not all(isinstance(turn, Mapping) and set(turn) == _PARTS for turn in value):
        return ()
    return value


def _key(value: object) -> Hashable:
    """Return what tells a group from others: a chat, say, is a list of mappings."""
    if isinstance(value, Hashable) and not isinstance(value, tuple):
        return value
    return json.dumps(value, sort_keys=True, default=str)


def _size(length: object, columns: Columns, path: Path) -> float:
    size = _characters(length) if columns.is_text else _tokens(length)
    if size is None:
        raise DataError(f"dump: {path}, {columns.length}: got {_shown(length)}, {_allowed_lengths(columns)}")
    return size


def _allowed_lengths(columns: Columns) -> str:
    name = columns.length
    if columns.is_text:
        return (
            "allowed are texts, and chats whose assistant messages have a text as content: their characters are "
            f"counted; numbers of tokens and lists of tokens are named with --columns length={name}"
        )
    return (
        "allowed are numbers of tokens and lists of tokens; the characters of a text or of a chat's assistant messages "
        f"are counted with --columns length=len({name})"
    )


def _tokens(length: object) -> float | None:
    """Return a number of tokens, or how many a list has; None for anything else, such as a list of messages."""
    if isinstance(length, list | tuple):
        return float(len(length)) if all(isinstance(token, int | float) for token in length) else None
    size = None if isinstance(length, bool) else _number(length)
    return size if size is not None and 0 <= size < math.inf else None


def _characters(answer: object) -> float | None:
    """Return the characters of a text, or of the assistant's messages of a chat; None for anything else."""
    if isinstance(answer, str):
        return float(len(answer))
    if not isinstance(answer, list | tuple) or not all(isinstance(message, Mapping) for message in answer):
        return None
    texts = [message.get("content") for message in answer if message.get("role") == "assistant"]
    if not texts or not all(isinstance(text, str) for text in texts):
        return None
    return float(sum(map(len, cast("list[str]", texts))))


def _number(value: object) -> float | None:
    """Return a float, infinite where a written number is larger than one can be; None for what is no number."""
    try:
        return float(cast(float, value))
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return None


def _shown(value: object) -> str:
    kind = "a list of messages" if isinstance(value, list) and value and isinstance(value[0], Mapping) else None
    return kind or f"{value!r:.80}"


def _right(verdict: object, columns: Columns, path: Path) -> bool | None:
    if isinstance(verdict, Mapping):
        if columns.reward_key not in verdict:
            raise DataError(
                f"dump: {path}, {columns.right}: got a mapping with {', '.join(map(str, verdict))}; allowed is one of "
                f"these with --reward-key{f', not {columns.reward_key}' if columns.reward_key else ''}"
            )
        verdict = _plain(verdict[columns.reward_key])
    if verdict is None or isinstance(verdict, bool):
        return verdict
    value = _number(verdict)
    if value is None or not math.isfinite(value):
        raise DataError(
            f"dump: {path}, {columns.right}: got {verdict!r:.80}, allowed are finite numbers and true or false"
        )
    if columns.correct_above is not None:
        return value > columns.correct_above
    if value not in (-1.0, 0.0, 1.0):
        raise DataError(
            f"dump: {path}, {columns.right}: got {value:g}, allowed are 0 and 1, or -1 and 1: a shaped reward does not "
            "say whether an answer is right; give --correct-above"
        )
    return value == 1.0


def _records(path: Path, names: list[str] | None = None) -> Iterator[Mapping[str, object]]:
    if path.suffix == ".parquet":
        yield from _parquet(path, names)
    elif path.suffix == ".pt":
        yield from _torch(path)
    else:
        yield from _json_lines(path)


def _json_lines(path: Path) -> Iterator[Mapping[str, object]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                record = json.loads(line.decode("utf-8"))
                rollouts = list(rollouts_of(record if isinstance(record, dict) else {}, where))
            except UnicodeDecodeError as error:
                raise DataError(f"dump: {where} is no UTF-8 ({error}); the file is damaged") from None
            except ValueError as error:
                raise DataError(f"dump: {where} is no JSON ({error}); the file is torn or no JSONL") from None
            except RecursionError:
                raise DataError(
                    f"dump: {where} has values nested too deep to be read; repair the line or leave it out"
                ) from None
            yield from rollouts


def _parquet(path: Path, names: list[str] | None) -> Iterator[Mapping[str, object]]:
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        file = parquet.ParquetFile(path)
        wanted = None if names is None else [n for n in {*names, "used"} if n in file.schema_arrow.names]
        for batch in file.iter_batches(columns=wanted):
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"dump: {path} cannot be read as Parquet ({error})") from None


def _torch(path: Path) -> Iterator[Mapping[str, object]]:
    loaded = load_torch_file(path)
    samples = loaded.get("samples") if isinstance(loaded, dict) else None
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        raise DataError(
            f"dump: {path} has no list `samples` of mappings, which slime's --save-debug-rollout-data writes"
        )
    yield from samples
