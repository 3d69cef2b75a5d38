"""`megatron-daro convert --average`: the weighted mean of the weights of several checkpoints of one model.

Hugging Face directories -> one Hugging Face directory. A piece of a tensor is read from each, added up in float64 and
rounded once, so memory does not grow with the model. Source: "model merging" of Kimi k1.5 (arXiv 2501.12599, section
2.4), a long-thinking and a short-thinking model of one architecture with equal weights. Refuses checkpoints that are
not of one shape and vocabulary, naming the first difference. The target appears whole or not at all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from megatron_daro import durable
from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.convert.hf_files import HFCheckpoint, copy_model_files, new_directory, shard_name, write_index
from megatron_daro.convert.plan import PIECE_BYTES, grouped
from megatron_daro.convert.safetensors_file import FileWriter
from megatron_daro.errors import ConfigError, ModelError, disk_fault
from megatron_daro.workshop.convert.partial import replaceable
from megatron_daro.workshop.convert.rows import cast, windows

NOTE_FILE = "average.json"
_VOCABULARY = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")
"""Files that say which text a token is. Chat templates and sampling options may differ; those of the first are kept."""
_ROUNDING = 1e-6
_SUMMED = 4
"""How many times as large as bf16 the float64 of the sum is."""


def read_weights(text: str, count: int) -> tuple[float, ...]:
    """Return the weights that `A,B,...` says; equal ones for an empty text.

    Raises:
        ConfigError: fewer than two checkpoints, another number of weights, a weight that is not finite, or a sum other
            than 1.
    """
    if count < 2:
        raise ConfigError(f"--average: got {count}; allowed: two or more directories; fix: name each with --average")
    if not text:
        return (1.0 / count,) * count
    try:
        weights = tuple(float(part) for part in text.split(","))
    except ValueError:
        weights = ()
    if len(weights) != count or not all(map(math.isfinite, weights)) or abs(sum(weights) - 1) > _ROUNDING:
        raise ConfigError(
            f"--weights: got {text!r}; allowed: {count} numbers that add up to 1, one for each --average; fix: "
            f"--weights {','.join([f'{1 / count:g}'] * count)}"
        )
    return weights


def average(
    sources: Sequence[Path],
    weights: Sequence[float],
    out: Path,
    *,
    max_shard_bytes: int,
    progress: Callable[[str, int], None],
) -> int:
    """Write the mean, and return its size in bytes.

    Args:
        sources: Hugging Face directories, two or more. weights: one of each. out: not there yet, or empty.
        max_shard_bytes: files hold at most this many bytes of tensors, or one larger tensor. progress: called with the
            bytes done.

    Raises:
        ConfigError: a source is named twice. ModelError: they differ in shape or vocabulary, or the disk refused.
    """
    if len({source.resolve() for source in sources}) < len(sources):
        got = ", ".join(map(str, sources))
        raise ConfigError(f"--average: got {got}; allowed: different directories; fix: name each once")
    target = replaceable(out)
    check_vocabulary(sources)
    with ExitStack() as stack:
        opened = [stack.enter_context(HFCheckpoint(source, as_stored=True)) for source in sources]
        check_tensors(opened)
        try:
            with new_directory(target) as folder:
                num_bytes = _write(opened, weights, folder, max_shard_bytes, progress)
                copy_model_files(sources[0], folder, None)
                made_of = [{"path": str(s.absolute()), "weight": w} for s, w in zip(sources, weights, strict=True)]
                durable.write(folder / NOTE_FILE, json.dumps({"average_of": made_of}, indent=1) + "\n")
        except OSError as error:
            cause, advice = disk_fault(error, target.parent, "run the same command again")
            raise ModelError(f"{target} was not written: {cause}; {advice}") from error
    return num_bytes


def check_vocabulary(sources: Sequence[Path]) -> None:
    """Refuse models of different shapes, or in which a token id stands for different texts. Raises ModelError."""
    first = sources[0]
    shape = read_model_shape(first)
    for other in sources[1:]:
        if read_model_shape(other) != shape:
            raise ModelError(
                f"--average: {other}/config.json describes another model than {first}/config.json; allowed: "
                "checkpoints of one architecture and size"
            )
        for name in _VOCABULARY:
            if _content(first / name) != _content(other / name):
                raise ModelError(
                    f"--average: {name} of {other} is not that of {first}: one token id would stand for two texts; "
                    "allowed: models of one tokenizer"
                )


def _content(path: Path) -> object:
    """Return a file's content, JSON parsed so that spacing does not count; None where there is no file."""
    if not path.is_file():
        return None
    data = path.read_bytes()
    try:
        return json.loads(data) if path.suffix == ".json" else data
    except (ValueError, RecursionError):
        return data


def check_tensors(opened: Sequence[HFCheckpoint]) -> None:
    """Refuse checkpoints whose tensors differ in name, shape or dtype, or are quantized. Raises ModelError."""
    first, *others = opened
    names = set(first.names())
    for other in others:
        lone = sorted(names ^ set(other.names()))
        if lone:
            where, lacks = (first, other) if lone[0] in names else (other, first)
            raise ModelError(
                f"--average: {where.directory} holds {lone[0]}, which {lacks.directory} does not; allowed: the same "
                "tensors in each"
            )
        for name in sorted(names):
            mine, theirs = ((one.shape(name), one.dtype(name)) for one in (first, other))
            if mine != theirs:
                raise ModelError(
                    f"--average: {name} is {theirs[1]} {list(theirs[0])} in {other.directory}, {mine[1]} "
                    f"{list(mine[0])} in {first.directory}; allowed: equal shapes and dtypes"
                )
    for name in sorted(names):
        if not first.dtype(name).is_floating_point or first.dtype(name).itemsize < 2:
            raise ModelError(f"--average: {name} is {first.dtype(name)}; allowed: fp64, fp32, bf16, fp16")


def _write(
    opened: Sequence[HFCheckpoint],
    weights: Sequence[float],
    folder: Path,
    max_shard_bytes: int,
    progress: Callable[[str, int], None],
) -> int:
    first, done = opened[0], 0
    files = list(
        grouped(first.names(), max_shard_bytes, lambda name: math.prod(first.shape(name)) * first.dtype(name).itemsize)
    )
    for number, names in enumerate(files):
        header = [(name, first.dtype(name), first.shape(name)) for name in names]
        with FileWriter(folder / shard_name(number, len(files)), header, metadata={"format": "pt"}) as writer:
            for name in names:
                for values in _means(opened, weights, name):
                    writer.write(values)
                    done += values.nbytes
                    progress("averaging", done)
    write_index(folder, {name: shard_name(i, len(files)) for i, names in enumerate(files) for name in names}, done)
    return done


def _means(opened: Sequence[HFCheckpoint], weights: Sequence[float], name: str) -> Iterator[torch.Tensor]:
    """Yield the rows of one tensor's mean, a piece at a time."""
    dtype = opened[0].dtype(name)
    for start, stop in windows(opened[0].shape(name), dtype, PIECE_BYTES // _SUMMED):
        total = None
        for one, weight in zip(opened, weights, strict=True):
            part = one.read(name, start, stop).to(torch.float64).mul_(weight)
            total = part if total is None else total.add_(part)
        assert total is not None
        yield cast(total, torch.empty(total.shape, dtype=dtype), name)
