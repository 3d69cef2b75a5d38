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
from hf_checkpoints import RefusedError, assert_equal, config_of, make_hf, tensors_of, to_hf, to_megatron

from megatron_daro.config.model_shape import read_model_shape


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
    to_hf(folder, tmp_path / "back")
    assert_equal(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "hf"))
    assert read_model_shape(tmp_path / "back") == read_model_shape(config)


def test_without_its_vocabulary_the_padded_one_counts(checkpoint, tmp_path):
    folder, config = checkpoint("llama")
    save(folder, argparse.Namespace(**{**vars(arguments_of(config)), "vocab_size": None}))
    to_hf(folder, tmp_path / "back")
    rows = tensors_of(tmp_path / "back")["lm_head.weight"]
    assert len(rows) == 128 and torch.equal(rows[:61], tensors_of(tmp_path / "hf")["lm_head.weight"])
    assert not rows[61:].any()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"normalization": "LayerNorm"}, "normalization 'LayerNorm'"),
        ({"multi_latent_attention": True, "rotary_percent": 0.5}, "rotary_percent 0.5 .*multi_latent_attention True"),
        ({"position_embedding_type": "yarn"}, "position_embedding_type"),
        ({"softmax_type": "learnable"}, "softmax_type"),
        ({"moe_router_score_function": "sigmoid"}, "moe_router_score_function"),
        ({"add_qkv_bias": True}, "add_qkv_bias True"),  # with norms of queries and keys: no family has both
        ({"num_experts": 4, "moe_ffn_hidden_size": 8, "qk_layernorm": False, "add_qkv_bias": True}, "experts True"),
        ({"num_layers": None}, "num_hidden_layers"),
    ],
)
def test_arguments_of_a_model_that_no_family_has_are_refused(checkpoint, tmp_path, changes, named):
    folder, config = checkpoint("qwen3")
    save(folder, argparse.Namespace(**{**vars(arguments_of(config)), **changes}))
    with pytest.raises(RefusedError, match=named):
        to_hf(folder, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_missing_arguments_are_named(checkpoint, tmp_path):
    folder, config = checkpoint("qwen3")
    arguments = arguments_of(config)
    del arguments.rotary_base
    save(folder, arguments)
    with pytest.raises(RefusedError, match=r"common\.pt: .* rotary_base.*--hf-config"):
        to_hf(folder, tmp_path / "back")
    torch.save({"iteration": 7}, folder / "release/common.pt")
    with pytest.raises(RefusedError, match=r"config\.json .*--hf-config"):
        to_hf(folder, tmp_path / "back")
    (folder / "release/common.pt").write_bytes(b"PK")
    with pytest.raises(RefusedError, match=r"common\.pt"):
        to_hf(folder, tmp_path / "back")


def test_the_folder_that_slime_was_given_counts_before_the_arguments(checkpoint, tmp_path):
    folder, config = checkpoint("qwen3")
    given = {**vars(arguments_of(config)), "num_layers": 7, "hf_checkpoint": str(tmp_path / "hf")}
    save(folder, argparse.Namespace(**given))
    to_hf(folder, tmp_path / "back")
    assert json.loads((tmp_path / "back/config.json").read_text()) == config


def test_arguments_that_only_some_models_have_may_be_missing(checkpoint, tmp_path):
    folder, config = checkpoint("llama", rope_scaling=None)
    arguments = vars(arguments_of(config))
    for name in ("group_query_attention", "use_rope_scaling", "rope_scaling_factor", "num_experts", "moe_layer_freq"):
        del arguments[name]
    save(folder, argparse.Namespace(**arguments))
    to_hf(folder, tmp_path / "back")
    assert read_model_shape(tmp_path / "back") == read_model_shape(config)


@pytest.fixture
def hf(tmp_path):
    make_hf(tmp_path / "hf", config_of())
    return tmp_path / "hf"


def test_megatron_checkpoints_in_formats_that_are_not_read(hf, tmp_path):
    legacy = tmp_path / "run/iter_0000100/mp_rank_00"
    legacy.mkdir(parents=True)
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("100")

    def refused(source, match):
        with pytest.raises(RefusedError, match=match):
            to_hf(source, tmp_path / "back", config=hf)

    refused(tmp_path / "run", "mp_rank_")
    to_megatron(hf, tmp_path / "megatron", format_="torch_dist")
    metadata = tmp_path / "megatron/release/metadata.json"
    metadata.write_text(json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}))
    refused(tmp_path / "megatron", "'zarr'")
    refused(hf / "config.json", "--megatron: .*config.json")


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
        to_hf(source, tmp_path / f"back{number}")
        assert_equal(tensors_of(tmp_path / f"back{number}"), given)


def test_verls_weights_in_hugging_faces_format_are_named(hf, tmp_path):
    model = tmp_path / "global_step_7/actor/model"
    model.mkdir(parents=True)
    hf.rename(model / "huggingface")
    with pytest.raises(RefusedError, match=r"actor/model/huggingface .*--hf"):
        to_hf(tmp_path / "global_step_7", tmp_path / "back")


class _Evil:
    """Writes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_nothing_of_the_arguments_is_run(checkpoint, tmp_path):
    folder, config = checkpoint("qwen3")
    save(folder, argparse.Namespace(**vars(arguments_of(config)), evil=_Evil(tmp_path / "executed")))
    to_hf(folder, tmp_path / "back")
    assert read_model_shape(tmp_path / "back") == read_model_shape(config)
    assert not (tmp_path / "executed").exists()
    torch.load(folder / "release/common.pt", weights_only=False)
    assert (tmp_path / "executed").exists(), "the attack must work on a reader that trusts it"
