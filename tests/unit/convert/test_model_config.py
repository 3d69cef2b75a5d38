"""Megatron checkpoints of other programs: where their tensors and their model's config.json are, config.json out of
Megatron-LM's arguments, and that nothing of their pickle is run."""

from __future__ import annotations

import argparse
import enum
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from hf_checkpoints import assert_equal, config_of, make_hf, tensors_of, to_hf, to_megatron

from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.errors import CheckpointError, ModelError
from megatron_daro.workshop.convert import model_config
from megatron_daro.workshop.convert.model_config import find_config, read_arguments


class Backend(enum.Enum):
    """As megatron.core.transformer.enums.AttnBackend, which the arguments hold."""

    auto = 5


LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
MODELS = {
    "qwen2": {"tie_word_embeddings": True, "rope_theta": 1000000.0},
    "qwen3": {"rms_norm_eps": 1e-6},
    "llama": {"rope_scaling": LLAMA3, "rms_norm_eps": 1e-5},
    "qwen3_moe": {"num_hidden_layers": 3, "mlp_only_layers": [1]},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def arguments_of(config: dict) -> argparse.Namespace:
    """What Megatron-LM's parser makes of the options for a model: names of megatron/training/arguments.py."""
    shape = read_model_shape(config)
    experts = shape.experts
    return argparse.Namespace(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        group_query_attention=True,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        padded_vocab_size=128,
        vocab_size=shape.vocab,
        normalization="RMSNorm",
        norm_epsilon=shape.rms_eps,
        swiglu=True,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        position_embedding_type="rope",
        rotary_base=int(shape.rope_theta),
        rotary_percent=1.0,
        use_rope_scaling=shape.rope_scaling is not None,
        rope_scaling_factor=shape.rope_scaling.factor if shape.rope_scaling else 8.0,
        untie_embeddings_and_output_weights=not shape.tie,
        num_experts=experts and experts.number,
        moe_router_topk=experts.chosen if experts else 2,
        moe_router_pre_softmax=experts is not None and not experts.normalize,
        moe_ffn_hidden_size=experts and experts.ffn,
        moe_layer_freq=[int(shape.has_experts(layer)) for layer in range(shape.layers)] if experts else 1,
        bf16=True,
        fp16=False,
        params_dtype=torch.bfloat16,
        attention_backend=Backend.auto,
        save=Path("/somewhere"),
    )


@pytest.fixture
def checkpoint(tmp_path):
    """Makes a torch_dist checkpoint of a model as Megatron-LM leaves it: with arguments and without config.json."""

    def make(family: str, **changes) -> tuple[Path, dict]:
        config = config_of(family, **{"dtype": "bfloat16", **MODELS.get(family, {}), **changes})
        make_hf(tmp_path / "hf", config)
        to_megatron(tmp_path / "hf", tmp_path / "megatron", format_="torch_dist")
        shutil.rmtree(tmp_path / "megatron/hf")
        save(tmp_path / "megatron", arguments_of(config))
        return tmp_path / "megatron", config

    return make


def save(folder: Path, arguments: argparse.Namespace) -> None:
    state = {"args": arguments, "checkpoint_version": 3.0, "iteration": 7, "rng": torch.ones(3)}
    torch.save(state, folder / "release/common.pt")


@pytest.mark.parametrize("family", MODELS)
def test_the_arguments_describe_the_model(checkpoint, tmp_path, family):
    folder, config = checkpoint(family)
    made = find_config(folder)
    assert isinstance(made, dict) and read_model_shape(made) == read_model_shape(config)
    to_hf(folder, tmp_path / "back", config=made, verify=True)
    assert_equal(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "hf"))
    assert read_model_shape(tmp_path / "back") == read_model_shape(config)


def test_without_its_vocabulary_the_padded_one_counts(checkpoint, tmp_path):
    folder, _ = checkpoint("llama")
    arguments = read_arguments(folder / "release")
    save(folder, argparse.Namespace(**{**arguments, "vocab_size": None}))
    to_hf(folder, tmp_path / "back", config=find_config(folder), verify=True)
    rows = tensors_of(tmp_path / "back")["lm_head.weight"]
    assert len(rows) == 128 and torch.equal(rows[:61], tensors_of(tmp_path / "hf")["lm_head.weight"])
    assert not rows[61:].any()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"normalization": "LayerNorm"}, r"normalization 'LayerNorm' \(allowed: 'RMSNorm'\)"),
        ({"multi_latent_attention": True, "rotary_percent": 0.5}, "rotary_percent 0.5 .*; multi_latent_attention True"),
        ({"add_qkv_bias": True}, "no family has models with qk_layernorm True, add_qkv_bias True, experts False"),
        ({"num_layers": None}, "num_hidden_layers"),
    ],
)
def test_arguments_of_another_model(checkpoint, changes, match):
    folder, config = checkpoint("qwen3")
    save(folder, argparse.Namespace(**{**vars(arguments_of(config)), **changes}))
    with pytest.raises(ModelError, match=match):
        find_config(folder)


def test_missing_arguments_are_named(checkpoint):
    folder, config = checkpoint("qwen3")
    arguments = arguments_of(config)
    del arguments.rotary_base
    save(folder, arguments)
    with pytest.raises(ModelError, match=r"common\.pt: the saved arguments have no rotary_base.*--hf-config"):
        find_config(folder)
    torch.save({"iteration": 7}, folder / "release/common.pt")
    with pytest.raises(ModelError, match=r"no config\.json .* nor the arguments of Megatron-LM.*--hf-config"):
        find_config(folder)
    (folder / "release/common.pt").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"common\.pt cannot be read: BadZipFile"):
        find_config(folder)


def test_the_folder_that_slime_was_given_counts_before_the_arguments(checkpoint, tmp_path):
    folder, config = checkpoint("qwen3")
    save(folder, argparse.Namespace(**vars(arguments_of(config)), hf_checkpoint=str(tmp_path / "hf")))
    assert find_config(folder) == tmp_path / "hf"


@pytest.fixture
def hf(tmp_path):
    make_hf(tmp_path / "hf", config_of())
    return tmp_path / "hf"


def test_megatron_checkpoints_in_formats_that_are_not_read(hf, tmp_path):
    legacy = tmp_path / "run/iter_0000100/mp_rank_00"
    legacy.mkdir(parents=True)
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("100")

    def refused(source, match):
        with pytest.raises(CheckpointError, match=match):
            to_hf(source, tmp_path / "back", config=hf)

    refused(tmp_path / "run", r"holds mp_rank_\* folders of pickles.*--ckpt-format torch_dist")
    to_megatron(hf, tmp_path / "megatron", format_="torch_dist")
    metadata = tmp_path / "megatron/release/metadata.json"
    metadata.write_text(json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}))
    refused(tmp_path / "megatron", "format 'zarr'; allowed: 'torch_dist' and 'daro_saf")
    refused(hf / "config.json", "it is a file; give its directory")


@pytest.mark.parametrize("layout", ["actor/model", "actor", "model", "."])
def test_verls_layout_is_found(hf, tmp_path, layout):
    given = tensors_of(hf)
    to_megatron(hf, tmp_path / "megatron", format_="torch_dist")
    step = tmp_path / "checkpoints/global_step_7"
    (step / layout).mkdir(parents=True)
    (tmp_path / "megatron/release").rename(step / layout / "dist_ckpt")
    (tmp_path / "megatron/hf").rename(step / layout / "huggingface")
    (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").write_text("7")
    for number, source in enumerate([step, step / layout / "dist_ckpt", tmp_path / "checkpoints"]):
        assert find_config(source) == step / layout / "huggingface"
        to_hf(source, tmp_path / f"back{number}", config=find_config(source))
        assert_equal(tensors_of(tmp_path / f"back{number}"), given)


def test_verls_weights_in_hugging_faces_format_are_named(hf, tmp_path):
    model = tmp_path / "global_step_7/actor/model"
    model.mkdir(parents=True)
    hf.rename(model / "huggingface")
    with pytest.raises(CheckpointError, match=r"actor/model/huggingface holds its weights .*; give that to --hf"):
        find_config(tmp_path / "global_step_7")


class _Evil:
    """Writes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_nothing_of_the_arguments_is_run(checkpoint, tmp_path):
    folder, config = checkpoint("qwen3")
    save(folder, argparse.Namespace(**vars(arguments_of(config)), evil=_Evil(tmp_path / "executed")))
    assert read_model_shape(find_config(folder)) == read_model_shape(config)
    assert not (tmp_path / "executed").exists()
    torch.load(folder / "release/common.pt", weights_only=False)
    assert (tmp_path / "executed").exists(), "the attack must work on a reader that trusts it"


ARGUMENTS = {
    "num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "num_query_groups": 2,
    "padded_vocab_size": 128, "max_position_embeddings": 64, "layernorm_epsilon": 1e-5, "rotary_base": 10000,
    "untie_embeddings_and_output_weights": True,
}  # fmt: skip


def described(**changes: object) -> dict[str, object]:
    return model_config.config_from_arguments(ARGUMENTS | changes, Path("common.pt"))


def test_missing_arguments_have_megatrons_defaults():
    assert described() == {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 24, "vocab_size": 128,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "dtype": "float32",
    }  # fmt: skip
    given = described(
        kv_channels=8, vocab_size=100, norm_epsilon=1e-6, fp16=True, untie_embeddings_and_output_weights=False
    )
    assert (given["head_dim"], given["vocab_size"], given["rms_norm_eps"], given["dtype"]) == (8, 100, 1e-6, "float16")
    assert given["tie_word_embeddings"] is True and described(bf16=True, fp16=True)["dtype"] == "bfloat16"
    assert (
        described(group_query_attention=False)["num_key_value_heads"]
        == 4
        == described(num_query_groups=None)["num_key_value_heads"]
    )
    scaled = described(use_rope_scaling=True, rope_scaling_factor=8.0)["rope_scaling"]
    assert scaled == {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip


@pytest.mark.parametrize(("name", "allowed"), [(name, values) for name, values in model_config._FIXED.items()])
def test_arguments_that_no_family_has_are_refused(name, allowed):
    right = {
        "swiglu": True, "rotary_percent": 1.0, "moe_router_topk_scaling_factor": 1.0, "normalization": "RMSNorm",
        "position_embedding_type": "rope", "softmax_type": "vanilla", "moe_router_score_function": "softmax",
    }  # fmt: skip
    nothing = ("factor", "freq", "size", "variant", "path", "groups")
    value = right.get(name, None if name.endswith(nothing) else False)
    described(**{name: value})
    for wrong in (not value, 0.5, "x", 2.0):
        with pytest.raises(ModelError, match=rf"common\.pt: the saved arguments ask for .*: {name} "):
            described(**{name: wrong})
    assert value in allowed


def test_the_family_of_experts_follows_from_the_arguments():
    experts = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 8}
    mixtral = described(**experts)
    assert mixtral["model_type"] == "mixtral" and (mixtral["num_local_experts"], mixtral["num_experts_per_tok"]) == (
        4,
        2,
    )
    qwen = described(**experts, qk_layernorm=True, moe_layer_freq=2)
    assert qwen["model_type"] == "qwen3_moe" and qwen["mlp_only_layers"] == [1] and qwen["norm_topk_prob"] is True
    assert described(**experts, qk_layernorm=True, moe_layer_freq=[0, 1])["mlp_only_layers"] == [0]
    assert described(**experts, qk_layernorm=True, moe_router_pre_softmax=True)["norm_topk_prob"] is False
    wide = described(**(experts | {"moe_ffn_hidden_size": None}), qk_layernorm=True)
    assert wide["moe_intermediate_size"] == 24 and wide["mlp_only_layers"] == []
    assert (
        described(add_qkv_bias=True)["model_type"] == "qwen2" and described(qk_layernorm=True)["model_type"] == "qwen3"
    )
    with pytest.raises(
        ModelError, match="no family has models with qk_layernorm True, add_qkv_bias True, experts False"
    ):
        described(qk_layernorm=True, add_qkv_bias=True)
    with pytest.raises(ModelError, match="no family has models with"):
        described(**experts, moe_router_pre_softmax=True)
    with pytest.raises(ModelError, match=r"common\.pt: the saved arguments have no moe_router_topk\. Name a folder"):
        described(num_experts=4)


@pytest.mark.parametrize("place", ["hf", "step/hf", "huggingface", "step", "."])
def test_the_models_folder_is_looked_for_beside_the_tensors_and_above(tmp_path, monkeypatch, place):
    folder = tmp_path / "step"
    folder.mkdir()
    monkeypatch.setattr(model_config, "checkpoint_directory", lambda megatron: folder)
    with pytest.raises(ModelError, match=r"step has no config\.json of its model with it, nor the arguments"):
        model_config.find_config_folder(tmp_path)
    (tmp_path / place).mkdir(exist_ok=True, parents=True)
    (tmp_path / place / "config.json").write_text("{}")
    assert model_config.find_config(tmp_path) == tmp_path / place


def test_an_inert_record_takes_everything():
    one = model_config._Inert(1, a=2)
    one.append(1)
    one.extend([1])
    one["x"] = 1
    assert isinstance(one, model_config.Record)
