"""The minimal loop: its replay agrees with the Megatron policy, its sampling with transformers, and it learns."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import minimal_loop
import pytest
import recorded_run
import tokenizer
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from megatron_daro.config import Config

STOP = tokenizer.SUMS.ids["<eos>"]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """A random two-layer Qwen2 with the quickstart's tokenizer."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    save_model(Qwen2ForCausalLM(small_qwen2()), path)
    return path


def small_qwen2() -> Qwen2Config:
    return Qwen2Config(
        vocab_size=24,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=STOP,
        pad_token_id=0,
    )


def save_model(model, path: Path) -> None:
    model.save_pretrained(path)
    tokenizer.SUMS.write(path)


@pytest.fixture(scope="module")
def recorded(model_path, tmp_path_factory):
    return recorded_run.record(model_path, tmp_path_factory.mktemp("runs") / "run")


@pytest.mark.slow
def test_replay_agrees_with_the_megatron_policy(recorded, capsys):
    assert minimal_loop.main(["--replay", str(recorded), "--steps", "3"]) == 0
    out = capsys.readouterr().out
    assert out.count("metrics compared") == recorded_run.STEPS
    assert "agree" in out


@pytest.mark.slow
def test_the_compared_metrics_are_those_that_matter(recorded):
    line = json.loads((recorded / "metrics.jsonl").read_text().splitlines()[1])
    assert all(line[f"difficulty/weight/{k}"] != 1.0 for k in (1, 2, 3)), "weights must move, or nothing is compared"
    assert {f"difficulty/loss/{k}" for k in (1, 2, 3)} | {"loss/policy", "loss/grad_norm"} <= set(line)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["difficulty/loss/2", "difficulty/weight/1", "loss/grad_norm", "policy/entropy"])
@pytest.mark.parametrize("change", [1e-3, None, float("nan")], ids=["other", "absent", "nan"])
def test_replay_sees_a_difference(recorded, tmp_path, capsys, key, change):
    run = tmp_path / "run"
    shutil.copytree(recorded, run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    value = lines[1].pop(key)
    if change is not None:
        lines[1][key] = value + change * max(1.0, abs(value))
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert minimal_loop.main(["--replay", str(run)]) == 1
    assert f"in {key}" in capsys.readouterr().out


def run_config(model: Path, problems: Path, **sections) -> Config:
    return Config.model_validate(
        {
            "model": {"path": model},
            "data": {
                "train": [problems],
                "prompt_template": "plain",
                "eval": [{"name": "sums", "path": problems, "temperature": 1.0}],
            },
            "reward": {"verifier": "exact"},
            "algorithm": {"old_logprobs": "forward"},
            **sections,
        }
    )


@pytest.mark.parametrize(
    "override",
    ["algorithm.name=dapo", "algorithm.kl.coefficient=0.1", "reward.verifier=math", 'reward.options={"strict":false}'],
)
def test_options_that_are_not_implemented_are_refused_by_name(model_path, tmp_path, capsys, override):
    from megatron_daro.config import to_yaml

    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(run_config(model_path, tmp_path / "p.jsonl")))
    assert minimal_loop.main([str(path), override]) == 2
    assert override.split("=")[0] in capsys.readouterr().err


def test_greedy_generation_is_that_of_transformers(model_path):
    model = Qwen2ForCausalLM.from_pretrained(model_path)
    prompts = [[1, 5, 6, 7], [1, 9], [1, 4, 4, 4, 4, 12, 15]]
    found = minimal_loop.generate(model, prompts, limit=12, temperature=0.0, stop=STOP, noise=torch.Generator())
    for prompt, (tokens, _) in zip(prompts, found, strict=True):
        wanted = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=STOP)
        assert tokens == wanted[0, len(prompt) :].tolist()


def test_sampled_logprobs_are_those_of_a_full_forward_pass(model_path):
    model = Qwen2ForCausalLM.from_pretrained(model_path)
    prompts, noise = [[1, 5, 6, 7], [1, 9]], torch.Generator().manual_seed(1)
    answers = minimal_loop.generate(model, prompts, limit=8, temperature=0.7, stop=STOP, noise=noise)
    samples = [minimal_loop.Sample(p, *a, 0, False, 0.0) for p, a in zip(prompts, answers, strict=True)]
    columns = minimal_loop.token_columns(samples)
    with torch.no_grad():
        logits = model(columns["tokens"], attention_mask=columns["attention"]).logits[:, :-1]
    logprobs = torch.log_softmax(logits / 0.7, -1).gather(2, columns["tokens"][:, 1:, None])[..., 0]
    mask = columns["mask"]
    assert mask.sum(1).tolist() == [len(tokens) for tokens, _ in answers]
    torch.testing.assert_close(logprobs[mask], columns["sampled"][mask], atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def coin(tmp_path_factory):
    """A model that answers 1+1= with 2 or 3, each about half of the time, and the problem."""
    path = tmp_path_factory.mktemp("coin")
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(small_qwen2())
    rows = torch.tensor([[1, *tokenizer.SUMS.encode(f"1+1=####{answer}"), STOP] for answer in (2, 3)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(60):
        labels = rows.clone()
        labels[:, :5] = -100
        optimizer.zero_grad()
        model(rows, labels=labels).loss.backward()
        optimizer.step()
    save_model(model, path / "model")
    row = {"problem": "1+1=", "answer": "2", "category": "digits_1"}
    (path / "problems.jsonl").write_text((json.dumps(row) + "\n") * 32)
    return path


def coin_config(coin: Path) -> Config:
    rollout = {"prompts_per_batch": 4, "rollouts_per_prompt": 8, "max_response_tokens": 6}
    actor = {"precision": "fp32", "optimizer": {"learning_rate": 2e-3}}
    trainer = {"steps": 12, "seed": 0}
    return run_config(coin / "model", coin / "problems.jsonl", rollout=rollout, actor=actor, trainer=trainer)


def test_training_raises_the_accuracy_and_repeats_exactly(coin, capsys):
    outputs = []
    for _ in range(2):
        assert minimal_loop.train(coin_config(coin)) == 0
        lines = capsys.readouterr().out.splitlines()
        outputs.append([line.rsplit(",", 1)[0] if line.startswith("step") else line for line in lines])
    assert outputs[0] == outputs[1]
    first, last = (json.loads(outputs[0][i]) for i in (0, -1))
    assert 0.2 < first["eval/sums/accuracy"] < 0.8
    assert last["step"] == 12
    assert last["eval/sums/accuracy"] > 0.95
    assert last["eval/sums/accuracy/digits_1"] == last["eval/sums/accuracy"]


def test_a_batch_holds_whole_mixed_groups_only_and_no_more_than_asked_for(coin):
    config = coin_config(coin)
    trainer = minimal_loop.Trainer(config)
    row = json.loads((coin / "problems.jsonl").read_text().splitlines()[0])
    never_right = row | {"answer": "7"}
    samples, accuracy = minimal_loop.Asker(config, trainer.model).batch(iter([row, never_right] * 100))
    groups = [samples[i : i + 8] for i in range(0, len(samples), 8)]
    assert len(groups) == 4
    assert all(len({s.group for s in group}) == 1 and len({s.correct for s in group}) == 2 for group in groups)
    assert len({group[0].group for group in groups}) == 4
    assert 0.1 < accuracy < 0.4, "half of the problems are never answered right; they count here"
