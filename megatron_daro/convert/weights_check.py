"""Comparison of the tensors of a Hugging Face checkpoint with its config.json, by headers and without torch.

A start and its dry run call `check_weights` before any process. Refuses missing, misshapen, unknown and quantized
tensors, and norms and biases that are not finite; larger tensors are not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron_daro.config.model_files import QUANTIZED
from megatron_daro.config.model_shape import ModelShape, read_json
from megatron_daro.config.safetensors_header import Entry, read_header
from megatron_daro.convert.mapping import VALUE_HEAD, hf_tensor_shapes, output_rule, unknown_tensors
from megatron_daro.convert.stacked import names_in_files, taken_apart
from megatron_daro.errors import ModelError
from megatron_daro.families import families

_EXPONENTS = {
    "F64": ("<u8", 0x7FF << 52),
    "F32": ("<u4", 0xFF << 23),
    "F16": ("<u2", 0x1F << 10),
    "BF16": ("<u2", 0xFF << 7),
}
"""Dtypes that can be trained -> (numpy's type for its bits, the exponent bits: all set in infinities and NaN)."""
_FAULTS_SHOWN = 3
_HEAD_BIAS = "score.bias"


def check_weights(directory: Path, shape: ModelShape, *, critic: bool = False) -> None:
    """Compare the checkpoint in a folder with the model that its config.json describes.

    Args:
        directory: its safetensors headers must be readable. shape: from its config.json. critic: whether it is a
            critic's checkpoint, which may have a value head in place of the output layer, or neither.

    Raises:
        ModelError: names the first tensors that do not fit.
    """
    try:
        tensors = _tensors(directory, shape.family)
        needed = hf_tensor_shapes(shape)
        optional: dict[str, tuple[int, ...]] = {}
        if critic:
            outputs = output_rule(shape).hf_names if not shape.tie else ()
            optional = {name: needed.pop(name) for name in outputs}
            optional |= {VALUE_HEAD: (1, shape.hidden), _HEAD_BIAS: (1,)}
        faults = list(_faults(tensors, needed, optional, shape))
    except OSError as error:
        raise ModelError(f"{directory}: {error}; copy or download the complete model again") from None
    if faults:
        more = f"; and {len(faults) - _FAULTS_SHOWN} more" if len(faults) > _FAULTS_SHOWN else ""
        raise ModelError(
            f"{directory} does not hold the model of its config.json: {'; '.join(faults[:_FAULTS_SHOWN])}{more}. Copy "
            "or download config.json and weights of the same model again"
        )


def _tensors(directory: Path, family: str) -> dict[str, tuple[Path, Entry]]:
    index = directory / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.is_file():
        files = set(read_json(index)["weight_map"].values())
    paths = [directory / file for file in sorted(files)]
    tensors = {name: (path, entry) for path in paths for name, entry in read_header(path).items()}
    apart = taken_apart(families()[family], {name: entry.shape for name, (_, entry) in tensors.items()})
    experts: dict[str, tuple[Path, Entry]] = {}
    for name, (place, dims) in apart.items():
        path, entry = tensors[place.stored_as(tensors)[0]]
        size = entry.num_bytes // entry.shape[0]  # of an expert; its halves may mix gate and up, but both are checked
        start = entry.start + place.expert * size + place.part * (size // place.parts)
        experts[name] = path, Entry(name, entry.dtype if place.stack in tensors else "BF16", dims, start)
    held = {stored for place, _ in apart.values() for stored in place.stored_as(tensors)}
    return experts | {name: found for name, found in tensors.items() if name not in held}


def _faults(
    tensors: Mapping[str, tuple[Path, Entry]],
    needed: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, tuple[int, ...]],
    shape: ModelShape,
) -> Iterator[str]:
    for name in names_in_files(shape, (name for name in needed if name not in tensors)):
        yield f"{name} is missing"
    for name, dims in {**needed, **optional}.items():
        if name not in tensors:
            continue
        path, entry = tensors[name]
        if entry.shape != dims:
            yield f"{name} has shape {list(entry.shape)}, config.json asks for {list(dims)}"
        elif entry.dtype not in _EXPONENTS:
            yield f"{name} is {entry.dtype}, allowed are {', '.join(_EXPONENTS)} ({QUANTIZED})"
        elif len(dims) == 1 and not _is_finite(path, entry):
            yield f"{name} holds NaN or infinities"
    for name in unknown_tensors(shape, tensors):
        if name not in optional:
            yield f"{name} of shape {list(tensors[name][1].shape)} is not a tensor of a {shape.family} model"


def _is_finite(path: Path, entry: Entry) -> bool:
    """Return whether a tensor holds neither NaN nor infinities; reads all of it."""
    import numpy as np

    kind, exponent = _EXPONENTS[entry.dtype]
    with path.open("rb") as file:
        file.seek(entry.start)
        bits = np.frombuffer(file.read(entry.num_bytes), kind)
    return not bool(((bits & np.array(exponent, kind)) == exponent).any())
