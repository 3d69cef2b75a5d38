"""What a GPU has: memory, arithmetic and links, from the vendors' data sheets, or from a file of the user's own.

`--gpu NAME` or `--gpu FILE.yaml` -> Gpu -> memory and times of the plan. Refuses unknown names (and suggests the
nearest ones) and files with wrong fields.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from megatron_daro.config import yaml_text
from megatron_daro.config.base import Section
from megatron_daro.config.problems import nearest_paths
from megatron_daro.errors import ConfigError

Positive = Annotated[float, Field(gt=0)]


class Gpu(Section):
    """One GPU and its surroundings. Bandwidths are one-directional, in 10^9 bytes a second; arithmetic is dense."""

    name: str
    """Its name."""
    memory_mib: Positive
    """Memory that a program sees, MiB."""
    bf16_tflops: Positive
    """Peak bf16 matrix products, 10^12 floating-point operations a second, without sparsity."""
    fp8_tflops: Annotated[float, Field(ge=0)] = 0.0
    """The same in fp8; 0: no fp8."""
    memory_gb_s: Positive
    """Peak bandwidth of its memory."""
    link_gb_s: Positive
    """Bandwidth to the other GPUs of the node."""
    network_gb_s: Positive = 50.0
    """Bandwidth to GPUs of other nodes: its share of the network cards."""
    gpus_per_node: Annotated[int, Field(ge=1)] = 8
    """GPUs of a node; a tensor-parallel group of the trainer lies within one."""
    linked_gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs that the fast links join, if these links span several nodes (a rack of 72); 0: the GPUs of one node."""
    sustained: Positive = 1.0
    """Sustained share of the peak relative to other GPUs of its generation; a higher power limit makes it larger."""
    source: str = "own numbers"
    """Where the numbers are from."""

    @property
    def memory_bytes(self) -> float:
        """memory_mib in bytes."""
        return self.memory_mib * 2**20

    @property
    def linked(self) -> int:
        """GPUs that the fast links join, at least those of one node."""
        return max(self.linked_gpus, self.gpus_per_node)


def _gpu(
    name: str, mib: int, bf16: float, fp8: float, memory: float, link: float, network: float, node: int, linked: int,
    source: str, sustained: float = 1.0,
) -> Gpu:  # fmt: skip
    return Gpu(
        name=name,
        memory_mib=mib,
        bf16_tflops=bf16,
        fp8_tflops=fp8,
        memory_gb_s=memory,
        link_gb_s=link,
        network_gb_s=network,
        gpus_per_node=node,
        linked_gpus=linked,
        source=source,
        sustained=sustained,
    )


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100-40g", 40960, 312, 0, 1555, 300, 25, 8, 8, "NVIDIA A100 data sheet; HDR network of DGX A100"),
        _gpu("a100-80g", 81920, 312, 0, 2039, 300, 25, 8, 8, "NVIDIA A100 data sheet (SXM); HDR network of DGX A100"),
        _gpu("h20-96g", 97871, 148, 296, 4000, 450, 50, 8, 8, "NVIDIA H20 data sheet; NDR network"),
        _gpu(
            "h100-80g", 81559, 989, 1979, 3350, 450, 50, 8, 8, "NVIDIA H100 data sheet (SXM); NDR network of DGX H100"
        ),
        _gpu("h200-141g", 143771, 989, 1979, 4800, 450, 50, 8, 8, "NVIDIA H200 data sheet (SXM); NDR of DGX H200"),
        _gpu("b200-180g", 183359, 2250, 4500, 7700, 900, 50, 8, 8, "NVIDIA DGX B200 data sheet, an eighth of it"),
        _gpu("b300-270g", 275040, 2250, 4500, 8000, 900, 100, 8, 8, "NVIDIA DGX B300 data sheet, an eighth of it"),
        _gpu("gb200-186g", 189471, 2500, 5000, 8000, 900, 50, 4, 72, "NVIDIA GB200 NVL72 data sheet; a tray as a node"),
        _gpu(
            "gb300-279g",
            284208,
            2500,
            5000,
            8000,
            900,
            100,
            4,
            72,
            "NVIDIA GB300 NVL72 data sheet; a tray as a node",
            1.17,
        ),
        _gpu("mi300x-192g", 196592, 1307, 2615, 5300, 448, 50, 8, 8, "AMD Instinct MI300X data sheet"),
    )
}
"""By name. Memory is what the driver reports. Links: NVLink or Infinity Fabric, half of the two-way number.
GB300 sustains more of the peak that it shares with GB200: 1,400 W to 1,200 W."""

_ALIASES = {name.rpartition("-")[0]: name for name in GPUS if not name.startswith("a100")}


def find_gpu(name: str) -> Gpu:
    """Return the GPU of this name, or of this YAML file.

    Raises:
        ConfigError: neither a known name nor a file with a GPU's fields.
    """
    key = name.lower()
    if key.endswith((".yaml", ".yml")):
        return _read(Path(name))
    known = GPUS.get(_ALIASES.get(key, key))
    if known is None:
        nearest = nearest_paths(key, list(GPUS), at_most=2)
        fix = f"did you mean {' or '.join(nearest)}?" if nearest else "give its numbers in a file: --gpu my_gpu.yaml"
        raise ConfigError(f"--gpu: got {name!r}; allowed: {', '.join(GPUS)}, or a YAML file (docs/plan.md); fix: {fix}")
    return known


def _read(path: Path) -> Gpu:
    fields = ", ".join(Gpu.model_fields)
    try:
        document = yaml_text.parse(path.read_text(encoding="utf-8"), path.name)
        if document.problems:
            raise ConfigError("; ".join(map(str, document.problems)))
        return Gpu.model_validate_json(json.dumps(document.value))
    except OSError as error:
        raise ConfigError(f"--gpu: got {str(path)!r} ({error.strerror}); allowed: a YAML file; fix: check it") from None
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors())
        raise ConfigError(f"--gpu: got {str(path)!r} with {wrong}; allowed: {fields}; fix: correct the file") from None
