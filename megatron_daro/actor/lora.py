"""Low-rank adapters (LoRA) on Megatron's linear layers: y = W x + scale * B (A x), with W frozen.

One A [rank, in] and one B [out, rank] for each Hugging Face matrix, as PEFT defines them. Megatron's layers hold
several matrices in one weight: each A is a parameter of its own, and the B's lie in one parameter as the matrices lie
in the weight, so that tensor parallelism cuts both alike, even where a key-value head is cut over several ranks.

Under tensor parallelism, ranks exchange only `rank` numbers for each token and matrix:

    layers cut by rows (q, k, v, gate, up)   A whole on each rank, A x gathered where ranks have parts of the sequence;
                                             B cut as the weight
    layers cut by columns (o, down)          A cut as the weight, A x summed over the ranks; B whole on each rank
    layers that are whole (to latents)       both whole on each rank, which has its own tokens

A parameter that is whole on each rank sees only that rank's tokens under sequence parallelism, and is marked so that
its gradients are summed over the ranks, as those of norms are. `attach` freezes a model's weights and puts adapters
beside them; from then on adapters are treated like any other parameters.
Source of the definition and of the first values: PEFT 0.21.2, `LoraLayer`.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from megatron_daro.actor import device
from megatron_daro.actor.linear_attention import in_sections
from megatron_daro.actor.megatron import (
    ShardedTensor,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    parallel_state,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron_daro.actor.model import Chunks, LocalParameter, local_parameters, mark_shard
from megatron_daro.actor.weights import gathered, sends_for_stage, tensor_parallel_place
from megatron_daro.config.lora import PEFT_PREFIX, WEIGHTS_FILE, LoraSection, matrix_of
from megatron_daro.config.model_shape import ModelShape
from megatron_daro.convert.mapping import TensorRule, shard
from megatron_daro.convert.parameters import Kind

_B = "B"


class Adapter(torch.nn.Module):
    """The adapters of the matrices in one linear layer; a parameter for each A, one for all B's."""

    _owners: Tensor

    def __init__(self, local: LocalParameter, targets: frozenset[str], section: LoraSection, *, sequence: bool) -> None:
        """Create the parameters; `attach` sets their values.

        Args:
            local: the layer's weight. targets: names of matrices, at least one of them in the layer.
            sequence: whether each rank of a tensor-parallel group has a part of the sequence.
        """
        super().__init__()
        rule, weight, rank = local.rule, local.parameter, section.rank
        chosen = [place for place, name in enumerate(rule.hf_names) if matrix_of(name) in targets]
        self.scale, self._sequence, self._is_cut = section.scale, sequence, rule.is_cut
        self._cut_by_columns = rule.kind == "columns"
        self._rules: dict[str, TensorRule] = {}
        kinds: tuple[Kind, Kind] = ("columns", "copy") if self._cut_by_columns else ("copy", rule.kind)
        for place in chosen:
            name, shape = rule.hf_names[place], (rank, rule.hf_shapes[place][1])
            own = replace(rule, kind=kinds[0], groups=1, hf_names=(_factor(name, "A"),), hf_shapes=(shape,))
            self._add(matrix_of(name), own, weight.new_empty(rank, weight.shape[1]))
        names, shapes = (_factor(name, "B") for name in rule.hf_names), ((s[0], rank) for s in rule.hf_shapes)
        own = replace(rule, kind=kinds[1], hf_names=tuple(names), hf_shapes=tuple(shapes))
        self._add(_B, own, weight.new_zeros(weight.shape[0], rank))
        self.exported = frozenset(_factor(rule.hf_names[place], letter) for place in chosen for letter in "AB")
        self.register_buffer("_owners", _owners(rule, chosen, weight), persistent=False)

    def _add(self, name: str, rule: TensorRule, values: Tensor) -> None:
        parameter = torch.nn.Parameter(values)
        megatron_name = f"{rule.megatron_name.removesuffix('weight')}adapter.{name}"
        self._rules[name] = replace(rule, megatron_name=megatron_name)
        if self._rules[name].is_cut:
            mark_shard(parameter, self._rules[name].dim)
        else:  # it is whole, but its rank may see only a part of the tokens
            parameter.sequence_parallel = self._sequence  # type: ignore[attr-defined]
        self.register_parameter(name, parameter)

    def forward(self, x: Tensor) -> Tensor:
        """Return what is added to the layer's output. Args: x: the layer's input, [tokens, 1, in] or
        [tokens, in] of this rank."""
        low = F.linear(x, self._joined_a())
        if self._cut_by_columns and self._sequence:
            low = reduce_scatter_to_sequence_parallel_region(low)
        elif self._cut_by_columns:
            low = reduce_from_tensor_model_parallel_region(low)
        elif self._is_cut and self._sequence:
            low = gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True)
        elif self._is_cut:
            low = copy_to_tensor_model_parallel_region(low)
        return F.linear(low, self._wide_b()) * self.scale

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Return this rank's part of W + scale * B A, added in fp32, in the dtype of the weight."""
        added = self._wide_b().float() @ self._joined_a().float()
        return (weight.float() + self.scale * added).to(weight.dtype)

    def locals(self) -> Iterator[LocalParameter]:
        """Yield the parameters with their rules."""
        for name, rule in self._rules.items():
            yield LocalParameter(self.get_parameter(name), rule, (rule,))

    def _joined_a(self) -> Tensor:
        """Return all A's, one below the other: [matrices * rank, in]."""
        return torch.cat([self.get_parameter(name) for name in self._rules if name != _B])

    def _wide_b(self) -> Tensor:
        """Return [out, matrices * rank]: each row of B in the columns of its own matrix, zeros in the others."""
        return (self.get_parameter(_B)[:, None] * self._owners[:, :, None]).flatten(1)


def _owners(rule: TensorRule, chosen: list[int], weight: Tensor) -> Tensor:
    """Return [out, matrices]: 1 where this rank's row of the weight belongs to that matrix."""
    owners = weight.detach().new_zeros(weight.shape[0], len(chosen))
    if rule.kind == "columns":
        return owners + 1
    row = 0
    for one in rule.slices(*tensor_parallel_place(rule)):
        length = one.stop - one.start
        if one.source in chosen:
            owners[row : row + length, chosen.index(one.source)] = 1
        row += length
    return owners


def _factor(hf_name: str, letter: str) -> str:
    return hf_name.replace(".weight", f".lora_{letter}.weight")


def attach(chunks: Chunks, shape: ModelShape, section: LoraSection, *, seed: int) -> None:
    """Freeze all weights and put adapters beside those that the section names. Adapters begin with a product of 0, or
    as they were stored.

    Args:
        chunks: with their weights, not yet wrapped. seed: of the run; an adapter's first values follow from it and from
            the matrix's name, so that they are the same in every layout.
    """
    targets = section.target_names(shape)
    layers = {id(layer.weight): layer for chunk in chunks for layer in chunk.modules() if hasattr(layer, "weight")}
    for local in local_parameters(chunks, shape):
        local.parameter.requires_grad_(False)
        local.parameter.is_base = True  # type: ignore[attr-defined]
        if local.parameter.dim() == 2 and targets.intersection(map(matrix_of, local.rule.hf_names)):
            layer = layers[id(local.parameter)]
            layer.adapter = Adapter(local, targets, section, sequence=chunks[0].config.sequence_parallel)
            layer.register_forward_hook(_add_adapter)
    if chunks[0].config.recompute_granularity is not None:
        for chunk in chunks:
            if chunk.pre_process:
                chunk.embedding.register_forward_hook(_with_gradient)
    _fill(chunks, shape, section, seed)


def is_base(parameter: Tensor) -> bool:
    """Whether this is a weight that `attach` froze: it stays what the model's files say, which are read at each start,
    so checkpoints and snapshots leave it out."""
    return getattr(parameter, "is_base", False)


def _add_adapter(layer: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]) -> Any:
    """Add the adapter's output to that of its linear layer; a forward hook."""
    (x, *_), (values, bias) = inputs, output
    weight = getattr(layer, "layer_norm_weight", None)  # Transformer Engine's layer includes the norm before it
    if weight is not None and layer.zero_centered_gamma:
        x = F.rms_norm(x.float(), (x.shape[-1],), 1 + weight.float(), layer.eps).to(x.dtype)
    elif weight is not None:
        x = F.rms_norm(x, (x.shape[-1],), weight, layer.eps)
    return values + layer.adapter(x), bias


def _with_gradient(module: Any, inputs: Any, output: Tensor) -> Tensor:
    """Make the output of a frozen embedding require a gradient; a forward hook. Under recomputation, upstream computes
    gradients for the parameters of a layer, or of a part of it, only if its input requires one."""
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output


@torch.no_grad()
def _fill(chunks: Chunks, shape: ModelShape, section: LoraSection, seed: int) -> None:
    stored = None if section.path is None else load_file(section.path / WEIGHTS_FILE)
    for adapter in _adapters(chunks):
        for local in adapter.locals():
            wholes = {}
            for name, dims in zip(local.rule.hf_names, local.rule.hf_shapes, strict=True):
                if stored is not None and name in adapter.exported:
                    wholes[name] = stored[PEFT_PREFIX + name]
                else:
                    wholes[name] = _drawn(name, dims, seed) if ".lora_A." in name else torch.zeros(dims)
            local.parameter.copy_(shard(local.rule, wholes, *tensor_parallel_place(local.rule)))


def _drawn(name: str, dims: tuple[int, ...], seed: int) -> Tensor:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
    return torch.nn.init.kaiming_uniform_(torch.empty(dims), a=math.sqrt(5), generator=generator)


def _adapters(chunks: Any) -> Iterator[Adapter]:
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, Adapter))


def gathered_adapters(chunks: Chunks, values_of: Any) -> Iterator[tuple[str, Tensor]]:
    """Gather values of this stage's adapters and yield them under PEFT's names. Collective like `gathered`.

    Args:
        values_of: (parameter) -> its values, its gradients, or any tensor of its shape.
    """
    for adapter in _adapters(chunks):
        for local in adapter.locals():
            for name, whole in gathered(local, values_of(local.parameter)):
                if name in adapter.exported:
                    yield PEFT_PREFIX + name, whole


def export_adapters(chunks: Chunks) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapters of all stages under PEFT's names: with several stages only on the first stage's sending rank,
    else on every rank for which `exports_weights` holds. Collective over all such ranks of every stage."""
    own = gathered_adapters(chunks, lambda parameter: device.shown(parameter.detach()))
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        yield from own
        return
    on_host = [(name, whole.cpu()) for name, whole in own]
    if sends_for_stage():
        stages: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
        dist.gather_object(on_host, stages, group=group, group_dst=0)
        for stage in stages or ():
            yield from stage


@contextlib.contextmanager
def without_adapters(chunks: Any) -> Iterator[None]:
    """Switch the adapters off, so that the frozen weights alone compute."""
    scales = {adapter: adapter.scale for adapter in _adapters(chunks)}
    try:
        for adapter in scales:
            adapter.scale = 0.0
        yield
    finally:
        for adapter, scale in scales.items():
            adapter.scale = scale


def sharded_adapters(chunk: torch.nn.Module) -> dict[str, Any]:
    """Return the adapters of one part of the model as Megatron's sharded tensors, by their names in the part."""
    replica = parallel_state.get_data_parallel_group(with_context_parallel=True).rank()
    names = {parameter: name for name, parameter in chunk.named_parameters()}
    found = {}
    for local in (local for adapter in _adapters([chunk]) for local in adapter.locals()):
        rank, size = tensor_parallel_place(local.rule)
        cut = ((local.rule.dim, rank, size),) if local.rule.is_cut else ()
        place = (0, 0 if cut else rank, replica)
        tensor = ShardedTensor.from_rank_offsets(local.rule.megatron_name, local.parameter, *cut, replica_id=place)
        runs = local.rule.sections if local.rule.kind == "heads" else ()
        rows = [sum(run.stop - run.start for run in section) // size for section in runs]
        rows = [len(local.parameter) // 2] * 2 if local.rule.kind == "gate_up" else rows
        found[names[local.parameter]] = in_sections(tensor, local.parameter, rows, rank, size) if rows else tensor
    return found
