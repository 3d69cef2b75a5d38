"""A Megatron checkpoint as Hugging Face tensors: opened in any supported format, and read a few rows at a time.

Checkpoints of `train` and of `convert`, and `torch_dist` checkpoints of Megatron-LM, Megatron-Bridge and slime ->
`MegatronWeights` -> conversion to HF, verification, and the start of a run. Optimizer state is ignored. Refuses a
checkpoint whose tensors are not those of the model's config.json.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from megatron_daro.config.model_shape import ModelShape, require_regular_files
from megatron_daro.convert import daro_format, torch_dist
from megatron_daro.convert.checkpoint_keys import GlobalBox, global_boxes, possible_boxes
from megatron_daro.convert.mapping import TensorRule, hf_to_megatron
from megatron_daro.convert.pieces import PieceStore
from megatron_daro.convert.runs import Run, hf_runs
from megatron_daro.errors import CheckpointError

_WEIGHT_PREFIXES = ("decoder.", "embedding.", "output_layer.", "mtp.")
_ITERATION = re.compile(r"[0-9]{1,18}")
_RULES_KEPT = 8
_VERL_WEIGHTS = tuple(f"{actor}{model}dist_ckpt" for actor in ("", "actor/") for model in ("model/", ""))
_VERL_MODELS = tuple(f"{actor}{model}huggingface" for actor in ("", "actor/") for model in ("model/", ""))
_SAVE_AGAIN = "save it with --ckpt-format torch_dist (Megatron-LM: --ckpt-convert-format, --ckpt-convert-save)"


def checkpoint_directory(path: Path) -> Path:
    """Return the folder with the tensors of a Megatron checkpoint.

    Args:
        path: that folder; a folder with `latest_checkpointed_iteration.txt`, as for Megatron-LM's `--load`; or verl's
            `global_step_N`, its `actor`, or the folder above.

    Raises:
        CheckpointError: it is none of these, or its format is not supported.
    """
    if (path / daro_format.METADATA_FILE).is_file():
        return path
    for inner in _VERL_WEIGHTS:
        if (path / inner / daro_format.METADATA_FILE).is_file():
            return path / inner
    tracker = path / torch_dist.TRACKER_FILE
    if tracker.is_file():
        named = tracker.read_text(errors="replace").strip()
        if named != torch_dist.RELEASE and not _ITERATION.fullmatch(named):
            raise CheckpointError(
                f"{tracker} says {named[:80]!r}; allowed: the number of an iteration, or {torch_dist.RELEASE}; copy it "
                "again, or give the folder of one iteration"
            )
        names = (named,) if named == torch_dist.RELEASE else (f"iter_{int(named):07d}", f"global_step_{named}")
        folders = [path / name for name in names if (path / name).is_dir()]
        if folders:
            return checkpoint_directory(folders[0])
        raise CheckpointError(f"{tracker} says {named!r}, but {path / names[0]} is no checkpoint; copy it again")
    raise CheckpointError(f"{path} is no Megatron checkpoint: {_why_none(path)}")


def _why_none(path: Path) -> str:
    if not path.is_dir():
        return "it is a file; give its directory" if path.exists() else "there is no such directory"
    if any(path.glob("mp_rank_*")):
        return (
            "it holds mp_rank_* folders of pickles, Megatron-LM's `--ckpt-format torch`, which are not read. Load it "
            f"with Megatron-LM and {_SAVE_AGAIN}"
        )
    models = [inner for inner in _VERL_MODELS if any((path / inner).glob("*.safetensors"))]
    if models:
        return f"{path / models[0]} holds its weights in Hugging Face's format; give that to --hf"
    near = sorted(p.parent.name for p in path.glob(f"*/{daro_format.METADATA_FILE}"))
    hint = f"; it holds {', '.join(near[-3:])}: give one of them" if near else ""
    return f"it has no {daro_format.METADATA_FILE}{hint}"


def open_pieces(directory: Path) -> PieceStore:
    """Open a checkpoint folder of either format. Raises CheckpointError."""
    backend, _ = daro_format.read_backend(directory)
    if backend == torch_dist.BACKEND:
        return torch_dist.TorchDistPieces(directory)
    if backend != daro_format.BACKEND:
        raise CheckpointError(
            f"{directory} is a checkpoint of format {backend!r}; allowed: {torch_dist.BACKEND!r} and "
            f"{daro_format.BACKEND!r}. Load it with the program that wrote it and {_SAVE_AGAIN}"
        )
    daro_format.check_format(directory)
    return daro_format.DaroPieces(directory)


class MegatronWeights(Mapping[str, Tensor]):
    """HF name -> tensor of a Megatron checkpoint; a tensor is read when it is asked for."""

    def __init__(self, path: Path, shape: ModelShape) -> None:
        """Open the checkpoint and compare its tensors with those of the model.

        Args:
            path: as in `checkpoint_directory`. shape: of the model.

        Raises:
            CheckpointError: it is torn, of another model, or has weights that this model does not have.
        """
        self.directory = checkpoint_directory(path)
        require_regular_files(self.directory)
        self.pieces = open_pieces(self.directory)
        self.rules = hf_to_megatron(shape, fused_norms=True)
        self._keys = set(self.pieces.keys())
        self._used: set[str] = set()
        self._boxes = {
            r.megatron_name: self._fitting(r, b) for r, b in zip(self.rules, global_boxes(self.rules), strict=True)
        }
        self._source = {name: (rule, i) for rule in self.rules for i, name in enumerate(rule.hf_names)}
        self.ignored = self._check_extra(shape)
        self._runs = lru_cache(_RULES_KEPT)(self._runs_of)

    def box(self, rule: TensorRule) -> GlobalBox:
        """Return where the checkpoint has a rule's parameter."""
        return self._boxes[rule.megatron_name]

    def rule(self, name: str) -> TensorRule:
        """Return the rule of the parameter that contains an HF tensor."""
        return self._source[name][0]

    def parameter_shape(self, rule: TensorRule) -> tuple[int, ...]:
        """Return the shape of a rule's whole parameter, with the padding of this checkpoint."""
        box = self.box(rule)
        return self.pieces.shape(box.key)[len(box.index) :]

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of an HF tensor."""
        return self.pieces.dtype(self.box(self.rule(name)).key)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of an HF tensor."""
        rule, i = self._source[name]
        return rule.hf_shapes[i]

    def read(
        self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """Return rows [start, stop) and `columns` (None: all) of an HF tensor; with `out`, fill and return that tensor.
        Raises CheckpointError."""
        rule, i = self._source[name]
        dims = rule.hf_shapes[i]
        width = dims[1:] if columns is None else (columns[1] - columns[0],)
        values = torch.empty((stop - start, *width), dtype=self.dtype(name)) if out is None else out
        for run in self._runs(rule)[i]:
            first, last = max(run.start, start), min(run.stop, stop)
            if first < last:
                at = run.at + first - run.start
                self.read_parameter(rule, at, at + last - first, columns, out=values[first - start : last - start])
        return values

    def read_parameter(
        self,
        rule: TensorRule,
        start: int,
        stop: int,
        columns: tuple[int, int] | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return rows [start, stop) and `columns` (None: all) of a rule's parameter in Megatron's layout; with `out`,
        fill that tensor."""
        box, dims = self.box(rule), self.parameter_shape(rule)
        offset, size = [start, *[0] * (len(dims) - 1)], [stop - start, *dims[1:]]
        if columns is not None:
            offset[1], size[1] = columns[0], columns[1] - columns[0]
        ones = [1] * len(box.index)
        target = None if out is None else out[(None,) * len(ones)]
        return self.pieces.read(box.key, [*box.index, *offset], [*ones, *size], target).view(size)

    def close(self) -> None:
        """Close the files; they are opened again when needed."""
        self.pieces.close()

    def __enter__(self) -> MegatronWeights:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._source:
            raise KeyError(name)
        return self.read(name, 0, self.shape(name)[0])

    def __contains__(self, name: object) -> bool:
        return name in self._source

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._source)

    def _runs_of(self, rule: TensorRule) -> list[list[Run]]:
        return hf_runs(rule, padded_vocab=self.parameter_shape(rule)[0] if rule.kind == "vocab" else None)

    def _fitting(self, rule: TensorRule, box: GlobalBox) -> GlobalBox:
        """Return the box in which this checkpoint has the parameter. Raises CheckpointError: it has no such key, or
        another shape."""
        first_key = box.key
        present = [piece for piece in possible_boxes(box) if piece.key in self._keys]
        self._used |= {b.key for b in present}
        if not present:
            raise CheckpointError(
                f"{self.directory} holds no {first_key}, which {rule.hf_names[0]} comes from; is it of this model?"
            )
        box = present[0]
        actual, expected = self.pieces.shape(box.key), (*box.sizes, *rule.local_shape(1))
        axis = len(box.sizes)
        is_padded = rule.kind == "vocab" and actual[axis] >= expected[axis]
        if actual != expected and not (
            is_padded and (*actual[:axis], *actual[axis + 1 :]) == (*expected[:axis], *expected[axis + 1 :])
        ):
            raise CheckpointError(f"{box.key} has shape {actual} in {self.directory}; config.json asks for {expected}")
        return box

    def _check_extra(self, shape: ModelShape) -> list[str]:
        """Return the keys that no rule uses. Raises CheckpointError if weights are among them."""
        extra = sorted(self._keys - self._used)
        strange = [key for key in extra if key.startswith(_WEIGHT_PREFIXES) and "_extra_state" not in key]
        if strange:
            more = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
            tied = " (its embeddings are tied)" if shape.tie and strange == ["output_layer.weight"] else ""
            raise CheckpointError(
                f"{self.directory} holds {strange[0]} of shape {self.pieces.shape(strange[0])}{more}, which the model "
                f"of config.json does not have{tied}; nothing was converted"
            )
        return extra

    @property
    def num_bytes(self) -> int:
        """Bytes of the model's HF tensors."""
        return sum(math.prod(self.shape(name)) * self.dtype(name).itemsize for name in self)
