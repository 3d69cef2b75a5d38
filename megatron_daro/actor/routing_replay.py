"""Routing replay (R3): in training, tokens go to the experts that the rollout engine chose for them.

An engine and a trainer round differently, so a router's choice flips now and then, and such a token gets a very
different log-prob. Before each forward pass the routers are given the recorded experts of this rank's tokens; the
experts' weights are still this router's own, normalized over the given experts, and gradients flow as usual. Megatron's
own RouterReplay (0.16.1, moe/router_replay.py) has no place for tokens without known experts, such as padding, and one
list for all pipeline stages, so `RouterReplay` here replaces it. Rejects recordings of another model.

Legend: T packed tokens of this CP rank, N samples of the shard, L layers of the model, K experts of a token, E experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megatron_daro.actor.compat import HiddenStateGPTModel
from megatron_daro.actor.megatron import TopKRouter, parallel_state
from megatron_daro.config.model_shape import ModelShape
from megatron_daro.data.packing import PackedMicroBatch
from megatron_daro.errors import DataError
from megatron_daro.types import Sequences


class RouterReplay:
    """The recorded experts for one router; replaces Megatron's class of this name."""

    def __init__(self) -> None:
        self._experts_TK: Tensor | None = None
        self._training = False
        # A recomputed layer asks a second time in the backward pass, where micro-batches come in the same order.
        self._awaiting_recomputation: deque[Tensor | None] = deque()

    def set_experts(self, experts_TK: Tensor | None, *, training: bool) -> None:
        """Set the experts for the tokens of the next forward pass.

        Args:
            experts_TK: int64; -1 in the rows of tokens for which the router itself decides. None: it decides for all.
            training: whether a backward pass will follow.
        """
        self._experts_TK, self._training = experts_TK, training

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return scores and numbers of each token's experts, both [T, K]. Args: scores: of all experts, [T, E]."""
        assert default_compute_topk is not None
        values_TK, own_TK = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        experts_TK = self._next_experts()
        if experts_TK is None:
            return values_TK, own_TK
        chosen_TK = torch.where(experts_TK[:, :1] < 0, own_TK, experts_TK)
        return scores.gather(1, chosen_TK), chosen_TK

    def _next_experts(self) -> Tensor | None:
        """Return the experts of this pass. With recomputation, the first pass in training runs without gradients, the
        second one with them."""
        if self._training and not torch.is_grad_enabled():
            self._awaiting_recomputation.append(self._experts_TK)
        elif self._awaiting_recomputation:
            return self._awaiting_recomputation.popleft()
        return self._experts_TK


def replay_routing(model: HiddenStateGPTModel, packed: PackedMicroBatch) -> None:
    """Tell the routers of a part of the model which experts the tokens of a micro-batch go to."""
    experts_TLK = packed.routed_experts_TLK
    if experts_TLK is not None and model.config.sequence_parallel:
        parts = parallel_state.get_tensor_model_parallel_world_size()
        experts_TLK = experts_TLK.chunk(parts)[parallel_state.get_tensor_model_parallel_rank()]
    for layer, router in _routers(model):
        if experts_TLK is None and router.router_replay is None:
            continue
        if router.router_replay is None:
            router.router_replay = RouterReplay()
        experts_TK = None if experts_TLK is None else experts_TLK[:, layer].long()
        router.router_replay.set_experts(experts_TK, training=model.training)


def check_routed_experts(batch: Sequences, shape: ModelShape) -> None:
    """Refuse experts that are not those of this model.

    Raises:
        DataError: the model has no experts, or the shape is not that of its layers and experts per token.
    """
    experts_N = batch.routed_experts_N
    if experts_N is None:
        return
    if shape.experts is None:
        raise DataError("the batch says which experts its tokens met, but the model has no experts; remove that column")
    for experts, length in zip(experts_N, batch.lengths_N.tolist(), strict=True):
        wanted = (length, shape.layers, shape.experts.chosen)
        if experts is not None and experts.shape != wanted:
            raise DataError(
                f"routed experts have the shape {experts.shape}; allowed: {wanted}, tokens, layers and experts of a "
                "token; they are of another model, or of other tokens"
            )


def check_numbers(packed: PackedMicroBatch, experts: int) -> None:
    """Refuse experts that the model does not have, while the numbers are on the CPU. Raises DataError."""
    experts_TLK = packed.routed_experts_TLK
    if experts_TLK is None or not experts_TLK.numel():
        return
    low, high = int(experts_TLK.min()), int(experts_TLK.max())
    if low < -1 or high >= experts:
        raise DataError(
            f"routed experts are numbered {low} to {high}; allowed: 0 to {experts - 1}, and -1 where they are not known"
        )


def _routers(model: HiddenStateGPTModel) -> Iterator[tuple[int, TopKRouter]]:
    """Yield each router with the number of its layer in the model, from 0."""
    for layer in model.decoder.layers:
        router = getattr(layer.mlp, "router", None)
        if router is not None:
            yield layer.layer_number - 1, router
