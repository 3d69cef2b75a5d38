"""Where the host may read values of the device, and how often: what two_colours.py counts is compared with this."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from two_colours import Call

LAYERS = {
    "megatron/core/models/common/embeddings/rope_utils.py:_apply_rotary_pos_emb_thd",  # has a kernel there
    "megatron_daro/actor/layers.py:forward",  # attention of the local layers
    "megatron_daro/actor/layers.py:packed_causal_attention",
    "megatron/core/transformer/moe/moe_utils.py:permute",  # actor.megatron.moe_permute_fusion has a kernel
    "megatron/core/transformer/moe/moe_utils.py:unpermute",
    "megatron/core/transformer/moe/moe_utils.py:sort_chunks_by_idxs",
    "megatron/core/transformer/moe/experts.py:forward",  # of experts that run one after the other
    "megatron/core/transformer/moe/token_dispatcher.py:preprocess",  # counts of tokens for all_to_all
    "megatron_daro/actor/cpu.py:_on_host",  # the same, in the place of upstream's function
    "megatron/core/tensor_parallel/mappings.py:forward",  # which the test of the CPU has not moved to the host before
    "megatron/core/tensor_parallel/mappings.py:backward",
}
"""Where layers wait that a GPU runs with Transformer Engine's kernels, or as upstream must."""
STEP = {
    ("to the host", "megatron_daro/actor/reductions.py:sum_over_data_parallel"): 1,
    ("to the host", "megatron_daro/actor/loss.py:reduce"): 1,
    ("tolist", "megatron_daro/actor/loss.py:reduce"): 2,
    ("__float__", "megatron_daro/actor/loss.py:reduce"): 1,
    ("item", "megatron/core/optimizer/clip_grads.py:get_grad_norm_fp32"): 1,
    ("item", "megatron_daro/actor/reductions.py:finite_on_all_ranks"): 1,
}
"""Of a whole step of each model, whatever the number of its micro-batches."""
COLUMNS = {
    ("to the host", "megatron_daro/actor/reductions.py:sum_over_data_parallel"): 6,
    ("tolist", "megatron_daro/actor/critic.py:gradients"): 1,
}
"""Of a whole step with advantages per token: what they need of all ranks, if they are finite, a critic's metrics."""
PASS = {("to the host", "megatron_daro/data/packing.py:collect_responses"): 2}
"""Of each micro-batch, when all of them are done."""
CONTEXT = {("to the host", "megatron_daro/actor/forward.py:_join_context"): 1}
"""Of a whole pass with context parallelism."""
CHECKPOINT = ("megatron_daro/actor/sharded_state.py", "megatron/core/dist_checkpointing/")
"""A checkpoint's ranks tell each other, as objects, what each of them has."""
UNDER_WAY = "megatron_daro/actor/shard_file.py:release"
"""A save that is under way has copies made of what it did not read yet, before memory goes or a step changes it."""


def _free(call: Call, where: str) -> bool:
    """Whether any number of reads is allowed there."""
    saves = call.name in ("start_save", "load") and where.startswith(CHECKPOINT)
    return saves or where in LAYERS or where == UNDER_WAY


def _allowed(call: Call) -> Mapping[tuple[str, str], int]:
    if call.name in ("logprobs", "reference_logprobs", "values"):
        return {key: count * call.micro_batches for key, count in PASS.items()} | CONTEXT
    if call.name in ("train_step", "forward_backward"):
        return Counter({key: count * call.models for key, count in STEP.items()}) + Counter(COLUMNS)
    return {}


def unexpected(calls: Iterable[Call]) -> list[str]:
    """Reads of the device that nobody allowed, or more of them."""
    found = []
    for call in calls:
        allowed = _allowed(call)
        for (what, where), count in call.reads.items():
            most = allowed.get((what, where), 0)
            if count > most and not _free(call, where):
                found.append(f"{call.name}: {what} in {where}, {count} times, allowed: {most}")
    return found
