"""The base model: the actor's pretraining is supervised training, and a finished build is kept."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import build_base
import numpy as np
import problems
import pytest
import torch
import torch.multiprocessing
from transformers import Qwen2ForCausalLM

from megatron_daro.config import check, resolve, to_yaml

pytestmark = pytest.mark.slow

SMALL = build_base.BaseSettings(
    steps=3, batch=12, hidden=32, layers=1, ffn=48, training_draws=50, learning_rate=2e-2, warmup_steps=2
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    target = tmp_path_factory.mktemp("base") / "quickstart-base"
    assert build_base.build(target, SMALL, 1)
    return target


@pytest.mark.slow
def test_pretraining_by_the_actor_is_supervised_training(built, tmp_path):
    """Against plain torch: cross-entropy over the answer tokens, AdamW, clipping at 1."""
    build_base.write_random_model(tmp_path / "random", SMALL)
    model = Qwen2ForCausalLM.from_pretrained(tmp_path / "random")
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    held_out = frozenset(p.key for p in problems.held_out_problems(SMALL.seed))
    for step in range(1, SMALL.steps + 1):
        batch = build_base.supervised_batch(SMALL, step, held_out)
        optimizer.zero_grad()
        cross_entropy(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = SMALL.learning_rate * min(1.0, step / SMALL.warmup_steps)
        optimizer.step()
    found = Qwen2ForCausalLM.from_pretrained(built / "model").state_dict()
    start = Qwen2ForCausalLM.from_pretrained(tmp_path / "random").state_dict()
    for name, wanted in model.state_dict().items():
        torch.testing.assert_close(
            found[name], wanted, atol=2e-4, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )
    moved = max(float((found[name] - start[name]).abs().max()) for name in found)
    assert moved > 0.02, "three steps of learning rate 0.02 must have changed the weights"


def cross_entropy(model, batch):
    """Mean over all answer tokens of the batch, one sample at a time."""
    ends = np.cumsum(batch.lengths_N)
    total = torch.zeros(())
    for end, length, prompt in zip(ends, batch.lengths_N, batch.prompt_lengths_N, strict=True):
        tokens = torch.tensor(batch.tokens_T[end - length : end]).long()[None]
        logits = model(tokens).logits[0, prompt - 1 : -1]
        total = total + torch.nn.functional.cross_entropy(logits, tokens[0, prompt:], reduction="sum")
    return total / len(batch.loss_mask_R)


@pytest.mark.slow
def test_a_finished_build_is_kept_and_complete(built):
    before = {path: path.stat().st_mtime_ns for path in built.rglob("*")}
    assert build_base.build(built, SMALL, 1) is False
    assert {path: path.stat().st_mtime_ns for path in built.rglob("*")} == before
    names = {str(path.relative_to(built)) for path in before}
    assert {"settings.json", "train.jsonl", "held_out.jsonl", "model/config.json"} <= names
    assert {"model/model.safetensors", "model/tokenizer.json", "model/tokenizer_config.json"} <= names


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [[], ["trainer.steps=1"]], ids=["as it is", "one step"])
def test_the_configuration_fits_the_build(built, overrides):
    """Every check but the world size, which is that of the machine."""
    config = resolve(Path(build_base.__file__).parent / "config.yaml", overrides)
    text = to_yaml(config).replace("runs/quickstart-base", str(built))
    (built.parent / "config.yaml").write_text(text)
    report = check(resolve(built.parent / "config.yaml"))
    assert [p for p in report.problems if "parallel" not in p.field] == []


def test_what_another_build_left_is_replaced(tmp_path, monkeypatch):
    """Only the pretraining itself is left out here."""
    target = tmp_path / "base"
    calls = []
    monkeypatch.setattr(torch.multiprocessing, "spawn", lambda *arguments, **_: calls.append(arguments))
    assert build_base.build(target, SMALL, 1)
    (target / "stale").touch()
    assert not build_base.build(target, SMALL, 1)
    assert (target / "stale").exists()
    assert build_base.build(target, dataclasses.replace(SMALL, slips=problems.Slips()), 1)
    assert not (target / "stale").exists()
    (target / "settings.json").write_text("{ torn")
    assert build_base.build(target, SMALL, 1)
    assert len(calls) == 3


def test_an_interrupted_build_is_not_taken_for_a_finished_one(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch.multiprocessing, "spawn", interrupted)
        with pytest.raises(KeyboardInterrupt):
            build_base.build(tmp_path / "base", SMALL, 1)
    assert list(tmp_path.iterdir()) == [], "nothing half made may stay"
    monkeypatch.setattr(torch.multiprocessing, "spawn", lambda *_, **__: None)
    assert build_base.build(tmp_path / "base", SMALL, 1)


def test_batches_depend_on_seed_and_step_only_and_hold_no_held_out_sum():
    held_out = frozenset(p.key for p in problems.held_out_problems(0))
    first, again, next_step = (build_base.supervised_batch(SMALL, step, held_out) for step in (5, 5, 6))
    assert np.array_equal(first.tokens_T, again.tokens_T)
    assert not np.array_equal(first.tokens_T[:50], next_step.tokens_T[:50])
    everything = frozenset((min(a, b), max(a, b)) for a in range(10) for b in range(10))
    batch = build_base.supervised_batch(SMALL, 1, everything)
    assert batch.prompt_lengths_N.min() > len("1+1=") + 1, "sums of one digit are held out here"
