"""Hugging Face checkpoints: lazy reading, and streamed, atomic writing.

Reading accepts one safetensors file, or several with an index, and reads only the bytes of the rows and columns that
are asked for. Every header is checked against its file's size when the checkpoint is opened, so a torn download is
refused before anything starts; so are pickles (`pytorch_model.bin`), since loading one can run code. Matrices in fp8
blocks (`NAME.weight` with `NAME.weight_scale_inv`, as DeepSeek-V3 is published) are read as bf16.

Writing takes a stream of (name, tensor) and holds one file's tensors in memory at a time. Everything is written and
synced to a sibling directory, which is then renamed, so the checkpoint appears whole or not at all. Nothing that exists
is overwritten, and no code (`*.py`) is copied with the tokenizer.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron_daro import durable
from megatron_daro.config.model_files import ADAPTER, ADAPTER_FILE
from megatron_daro.config.model_shape import dangling_link, read_json, text_part, without_further_layers
from megatron_daro.config.precision import FP8_BLOCK as BLOCK
from megatron_daro.config.safetensors_header import read_header
from megatron_daro.convert.pieces import Piece, PieceStore
from megatron_daro.convert.safetensors_file import DTYPES
from megatron_daro.convert.stacked import BLOCKS, SCALES, Place, dequantized, taken_apart
from megatron_daro.errors import ModelError
from megatron_daro.families import families

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_SHARDS = "model-?????-of-?????.safetensors"  # the names that transformers and `shard_name` give
_AGAIN = "Copy or download the checkpoint again."
_SCALES = "_scale_inv"


class HFCheckpoint(Mapping[str, Tensor]):
    """A checkpoint directory as a mapping from tensor name to tensor; a tensor is read when it is asked for.

    If the family of config.json keeps all experts of a layer in one tensor, the tensors of each expert appear by
    themselves (convert/stacked.py), in bf16 if the file has them in MXFP4.

    Args:
        directory: holds `model.safetensors`, or `model.safetensors.index.json` and the files it names. as_stored: show
            all experts of a layer in one tensor if the files hold them so.

    Raises:
        ModelError: there is no such directory or no safetensors in it, a file is missing or torn, an index does not fit
            its files, or it stands beside a separate `model.safetensors`, which transformers would read instead.
    """

    def __init__(self, directory: str | Path, *, as_stored: bool = False) -> None:
        self.directory = Path(directory)
        located = self._locate()
        pieces = {own: located[name] for own, name in self._names_of_text(located).items()}
        blocks = [n for n, piece in pieces.items() if piece.dtype == torch.float8_e4m3fn and n + _SCALES in pieces]
        self._scales = _WholePieces({name: pieces.pop(name + _SCALES) for name in blocks})
        self._experts = {} if as_stored else self._taken_apart(pieces)
        held = {stored for place, _ in self._experts.values() for stored in place.stored_as(pieces)}
        self._stacks = _WholePieces({name: pieces.pop(name) for name in held})
        self._pieces = _WholePieces(pieces)
        self._last: tuple[tuple[str, int], Tensor] | None = None
        for name in blocks:
            self._check_scales(name)

    def names(self) -> list[str]:
        """Return every tensor name, sorted."""
        return sorted([*self._pieces.by_name, *self._experts])

    def tensor(self, name: str) -> Tensor:
        """Return one tensor, read now, on the CPU, in the dtype of `dtype`. Raises ModelError: missing or torn."""
        return self.read(name, 0, self.shape(name)[0]) if self.shape(name) else self._pieces.read(name, [], [])

    def read(
        self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """Return rows [start, stop) and `columns` (None: all) of a tensor. Only these bytes are read, except that an
        expert in a stack is read whole.

        With `out`, that tensor is filled and returned.

        Raises:
            ModelError: the tensor is missing or torn.
        """
        dims = self.shape(name)
        if name in self._experts:
            place, _ = self._experts[name]
            values = self._of_expert(place)
            rows, in_turns = len(values) // place.parts, slice(place.part, None, place.parts)
            own = slice(place.part * rows, (place.part + 1) * rows) if place.packed else in_turns
            values = values[own][start:stop]
            values = values if columns is None else values[:, slice(*columns)]
            return values.clone(memory_format=torch.contiguous_format) if out is None else out.copy_(values)
        offset, size = [start, *[0] * (len(dims) - 1)], [stop - start, *dims[1:]]
        if columns is not None:
            offset[1], size[1] = columns[0], columns[1] - columns[0]
        if name not in self._scales.by_name:
            return self._pieces.read(name, offset, size, out)
        values = self._read_blocks(name, offset, size)
        return values if out is None else out.copy_(values)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, from the header. Raises ModelError if it is missing."""
        return self._experts[name][1] if name in self._experts else self._piece(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor is read. Raises ModelError if it is missing."""
        if name in self._experts:
            stack = self._stacks.by_name.get(self._experts[name][0].stack)
            return torch.bfloat16 if stack is None else stack.dtype
        return torch.bfloat16 if name in self._scales.by_name else self._piece(name).dtype

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors that were read so far."""
        return self._pieces.bytes_read + self._scales.bytes_read + self._stacks.bytes_read

    def close(self) -> None:
        """Close the files; they are opened again when needed."""
        for pieces in (self._pieces, self._scales, self._stacks):
            pieces.close()
        self._last = None

    def __enter__(self) -> HFCheckpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self:
            raise KeyError(name)
        return self.tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self._pieces.by_name or name in self._experts

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self._pieces.by_name) + len(self._experts)

    def _config(self) -> dict[str, Any]:
        file = self.directory / "config.json"
        return read_json(file) if file.is_file() else {}

    def _names_of_text(self, names: Iterable[str]) -> dict[str, str]:
        """Return the text model's name of each tensor -> its name in the files, which differs if the model also sees
        images."""
        config = self._config()
        inner = "model.language_model." if text_part(config) != config else "model."
        return {name.replace(inner, "model.", 1) if name.startswith(inner) else name: name for name in names}

    def _taken_apart(self, found: Mapping[str, Piece]) -> dict[str, tuple[Place, tuple[int, ...]]]:
        family = families().get(str(text_part(self._config()).get("model_type")))
        return taken_apart(family, {name: piece.shape for name, piece in found.items()}) if family else {}

    def _of_expert(self, place: Place) -> Tensor:
        """Return the part of a stack that belongs to one expert, [rows, columns] or [rows], and keep it, since gate and
        up are read one after the other."""
        stack, expert = place.stack, place.expert
        if self._last is None or self._last[0] != (stack, expert):

            def read(name: str) -> Tensor:
                dims = self._stacks.shape(name)
                return self._stacks.read(name, [expert, *[0] * (len(dims) - 1)], [1, *dims[1:]])[0]

            if stack in self._stacks.by_name:
                values = read(stack)
                values = values.t() if values.dim() > 1 and not place.packed else values
            else:
                values = dequantized(read(stack + BLOCKS), read(stack + SCALES))
            self._last = (stack, expert), values
        return self._last[1]

    def _read_blocks(self, name: str, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """Return a box of a matrix in fp8 blocks as bf16: each number times its block's scale, multiplied in fp32, as
        in a bf16 model of transformers 5.24 (integrations/finegrained_fp8.py, `Fp8Dequantize`)."""
        first = [start // BLOCK for start in offset]
        last = [-(-(start + count) // BLOCK) for start, count in zip(offset, size, strict=True)]
        scale_nk = self._scales.read(name, first, [b - a for a, b in zip(first, last, strict=True)]).float()
        wide_NK = scale_nk.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        for dim, (start, count) in enumerate(zip(offset, size, strict=True)):
            wide_NK = wide_NK.narrow(dim, start % BLOCK, count)
        return (self._pieces.read(name, offset, size).float() * wide_NK).bfloat16()

    def _check_scales(self, name: str) -> None:
        shape, scales = self.shape(name), self._scales.by_name[name]
        expected = tuple(-(-count // BLOCK) for count in shape)
        if len(shape) != 2 or scales.shape != expected or scales.dtype.itemsize < 2:
            raise ModelError(
                f"{self.directory}: {name}{_SCALES} is {scales.dtype} of shape {scales.shape}; allowed: fp32 or bf16 "
                f"of shape {expected}, one for each {BLOCK} x {BLOCK} of {name}. {_AGAIN}"
            )

    def _locate(self) -> dict[str, Piece]:
        """Return tensor name -> where it is. Reads the header of every file and checks it against the file's size."""
        if not self.directory.is_dir():
            what = "a file, not a directory" if self.directory.exists() else "not a directory"
            raise ModelError(f"{self.directory} is {what}. Give the local directory of the checkpoint.")
        index = self.directory / INDEX_FILE
        if index.is_file():
            return self._read_index(index)
        if (self.directory / SINGLE_FILE).is_file():
            return self._open(SINGLE_FILE)
        raise ModelError(self._why_nothing())

    def _why_nothing(self) -> str:
        for link in (self.directory / name for name in (INDEX_FILE, SINGLE_FILE)):
            if link.is_symlink():
                return f"{self.directory}: {dangling_link(link)}. {_AGAIN}"
        shards = sorted(p.name for p in self.directory.glob("*.safetensors"))
        if (self.directory / ADAPTER_FILE).is_file():
            return f"{self.directory} holds {ADAPTER}"
        if shards:
            return f"{self.directory} holds {shards[0]} but no {INDEX_FILE}. {_AGAIN}"
        if any(self.directory.glob("*.bin")) or any(self.directory.glob("*.pt")):
            return (
                f"{self.directory} holds its weights as pickles only (.bin, .pt). They are not read, because loading a "
                "pickle can run code. Save it again with transformers' save_pretrained, which writes safetensors."
            )
        return f"{self.directory} holds no {SINGLE_FILE} and no {INDEX_FILE}. {_AGAIN}"

    def _read_index(self, index: Path) -> dict[str, Piece]:
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            advice = "Save it as UTF-8 without a byte order mark." if "BOM" in str(error) else _AGAIN
            raise ModelError(
                f"{index} is not a safetensors index ({type(error).__name__}: {error}). {advice}"
            ) from None
        for file in files:
            if not isinstance(file, str) or Path(file).name != file:
                raise ModelError(f"{index} names {file!r}, which is not a file name in its own directory. {_AGAIN}")
        if not files:
            raise ModelError(f"{index} names no file. {_AGAIN}")
        self._check_unnamed(files)
        held = {file: self._open(file) for file in files}
        for name, file in weight_map.items():
            if name not in held[file]:
                raise ModelError(f"{self.directory / file} does not hold {name}, though {INDEX_FILE} says so. {_AGAIN}")
        for file, tensors in held.items():
            unnamed = sorted(name for name in tensors if weight_map.get(name) != file)
            if unnamed:
                more = f" and {len(unnamed) - 1} more" if len(unnamed) > 1 else ""
                raise ModelError(
                    f"{self.directory / file} holds {unnamed[0]}{more}, which {INDEX_FILE} does not name there; "
                    f"transformers would load it. {_AGAIN}"
                )
        return {name: held[file][name] for name, file in weight_map.items()}

    def _check_unnamed(self, named: list[str]) -> None:
        """Refuse weights beside the files that the index names: it would be unclear which of them are the model."""
        if SINGLE_FILE not in named and (self.directory / SINGLE_FILE).is_file():
            raise ModelError(
                f"{self.directory} holds {SINGLE_FILE} beside {INDEX_FILE}, which names {named[0]}: transformers reads "
                f"{SINGLE_FILE}, others the files of the index. Remove {SINGLE_FILE}, or the index with its files"
            )
        unnamed = [
            path.name for path in sorted(self.directory.glob(_SHARDS)) if path.is_file() and path.name not in named
        ]
        if unnamed:
            raise ModelError(
                f"{self.directory} holds {unnamed[0]}, which {INDEX_FILE} does not name. Remove it if it is left from "
                "an older checkpoint, else copy the index again"
            )

    def _open(self, file: str) -> dict[str, Piece]:
        path = self.directory / file
        if not path.is_file():
            raise ModelError(f"{path} is missing, though {INDEX_FILE} names it. {_AGAIN}")
        try:
            entries = read_header(path)
        except OSError as error:
            raise ModelError(f"{path} cannot be read ({error}). {_AGAIN}") from None
        return {
            name: Piece(name, (0,) * len(entry.shape), entry.shape, entry.shape, DTYPES[entry.dtype], path, entry.start)
            for name, entry in entries.items()
        }

    def _piece(self, name: str) -> Piece:
        if name not in self._pieces.by_name:
            tied = " Set tie_word_embeddings in config.json if the model shares it." if name == "lm_head.weight" else ""
            raise ModelError(f"{self.directory} holds no tensor {name}. Is it the model of its config.json?{tied}")
        return self._pieces.by_name[name]


class _WholePieces(PieceStore):
    """Tensors that are stored whole, each in one piece."""

    error = ModelError

    def __init__(self, by_name: dict[str, Piece]) -> None:
        super().__init__()
        self.by_name = by_name

    def keys(self) -> list[str]:
        return sorted(self.by_name)

    def boxes(self, key: str) -> list[Piece]:
        return [self.by_name[key]]

    def piece(self, key: str, box: Piece) -> Piece:
        return box

    def shape(self, key: str) -> tuple[int, ...]:
        return self.by_name[key].shape


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_TEMPLATE_FOLDER = "additional_chat_templates"  # transformers' folder of further templates, one .jinja file each
_LICENSES = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
"""Beginnings of the names of files that must be copied with the weights."""
_DTYPE_KEYS = ("dtype", "torch_dtype")  # of config.json: transformers 5 and 4; both read the second


def write_hf_checkpoint(
    directory: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    config: Mapping[str, Any],
    tokenizer_files: str | Path | None = None,
    *,
    max_shard_bytes: int = 5 * 1000**3,
) -> None:
    """Write a checkpoint directory that transformers loads.

    Args:
        directory: must not exist; its parent is created.
        tensors: (HF name, tensor), any device; consumed once, in order.
        config: the content of config.json, written as it is.
        tokenizer_files: a directory to copy the tokenizer and generation_config.json from; None copies nothing.
        max_shard_bytes: files hold at most this many bytes of tensors, or one larger tensor.

    Raises:
        ModelError: the directory exists, a name came twice, no tensor came, or the disk refused. Errors of the stream
            itself are passed on. In each case what was written is removed first.
    """
    target = Path(directory)
    if target.exists():
        raise ModelError(f"{target} exists already. Remove it or choose another directory; nothing was written.")
    try:
        with new_directory(target) as folder:
            writer = _ShardWriter(folder, max_shard_bytes)
            for name, tensor in tensors:
                writer.add(name, tensor)
            writer.finish()
            _write_json(folder / "config.json", dict(config))
            copy_tokenizer(tokenizer_files, folder)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{target} could not be written ({error}); nothing was left there. Free space or check rights."
        ) from error


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yield a folder beside the target; at the end it is synced and renamed to the target. After an error in the block
    it is removed, and the error is passed on.

    Args:
        target: must not exist, or be empty; its parent is created.
    """
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        yield partial
        durable.sync_folder(partial)
        partial.rename(target)
        durable.sync(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


class _ShardWriter:
    """Collects tensors until a file is full. File names contain the number of files, so they are given at the end."""

    def __init__(self, directory: Path, max_shard_bytes: int) -> None:
        self._directory = directory
        self._limit = max_shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._seen: set[str] = set()
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor. If the file would exceed the limit with it, write the file without it first."""
        if name in self._seen:
            raise ModelError(f"tensor {name} came twice; a checkpoint holds each name once.")
        if self._pending and self._pending_bytes + tensor.nbytes > self._limit:
            self._flush()
        self._seen.add(name)
        # A view would keep a larger buffer alive, and safetensors refuses tensors that share memory: clone it.
        shared = tensor.untyped_storage().nbytes() != tensor.nbytes or not tensor.is_contiguous()
        plain = tensor.detach().cpu()
        self._pending[name] = plain.clone().contiguous() if shared else plain
        self._pending_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write the remaining tensors, give the files their names, and write the index if there are several files."""
        if not self._seen:
            raise ModelError("no tensor came; a checkpoint without weights is not written.")
        self._flush()
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            file = shard_name(number, len(self._shards))
            (self._directory / _unnamed(number)).rename(self._directory / file)
            weight_map |= dict.fromkeys(names, file)
        write_index(self._directory, weight_map, self._total_bytes)

    def _flush(self) -> None:
        save_file(self._pending, self._directory / _unnamed(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0


def _unnamed(number: int) -> str:
    return f"shard-{number:05d}.tmp"


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def shard_name(number: int, count: int) -> str:
    """Return the name of file `number` (from 0) of `count`, as in transformers; tools look for these names."""
    return SINGLE_FILE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def write_index(directory: Path, weight_map: Mapping[str, str], total_bytes: int) -> None:
    """Write the index of several files: tensor name -> file. A single file gets no index."""
    if len(set(weight_map.values())) > 1:
        content = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(directory / INDEX_FILE, content)


def copy_tokenizer(source: str | Path | None, target: Path) -> None:
    """Copy the tokenizer, chat templates, generation_config.json and licence of a model; None copies nothing."""
    if source is None:
        return
    for path in Path(source).iterdir():
        if path.is_file() and (path.name in TOKENIZER_FILES or path.name.upper().startswith(_LICENSES)):
            shutil.copyfile(path, target / path.name)
    for path in Path(source, _TEMPLATE_FOLDER).glob("*.jinja"):
        (target / _TEMPLATE_FOLDER).mkdir(exist_ok=True)
        shutil.copyfile(path, target / _TEMPLATE_FOLDER / path.name)


def copy_model_files(
    source: Path | Mapping[str, Any],
    target: Path,
    dtype: str | None,
    *,
    always: bool = False,
    further_layers: bool = True,
    changes: Mapping[str, Any] = {},
) -> None:
    """Copy config.json, adapted to the target, and everything that `copy_tokenizer` copies. The target's config.json
    never says that the tensors are quantized.

    Args:
        source: the model's folder, or the content of config.json.
        dtype: torch's name of the dtype that config.json shall name, since loaders would otherwise convert to that of
            the source; None: as in the source. always: name it even if the source names none.
        further_layers: whether the target has layers that predict tokens after the next.
        changes: further changes to config.json.
    """
    folder = source if isinstance(source, Path) else None
    text = json.dumps(source) if folder is None else (folder / "config.json").read_text(encoding="utf-8")
    given = json.loads(text)
    config = text_part(given)
    was_quantized = config.pop("quantization_config", None) is not None  # the target's weights are not
    keys = [key for key in _DTYPE_KEYS if key in config] or (_DTYPE_KEYS[1:] if always else ())
    named = {**({} if dtype is None else dict.fromkeys(keys, dtype)), **changes}
    named |= {} if further_layers else without_further_layers(config)
    if folder is not None and not was_quantized and given == {**config, **named}:
        shutil.copyfile(folder / "config.json", target / "config.json")
    else:
        _write_json(target / "config.json", {**config, **named})
    copy_tokenizer(folder, target)
