"""One gloo rank of Megatron-LM's RL script, started through DARO's launcher, on a small model.

From Megatron-LM, as it is: train_rl.py (its forward_step and loss_func), training.train_step, and of megatron.rl:
prepare_data_for_update, prepare_trajectories, calculate_grpo_advantages, calculate_grpo_loss, the packing of sequences.
They are compiled from the checkout's text with "cuda" replaced by "cpu", because importing their modules needs Python
3.12, triton and what is in no package. From Megatron-core: schedule, DistributedDataParallel, finalize_model_grads, the
scheduler. Stood in for: options, tokenizer, rollouts, the model and its log-probs, `pretrain`, whose loop is `loop`.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python megatron_rl_ranks.py OUTPUT_DIRECTORY
"""

from __future__ import annotations

import ast
import inspect
import math
import os
import sys
from argparse import Namespace
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch

from megatron_daro.actor import device

device.prepare()
import rollout_batches as batches  # noqa: E402
from megatron.core import mpu, num_microbatches_calculator  # noqa: E402
from megatron.core import utils as core_utils  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.rerun_state_machine import RerunDataIterator, initialize_rerun_state_machine  # noqa: E402
from table_model import PlainStep, scheduler_of, table_model  # noqa: E402

from megatron_daro.actor.parallel import Layout, initialize  # noqa: E402
from megatron_daro.plugins import megatron_rl as adapter  # noqa: E402

SOURCE = Path(os.environ["MEGATRON_DARO_MEGATRON_LM"])
PER_TURN = "PAD_TURN_UNIT = " in (SOURCE / "megatron/rl/rl_utils.py").read_text(encoding="utf-8")
"""Whether it is the layout of rows of core_v0.19.0."""
PAD, LONGEST, FAILED = batches.VOCAB, 48, 4
"""FAILED: the group of which one rollout failed."""


def compiled(module: ModuleType, path: str, *names: str) -> None:
    """Run functions and classes of a file, all of them if none is named, in a module's namespace."""
    text = (SOURCE / path).read_text(encoding="utf-8")
    for old, new in (("device='cuda'", "device='cpu'"), (".cuda()", ".cpu()"), ("is_cuda", "is_cpu")):
        text = text.replace(old, new)
    tree = ast.parse("from __future__ import annotations\n" + text)
    kept = [node for node in tree.body if not names or getattr(node, "name", None) in names]
    assert not names or {node.name for node in kept} == set(names), path
    head = tree.body[:1] if names else []
    exec(compile(ast.Module([*head, *kept], []), path, "exec"), module.__dict__)


def arguments() -> Namespace:
    """Megatron-LM's options, as far as its functions read them; the others are off."""

    class Options(Namespace):
        def __getattr__(self, name: str) -> Any:
            return None

    return Options(
        perform_rl_step=True,
        calculate_per_token_loss=True,
        rl_use_sequence_packing=True,
        rl_sequence_packing_max_sequences_per_bin=4,
        rl_sequence_packing_algo="fifo",
        rl_skip_bos_token=True,
        grpo_group_size=batches.K,
        grpo_prompts_per_batch=batches.GROUPS,
        grpo_iterations=1,
        grpo_kl_beta=0.0,
        grpo_entropy_term_weight=0.0,
        grpo_clamp_eps_lower=0.2,
        grpo_clamp_eps_upper=0.28,
        global_batch_size=batches.GROUPS * batches.K // 2,
        micro_batch_size=1,
        seq_length=LONGEST,
        bf16=True,
        fp16=False,
        cuda_graph_impl="none",
        data_parallel_size=mpu.get_data_parallel_world_size(),
        context_parallel_size=1,
        gtp_weight_remat_size=1,
        empty_unused_memory_level=0,
    )


def host_modules(args: Namespace) -> tuple[ModuleType, ModuleType]:
    """megatron.rl.rl_utils and megatron.training.training, and what train_rl.py imports beside them."""
    names = ["megatron.rl", "megatron.rl.rl_utils", "megatron.rl.sequence_packing_utils", "megatron.training"]
    names += [f"megatron.training.{n}" for n in ("training", "arguments", "argument_utils", "global_vars", "utils")]
    names += ["megatron.inference", "megatron.inference.utils", "gpt_builders", "hybrid_builders", "model_provider"]
    modules = {name: MagicMock(spec=ModuleType, name=name) for name in names}
    for name in ("megatron.rl.rl_utils", "megatron.rl.sequence_packing_utils", "megatron.training.training"):
        modules[name] = ModuleType(name)
    sys.modules.update(modules)
    tokenizer = SimpleNamespace(
        library="test", pad=PAD, eod=99, bos=None, vocab_size=PAD, detokenize=lambda *tokens: ""
    )
    no_range = lambda: lambda *names, **options: nullcontext()
    for name in ("megatron.training", "megatron.training.global_vars", "megatron.training.utils"):
        module = modules[name]
        module.get_args, module.get_timers = lambda: args, lambda: MagicMock()
        module.get_tokenizer, module.get_nvtx_range = lambda: tokenizer, no_range
        module.is_hybrid_model = lambda args: False
        module.print_rank_0, module.pretrain = print, lambda *given: loop(args, given[3])
    modules["megatron.training.arguments"].parse_and_validate_args = lambda **options: args
    modules["megatron.training.arguments"]._add_rl_args = lambda parser: parser
    modules["megatron.training.arguments"].core_transformer_config_from_args = MagicMock()
    for name in ("gpt_config_from_args", "hybrid_config_from_args", "pretrain_cfg_container_from_args"):
        setattr(modules["megatron.training.argument_utils"], name, MagicMock())
    modules["megatron.inference.utils"].add_inference_args = MagicMock()
    modules["gpt_builders"].gpt_builder = modules["hybrid_builders"].hybrid_builder = MagicMock()
    modules["model_provider"].model_provider = MagicMock()
    packing = modules["megatron.rl.sequence_packing_utils"]
    if not PER_TURN:  # newer than the installed core
        compiled(core_utils, "megatron/core/utils.py", "round_up_to_nearest_multiple")
    compiled(packing, "megatron/rl/sequence_packing_utils.py")
    packing.reconfigure_num_microbatches_calculator = partial(
        num_microbatches_calculator.reconfigure_num_microbatches_calculator, rampup_batch_size=None
    )
    packing.PackedSeqParams, packing.log_packing_efficiency = SimpleNamespace, lambda context: None
    packing.compute_packed_inference_logprobs_stats = lambda **given: None
    fill_rl_utils(modules["megatron.rl.rl_utils"], packing, args, no_range)
    fill_training(modules["megatron.training.training"], args)
    return modules["megatron.rl.rl_utils"], modules["megatron.training.training"]


def fill_rl_utils(rl_utils: ModuleType, packing: ModuleType, args: Namespace, no_range: Any) -> None:
    """megatron.rl.rl_utils: functions of the checkout, and what they look up."""
    import copy
    import itertools
    import logging
    from dataclasses import dataclass

    from torch.utils.data import DataLoader, TensorDataset

    found = dict(vars(packing), np=np, math=math, itertools=itertools, Counter=Counter, mpu=mpu, torch=torch)
    found |= {"dist": torch.distributed, "logger": logging.getLogger("rl"), "nullcontext": nullcontext, "PAD_ROW": None}
    found |= {"DataLoader": DataLoader, "TensorDataset": TensorDataset, "RerunDataIterator": RerunDataIterator}
    found |= {
        "copy": copy,
        "dataclass": dataclass,
        "get_args": lambda: args,
        "get_nvtx_range": no_range,
        "gc": MagicMock(),
    }
    found |= {"get_forward_backward_func": MagicMock, "is_batch_invariant_mode_enabled": lambda: False}
    found |= {"get_attr_wrapped_model": MagicMock(), "Rollout": Rollout, "TokenRollout": Rollout}
    rl_utils.__dict__.update({k: v for k, v in found.items() if not k.startswith("__")})
    compiled(
        rl_utils,
        "megatron/rl/rl_utils.py",
        *("calculate_grpo_advantages", "calculate_grpo_loss", "prepare_data_for_update", "prepare_trajectories"),
        *("selective_log_softmax", "_pad_nonnull_with_zeros", "RLRuntimeState", "get_rl_runtime_state"),
        *(() if PER_TURN else ("_is_collapsible_rollout", "_to_list")),
    )
    if PER_TURN:
        rl_utils.PAD_TURN_UNIT = (None, -1)
    rl_utils._rl_runtime_state = rl_utils.RLRuntimeState()
    rl_utils.compute_group_stats = lambda rollouts, *others: SimpleNamespace(
        advantages=rl_utils.calculate_grpo_advantages(
            [[r.reward for r in group] for group in rollouts],
            [[len(r.trajectory) for r in group] for group in rollouts],
        )
    )
    rl_utils.compute_logprobs_batch = old_logprobs
    rl_utils.get_logprobs = lambda model, tokens, *rest, **options: rl_utils.selective_log_softmax(
        model(tokens)[:, :-1], tokens[:, 1:].clamp(max=batches.VOCAB - 1)
    )
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda: None


def fill_training(training: ModuleType, args: Namespace) -> None:
    """megatron.training.training: its train_step, and what that looks up."""
    groups = SimpleNamespace(mp="mp", pp="pp", dp_cp=mpu.get_data_parallel_group(with_context_parallel=True))
    same = lambda value, group: value
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    found: dict[str, Any] = {"torch": torch, "nullcontext": nullcontext, "has_nvidia_modelopt": False}
    found |= {"get_args": lambda: args, "get_timers": lambda: MagicMock(), "_otel_sg_enabled": lambda name: False}
    found |= {"get_rerun_state_machine": get_rerun_state_machine, "get_attr_wrapped_model": lambda model, name: groups}
    found |= {
        "_forward_backward_grad_context": lambda args: (nullcontext(), False),
        "is_pp_last_stage": lambda pp: True,
    }
    found |= {"get_num_microbatches": num_microbatches_calculator.get_num_microbatches}
    found |= {"get_moe_router_tracer": lambda: None, "logical_and_across_model_parallel_group": same}
    found |= {"reduce_max_stat_across_model_parallel_group": same}
    found |= {"save_checkpoint": lambda *given: None, "load_checkpoint": lambda *given: (1, 0)}
    training.__dict__.update(found)
    compiled(training, "megatron/training/training.py", "train_step")


class Rollout:
    """A TokenRollout; one of the failed group has no turn."""

    def __init__(self, sample: batches.Sample, failed: bool) -> None:
        tokens, mask = sample.prompt + sample.response, [0] * len(sample.prompt) + sample.mask
        self.sample, self.reward, self.env_id = sample, sample.reward, "math"
        self.trajectory = [] if failed else [tokens]
        self.generation_mask, self.logprobs = [[bool(m) for m in mask]], [[0.0] * sum(mask)]


def collection(seed: int) -> list[list[Rollout]]:
    """Groups of rollouts."""
    groups: list[list[Rollout]] = [[] for _ in range(batches.GROUPS)]
    for sample in batches.samples(seed):
        if PER_TURN and not any(sample.mask):
            # core_v0.19.0 packs no rollout without a generated token: pack_inference_logprobs starts it at -1
            sample.mask[-1] = 1
        group = groups[sample.group]
        group.append(Rollout(sample, failed=sample.group == FAILED and len(group) == 1))
    return groups


def old_logprobs(packing_context: Any, **others: object) -> torch.Tensor:
    """What the policy that made the rollouts gave, packed as Megatron packs it: [bins, positions - 1]."""
    info = packing_context.packing_info
    packed = torch.zeros(len(info.bin_seq_indices), LONGEST - 1, dtype=torch.float64)
    for i, rows in enumerate(info.bin_seq_indices):
        for row, first in zip(rows, info.seq_starts[i], strict=False):
            if row < len(ROWS):
                sample = ROWS[row]
                first += len(sample.prompt) - 1
                packed[i, first : first + len(sample.old)] = torch.tensor(sample.old)
    return packed


ROWS: list[batches.Sample] = []
FOUND: dict[str, Any] = {}


def loop(args: Namespace, forward_step: Any) -> None:
    """The calls of Megatron's train loop: two collections of two optimizer steps."""
    rl_utils, training = (sys.modules[f"megatron.{name}"] for name in ("rl.rl_utils", "training.training"))
    model = table_model(per_token=True)
    optimizer = PlainStep(model)
    scheduler = scheduler_of(optimizer)
    schedule = get_forward_backward_func()
    known = set(inspect.signature(schedule).parameters)
    run = lambda **given: schedule(**{name: value for name, value in given.items() if name in known})
    FOUND.update(gradients=optimizer.gradients, rows=[], logged=[])
    for seed in range(2):
        groups = collection(seed)
        ROWS[:] = [r.sample for group in groups for r in group if r.trajectory]
        iterator, _, _ = rl_utils.prepare_data_for_update(
            model=[model],
            ref_state_dict=model.state_dict(),
            rollouts=groups,
            tokenizer=sys.modules["megatron.training.global_vars"].get_tokenizer(),
            sequence_packing=True,
            is_correction=False,
            **({} if PER_TURN else {"request_ledger": {}}),
        )
        for _ in range(2):
            report, skipped, *_ = training.train_step(
                forward_step, iterator, [model], optimizer, scheduler, model.module.config, run, iteration=0
            )
            assert not skipped
            FOUND["logged"].append({name: float(value) for name, value in report.items()})
    FOUND["state"] = adapter.session().step.state_dict()
    args.save = args.load = str(Path.cwd())  # the ranks run in the output directory
    training.save_checkpoint(1, [model], optimizer, scheduler, 0)
    torch.distributed.barrier()
    (Path(args.load) / "latest_checkpointed_iteration.txt").write_text("1")
    adapter.start(args, per_turn=PER_TURN)
    training.load_checkpoint([model], optimizer, scheduler)
    FOUND["resumed"] = adapter.session().step.state_dict()


def main(out: Path) -> None:
    """Start train_rl.py through the launcher; keep the rows of each step."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    initialize(Layout(data=size), rank=rank, init_method=address, seed=1, timeout_s=120)
    initialize_rerun_state_machine(mode="disabled")
    num_microbatches_calculator.init_num_microbatches_calculator(rank, None, batches.GROUPS * 2, 1, size, False)
    host_modules(arguments())
    own_begin = adapter.Session.begin

    def begin(self: Any, bins: list[Any]) -> None:
        FOUND["rows"].append([(row, ROWS[row]) for b in bins for row in b.rows_M.tolist() if row < len(ROWS)])
        own_begin(self, bins)

    adapter.Session.begin = begin  # type: ignore[method-assign]
    adapter.main([str(SOURCE / "train_rl.py")])
    torch.save(FOUND, out / f"rank_{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
