"""Adapters against PEFT's definition written out on transformers: log-probs, gradients, files, in every layout."""

from __future__ import annotations

import json

import lora_tasks
import numpy as np
import pytest
import torch
from heavy_cases import mostly_heavy
from safetensors.torch import save_file
from small_models import random_batch, save_model
from test_gradients_exact import layouts, reference_gradients, relative_difference

from megatron_daro.actor.parallel import Layout
from megatron_daro.config.lora import LoraSection, stored_shapes
from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.convert.daro_format import read_index

RANK, ALPHA = 4, 6.0
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
LINEAR = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]


class Reference:
    """y = W x + alpha / rank * B (A x) beside the named matrices of a transformers model; nothing else is trained."""

    def __init__(self, model, targets=ALL, *, seed=3):
        self.model, self.factors = model.requires_grad_(False), {}
        generator = torch.Generator().manual_seed(seed)
        for name, layer in model.named_modules():
            if name.split(".")[-1] in targets:
                rows, columns = layer.weight.shape
                a = torch.randn(RANK, columns, generator=generator) / columns**0.5
                b = torch.randn(rows, RANK, generator=generator) * 0.05
                names = [f"base_model.model.{name}.lora_{letter}.weight" for letter in "AB"]
                self.factors |= dict(zip(names, (a.requires_grad_(), b.requires_grad_()), strict=True))
                layer.register_forward_hook(lambda _, inputs, out, ab=(a, b): out + self._added(inputs[0], *ab))

    def _added(self, x, a, b):
        return ALPHA / RANK * (x @ a.T @ b.T)

    def __call__(self, tokens):
        return self.model(tokens)

    def named_parameters(self):
        return self.factors.items()

    def zero_grad(self):
        for value in self.factors.values():
            value.grad = None

    @torch.no_grad()
    def take(self, adapters):
        assert adapters.keys() == self.factors.keys()
        for name, value in adapters.items():
            self.factors[name].copy_(torch.from_numpy(value))

    def save(self, folder):
        folder.mkdir()
        save_file({name: value.detach() for name, value in self.factors.items()}, folder / "adapter_model.safetensors")
        targets = sorted({name.split(".")[-3] for name in self.factors})
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": targets, "bias": "none"}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        return {"rank": RANK, "alpha": ALPHA, "targets": targets, "path": folder}


@torch.no_grad()
def logprobs(model, batch):
    parts = []
    for i in range(len(batch)):
        sample = batch.select([i])
        tokens, prompt = torch.tensor(sample.tokens_T, dtype=torch.long), int(sample.prompt_lengths_N[0])
        logits = model(tokens[None]).logits[0].log_softmax(-1)[prompt - 1 : -1]
        parts.append(logits.gather(1, tokens[prompt:, None])[:, 0])
    return torch.cat(parts).numpy()


def joined(results, number, what):
    return {name: value for result in results for name, value in result["updates"][number][what].items()}


def column(results, number, what="logprobs"):
    return next(r["updates"][number][what] for r in results if r["updates"][number][what] is not None)


def check(rank_pool, tmp_path, family, layout, targets=ALL, **options):
    """Two updates from an adapter that is not 0, against the reference."""
    model, batch = save_model(family, tmp_path / "hf"), random_batch()
    reference = Reference(model, targets)
    section = reference.save(tmp_path / "adapter")
    begun = {name: value.detach().clone().numpy() for name, value in reference.factors.items()}
    wanted = stored_shapes(LoraSection(**section), read_model_shape(tmp_path / "hf"))
    assert wanted == {name: value.shape for name, value in begun.items()}, "what a run is checked against"
    results = rank_pool.run(lora_tasks.two_updates, layout, path=tmp_path / "hf", batch=batch, lora=section, **options)
    assert not any(update["skipped"] for result in results for update in result["updates"])
    differences = []
    for number in range(2):
        adapters = joined(results, number, "adapters")
        if number == 0:
            assert all(np.array_equal(adapters[name], begun[name]) for name in begun), "as stored, bit for bit"
            before = logprobs(reference, batch)
        reference.take(adapters)
        moved = logprobs(reference, batch)
        _, _, want = reference_gradients(reference, batch, "daro")
        differences.append(relative_difference(joined(results, number, "gradients"), want))
        scale = np.abs(moved).max()
        assert np.abs(column(results, number) - moved).max() < 1e-6 * scale
        assert np.abs(column(results, number, "reference") - before).max() < 1e-6 * scale, "where the run began"
        merged = save_model(family, tmp_path / f"merged{number}")
        state = {name: torch.from_numpy(value) for name, value in joined(results, number, "merged").items()}
        merged.load_state_dict(state, strict=False)
        assert np.abs(logprobs(merged, batch) - moved).max() < 1e-5
    assert np.abs(moved - before).max() > 1e-3
    for result in results:
        assert result["updates"][1]["numbers"]["trained"] == result["updates"][1]["numbers"]["gradients"]
        assert result["updates"][1]["numbers"]["reference"] == 4 * result["updates"][1]["numbers"]["trained"]
    return max(differences)


CASES = [
    ("qwen2", "single"),
    ("qwen3", "tp2"),
    ("llama", "tp2_plain"),
    ("qwen2_tied", "pp2"),
    ("mistral", "cp2"),
    ("qwen2", "dp2"),
    ("qwen2", "tp2_pp2"),
    ("llama_one_group", "tp2_cp2"),
    ("qwen2", "pp2_vpp2"),
    ("qwen2", "recomputed"),
    ("olmo3", "tp2"),
]


@pytest.mark.parametrize(
    ("family", "layout"),
    mostly_heavy(CASES, ("qwen2", "dp2"), ("qwen2", "tp2_pp2"), ("llama_one_group", "tp2_cp2"), ("qwen2", "pp2_vpp2")),
)
def test_two_updates_are_those_of_the_definition(rank_pool, tmp_path, family, layout):
    (tmp_path / "hf").mkdir()
    known = layouts() | {"tp2": Layout(tensor=2), "tp2_plain": Layout(tensor=2), "recomputed": Layout()}
    options = {"tp2_plain": {"sequence_parallel": False}, "recomputed": {"recompute": "full"}}.get(layout, {})
    assert check(rank_pool, tmp_path, family, known[layout], **options) < 1e-5


FUSED = {
    "qwen3": (Layout(tensor=2), ["q_proj", "v_proj", "up_proj"]),
    "qwen3_moe": (Layout(data=2, expert=2), ALL[:4]),
    "glm4_moe": (Layout(pipeline=2, expert=2, data=2), ALL[:4]),
    "mixtral": (Layout(tensor=2), ALL[:4]),
    "gpt_oss": (Layout(tensor=2, expert=2), ALL[:4]),
    "deepseek_v3": (Layout(tensor=2, expert=2), LATENT),
    "deepseek_v3_plain": (Layout(pipeline=2), ["q_proj", *LATENT[2:]]),
    "qwen3_next": (Layout(tensor=2), [*ALL[:4], "in_proj_qkvz", "in_proj_ba", "out_proj"]),
    "qwen3_5": (Layout(tensor=2, pipeline=2), [*ALL, *LINEAR]),
    "qwen3_5_moe": (Layout(data=2, expert=2), [*ALL[:4], *LINEAR]),
}
"""By family: a layout, and those of the matrices that lie together in one of Megatron's."""


@pytest.mark.parametrize("family", mostly_heavy(FUSED, "gpt_oss", "deepseek_v3", "qwen3_5"))
def test_some_matrices_of_a_fused_layer(rank_pool, tmp_path, family):
    (tmp_path / "hf").mkdir()
    assert check(rank_pool, tmp_path, family, *FUSED[family]) < 1e-5


@pytest.mark.parametrize(
    ("family", "part", "targets"), [("qwen2", "mlp", ["down_proj"]), ("deepseek_v3", "mla_up_proj", ["kv_b_proj"])]
)
def test_adapters_in_parts_that_are_recomputed_are_trained_where_none_comes_before(
    rank_pool, tmp_path, family, part, targets
):
    (tmp_path / "hf").mkdir()
    options = {"recompute_granularity": "selective", "recompute_modules": [part]}
    assert check(rank_pool, tmp_path, family, Layout(), targets, megatron=options) < 1e-5


LORA = {"rank": RANK, "targets": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "in_proj_qkv", "in_proj_a"]}


def together(results, what=None):
    return {name: value for result in results for name, value in (result[what] if what else result).items()}


@pytest.mark.parametrize(
    ("family", "saved", "other"),
    [
        ("qwen2_tied", "dp2", "tp2_pp2"),
        ("qwen2_tied", "tp2_dp2", "single"),
        ("qwen2_tied", "pp2_vpp2", "tp2_cp2"),
        ("qwen3_5", "tp2", "single"),
    ],
)
def test_a_checkpoint_holds_adapters_and_goes_on(rank_pool, tmp_path, family, saved, other):
    """Bit for bit in its own layout, with the same adapters in another one; nothing of the frozen model is in it."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "saved").mkdir()
    save_model(family, tmp_path / "hf")
    options = {"path": tmp_path / "hf", "batch": random_batch(), "directory": tmp_path / "saved", "lora": LORA}
    trained = together(rank_pool.run(lora_tasks.save_train, layouts()[saved], **options))
    again = rank_pool.run(lora_tasks.load_train, layouts()[saved], **options)
    after = together(again, "after")
    assert all(np.array_equal(after[name], trained[name]) for name in trained)
    elsewhere = rank_pool.run(lora_tasks.load_train, layouts()[other], **options)
    assert all(np.array_equal(together(elsewhere, "loaded")[n], v) for n, v in together(again, "loaded").items())
    moved = together(elsewhere, "after")
    assert max(float(np.abs(moved[name] - trained[name]).max()) for name in trained) < 1e-4
    keys = [shard.key for shard in read_index(tmp_path / "saved")]
    assert keys and all(".adapter." in key for key in keys if "_extra_state" not in key)


def test_new_adapters_are_the_same_in_every_layout(rank_pool, tmp_path):
    (tmp_path / "hf").mkdir()
    save_model("llama_one_group", tmp_path / "hf")
    options = {"path": tmp_path / "hf", "lora": LORA}
    one, two = (together(rank_pool.run(lora_tasks.begun, layouts()[name], **options)) for name in ("single", "tp2_pp2"))
    assert one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)
    assert all(value.any() == (".lora_A." in name) for name, value in one.items()), "B begins at 0"
    first = next(value for name, value in one.items() if ".down_proj.lora_A" in name)
    assert 0.9 < np.abs(first).max() * 96**0.5 <= 1, "PEFT's range: 1 / sqrt(in)"
