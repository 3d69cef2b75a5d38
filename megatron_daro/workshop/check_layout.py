"""Builds every rank of a world without memory, to check that a layout uses each tensor of a checkpoint exactly once.

A config.json and a layout -> `check_world` -> what each rank holds. Each rank is built as in training without
Transformer Engine, on the meta device, with Megatron's own groups over a process group that sends nothing. Its
parameters are then traced back to the Hugging Face tensors by the rules that loading, export and conversion use.
Refuses: a layout that does not fit the model; anything held twice, never, or in another shape than that of its rule.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_daro.actor import parallel
from megatron_daro.actor.compat import quiet
from megatron_daro.actor.model import (
    Chunks,
    LocalParameter,
    bare_model,
    local_parameters,
    transformer_config,
)
from megatron_daro.actor.parallel import Layout
from megatron_daro.actor.weights import tensor_parallel_place
from megatron_daro.config.model_shape import ModelShape
from megatron_daro.convert.mapping import TensorRule, hf_tensor_shapes
from megatron_daro.convert.stacked import names_in_files
from megatron_daro.errors import ModelError

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one rank holds. stage: of the pipeline, from 0. size_bytes: of the weights alone."""

    rank: int
    stage: int
    parameters: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class WorldReport:
    """A layout that fits. tensors, parameters: of the whole model, as in its checkpoint."""

    layout: Layout
    tensors: int
    parameters: int
    ranks: tuple[RankShare, ...]


def check_world(
    shape: ModelShape,
    layout: Layout,
    *,
    dtype: str = "bf16",
    options: Mapping[str, object] | None = None,
    progress: Callable[[int], None] = lambda rank: None,
) -> WorldReport:
    """Build every rank of a world, one after the other, and check that the checkpoint fills it exactly.

    Args:
        shape: the model. layout: sizes; their product is the world.
        dtype: of the weights, fp32 or bf16.
        options: those of `actor.megatron` that belong to TransformerConfig, such as the layers of the first stage.
        progress: called with the number of each rank that is done.

    Returns:
        What each rank holds.

    Raises:
        ModelError: no parameter uses a tensor, or several do; no tensor fills a parameter, or its shape differs. The
            message names the first few. RuntimeError: this process has a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError("check_world: this process has a process group; ask in a process of its own")
    use, ranks = TensorUse(shape, layout), []
    for rank in range(layout.world_size):
        with quiet():
            ranks.append(_check_rank(use, shape, layout, rank, dtype, options))
        progress(rank)
    faults = list(use.faults())
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise ModelError(f"the layout does not hold the checkpoint: {'; '.join(faults[:_SHOWN])}{more}.")
    return WorldReport(layout, len(names_in_files(shape, hf_tensor_shapes(shape))), shape.num_parameters, tuple(ranks))


def _check_rank(
    use: TensorUse, shape: ModelShape, layout: Layout, rank: int, dtype: str, options: Mapping[str, object] | None
) -> RankShare:
    # From torch's own tests: this process group has every rank and sends nothing.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
    try:
        parallel.build_groups(layout, seed=1)
        config = transformer_config(
            shape, layout, dtype=dtype, sequence_parallel=layout.tensor > 1, options={**_ON_META, **(options or {})}
        )
        with torch.device("meta"):
            chunks = bare_model(shape, config)
        use.add_rank(local_parameters(chunks, shape))
        return _share(rank, chunks)
    finally:
        parallel.shutdown()


_ON_META = {"use_cpu_initialization": True, "init_model_with_meta_device": True}


def _share(rank: int, chunks: Chunks) -> RankShare:
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    return RankShare(
        rank=rank,
        stage=parallel.pipeline_parallel_rank(),
        parameters=sum(parameter.numel() for parameter in parameters),
        size_bytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
    )


class TensorUse:
    """Counts which ranks hold which slices of which Hugging Face tensors."""

    def __init__(self, shape: ModelShape, layout: Layout) -> None:
        self._shape, self._layout = shape, layout
        # HF name -> rule of the parameter -> (start, stop) along the rule's dimension -> ranks that hold it.
        self._held: dict[str, dict[TensorRule, Counter[tuple[int, int]]]] = defaultdict(lambda: defaultdict(Counter))
        self._wrong: list[str] = []

    def add_rank(self, parameters: list[LocalParameter]) -> None:
        """Count what the current rank holds."""
        names = Counter(local.rule.megatron_name for local in parameters)
        self._wrong += [f"{name} comes {count} times on one rank" for name, count in names.items() if count > 1]
        for local in parameters:
            rule, (rank, size) = local.rule, tensor_parallel_place(local.rule)
            vocabulary = self._shape.padded_vocab(size) if rule.kind == "vocab" else None
            wanted, got = rule.local_shape(size, padded_vocab=vocabulary), tuple(local.parameter.shape)
            if got != wanted:
                self._wrong.append(f"{rule.megatron_name} has shape {got}, its tensors make {wanted}")
            slices = rule.slices(rank, size, padded_vocab=vocabulary)
            for one in slices:
                self._held[rule.hf_names[one.source]][rule][one.start, one.stop] += 1
            filled = sum(one.stop - one.start for one in slices)
            if filled != wanted[rule.dim] and rule.kind != "vocab":
                self._wrong.append(f"{rule.megatron_name}: {filled} of {wanted[rule.dim]} entries are filled")

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with the world. Call after all its ranks were added."""
        yield from dict.fromkeys(self._wrong)
        shapes = hf_tensor_shapes(self._shape)
        yield from (f"{name} is no tensor of the checkpoint" for name in self._held if name not in shapes)
        for name in shapes:
            users = self._held.get(name, {})
            # The last stage of a tied model has a copy of the embedding.
            copies = [r for r in users if r.megatron_name == "output_layer.weight"] if self._shape.tie else []
            if len(users) - len(copies) != 1:
                yield f"{name} is used by {len(users) - len(copies)} parameters"
            for rule, slices in users.items():
                yield from self._slice_faults(name, rule, slices)

    def _slice_faults(self, name: str, rule: TensorRule, slices: Counter[tuple[int, int]]) -> Iterator[str]:
        """Yield where the slices do not cover the tensor side by side, or lie on the wrong number of ranks."""
        position = 0
        for start, stop in sorted(slices):
            if start != position:
                yield f"{name}: entries {min(start, position)} to {max(start, position)} are held twice or never"
            position = stop
        whole = rule.hf_shapes[rule.hf_names.index(name)][rule.dim]
        if position != whole:
            yield f"{name}: entries {position} to {whole} are held by no rank"
        wanted = self._copies(rule)
        for (start, stop), count in slices.items():
            if count != wanted:
                yield f"{name}: entries {start} to {stop} are on {count} ranks, not on {wanted}"

    def _copies(self, rule: TensorRule) -> int:
        """Return how many ranks of the stage hold the same slice."""
        stage = self._layout.world_size // self._layout.pipeline
        if rule.expert is not None:
            return stage // self._layout.expert_group_size
        return stage // (self._layout.tensor if rule.is_cut else 1)
