"""What the oracle is measured on: wrong losses with the cause that it must name, right ones about which it is silent.

The words of a cause were written before the tool was changed for its loss.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wrong:
    """One loss. flags: of calculate_per_token_loss that it was written for; words: a pattern of the cause, "" where
    nothing can be found; source: repository and number, or how it came about. whole: under context parallelism it sees
    whole samples."""

    name: str
    flags: tuple[bool, ...]
    words: str
    source: str = "by hand"
    uses: str = "advantages"
    whole: bool = False
    module: str = "planted_losses"


ON, OFF, BOTH = (True,), (False,), (True, False)
_FIRST = [
    ("nemo_rl_3791", ON, "denominator per micro-batch", "NVIDIA-NeMo/RL#3791"),
    ("nemo_rl_3792", ON, "no influence", "NVIDIA-NeMo/RL#3792", "rewards"),
    ("compose_rl_71", OFF, "mean of means", "databricks/compose-rl#71"),
    ("megatron_lm_906", OFF, "context-parallel factor of 2 too much", "NVIDIA/Megatron-LM#906"),
    ("megatron_lm_7452", OFF, "mean of means", "NVIDIA/Megatron-LM#7452"),
    ("slime_987", ON, "context-parallel factor is missing", "THUDM/slime#987"),
    ("verl_6609", ON, "summed where they should be averaged", "verl-project/verl#6609"),
    ("gspo_local_sequence", ON, "part of a sample"),
    ("slime_whitening", ON, "mean of means|statistic"),
    ("roll_agg_loss", ON, "padded positions|mask leaves out"),
    ("masked_by_multiplication", ON, "mask leaves out"),
    ("verl_horizon", ON, "mean of means", "verl-project/verl#3741"),
    ("miles_3231", ON, "number of tokens that is returned", "radixark/miles#3231"),
    ("areal_1273", OFF, "divided by the number of micro-batches", "areal-project/AReaL#1273"),
]
_MORE = [
    ("verl_5641", OFF, "mean of means", "verl-project/verl#5641"),
    ("verl_7200", OFF, "denominator per micro-batch|mean of means", "verl-project/verl#7200"),
    ("trl_6024", OFF, "number of micro-batches", "huggingface/trl#6024"),
    ("ms_swift_10117", OFF, "divided by the number of micro-batches", "modelscope/ms-swift#10117"),
    ("prime_rl_2562", OFF, "missing all-reduce", "PrimeIntellect-ai/prime-rl#2562"),
    ("prime_rl_2562_review", OFF, "context-parallel factor is missing", "PrimeIntellect-ai/prime-rl#2562"),
    ("veomni_338", OFF, "context-parallel factor is missing", "ByteDance-Seed/VeOmni#338"),
    ("nemo_rl_1693", OFF, "divided by the data-parallel size", "NVIDIA-NeMo/RL#1693"),
    ("arctic_119", OFF, "divided by the data-parallel size", "Snowflake-AI-Research/Arctic-Platform#119"),
    ("nemo_rl_212", OFF, "mean of means", "NVIDIA-NeMo/RL#212"),
    ("prime_rl_674", ON, "padded positions", "PrimeIntellect-ai/prime-rl#674"),
    ("slime_2235", ON, "part of a sample|context-parallel.*statistic|statistic.*context-parallel", "THUDM/slime#2235"),
    ("miles_3229", ON, "call it on every rank", "radixark/miles#3229"),
    ("slime_393", ON, "call it on every rank", "THUDM/slime#393"),
    ("openrlhf_973", ON, "shifted by one", "OpenRLHF/OpenRLHF#973"),
    ("ms_swift_10185", ON, "shifted by one", "modelscope/ms-swift#10185"),
    ("tt_metal_46548", ON, "taken by position", "tenstorrent/tt-metal#46548"),
    ("verl_6049", OFF, "context-parallel", "verl-project/verl#6049"),
    ("torchforge_571", ON, "no influence", "meta-pytorch/torchforge#571", "old_logprobs"),
    ("prime_rl_568", ON, "bfloat16", "PrimeIntellect-ai/prime-rl#568"),
    ("open_instruct_535", ON, "padded positions|mask leaves out", "allenai/open-instruct#535"),
    ("wrong_sign_of_clip", ON, ""),
    ("dropped_micro_batch", ON, "micro-batch.*is not trained"),
    ("random_tokens", ON, "random numbers"),
    ("tensor_sum", ON, "tensor-parallel size"),
    ("bf16_logprobs", ON, ""),
    ("sequence_mean_of_a_part", ON, "part of a sample"),
    ("kl_of_a_micro_batch", ON, "denominator per micro-batch|mean of means", "by hand", "ref_logprobs"),
    ("group_of_a_micro_batch", ON, "mean of means|statistic", "by hand", "rewards"),
    ("whitening_of_a_rank", ON, "missing all-reduce"),
    ("shifted_advantages", ON, "shifted by one"),
    ("moving_baseline", ON, "state", "by hand", "rewards"),
    ("longest_of_the_micro_batch", ON, "mean of means"),
    ("detached", ON, "no gradient"),
    ("largest_advantage_of_a_micro_batch", ON, "statistic.*of the micro-batch"),
    ("deviation_of_a_micro_batch", ON, "^not certain.*deviation"),
    ("veto_of_a_part", ON, "^not certain.*part of a sample"),
    ("clamped_loss_of_a_micro_batch", OFF, "limit"),
    ("running_sum_over_samples", ON, "across the border of samples"),
]
WRONG = [Wrong(*row, module="buggy_losses") for row in _FIRST] + [Wrong(*row) for row in _MORE]


@dataclass(frozen=True)
class Right:
    """A loss that no layout changes. framework: whose formula it is."""

    name: str
    framework: str
    flags: tuple[bool, ...]
    uses: tuple[str, ...] = ("advantages",)
    whole: bool = False
    module: str = "host_losses"


_SHIPPED = [
    "grpo",
    "grpo_sequence",
    "dapo",
    "lite_ppo",
    "dr_grpo",
    "rloo",
    "daro",
    "maxrl",
    "f_grpo",
    "mgpo",
    "dgpo",
    "ppo",
    "gspo",
    "cispo",
]
RIGHT = [
    *(Right(n, "megatron_daro", BOTH, module="megatron_daro.workshop.check_loss.shipped") for n in _SHIPPED),
    Right("verl", "verl", OFF),
    Right("verl", "verl", OFF, whole=True),
    Right("verl_sequence_mean", "verl", OFF, ("advantages", "ref_logprobs"), whole=True),
    Right("verl_gspo", "verl", OFF, ("advantages", "old_logprobs"), whole=True),
    Right("slime", "slime", OFF),
    Right("slime_per_token", "slime", ON),
    Right("slime_kl", "slime", OFF, ("advantages", "ref_logprobs")),
    Right("nemo_rl", "NeMo-RL", OFF, ("advantages", "ref_logprobs")),
    Right("nemo_rl_sequence", "NeMo-RL", OFF),
    Right("roll", "ROLL", OFF),
    Right("megatron_rl", "Megatron-LM", ON, ("advantages", "ref_logprobs")),
    Right("areal", "AReaL", OFF),
    Right("trl_dapo", "TRL", OFF),
    Right("reinforce_plus_plus", "OpenRLHF", OFF),
    Right("supervised", "by hand", ON, ()),
    Right("float32", "by hand", OFF),
    Right("positive_only", "by hand", OFF),
    Right("sign_of_advantage", "by hand", ON, module="buggy_losses"),
    Right("verdict_of_reward", "by hand", ON, ("rewards",), module="buggy_losses"),
]
