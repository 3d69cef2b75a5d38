"""HF <-> Megatron parameters: names of Megatron-core 0.16.1, slices against a slow reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_daro.config.model_shape import ModelShape, read_model_shape
from megatron_daro.convert.checkpoint_keys import global_boxes
from megatron_daro.convert.mapping import (
    TensorRule,
    critic_config,
    global_name,
    hf_tensor_shapes,
    hf_to_megatron,
    merge,
    output_rule,
    padded_vocab_size,
    shard,
    value_head_rule,
)
from megatron_daro.errors import ModelError


def model_shape(family: str = "qwen2", *, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=24, vocab=61, tie=False):
    return read_model_shape(
        {
            "model_type": family,
            "num_hidden_layers": layers,
            "hidden_size": 16,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "intermediate_size": ffn,
            "vocab_size": vocab,
            "tie_word_embeddings": tie,
            **EXPERTS.get(family, {}),
        }
    )


EXPERTS = {
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
    },
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "n_shared_experts": 2,
        "attention_bias": True,
        "use_qk_norm": True,
        "num_nextn_predict_layers": 0,
    },
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "head_dim": None,
        "num_key_value_heads": None,
        "kv_lora_rank": 10,
        "q_lora_rank": 14,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 2,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_next": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 12,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 3,
        "linear_value_head_dim": 5,
        "full_attention_interval": 2,
        "partial_rotary_factor": 0.5,
    },
    "qwen3_5_text": {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 3,
        "linear_value_head_dim": 5,
        "full_attention_interval": 2,
        "partial_rotary_factor": 0.5,
    },
}


MOE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "vocab_size": 61,
    **EXPERTS["qwen3_moe"],
}


def random_tensors(shape: ModelShape, dtype=torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    kept = {name for rule in hf_to_megatron(shape) for name in rule.hf_names if rule.fp32}
    return {
        name: torch.randn(d, generator=generator).to(torch.float32 if name in kept else dtype)
        for name, d in hf_tensor_shapes(shape).items()
    }


def rules_of(shape: ModelShape, **options):
    return {rule.megatron_name: rule for rule in hf_to_megatron(shape, **options)}


LOCAL_LAYER = {
    "input_layernorm.weight",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_proj.weight",
    "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
}
FUSED_LAYER = LOCAL_LAYER - {"input_layernorm.weight", "pre_mlp_layernorm.weight"} | {
    "self_attention.linear_qkv.layer_norm_weight",
    "mlp.linear_fc1.layer_norm_weight",
}
OF_FAMILY = {
    "llama": set(),
    "qwen2": {"self_attention.linear_qkv.bias"},
    "qwen3": {"self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"},
}
OUTSIDE = {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"}


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("fused", [False, True])
def test_names(family, fused):
    layer = (FUSED_LAYER if fused else LOCAL_LAYER) | OF_FAMILY[family]
    expected = OUTSIDE | {f"decoder.layers.{i}.{name}" for i in range(2) for name in layer}
    assert set(rules_of(model_shape(family), fused_norms=fused)) == expected


EXPERT_MLP = {
    False: [f"mlp.experts.local_experts.{e}.linear_fc{i}.weight" for e in range(4) for i in (1, 2)],
    True: [f"mlp.experts.linear_fc{i}.weight{e}" for i in (1, 2) for e in range(4)],
}


@pytest.mark.parametrize("fused", [False, True])
def test_names_of_experts_in_forward_order(fused):
    """The norm before experts is never part of a linear layer: the router reads it too."""
    rules = hf_to_megatron(model_shape("qwen3_moe", layers=2), fused_norms=fused)
    mlp = [r for r in rules if r.layer == 1 and not r.megatron_name.startswith("decoder.layers.1.self_attention")]
    names = [r.megatron_name.removeprefix("decoder.layers.1.") for r in mlp]
    assert [n for n in names if n != "input_layernorm.weight"] == [
        "pre_mlp_layernorm.weight", "mlp.router.weight", *EXPERT_MLP[fused]
    ]  # fmt: skip
    assert {r.expert for r in mlp} == {None, 0, 1, 2, 3}
    dense = {r.megatron_name for r in rules if r.layer == 0}
    assert {"decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.mlp.linear_fc2.weight"} < dense
    third = next(r for r in mlp if r.expert == 3 and "fc2" in r.megatron_name)
    assert third.hf_names == ("model.layers.1.mlp.experts.3.down_proj.weight",)


@pytest.mark.parametrize("grouped", [False, True])
def test_experts_may_be_grouped_or_not_whatever_the_norms(grouped):
    rules = rules_of(model_shape("qwen3_moe"), fused_norms=not grouped, grouped_experts=grouped)
    assert f"decoder.layers.1.{EXPERT_MLP[grouped][-1]}" in rules
    assert f"decoder.layers.1.{EXPERT_MLP[not grouped][-1]}" not in rules


def test_a_tied_model_has_no_output_layer_but_a_rule_for_the_last_stages_copy():
    shape = model_shape(tie=True)
    assert set(rules_of(shape)) & {"output_layer.weight"} == set()
    assert "lm_head.weight" not in hf_tensor_shapes(shape)
    assert output_rule(shape).hf_names == ("model.embed_tokens.weight",)
    assert output_rule(model_shape()).hf_names == ("lm_head.weight",)


def reference_qkv(tensors, layer: int, shape: ModelShape, ending: str) -> torch.Tensor:
    """Row by row: for each key/value head its query heads, then the key, then the value."""
    d, per_group = shape.head_dim, shape.heads // shape.kv_heads
    q, k, v = (tensors[f"model.layers.{layer}.self_attn.{part}_proj.{ending}"] for part in "qkv")
    rows = []
    for group in range(shape.kv_heads):
        for head in range(group * per_group, (group + 1) * per_group):
            rows += [q[head * d + i] for i in range(d)]
        rows += [k[group * d + i] for i in range(d)]
        rows += [v[group * d + i] for i in range(d)]
    return torch.stack(rows)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("ending", ["weight", "bias"])
def test_qkv_is_grouped_and_cut_into_equal_runs_of_rows(tp_size, ending):
    shape = model_shape(heads=4, kv_heads=2)  # 4 ranks on 2 groups: half a group each, as Megatron-core gathers them
    tensors = random_tensors(shape)
    rule = rules_of(shape)[f"decoder.layers.1.self_attention.linear_qkv.{ending}"]
    expected = reference_qkv(tensors, 1, shape, ending)
    got = [shard(rule, tensors, rank, tp_size) for rank in range(tp_size)]
    assert torch.equal(torch.cat(got), expected)
    assert {len(piece) for piece in got} == {len(expected) // tp_size}


def test_fc1_stacks_gate_and_up_of_the_same_rank():
    shape = model_shape(ffn=24)
    tensors = random_tensors(shape)
    rule = rules_of(shape)["decoder.layers.0.mlp.linear_fc1.weight"]
    gate, up = (tensors[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    for rank in range(3):
        own = slice(rank * 8, rank * 8 + 8)
        assert torch.equal(shard(rule, tensors, rank, 3), torch.cat([gate[own], up[own]]))


@pytest.mark.parametrize("name", ["self_attention.linear_proj", "mlp.linear_fc2"])
def test_row_parallel_layers_are_cut_along_their_input(name):
    shape = model_shape()
    tensors = random_tensors(shape)
    rule = rules_of(shape)[f"decoder.layers.0.{name}.weight"]
    whole = tensors[rule.hf_names[0]]
    half = whole.shape[1] // 2
    assert torch.equal(shard(rule, tensors, 0, 2), whole[:, :half])
    assert torch.equal(shard(rule, tensors, 1, 2), whole[:, half:])


def test_the_vocabulary_is_padded_with_zero_rows_that_export_drops():
    shape = model_shape(vocab=61)
    tensors = random_tensors(shape)
    rule = rules_of(shape)["output_layer.weight"]
    for padded in (None, 64, 128):  # 128 leaves the last ranks with padding alone
        pieces = [shard(rule, tensors, rank, 4, padded_vocab=padded) for rank in range(4)]
        whole = torch.cat(pieces)
        assert len(whole) == (padded or 64)
        assert torch.equal(whole[:61], tensors["lm_head.weight"])
        assert not whole[61:].any()
        assert torch.equal(merge(rule, pieces)["lm_head.weight"], tensors["lm_head.weight"])


@settings(max_examples=40, deadline=None)
@given(
    family=st.sampled_from(["qwen2", "qwen3", "llama", "olmo3", *EXPERTS]),
    kv_heads=st.sampled_from([1, 2, 4]),
    per_group=st.integers(1, 3),
    tp_size=st.sampled_from([1, 2, 4]),
    vocab=st.integers(5, 40),
    tie=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_merge_undoes_shard_bit_for_bit(family, kv_heads, per_group, tp_size, vocab, tie, dtype):
    if family in ("gpt_oss", "deepseek_v3"):
        assume(kv_heads * per_group % tp_size == 0)  # whose ranks have whole heads only
    shape = model_shape(
        family, layers=2, heads=kv_heads * per_group, kv_heads=kv_heads, head_dim=8, ffn=16, vocab=vocab, tie=tie
    )
    tensors, restored = random_tensors(shape, dtype), {}
    for rule in hf_to_megatron(shape):
        pieces = [shard(rule, tensors, rank, tp_size) for rank in range(tp_size)]
        assert {tuple(p.shape) for p in pieces} == {rule.local_shape(tp_size)}
        assert all(p.dtype == tensors[rule.hf_names[0]].dtype and p.is_contiguous() for p in pieces)
        restored |= merge(rule, pieces)
    assert restored.keys() == tensors.keys()
    assert all(torch.equal(restored[name], tensors[name]) for name in tensors)
    assert all(restored[name].is_contiguous() for name in tensors)


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(["qkv", "gate_up", "rows", "columns", "vocab"]),
    tp_size=st.sampled_from([1, 2, 4, 8]),
    groups=st.sampled_from([1, 2, 4, 8]),
)
def test_pieces_use_every_entry_once_and_shard_is_made_of_them(kind, tp_size, groups):
    sizes = {"qkv": [16 * groups, 8 * groups, 8 * groups], "gate_up": [16, 16]}.get(kind, [24])
    dims = tuple((3, n) if kind == "columns" else (n, 3) for n in sizes)
    names = tuple(f"t{i}" for i in range(len(sizes)))
    rule = TensorRule("p", names, dims, kind, groups if kind == "qkv" else 1)
    tensors = {n: torch.randn(d) for n, d in zip(names, dims, strict=True)}
    used = {name: torch.zeros(d) for name, d in zip(names, dims, strict=True)}
    for rank in range(tp_size):
        parts = []
        for piece in rule.slices(rank, tp_size):
            length = piece.stop - piece.start
            used[names[piece.source]].narrow(rule.dim, piece.start, length).add_(1)
            parts.append(tensors[names[piece.source]].narrow(rule.dim, piece.start, length))
        assert torch.equal(torch.cat(parts, rule.dim), shard(rule, tensors, rank, tp_size))
    assert all((count == 1).all() for count in used.values())


def test_global_name_moves_experts_too():
    local = "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight"
    assert global_name(local, 4, 8) == "decoder.layers.5.mlp.experts.local_experts.10.linear_fc1.weight"
    grouped = "decoder.layers.1.mlp.experts.linear_fc2.weight2"
    assert global_name(grouped, 4, 8) == "decoder.layers.5.mlp.experts.linear_fc2.weight10"
    assert global_name("decoder.layers.1.mlp.router.weight", 4, 8) == "decoder.layers.5.mlp.router.weight"


def test_global_name_moves_only_the_layer_index():
    assert global_name("decoder.layers.3.mlp.linear_fc1.weight", 8) == "decoder.layers.11.mlp.linear_fc1.weight"
    assert global_name("decoder.final_layernorm.weight", 8) == "decoder.final_layernorm.weight"
    assert global_name("embedding.word_embeddings.weight", 8) == "embedding.word_embeddings.weight"


def test_padded_vocab_size():
    assert [padded_vocab_size(61, 1), padded_vocab_size(61, 4), padded_vocab_size(64, 4)] == [61, 64, 64]
    assert padded_vocab_size(61, 2, multiple=64) == 128


def test_refuses_what_does_not_fit():
    shape = model_shape()
    tensors, rules = random_tensors(shape), rules_of(shape)
    qkv = rules["decoder.layers.0.self_attention.linear_qkv.weight"]
    with pytest.raises(ModelError, match="tensor_parallel 3"):
        shard(qkv, tensors, 0, 3)
    with pytest.raises(ModelError, match="24"):
        shard(rules["decoder.layers.0.mlp.linear_fc2.weight"], tensors, 0, 5)
    with pytest.raises(ModelError, match="rank 2"):
        shard(qkv, tensors, 2, 2)
    with pytest.raises(ModelError, match="60"):
        shard(rules["output_layer.weight"], tensors, 0, 2, padded_vocab=60)
    with pytest.raises(ModelError, match=r"q_proj\.weight"):
        shard(qkv, {}, 0, 1)
    wrong = {**tensors, "lm_head.weight": torch.zeros(61, 15)}
    with pytest.raises(ModelError, match=r"lm_head\.weight.*\(61, 15\)"):
        shard(rules["output_layer.weight"], wrong, 0, 1)
    with pytest.raises(ModelError, match="linear_qkv"):
        merge(qkv, [torch.zeros(3, 16), torch.zeros(3, 16)])
    with pytest.raises(ModelError, match="linear_qkv"):
        merge(qkv, [])


def test_whole_shards_are_merged_without_copying_but_where_rows_move():
    shape = model_shape(layers=1)
    tensors = random_tensors(shape, torch.float32)
    for rule in hf_to_megatron(shape):
        only = shard(rule, tensors, 0, 1)
        place = only.untyped_storage().data_ptr()
        shared = all(whole.untyped_storage().data_ptr() == place for whole in merge(rule, [only]).values())
        assert shared or rule.kind == "qkv", rule.megatron_name


def test_a_critics_head_is_one_row_that_transformers_knows():
    rule = value_head_rule(model_shape())
    assert (rule.megatron_name, rule.hf_names, rule.hf_shapes) == ("output_layer.weight", ("score.weight",), ((1, 16),))
    assert rule.kind == "copy" and rule.local_shape(4) == (1, 16)
    assert critic_config("qwen2") == {
        "architectures": ["Qwen2ForSequenceClassification"],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }


def test_places_of_parameters_in_a_checkpoint_of_all_layers():
    boxes = {box.key: box for box in global_boxes(hf_to_megatron(model_shape("llama", layers=3), fused_norms=True))}
    box = boxes["decoder.layers.mlp.linear_fc2.weight"]
    assert (box.index, box.sizes, box.layer_key) == ((2,), (3,), "decoder.layers.2.mlp.linear_fc2.weight")
    assert box.without_layers().key == box.layer_key and box.without_layers().index == box.without_layers().sizes == ()
    assert boxes["embedding.word_embeddings.weight"].without_layers() == boxes["embedding.word_embeddings.weight"]
    shape = read_model_shape({**MOE, "mlp_only_layers": []})
    boxes = global_boxes(hf_to_megatron(shape, fused_norms=True))
    assert ("decoder.layers.mlp.experts.experts.linear_fc1.weight", (1, 3), (2, 4)) in [
        (box.key, box.index, box.sizes) for box in boxes
    ]
    mixed = global_boxes(hf_to_megatron(read_model_shape(MOE), fused_norms=True))  # a dense layer: a key for each
    assert ("decoder.layers.1.mlp.experts.experts.linear_fc2.weight", (2,), (4,)) in [
        (box.key, box.index, box.sizes) for box in mixed
    ]
