"""`megatron-daro eval`: whose weights answer, known before any engine starts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from model_servers import serving
from safetensors.torch import load_file, save_file
from weightless import save_tiny_model

from megatron_daro.checkpoints import Checkpoints
from megatron_daro.cli import main
from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.convert.mapping import hf_tensor_shapes
from megatron_daro.errors import CheckpointError
from megatron_daro.observe.progress import Progress
from megatron_daro.workshop.evaluate import measuring
from megatron_daro.workshop.evaluate.models import of_checkpoint


@pytest.fixture
def plans(monkeypatch):
    """The plans that reach the runtime, in place of engines."""
    found = []
    monkeypatch.setattr(measuring, "measure", lambda plan, notices: found.append(plan) or {"sets": {}, "mean": {}})
    return found


@pytest.fixture
def problems(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"problem": "1=", "answer": "1"}\n')
    return ["--set", f"mine={path}", "--template", "none", "--out", str(tmp_path / "out")]


def save_model(directory: Path, seed: int, dtype: str = "float32") -> Path:
    """A tiny model with weights."""
    directory.mkdir(exist_ok=True)
    save_tiny_model(directory)
    config = json.loads((directory / "config.json").read_text()) | {"dtype": dtype}
    (directory / "config.json").write_text(json.dumps(config))
    torch.manual_seed(seed)
    shapes = hf_tensor_shapes(read_model_shape(config))
    tensors = {name: torch.randn(shape).to(getattr(torch, dtype)) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize(("dtype", "precision"), [("float32", "fp32"), ("bfloat16", "bf16"), ("float16", "bf16")])
def test_weights_are_computed_in_the_type_they_are_kept_in(plans, problems, tmp_path, dtype, precision):
    model = save_model(tmp_path / "base", 0, dtype)
    assert main(["eval", "--hf", str(model), *problems]) == 0
    assert plans[0].config.actor.precision == precision


def test_a_checkpoint_is_converted_once_and_again_when_it_changes(plans, problems, tmp_path):
    def converted(seed):
        model = save_model(tmp_path / f"hf{seed}", seed)
        assert main(["convert", "--hf", str(model), "--out", str(tmp_path / f"mg{seed}"), "--processes", "1"]) == 0
        return tmp_path / f"mg{seed}"

    checkpoint, changed, written = converted(0), converted(1), tmp_path / "out" / "model" / "model.safetensors"

    def evaluated(seed):
        assert main(["eval", "--checkpoint", str(checkpoint), *problems]) == 0
        found, expected = load_file(written), load_file(tmp_path / f"hf{seed}" / "model.safetensors")
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        return written.stat().st_mtime_ns

    first = evaluated(0)
    assert evaluated(0) == first
    for file in changed.glob("*.safetensors"):
        (checkpoint / file.name).write_bytes(file.read_bytes())
    assert evaluated(1) != first
    assert plans[0].config.model.path == tmp_path / "out" / "model"
    assert plans[0].weights == plans[1].weights != plans[2].weights


def test_a_checkpoint_of_another_version_of_the_package_is_refused(tmp_path):
    async def write(directory):
        (directory / "weights").write_text("x")

    notices = Progress(total_steps=1, rollouts_per_prompt=2, mode="off")
    store = Checkpoints(tmp_path, keep=1, provenance={})
    checkpoint = asyncio.run(store.save(1, write, {"format": 1, "step": 1}, notices))
    with pytest.raises(CheckpointError, match="format 1"):
        of_checkpoint(checkpoint, save_tiny_model(tmp_path / "base"), tmp_path / "out", notices)


def test_a_directory_without_weights_is_refused(plans, problems, tmp_path, capsys):
    model = save_tiny_model(tmp_path / "base")
    (model / "model.safetensors").unlink()
    assert main(["eval", "--hf", str(model), *problems]) == 1
    assert str(model) in capsys.readouterr().err and not plans


def test_servers_must_answer_and_have_one_model_that_is_here(plans, problems, tmp_path, capsys):
    model, other = (save_tiny_model(tmp_path / name) for name in ("base", "other"))

    def refused(*urls):
        assert main(["eval", "--urls", ",".join(urls), *problems]) in (1, 2)
        return capsys.readouterr().err

    with serving((model, "3"), (model, "3"), (other, "3"), (model, "4"), (tmp_path / "elsewhere", "3")) as urls:
        assert main(["eval", "--urls", ",".join(urls[:2]), *problems]) == 0
        (plan,) = plans
        assert plan.config.model.path == model and list(plan.config.engine.sglang.urls) == urls[:2]
        assert plan.weights["served"]["weight_version"] == "3"
        for wrong in (urls[2], urls[3]):
            words = refused(urls[0], wrong)
            assert urls[0] in words and wrong in words
        assert "http://127.0.0.1:1 " in refused(urls[0], "http://127.0.0.1:1")
        assert "model.path" in refused(urls[4])
    assert len(plans) == 1
