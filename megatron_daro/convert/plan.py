"""The plan of a conversion, made before the first tensor is read: which files, with which tensors, from which source.

Source checkpoint and options -> `plan_to_megatron` or `plan_to_hf` -> jobs, one for each file, which worker processes
carry out (workshop/convert/jobs.py). A Megatron checkpoint is read as HF tensors, so that the same code writes Megatron
files from either source. Everything that is wrong with the source's headers is refused here.
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
"""The folder with a model's config.json and tokenizer, or the content of a config.json that exists in no file."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
VOCABULARY_MULTIPLE = 128
"""Rows of the embedding are padded to a multiple of this, as Megatron-LM does; loading cuts or pads them again."""
FURTHER_FILE = "mtp.safetensors"
"""File in a target, beside config.json, for the layers that predict tokens after the next, which are not computed
here."""
PART_BYTES = 512 * 1024**2
"""Bytes of an HF file that one process writes at a time."""
_NUM_BYTES = attrgetter("num_bytes")
_LEAST_FILE_BYTES, _MOST_FILE_BYTES, _FILES = 256 * 1024**2, 4 * 1024**3, 64


class _Written:
    """A tensor in the target, with its shape and dtype."""

    __slots__ = ()
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor in the target."""
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class MegatronParameter(_Written):
    """One parameter to write to a Megatron checkpoint. shape: of the whole parameter, padded. dtypes are torch's names;
    source_dtypes has one for each HF tensor of the rule."""

    rule: TensorRule
    box: GlobalBox
    shape: tuple[int, ...]
    source_dtypes: tuple[str, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class HFTensor(_Written):
    """One tensor to write to an HF checkpoint. members: names of the experts' tensors that it holds, expert by expert;
    empty if it is not a stack."""

    name: str
    shape: tuple[int, ...]
    source_dtype: str
    dtype: str
    members: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """One file to write, or a part of one. before, after: the tensors in front of and behind the part, of HF files
    only."""

    file: str
    items: tuple[MegatronParameter, ...] | tuple[HFTensor, ...]
    before: tuple[HFTensor, ...] = ()
    after: tuple[HFTensor, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the job's tensors."""
        return sum(item.num_bytes for item in self.items)

    @property
    def part(self) -> tuple[int, int] | None:
        """(number of the part's first tensor in the file, that of its last one plus 1); None for a whole file."""
        first = len(self.before)
        return (first, first + len(self.items)) if self.before or self.after else None

    @property
    def in_file(self) -> tuple[HFTensor, ...]:
        """All tensors of the file; only for HF files."""
        return (*self.before, *(item for item in self.items if isinstance(item, HFTensor)), *self.after)

    def parts(self, most_bytes: int) -> list[Job]:
        """Return jobs of at most this many bytes (or one tensor) that together write the file; a Megatron file remains
        one job."""
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
    """A conversion. source: folder with tensors, Hugging Face's or Megatron's. config: describes the model.

    cast: torch's name of the dtype that tensors get; None: each keeps its own. ignored: tensors of the source that the
    target will not have. piece_bytes: how much of a tensor a process holds at a time, and the largest chunk of a
    Megatron checkpoint.
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
        """Return the folder of a target that has the files with tensors."""
        return target / RELEASE if self.format == TORCH_DIST else target

    def further(self) -> list[str]:
        """Return the names of the tensors that are copied unchanged: those of layers that predict tokens after the
        next. From a Hugging Face checkpoint they go to the target's `FURTHER_FILE`; with a Megatron checkpoint they
        come from such a file."""
        if self.source_format == "hf":
            with HFCheckpoint(self.source) as tensors:
                return further_tensors(read_compared_shape(self.config), tensors)
        file = self.config / FURTHER_FILE if isinstance(self.config, Path) else None
        return [*read_header(file)] if file is not None and file.is_file() else []

    @cached_property
    def tensors(self) -> HFCheckpoint | MegatronWeights:
        """The source as HF tensors, whose headers are read once per process. After `close` it opens its files again
        when it is read. Raises ModelError, CheckpointError."""
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
        dtype: fp32, bf16, fp16; None: unchanged.
        per_layer_keys: a key for each layer, not one tensor for all layers (a model with two kinds of layers always has
            a key for each).
        megatron_config: describes the model of a Megatron checkpoint; None: the source is a Hugging Face checkpoint.

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
        source: Megatron checkpoint. config: of its model. dtype: fp32, bf16, fp16; None: unchanged.
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
    """Return torch's name of a dtype that is named as in `DTYPES`; None for None."""
    return torch_name(DTYPES[dtype]) if dtype else None


def _check_dtype(name: str, dtype: torch.dtype, cast: str | None) -> None:
    """Raise ModelError for a dtype that the target cannot have."""
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
    """Raise ModelError if layers that share a tensor differ in dtype."""
    first: dict[str, MegatronParameter] = {}
    for parameter in parameters:
        other = first.setdefault(parameter.box.key, parameter)
        if other.dtype != parameter.dtype:
            raise ModelError(
                f"{parameter.rule.hf_names[0]} is {parameter.dtype}, but {other.rule.hf_names[0]} is {other.dtype}; "
                "they are layers of one Megatron tensor. Choose one with --dtype."
            )


def _extra_tensors(shape: ModelShape, rules: Sequence[TensorRule], tensors: HFCheckpoint) -> list[str]:
    """Return the tensors that no rule uses and that may be left out. Raises ModelError for one that may not."""
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
    """Raise ModelError if config.json ties output layer and embedding although they differ: transformers would untie
    them."""
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
    """Yield groups of consecutive items of at most this many bytes each, or of one larger item."""
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
