"""What the ranks of a RankPool do in the tests of log-probabilities, loss terms and refused updates.

Place in the data flow: called by `RankPool.run` on every rank of a layout; plain arguments in, plain results out.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_daro.config import nccl_environment
from megatron_daro.types import StepBatch

VOCAB = 50


def rank_environment(layout: Any) -> dict[str, str | None]:
    """What torch and NCCL read in a rank."""
    return {name: os.environ.get(name) for name in nccl_environment.nccl_of_rank({})}


def gloo_groups(layout: Any) -> list[str]:
    """Megatron's groups for tensors of the host, by their names there."""
    from megatron.core import parallel_state

    return [name for name, group in vars(parallel_state).items() if name.endswith("_GLOO") and group is not None]


def build_policy(
    path: Path,
    layout: Any,
    algorithm: dict[str, Any],
    *,
    temperature: float = 1.0,
    weights: Path | None = None,
    to_be_restored: bool = False,
    reference: Any = None,
    lora: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    from megatron_daro.actor.policy import MegatronPolicy
    from megatron_daro.actor.settings import PolicySettings
    from megatron_daro.config.actor import ActorSection
    from megatron_daro.config.algorithm import AlgorithmSection
    from megatron_daro.config.lora import LoraSection

    actor = ActorSection(
        tensor_parallel=layout.tensor,
        pipeline_parallel=layout.pipeline,
        virtual_pipeline_parallel=layout.virtual_pipeline,
        context_parallel=layout.context,
        data_parallel=layout.data,
        expert_parallel=layout.expert,
        expert_tensor_parallel=layout.expert_tensor,
        **{"precision": "fp32", **options},
    )
    settings = PolicySettings(
        path,
        rollouts_per_prompt=4,
        max_response_tokens=32,
        temperature=temperature,
        total_steps=10,
        weights=weights,
        lora=LoraSection(**(lora or {})),
        environments=("a", "b"),
    )
    sections = settings, actor, AlgorithmSection(**algorithm)
    return MegatronPolicy(*sections, to_be_restored=to_be_restored, reference=reference)


def loss_settings(policy: Any, algorithm: dict[str, Any], *, temperature: float = 1.0, **options: Any) -> Any:
    """Objective and output layer of a policy that was built with these."""
    from megatron_daro.actor.forward import OutputSettings
    from megatron_daro.actor.objective_settings import objective_settings
    from megatron_daro.algo.weighting import make_algorithm
    from megatron_daro.config.actor import ActorSection
    from megatron_daro.config.algorithm import AlgorithmSection

    actor = ActorSection(**{"precision": "fp32", **options})
    output = OutputSettings(policy.shape.vocab, temperature, actor.logprob_chunk_tokens, actor.logprob_kernel)
    section = AlgorithmSection(**algorithm)
    own = make_algorithm(**section.arguments(rollouts_per_prompt=4, max_response_tokens=32))
    return objective_settings(section, own), output


def summed_gradients(
    policy: Any,
    algorithm: dict[str, Any],
    batch: StepBatch,
    micro_batches: Sequence[Sequence[int]],
    **settings: Any,
) -> Any:
    """The sums of a step, whose gradients `collect_gradients` finds in the policy; no update. settings: of
    `loss_settings`."""
    from megatron_daro.actor import step
    from megatron_daro.actor.advantages import with_advantages

    objective, output = loss_settings(policy, algorithm, **settings)
    batch = with_advantages(policy.train_state.algorithm, batch, objective)
    return step.forward_backward(policy.train_state, batch, micro_batches, objective, output, step.OwnTime())


def save_policy(policy: Any, directory: Path) -> None:
    """Write a checkpoint; it is whole when this returns."""
    policy.start_save(directory)
    policy.finish_save()
    dist.barrier()


def my_rows(num_samples: int, layout: Any) -> list[int]:
    """Rows of this data-parallel rank; rank 0 gets three eighths of them, so that shards differ in size."""
    from megatron.core import parallel_state

    if layout.data == 1:
        return list(range(num_samples))
    rank, rest = parallel_state.get_data_parallel_rank(), num_samples - num_samples * 3 // 8
    cuts = [0, *(num_samples - rest * (layout.data - n) // (layout.data - 1) for n in range(1, layout.data + 1))]
    return list(range(cuts[rank], cuts[rank + 1]))


def uneven_split(num_samples: int, num_parts: int) -> list[list[int]]:
    """Parts of growing size, one sample at least; the first holds the first sample only where there are several."""
    if num_parts >= num_samples:
        return [[row] for row in range(num_samples)]
    weights = np.arange(1, num_parts)
    bounds = [0, 1] if num_parts > 1 else [0]
    spare = num_samples - num_parts
    grown = np.floor(np.cumsum(weights) / max(weights.sum(), 1) * spare).astype(int) + np.arange(1, num_parts) + 1
    bounds += grown.tolist() if num_parts > 1 else [num_samples]
    return [list(range(a, b)) for a, b in itertools.pairwise(bounds)]


def collect_gradients(policy: Any) -> dict[str, np.ndarray]:
    """The summed gradients of this stage under Hugging Face names."""
    from megatron_daro.actor.model import local_parameters
    from megatron_daro.actor.weights import gathered
    from megatron_daro.convert.stacked import stack

    found: dict[str, np.ndarray] = {}
    for local in local_parameters(policy.chunks, policy.shape):
        if policy.shape.tie and local.rule.megatron_name == "output_layer.weight":
            continue
        if local.parameter.requires_grad:
            found |= {name: t.clone().cpu() for name, t in gathered(local, local.parameter.main_grad)}
    return {name: tensor.numpy() for name, tensor in stack(found.items(), policy.shape)}


def _with_columns(policy: Any, layout: Any, batch: StepBatch, num_micro_batches: int) -> Any:
    """This rank's shard, an uneven split of it, and the columns of the algorithm's passes: the last stage has them, and
    gives them to the others as Ray's references do."""
    from megatron.core import parallel_state

    mine = batch.select(my_rows(len(batch), layout))
    micro_batches = uneven_split(len(mine), num_micro_batches)
    found = [policy.run_pass("ref_logprobs", mine, micro_batches)]
    torch.distributed.broadcast_object_list(
        found,
        src=parallel_state.get_pipeline_model_parallel_last_rank(),
        group=parallel_state.get_pipeline_model_parallel_group(),
    )
    return replace(mine, ref_logprobs_R=found[0]), micro_batches


def token_gradients(
    path: Path, layout: Any, batch: StepBatch, num_micro_batches: int, algorithm: dict[str, Any]
) -> dict[str, Any]:
    """Summed gradients of advantages per token, and the loss; the columns are computed by a pass."""
    policy = build_policy(path, layout, algorithm, optimizer={"distributed": False})
    mine, micro_batches = _with_columns(policy, layout, batch, num_micro_batches)
    sums = summed_gradients(policy, algorithm, mine, micro_batches)
    return {"gradients": collect_gradients(policy), "policy_loss": sums.policy_loss}


def token_epochs(
    path: Path, layout: Any, batch: StepBatch, splits: Sequence[int], algorithm: dict[str, Any]
) -> list[dict[str, float]]:
    """Metrics of optimizer steps on one batch, each split into so many micro-batches; columns of before the first."""
    policy = build_policy(path, layout, algorithm, optimizer={"learning_rate": 1e-3})
    mine, _ = _with_columns(policy, layout, batch, 3)
    return [
        dict(policy.train_step(mine, uneven_split(len(mine), number), step=step).metrics)
        for step, number in enumerate(splits, 1)
    ]


def error_of_a_step(path: Path, layout: Any, batch: StepBatch, algorithm: dict[str, Any]) -> str:
    """What a train step on this rank's part of the batch says: its error, why it was skipped, or nothing."""
    policy = build_policy(path, layout, algorithm)
    mine = batch.select(my_rows(len(batch), layout))
    try:
        result = policy.train_step(mine, uneven_split(len(mine), 2), step=1)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"skipped: {result.reason}" if result.skipped else ""


def moments(
    path: Path,
    layout: Any,
    batch: StepBatch,
    opens: Sequence[bool],
    algorithm: dict[str, Any],
    spoiled: Sequence[int] = (),
) -> Any:
    """After each of some optimizer steps Adam's step counts, and whether its moments are those of one gradient. The
    losses of the spoiled steps are not finite."""
    from megatron_daro.actor.compat import optimizer_parts

    policy = build_policy(path, layout, algorithm, optimizer={"learning_rate": 1e-4})
    mine, found = batch.select(my_rows(len(batch), layout)), []
    for step, first in enumerate(opens, 1):
        bad_N = mine.advantages_N * np.nan if step in spoiled else mine.advantages_N
        shard = replace(mine, opens_batch=first, advantages_N=bad_N)
        policy.train_step(shard, uneven_split(len(mine), 2), step=step)
        states = [s for part in optimizer_parts(policy.train_state.optimizer) for s in part.optimizer.state.values()]
        counts = {float(s["step"]) for s in states}
        gradients = [s["exp_avg"] / 0.1 for s in states]
        of_one = [
            torch.allclose(s["exp_avg_sq"], 0.001 * g**2, rtol=1e-4) for s, g in zip(states, gradients, strict=True)
        ]
        found.append((counts, all(of_one)))
    return found


def token_skip(path: Path, layout: Any, batch: StepBatch, algorithm: dict[str, Any]) -> dict[str, Any]:
    """What a step says, and whether it changed anything."""
    policy = build_policy(path, layout, algorithm)
    before = everything(policy)
    mine, micro_batches = _with_columns(policy, layout, batch, 2)
    result = policy.train_step(mine, micro_batches, step=1)
    after = everything(policy)
    changed = [name for name, value in after.items() if name not in before or not _same(value, before[name])]
    return {"skipped": result.skipped, "reason": result.reason, "changed": changed}


def logprobs_and_weights(
    path: Path, layout: Any, batch: StepBatch, num_micro_batches: int, temperature: float = 1.0, **options: Any
) -> dict[str, Any]:
    """Log-probs [R] of the whole batch (None before the last stage), and the exported weights in bytes."""
    policy = build_policy(path, layout, {"name": "grpo"}, temperature=temperature, **options)
    logprobs = policy.logprobs(batch, uneven_split(len(batch), num_micro_batches))
    exported = {name: tensor.detach().cpu().clone() for name, tensor in policy.export()}
    return {"logprobs": logprobs, "exported": exported, "num_micro_batches": num_micro_batches}


def loss_terms(
    path: Path,
    layout: Any,
    batch: StepBatch,
    num_micro_batches: int,
    algorithm: dict[str, Any],
    padding: tuple[int, int] | None = None,
    temperature: float = 1.0,
    **options: Any,
) -> dict[str, Any]:
    """Summed gradients, the step's sums, and the metrics of a train step from the same weights."""
    options = {"optimizer": {"distributed": False}, **options}
    policy = build_policy(path, layout, algorithm, temperature=temperature, **options)
    mine = batch.select(my_rows(len(batch), layout))
    micro_batches = uneven_split(len(mine), num_micro_batches)
    with _padded(padding):
        sums = summed_gradients(policy, algorithm, mine, micro_batches, temperature=temperature)
        gradients = collect_gradients(policy)
        metrics = dict(policy.train_step(mine, micro_batches, step=1).metrics)
    return {
        "gradients": gradients,
        "loss_sums": sums.loss_sums.numpy(),
        "abs_loss_sums": sums.step_stats.per_bin("abs_loss_sums").numpy(),
        "policy_loss": sums.policy_loss,
        "regularizer": sums.regularizer,
        "metrics": metrics,
        "num_micro_batches": len(micro_batches),
    }


def gradients_of_micro_batches(
    path: Path, layout: Any, batch: StepBatch, num_micro_batches: int, algorithm: dict[str, Any]
) -> dict[str, Any]:
    """The natural bug: each micro-batch is divided by its own totals, and not by those of the step."""
    policy = build_policy(path, layout, algorithm, optimizer={"distributed": False})
    mine, total = batch.select(my_rows(len(batch), layout)), dict[str, np.ndarray]()
    for rows in uneven_split(len(mine), num_micro_batches):
        summed_gradients(policy, algorithm, mine.select(rows), [list(range(len(rows)))])
        for name, gradient in collect_gradients(policy).items():
            total[name] = total.get(name, 0.0) + gradient
    return {"gradients": total}


@contextmanager
def _padded(multiples: tuple[int, int] | None) -> Iterator[None]:
    """Packs padded to other multiples than the layout asks for."""
    from megatron_daro.actor import forward

    original = forward.pack_multiples
    if multiples is not None:
        forward.pack_multiples = lambda *_: multiples
    try:
        yield
    finally:
        forward.pack_multiples = original


def pack_lengths(layout: Any, batch: StepBatch, sequence_parallel: bool, fp8_recipe: str | None) -> list[int]:
    """Tokens of this rank's slice of each of three micro-batches."""
    from megatron_daro.actor.forward import packed_micro_batches

    fields = {"sequence_parallel": sequence_parallel, "fp8": fp8_recipe, "fp8_recipe": fp8_recipe}
    config: Any = SimpleNamespace(**fields, num_moe_experts=None)
    packs = packed_micro_batches(config, batch, uneven_split(len(batch), 3), vocab_size=VOCAB)
    return [len(packed.tokens_T) for packed in packs]


def rotary_tables(path: Path, layout: Any, batch: StepBatch) -> dict[str, Any]:
    """Tables of rotary angles that log-probs of packs of all lengths leave behind, and one against upstream's own."""
    policy = build_policy(path, layout, {"name": "grpo"})
    rotary = policy.chunks[0].rotary_pos_emb
    forward = type(rotary).forward
    forward.cache_clear()
    policy.logprobs(batch, [[row] for row in range(len(batch))])
    tables = forward.cache_info().currsize
    own = rotary(1025, packed_seq=True)
    return {"tables": tables, "equal": bool(torch.equal(own[:300], rotary(300, packed_seq=True)))}


def reference_after_training(path: Path, layout: Any, batch: StepBatch, **options: Any) -> dict[str, Any]:
    """Log-probs of the start weights: before any step, as the reference after one step, and of the moved weights."""
    kl = {"name": "grpo", "kl": {"coefficient": 0.1}}
    policy = build_policy(path, layout, kl, optimizer={"learning_rate": 1e-2}, **options)
    rows = [list(range(len(batch)))]
    before = policy.logprobs(batch, rows)
    with_reference = batch if before is None else replace(batch, ref_logprobs_R=before)
    if before is None:  # earlier stages never look at the column, but every rank must have one
        with_reference = replace(batch, ref_logprobs_R=np.zeros_like(batch.rollout_logprobs_R))
    policy.train_step(with_reference, rows, step=1)
    moved = policy.logprobs(batch, rows)
    reference = policy.reference_logprobs(batch, rows)
    return {"before": before, "moved": moved, "reference": reference, "moved_again": policy.logprobs(batch, rows)}


def skip_and_go_on(
    path: Path,
    layout: Any,
    good: Sequence[StepBatch],
    bad: StepBatch | None,
    poison: str,
    algorithm: dict[str, Any],
    **options: Any,
) -> dict[str, Any]:
    """A good step, the bad one (unless it is None), a good step; what changed in the bad one, and where it ended.

    poison: "" or "weight": an infinite value in a parameter of one rank, taken out again after the bad step.
    """
    policy = build_policy(path, layout, algorithm, **options)

    def step(batch: StepBatch, number: int) -> Any:
        mine = batch.select(my_rows(len(batch), layout))
        return policy.train_step(mine, uneven_split(len(mine), 2), step=number)

    first = step(good[0], 1)
    outcome = None
    if bad is not None:
        with _poisoned(policy, poison):
            before = everything(policy)
            outcome = step(bad, 2)
            changed = [name for name, value in everything(policy).items() if not _same(value, before[name])]
        outcome = {"skipped": outcome.skipped, "reason": outcome.reason, "changed": changed, "kept": sorted(before)}
    last = step(good[1], 2)
    return {"outcome": outcome, "metrics": [first.metrics, last.metrics], "end": everything(policy)}


def everything(policy: Any) -> dict[str, np.ndarray]:
    """Every number that a checkpoint would hold, copied, as bytes with names."""
    train_state = policy.train_state
    give_turn(policy, "policy")
    found = {n: t.clone() for n, t in _of_model(policy.chunks, train_state).items()}
    if policy.critic is not None:
        give_turn(policy, "critic")
        found |= {
            f"critic {name}": value for name, value in _of_model(policy.critic.chunks, policy.critic.state).items()
        }
    if train_state.algorithm.weights is not None:
        difficulty = train_state.algorithm.difficulty.state_dict()
        found |= {f"difficulty {n}": torch.tensor(v) for n, v in difficulty.items() if isinstance(v, list)}
    return {name: _bytes(tensor) for name, tensor in found.items()}


def give_turn(policy: Any, model: str) -> None:
    """Let this model have the device, where policy and critic take turns: an export needs its memory."""
    if policy.critic is not None:
        for _ in policy.export() if model == "policy" else policy.export_critic():
            pass


def device_bytes(policy: Any, model: str) -> int:
    """Bytes of a model's weights, gradients and optimizer state that have memory on the device."""
    from megatron_daro.actor.compat import optimizer_parts

    state = policy.train_state if model == "policy" else policy.critic.state
    tensors = [parameter.data for chunk in state.chunks for parameter in chunk.parameters()]
    buffers = [buffer for chunk in state.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    tensors += [buffer.grad_data for buffer in buffers]
    for part in optimizer_parts(state.optimizer):
        for parameter, values in part.optimizer.state.items():
            tensors += [parameter.data, *(value for value in values.values() if torch.is_tensor(value))]
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())


def _of_model(chunks: Any, state: Any) -> dict[str, torch.Tensor]:
    found = {f"parameter {n}": p.detach() for n, p in torch.nn.ModuleList(chunks).named_parameters()}
    parts = getattr(state.optimizer, "chained_optimizers", [state.optimizer])
    for i, part in enumerate(parts):
        for g, group in enumerate(part.optimizer.param_groups):
            found[f"optimizer {i} group {g} lr"] = torch.tensor([group["lr"], group["weight_decay"]])
            for p, parameter in enumerate(group["params"]):
                found[f"optimizer {i} group {g} main {p}"] = parameter.detach()
                moments = part.optimizer.state[parameter]
                found |= {f"optimizer {i} group {g} {n} {p}": torch.as_tensor(v) for n, v in moments.items()}
    found["scheduler"] = torch.tensor([state.scheduler.num_steps], dtype=torch.float64)
    return found


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    """Bit patterns: NaN equals itself, and 0 differs from -0."""
    return tensor.detach().cpu().clone().contiguous().reshape(-1).view(torch.uint8).numpy()


def _same(left: np.ndarray, right: np.ndarray) -> bool:
    return left.shape == right.shape and bool((left == right).all())


@contextmanager
def _poisoned(policy: Any, poison: str) -> Iterator[None]:
    if poison != "weight" or torch.distributed.get_rank() != torch.distributed.get_world_size() - 1:
        yield
        return
    parameter = next(p for n, p in policy.chunks[0].named_parameters() if n.endswith("linear_fc2.weight"))
    with torch.no_grad():
        kept = parameter[0, 0].clone()
        parameter[0, 0] = float("inf")
    yield
    with torch.no_grad():
        parameter[0, 0] = kept


def experts(
    path: Path, layout: Any, batch: StepBatch, num_micro_batches: int, algorithm: dict[str, Any], **options: Any
) -> dict[str, Any]:
    """Log-probs of the whole batch, the weights that exporting ranks get, and summed gradients with their norm."""
    from megatron_daro.actor.weights import exports_weights, sends_for_stage

    policy = build_policy(path, layout, algorithm, optimizer={"distributed": False}, **options)
    logprobs = policy.logprobs(batch, uneven_split(len(batch), num_micro_batches))
    exported = {name: tensor.clone() for name, tensor in policy.export()} if exports_weights() else {}
    mine = batch.select(my_rows(len(batch), layout))
    micro_batches = uneven_split(len(mine), num_micro_batches)
    sums = summed_gradients(policy, algorithm, mine, micro_batches)
    gradients = collect_gradients(policy)
    policy.train_state.optimizer.prepare_grads()
    return {
        "logprobs": logprobs,
        "exported": exported,
        "sends": sends_for_stage(),
        "gradients": gradients,
        "policy_loss": sums.policy_loss,
        "grad_norm": float(policy.train_state.optimizer.get_grad_norm()),
    }


def steps_in_simulated_fp8(
    path: Path, layout: Any, batch: StepBatch, recipes: Sequence[str], num_steps: int
) -> dict[str, list[dict[str, float]]]:
    """Metrics of DARO's steps in bf16, and with the layers' products quantised as each recipe does it."""
    from contextlib import nullcontext

    from fp8_reference import simulated

    found = {}
    for recipe in ("bf16", *recipes):
        policy = build_policy(path, layout, {"name": "daro"}, precision="bf16", optimizer={"learning_rate": 1e-3})
        with nullcontext() if recipe == "bf16" else simulated(recipe):
            rows = [list(range(len(batch)))]
            old = policy.logprobs(batch, rows)
            current = replace(batch, old_logprobs_R=old, rollout_logprobs_R=old)
            results = [policy.train_step(current, rows, step=step + 1) for step in range(num_steps)]
        found[recipe] = [dict(result.metrics) for result in results]
    return found


def live_bytes(path: Path, layout: Any, batch: StepBatch, micro_batches: list[list[int]], **options: Any) -> int:
    """Peak of live bytes of forward and backward beside weights and gradients."""
    from live_bytes import LiveBytes

    algorithm = {"name": "grpo"}
    policy = build_policy(path, layout, algorithm, **options)
    buffers = [b for c in policy.train_state.chunks for b in [*c.buffers, *c.expert_parallel_buffers]]
    known = [*(p for c in policy.chunks for p in c.parameters()), *(b.grad_data for b in buffers)]
    with LiveBytes(known) as live:
        summed_gradients(policy, algorithm, batch, micro_batches, **options)
    return live.peak


def critic_gradients(
    path: Path, layout: Any, batch: StepBatch, num_micro_batches: int, algorithm: dict[str, Any], **options: Any
) -> dict[str, Any]:
    """Both models' summed gradients in a step of PPO, with the values that a pass gave plus `batch.values_R`."""
    from megatron_daro.actor.advantages import with_advantages

    policy = build_policy(path, layout, algorithm, optimizer={"distributed": False}, **options)
    mine = batch.select(my_rows(len(batch), layout))
    micro_batches = uneven_split(len(mine), num_micro_batches)
    values_R = of_last_stage(policy.run_pass("values", mine, micro_batches))
    mine = replace(mine, values_R=values_R + mine.values_R)
    sums = summed_gradients(policy, algorithm, mine, micro_batches)
    gradients = collect_gradients(policy)
    objective, _ = loss_settings(policy, algorithm)
    prepared = with_advantages(policy.train_state.algorithm, mine, objective)
    report = policy.critic.gradients(prepared, micro_batches)
    return {
        "gradients": gradients,
        "critic": {f"critic {name}": value for name, value in collect_gradients(policy.critic).items()},
        "policy_loss": sums.policy_loss,
        "values": values_R,
        "rows": my_rows(len(batch), layout),
        "metrics": report.metrics,
    }


def exported_critic(path: Path, layout: Any, batch: StepBatch, algorithm: dict[str, Any]) -> dict[str, Any]:
    """What the critic says of this rank's rows, and this stage's part of its export."""
    from megatron_daro.actor.weights import exports_weights

    policy = build_policy(path, layout, algorithm)
    mine = batch.select(my_rows(len(batch), layout))
    values_R = of_last_stage(policy.run_pass("values", mine, uneven_split(len(mine), 2)))
    tensors = {name: tensor.clone() for name, tensor in policy.export_critic()} if exports_weights() else {}
    return {"values": values_R, "rows": my_rows(len(batch), layout), "tensors": tensors}


def of_last_stage(column_R: np.ndarray | None) -> np.ndarray:
    """What the last stage computed, on all stages, as Ray's references give it to them."""
    from megatron.core import parallel_state

    found = [column_R]
    torch.distributed.broadcast_object_list(
        found,
        src=parallel_state.get_pipeline_model_parallel_last_rank(),
        group=parallel_state.get_pipeline_model_parallel_group(),
    )
    assert found[0] is not None
    return found[0]


def ppo_steps(
    path: Path,
    layout: Any,
    batches: Sequence[StepBatch],
    algorithm: dict[str, Any],
    save_to: Path | None = None,
    load_from: Path | None = None,
    first: int = 1,
    leaves: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Optimizer steps, values before each; all numbers of both models at the end. leaves: everything leaves the device
    between steps, as for servers that share it, the policy's weights last, when they have been sent."""
    from megatron_daro.types import KINDS_OF_MEMORY

    policy = build_policy(path, layout, algorithm, **{"optimizer": {"learning_rate": 1e-3}, **options})
    if load_from:
        policy.load(load_from)
    start, metrics = everything(policy), []
    for step, batch in enumerate(batches, first):
        mine = batch.select(my_rows(len(batch), layout))
        micro_batches = uneven_split(len(mine), 2)
        mine = replace(mine, values_R=of_last_stage(policy.run_pass("values", mine, micro_batches)))
        result = policy.train_step(mine, micro_batches, step=step)
        metrics.append({n: v for n, v in result.metrics.items() if not n.startswith("timing/")})
        metrics[-1]["skipped"] = float(result.skipped)
        if leaves:
            policy.offload(("gradients", "optimizer"))
            assert all(tensor.untyped_storage().nbytes() for _, tensor in policy.export())
            assert policy.offload(("weights",)).left == 0
            policy.onload(KINDS_OF_MEMORY)
    if save_to:
        save_policy(policy, save_to)
    names = ("policy", "critic")
    left = {name: device_bytes(policy, name) for name in names}
    give_turn(policy, "policy")
    back = {name: device_bytes(policy, name) for name in names}
    changed = [name for name, value in everything(policy).items() if name not in start or not _same(value, start[name])]
    return {"metrics": metrics, "end": everything(policy), "changed": changed, "left": [left, back]}
