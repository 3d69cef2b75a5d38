"""What a conversion will write: which files, with which tensors, from what; known before the first byte is read.

Source checkpoint and options -> `plan_to_megatron` or `plan_to_hf` -> jobs, one for each file, that worker processes
carry out (workshop/convert/jobs.py). A Megatron checkpoint is read as HF tensors, so that one code writes Megatron
files from either. Everything that can be wrong with the source's headers is refused here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from megatron_daro.config.model_files import QUANTIZED
from megatron_daro.config.model_shape import ModelShape, read_model_shape
from megatron_daro.config.safetensors_header import read_header
from megatron_daro.convert.checkpoint_keys import GlobalBox, global_boxes
from megatron_daro.convert.hf_files import HFCheckpoint, shard_name
from megatron_daro.convert.mapping import (
    TensorRule,
    further_tensors,
    hf_to_megatron,
    padded_vocab_size,
    unknown_tensors,
)
from megatron_daro.convert.megatron_weights import MegatronWeights
from megatron_daro.convert.runs import common_dtype, source_dtypes
from megatron_daro.convert.stacked import places
from megatron_daro.convert.torch_dist import BACKEND as TORCH_DIST
from megatron_daro.convert.torch_dist import RELEASE
from megatron_daro.convert.transformers_shape import read_compared_shape
from megatron_daro.errors import ModelError

Format = Literal["daro", "torch_dist", "hf"]
PIECE_BYTES = 64 * 1024**2
FORMATS: tuple[Format, ...] = ("daro", "torch_dist")
ModelConfig = Path | Mapping[str, Any]
"""The folder with a model's config.json and tokenizer, or the content of a config.json that is in no file."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
VOCABULARY_MULTIPLE = 128
"""Rows of the embedding are padded to a multiple of this, as Megatron-LM does; loading cuts or pads them again."""
FURTHER_FILE = "mtp.safetensors"
"""In a target, beside config.json: the layers that predict tokens after the next, which nothing here computes."""
PART_BYTES = 512 * 1024**2
"""Of a file of an HF checkpoint: what one process writes at a time."""
_NUM_BYTES = attrgetter("num_bytes")
_LEAST_FILE_BYTES, _MOST_FILE_BYTES, _FILES = 256 * 1024**2, 4 * 1024**3, 64


class _Written:
    """What has a shape and a dtype in the target."""

    __slots__ = ()
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes in the target."""
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class MegatronParameter(_Written):
    """One parameter to write to a Megatron checkpoint. shape: the whole one, padded. dtypes by torch's names, those of
    the source for each HF tensor of the rule."""

    rule: TensorRule
    box: GlobalBox
    shape: tuple[int, ...]
    source_dtypes: tuple[str, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class HFTensor(_Written):
    """One tensor to write to an HF checkpoint. members: what it holds of experts, expert by expert; none of others."""

    name: str
    shape: tuple[int, ...]
    source_dtype: str
    dtype: str
    members: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """One file to write, or a part of one. before, after: what the file has besides, of HF files only."""

    file: str
    items: tuple[MegatronParameter, ...] | tuple[HFTensor, ...]
    before: tuple[HFTensor, ...] = ()
    after: tuple[HFTensor, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(item.num_bytes for item in self.items)

    @property
    def part(self) -> tuple[int, int] | None:
        """Numbers of the first tensor in the file and of the one after the last; None where it is the whole file."""
        first = len(self.before)
        return (first, first + len(self.items)) if self.before or self.after else None

    @property
    def in_file(self) -> tuple[HFTensor, ...]:
        """All that the file holds, of HF files."""
        return (*self.before, *(item for item in self.items if isinstance(item, HFTensor)), *self.after)

    def parts(self, most_bytes: int) -> list[Job]:
        """Return jobs of at most so many bytes (or one tensor) that write the file together; of Megatron one."""
        tensors = tuple(item for item in self.items if isinstance(item, HFTensor))
        if not tensors:
            return [self]
        jobs, first = [], 0
        for group in grouped(tensors, most_bytes, _NUM_BYTES):
            last = first + len(group)
            jobs.append(Job(self.file, tuple(group), tensors[:first], tensors[last:]))
            first = last
        return jobs


@dataclass(frozen=True)
class Plan:
    """A conversion. source: folder of tensors, Hugging Face's or Megatron's. config: what describes the model.

    cast: the dtype that tensors get, by torch's name; None: each keeps its own. ignored: what the source holds and
    the target will not. piece_bytes: what a process holds of a tensor at a time, and the largest chunk of a Megatron
    checkpoint.
    """

    source: Path
    source_format: Literal["hf", "megatron"]
    config: ModelConfig
    format: Format
    cast: str | None
    jobs: tuple[Job, ...]
    ignored: tuple[str, ...] = ()
    piece_bytes: int = PIECE_BYTES

    @property
    def num_bytes(self) -> int:
        """Bytes of tensors in all files."""
        return sum(job.num_bytes for job in self.jobs)

    @property
    def num_tensors(self) -> int:
        """Parameters, or HF tensors, that are written."""
        return sum(len(job.items) for job in self.jobs)

    def weights_folder(self, target: Path) -> Path:
        """Return where in a target the files with tensors are."""
        return target / RELEASE if self.format == TORCH_DIST else target

    def further(self) -> list[str]:
        """Return the source's tensors of layers that predict tokens after the next, which go along as they are: out of
        a checkpoint of Hugging Face into the target's `FURTHER_FILE`, and out of such a file."""
        if self.source_format == "hf":
            with HFCheckpoint(self.source) as tensors:
                return further_tensors(read_compared_shape(self.config), tensors)
        file = self.config / FURTHER_FILE if isinstance(self.config, Path) else None
        return [*read_header(file)] if file is not None and file.is_file() else []

    @cached_property
    def tensors(self) -> HFCheckpoint | MegatronWeights:
        """The source as HF tensors, looked through once in a process; closed, it opens its files again when it is read.
        Raises ModelError, CheckpointError."""
        if self.source_format == "hf":
            return HFCheckpoint(self.source)
        return MegatronWeights(self.source, read_model_shape(self.config))


def plan_to_megatron(
    source: Path,
    format_: Format,
    dtype: str | None,
    *,
    per_layer_keys: bool = False,
    megatron_config: ModelConfig | None = None,
) -> Plan:
    """Plan HF -> Megatron, or Megatron -> Megatron in another format or dtype.

    Args:
        source: HF checkpoint directory; with megatron_config, a Megatron checkpoint. format_: "daro" or "torch_dist".
        dtype: fp32, bf16, fp16; None: as it is.
        per_layer_keys: a key for each layer, not one tensor for all (a model with layers of two kinds has them anyway).
        megatron_config: what describes the model of a Megatron checkpoint; None: the source is HF's.

    Raises:
        CheckpointError, ModelError: the source is torn, or its tensors are not exactly those of its config.json.
    """
    config = source if megatron_config is None else megatron_config
    shape = read_compared_shape(config)
    rules = hf_to_megatron(shape, fused_norms=True)
    with HFCheckpoint(source) if megatron_config is None else MegatronWeights(source, shape) as tensors:
        folder = tensors.directory
        ignored = tensors.ignored if isinstance(tensors, MegatronWeights) else _extra_tensors(shape, rules, tensors)
        kept = set(further_tensors(shape, ignored))
        boxes = [box.without_layers() if per_layer_keys else box for box in global_boxes(rules)]
        parameters = [_parameter(r, b, tensors, dtype) for r, b in zip(rules, boxes, strict=True)]
    _check_dtypes(parameters)
    name = {"daro": "shard_{:05d}.safetensors", "torch_dist": "__{}_0.distcp"}[format_]
    size = min(max(sum(p.num_bytes for p in parameters) // _FILES, _LEAST_FILE_BYTES), _MOST_FILE_BYTES)
    jobs = [Job(name.format(i), tuple(group)) for i, group in enumerate(grouped(parameters, size, _NUM_BYTES))]
    kind: Literal["hf", "megatron"] = "hf" if megatron_config is None else "megatron"
    return Plan(folder, kind, config, format_, _cast(dtype), tuple(jobs), tuple(n for n in ignored if n not in kept))


def plan_to_hf(source: Path, config: ModelConfig, dtype: str | None, max_shard_bytes: int) -> Plan:
    """Plan Megatron -> HF.

    Args:
        source: Megatron checkpoint. config: of its model. dtype: fp32, bf16, fp16; None: as it is.
        max_shard_bytes: files hold at most this many bytes of tensors, or one larger tensor.

    Raises:
        CheckpointError, ModelError: the source is torn, or not of the model of this config.json.
    """
    shape = read_compared_shape(config)
    with MegatronWeights(source, shape) as weights:
        tensors: list[HFTensor] = []
        for name in weights:
            _check_dtype(name, weights.dtype(name), dtype)
            own = torch_name(weights.dtype(name))
            target = own if weights.rule(name).fp32 else _cast(dtype) or own
            place, dims = places(shape).get(name), weights.shape(name)
            if place is None:
                tensors.append(HFTensor(name, dims, own, target))
            elif tensors[-1].name == place.stack:
                tensors[-1] = replace(tensors[-1], members=(*tensors[-1].members, name))
            elif shape.experts:
                stacked = (shape.experts.number, *dims[1:], dims[0] * place.parts)
                tensors.append(HFTensor(place.stack, stacked, own, target, (name,)))
        groups = list(grouped(tensors, max_shard_bytes, _NUM_BYTES))
        jobs = [Job(shard_name(i, len(groups)), tuple(group)) for i, group in enumerate(groups)]
        return Plan(weights.directory, "megatron", config, "hf", _cast(dtype), tuple(jobs), tuple(weights.ignored))


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of a torch name such as "bfloat16"."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{name} is no dtype")
    return dtype


def torch_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype; the inverse of `torch_dtype`."""
    return str(dtype).removeprefix("torch.")


def _cast(dtype: str | None) -> str | None:
    """Return torch's name of a dtype of `DTYPES`."""
    return torch_name(DTYPES[dtype]) if dtype else None


def _check_dtype(name: str, dtype: torch.dtype, cast: str | None) -> None:
    """Refuse dtypes that the target cannot have. Raises ModelError."""
    if dtype in DTYPES.values() or (dtype == torch.float64 and cast):
        return
    advice = "Choose one with --dtype" if dtype == torch.float64 else QUANTIZED
    raise ModelError(f"{name} is {dtype}; allowed: fp32, bf16, fp16. {advice}")


def _parameter(
    rule: TensorRule, box: GlobalBox, tensors: HFCheckpoint | MegatronWeights, dtype: str | None
) -> MegatronParameter:
    own = source_dtypes(rule, tensors) if dtype else (common_dtype(rule, tensors),) * len(rule.hf_names)
    for name, source_dtype in zip(rule.hf_names, own, strict=True):
        _check_dtype(name, source_dtype, dtype)
    shape = rule.local_shape(1)
    if rule.kind == "vocab":
        rows = padded_vocab_size(rule.hf_shapes[0][0], 1, multiple=VOCABULARY_MULTIPLE)
        shape = (rows, *shape[1:])
    target = None if rule.fp32 else _cast(dtype)
    return MegatronParameter(rule, box, shape, tuple(map(torch_name, own)), target or torch_name(own[0]))


def _check_dtypes(parameters: Iterable[MegatronParameter]) -> None:
    """Refuse layers of one tensor that differ in dtype. Raises ModelError."""
    first: dict[str, MegatronParameter] = {}
    for parameter in parameters:
        other = first.setdefault(parameter.box.key, parameter)
        if other.dtype != parameter.dtype:
            raise ModelError(
                f"{parameter.rule.hf_names[0]} is {parameter.dtype}, but {other.rule.hf_names[0]} is {other.dtype}; "
                "they are layers of one Megatron tensor. Choose one with --dtype."
            )


def _extra_tensors(shape: ModelShape, rules: Sequence[TensorRule], tensors: HFCheckpoint) -> list[str]:
    """Tensors that no rule uses and that may be left out. Raises ModelError for one that may not."""
    for name in unknown_tensors(shape, tensors):
        raise ModelError(
            f"{tensors.directory} holds {name} of shape {tensors.shape(name)}, which a {shape.family} model of its "
            "config.json does not have. Nothing was converted; is config.json that of this checkpoint?"
        )
    used = {name for rule in rules for name in rule.hf_names}
    ignored = [name for name in tensors if name not in used]
    if shape.tie and "lm_head.weight" in ignored:
        check_tied(tensors)
    return ignored


def check_tied(tensors: HFCheckpoint, rows: int = 4096) -> None:
    """Refuse an output layer that differs from the embedding where config.json ties them: transformers unties them."""
    names = ("lm_head.weight", "model.embed_tokens.weight")
    shapes = [tensors.shape(name) for name in names]
    is_same = shapes[0] == shapes[1] and all(
        torch.equal(*(tensors.read(name, start, min(start + rows, shapes[0][0])) for name in names))
        for start in range(0, shapes[0][0], rows)
    )
    if not is_same:
        raise ModelError(
            f"{tensors.directory}: lm_head.weight differs from model.embed_tokens.weight, though config.json says "
            "tie_word_embeddings: true. Set it to false if the model has an output layer of its own."
        )


T = TypeVar("T")


def grouped(items: Iterable[T], most_bytes: int, bytes_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield runs of items of at most so many bytes, or of one larger item."""
    group: list[T] = []
    total = 0
    for item in items:
        if group and total + bytes_of(item) > most_bytes:
            yield group
            group, total = [], 0
        group.append(item)
        total += bytes_of(item)
    if group:
        yield group
