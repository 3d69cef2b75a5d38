"""A whole PPO step of TRL's trainer and the same batch here: advantages, targets, losses, gradients of both models.

Needs trl 0.19.1 with datasets; skipped without. Answers have no padding, since TRL places a padded one's score one
token later.
"""

import sys

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from megatron_daro.algo.algorithm import StepTotals
from megatron_daro.algo.objective import ObjectiveSettings, token_objective
from megatron_daro.algo.ppo import Ppo, value_losses
from megatron_daro.algo.token_columns import TokenColumns

ANSWERS, LENGTH, GAMMA, LAMBDA, BETA, CLIP, VALUE_CLIP = 8, 12, 0.99, 0.95, 0.05, 0.2, 0.1
VOCABULARY, PAD, END = 512, 511, 510


def model(kind, seed, **options):
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(
        vocab_size=VOCABULARY, intermediate_size=64, pad_token_id=PAD, eos_token_id=END, initializer_range=0.3,
        tie_word_embeddings=False, **shape, **options,
    )  # fmt: skip
    return kind(config).double()


def trainer(trl, datasets, folder):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token=str(PAD), eos_token=str(END))
    data = datasets.Dataset.from_dict({"input_ids": [[i + 1, i + 2, i + 3] for i in range(ANSWERS)]})
    config = trl.PPOConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, report_to=[], save_strategy="no", num_sample_generations=0,
        per_device_train_batch_size=ANSWERS, gradient_accumulation_steps=1, total_episodes=ANSWERS,
        num_mini_batches=1, num_ppo_epochs=3, learning_rate=3e-3, response_length=LENGTH, kl_coef=BETA,
        gamma=GAMMA, lam=LAMBDA, cliprange=CLIP, cliprange_value=VALUE_CLIP, vf_coef=1.0, seed=1, disable_tqdm=True,
    )  # fmt: skip
    labels = {"num_labels": 1}
    return trl.PPOTrainer(
        config, tokenizer, model(Qwen2ForCausalLM, 1), model(Qwen2ForCausalLM, 2),
        model(Qwen2ForSequenceClassification, 3, **labels), data, model(Qwen2ForSequenceClassification, 4, **labels),
        eval_dataset=data,
    )  # fmt: skip


def ours(step):
    """Advantages, targets and both losses of the product, from what TRL's loop has at hand; [8, 12] where a table."""
    count = ANSWERS * LENGTH
    everything = torch.ones(count, dtype=torch.bool)
    bins_N, lengths_N = torch.zeros(ANSWERS, dtype=torch.int64), torch.full((ANSWERS,), LENGTH)
    tokens = TokenColumns(
        mask_R=everything,
        columns={"values": step["values"].reshape(-1)},
        lengths_N=lengths_N,
        rewards_N=step["scores"],
        advantages_N=torch.zeros(ANSWERS, dtype=torch.float64),
        bins_N=bins_N,
        group_ids_N=torch.arange(ANSWERS) // 2,
        truncated_N=torch.ones(ANSWERS, dtype=torch.bool),
        sum_over_step=lambda values: values,
        token_rewards_R=-BETA * (step["logprobs"] - step["ref_logprobs"]).reshape(-1),
    )
    algorithm = Ppo(rollouts_per_prompt=2, max_response_tokens=LENGTH, gamma=GAMMA, gae_lambda=LAMBDA)
    advantages_R, targets_R = algorithm.token_advantages(tokens), algorithm.value_targets(tokens)
    # TRL draws an order for every epoch: its tables of this mini-batch are rows of the batch's.
    rows = torch.as_tensor(step["micro_batch_inds"])
    drawn = (torch.arange(count).reshape(ANSWERS, LENGTH)[rows]).reshape(-1)
    objective = token_objective(
        step["new_logprobs"].reshape(-1),
        None,
        old_logprobs_T=step["logprobs"].reshape(-1)[drawn],
        rollout_logprobs_T=None,
        ref_logprobs_T=None,
        advantages_T=advantages_R[drawn],
        mask_T=everything,
        sample_T=torch.arange(ANSWERS).repeat_interleave(LENGTH),
        num_samples=ANSWERS,
        settings=ObjectiveSettings(clip_low=CLIP, clip_high=CLIP),
    )
    coefficients_N = algorithm.bin_coefficients(bins_N, lengths_N, StepTotals.of(bins_N, lengths_N, 2))
    critic, clipped = value_losses(
        step["vpred"].reshape(-1), step["values"].reshape(-1)[drawn], targets_R[drawn], clip=VALUE_CLIP
    )
    policy = (coefficients_N * objective.sample_losses_M).sum()
    return advantages_R.reshape(ANSWERS, LENGTH), targets_R.reshape(ANSWERS, LENGTH), policy, critic.mean(), clipped


@pytest.mark.timeout(300)
def test_a_whole_step_of_trls_trainer_is_the_same_here(tmp_path, monkeypatch):
    trl, datasets = pytest.importorskip("trl", exc_type=ImportError), pytest.importorskip("datasets")
    if not hasattr(trl, "PPOTrainer"):
        pytest.skip(f"trl {trl.__version__} has no PPOTrainer; 0.19.1 has")
    ppo, epochs = trainer(trl, datasets, tmp_path), []
    parameters = [parameter for parameter in ppo.model.parameters() if parameter.requires_grad]
    backward = ppo.accelerator.backward

    def compared(loss):
        step = sys._getframe(1).f_locals  # TRL's train() is one function
        assert not step["padding_mask"].any()
        advantages, targets, policy, critic, clipped = ours(step)
        torch.testing.assert_close(targets, step["returns"], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(critic, step["vf_loss"], rtol=1e-10, atol=1e-12)
        # TRL whitens with 96 / 95 in float32 (core.py, line 64), 2e-8 beside it; the policy's loss sums to nearly 0.
        torch.testing.assert_close(advantages, step["advantages"], rtol=3e-8, atol=1e-12)
        torch.testing.assert_close(policy, step["pg_loss"], rtol=0, atol=3e-8)
        for mine, theirs in zip(*(gradients(total) for total in (policy + critic, loss)), strict=True):
            assert float((mine - theirs).norm()) <= 1e-6 * float(theirs.norm())
        apart = (step["ratio"] - 1).abs()
        epochs.append((float(apart.max()), int((apart > CLIP).sum()), int(clipped.sum())))
        backward(loss)

    def gradients(total):
        found = torch.autograd.grad(total, parameters, retain_graph=True, allow_unused=True)
        return [gradient for gradient in found if gradient is not None]

    monkeypatch.setattr(ppo.accelerator, "backward", compared)
    ppo.train()
    assert len(epochs) == 3 and epochs[0][0] < 1e-6 and epochs[2][1] > 0 and epochs[2][2] > 0, epochs
