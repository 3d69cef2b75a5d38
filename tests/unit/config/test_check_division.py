"""What of a model a layout cannot divide; the layers of the stages against Megatron's own answer."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_daro.config.actor import ActorSection
from megatron_daro.config.check_training import division_problems, part_layers, stage_layers
from megatron_daro.config.model_shape import read_model_shape

DENSE = {
    "model_type": "llama",
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 100,
}
EXPERTS = {
    **DENSE,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}


def problems(model, **options):
    return [str(problem) for problem in division_problems(ActorSection(**options), read_model_shape(model))]


FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
BOTH_ENDS = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel": 4},
        {"tensor_parallel": 12},  # three ranks for each key-value head
        {"pipeline_parallel": 4, "megatron": {FIRST: 1, LAST: 1}},
        {"pipeline_parallel": 2, "megatron": {LAST: 2}},
        {"pipeline_parallel": 4, "megatron": BOTH_ENDS},
        {"pipeline_parallel": 2, "virtual_pipeline_parallel": 3},
        {"pipeline_parallel": 4, "virtual_pipeline_parallel": 2, "megatron": BOTH_ENDS},
        {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2, "megatron": {LAST: 2}},
    ],
)
def test_fits(options):
    assert problems(DENSE, **options) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel": 6}, "6, but the model has 4 key-value heads; allowed: a divisor or a multiple of 4"),
        ({"tensor_parallel": 8}, "12 attention heads; allowed: one of 1, 2, 3, 4, 6, 12"),
        ({"pipeline_parallel": 4}, "6 layers; allowed: one of 1, 2, 3, 6"),
        ({"pipeline_parallel": 4, "megatron": {FIRST: 1}}, "does not divide the model's 6"),
        ({"pipeline_parallel": 2, "megatron": {FIRST: "two"}}, "first_pipeline_stage 'two'"),
        ({"megatron": {FIRST: 6}}, "does not divide the model's 6 layers"),
        ({"virtual_pipeline_parallel": 2}, "2 with pipeline_parallel 1"),
        ({"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}, "a stage has 3 layers; allowed: a divisor of 3"),
        (
            {"pipeline_parallel": 2, "virtual_pipeline_parallel": 3, "megatron": BOTH_ENDS},
            "a stage has 4 layers; allowed: a divisor of 4",
        ),
        (
            {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2, "megatron": {FIRST: 2, LAST: 4}},
            f"2 with {FIRST} and {LAST} of two stages",
        ),
        ({"expert_parallel": 2}, "the model has no experts; allowed: 1"),
        ({"expert_tensor_parallel": 1}, "the model has no experts"),
    ],
)
def test_a_dense_model_that_does_not_divide(options, words):
    (problem,) = problems(DENSE, **options)
    assert words in problem


@pytest.mark.parametrize(
    "options",
    [
        {"expert_parallel": 8, "data_parallel": 8},
        {"expert_parallel": 2, "tensor_parallel": 4, "expert_tensor_parallel": 1},
        {"expert_parallel": 2, "tensor_parallel": 2, "data_parallel": 2},
        {"tensor_parallel": 2},
        {"tensor_parallel": 2, "expert_tensor_parallel": 1},
    ],
)
def test_experts_fit(options):
    assert problems(EXPERTS, **options) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"expert_parallel": 3, "data_parallel": 3}, "the model's 8 experts; allowed: one of 1, 2, 4, 8"),
        ({"expert_parallel": 4, "data_parallel": 2}, "allowed: ETP * EP that divides TP * CP * DP = 2"),
        ({"expert_parallel": 2, "data_parallel": 2, "expert_tensor_parallel": 16}, "24 columns of an expert"),
        ({"tensor_parallel": 2, "sequence_parallel": False}, "false with tensor_parallel 2 and experts"),
        (
            {"tensor_parallel": 4, "data_parallel": 3, "expert_parallel": 2, "expert_tensor_parallel": 3},
            "a divisor or a multiple of TP 4",
        ),
    ],
)
def test_experts_that_do_not_fit(options, words):
    found = problems(EXPERTS, **options)
    assert any(words in problem for problem in found), found


def test_the_mlp_of_dense_layers_counts_only_where_there_are_some():
    odd = {**EXPERTS, "intermediate_size": 97}
    assert problems(odd, tensor_parallel=2) == []
    assert "97 MLP columns" in problems({**odd, "mlp_only_layers": [0]}, tensor_parallel=2)[0]


def stage_options(first: int | None, last: int | None, accounts: tuple[bool, bool]) -> dict[str, object]:
    return {
        "num_layers_in_first_pipeline_stage": first,
        "num_layers_in_last_pipeline_stage": last,
        "account_for_embedding_in_pipeline_split": accounts[0],
        "account_for_loss_in_pipeline_split": accounts[1],
    }


def megatron_config(layers: int, stages: int, virtual: int | None, options: dict[str, object]):
    from types import SimpleNamespace

    return SimpleNamespace(
        num_layers=layers,
        pipeline_model_parallel_size=stages,
        pipeline_model_parallel_layout=None,
        virtual_pipeline_model_parallel_size=virtual,
        **options,
    )


@given(
    layers=st.integers(1, 12),
    stages=st.integers(1, 5),
    first=st.none() | st.integers(1, 5),
    last=st.none() | st.integers(1, 5),
    accounts=st.tuples(st.booleans(), st.booleans()),
)
def test_stages_have_the_layers_that_megatron_gives_them(layers, stages, first, last, accounts):
    pytest.importorskip("megatron_daro.actor.model")
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    options = stage_options(first, last, accounts)
    got = stage_layers(layers, stages, options)
    if got is None:
        return
    config = megatron_config(layers, stages, None, options)
    assert sum(got) == layers
    assert got == [get_num_layers_to_build(config, pp_rank=stage) for stage in range(stages)]
    assert part_layers(layers, stages, 1, options) == [
        [range(sum(got[:stage]), sum(got[: stage + 1]))] for stage in range(stages)
    ]


@given(
    layers=st.integers(2, 24),
    stages=st.integers(2, 4),
    virtual=st.integers(2, 4),
    ends=st.sampled_from([None, "accounted", *range(1, 9)]),
    which=st.tuples(st.booleans(), st.booleans()),
)
@example(layers=8, stages=2, virtual=5, ends="accounted", which=(True, True))
@example(layers=11, stages=3, virtual=2, ends="accounted", which=(True, False))
@example(layers=14, stages=3, virtual=2, ends=4, which=(True, False))
@example(layers=4, stages=2, virtual=2, ends=2, which=(True, True))
def test_parts_have_the_layers_that_megatron_gives_them(layers, stages, virtual, ends, which):
    pytest.importorskip("megatron_daro.actor.model")
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    numbers = [ends if isinstance(ends, int) and given else None for given in which]
    options = stage_options(*numbers, which if ends == "accounted" else (False, False))
    parts = part_layers(layers, stages, virtual, options)
    if parts is None or stage_layers(layers, stages, options) is None:
        return
    config = megatron_config(layers, stages, virtual, options)
    assert sorted(layer for stage in parts for part in stage for layer in part) == list(range(layers))
    for stage, own in enumerate(parts):
        for number, part in enumerate(own):
            assert len(part) == get_num_layers_to_build(config, vp_stage=number, pp_rank=stage)
            if part:
                assert part.start == get_transformer_layer_offset(config, vp_stage=number, pp_rank=stage)


@pytest.mark.parametrize(
    ("options", "field", "rests_on"),
    [
        ({"expert_parallel": 4}, "actor.expert_parallel", {"actor.data_parallel", "actor.context_parallel"}),
        (
            {"tensor_parallel": 2, "expert_parallel": 1, "expert_tensor_parallel": 3, "data_parallel": 3},
            "actor.expert_parallel",
            {"actor.tensor_parallel"},
        ),
        ({"tensor_parallel": 2, "sequence_parallel": False}, "actor.sequence_parallel", {"actor.tensor_parallel"}),
        ({"virtual_pipeline_parallel": 2}, "actor.virtual_pipeline_parallel", {"actor.pipeline_parallel"}),
    ],
)
def test_a_problem_of_several_fields_names_them_all(options, field, rests_on):
    """A wrong one among them is said alone: what rests on it says nothing new."""
    found = list(division_problems(ActorSection(**options), read_model_shape(EXPERTS)))
    also = [set(problem.also) for problem in found if problem.field == field]
    assert any(rests_on <= names for names in also), [(str(p), p.also) for p in found]


RANKS = ("actor.tensor_parallel", "actor.context_parallel", "actor.data_parallel", "actor.expert_tensor_parallel")


@pytest.mark.parametrize(
    ("model", "options", "field", "also"),
    [
        (DENSE, {"tensor_parallel": 8}, "actor.tensor_parallel", ("model.path",)),
        (DENSE, {"tensor_parallel": 6}, "actor.tensor_parallel", ("model.path",)),
        (DENSE, {"pipeline_parallel": 4}, "actor.pipeline_parallel", ("model.path",)),
        (
            *(DENSE, {"pipeline_parallel": 4, "megatron": {FIRST: 1, LAST: None}}, "actor.pipeline_parallel"),
            ("model.path", f"actor.megatron.{FIRST}"),
        ),
        (DENSE, {"virtual_pipeline_parallel": 2}, "actor.virtual_pipeline_parallel", ("actor.pipeline_parallel",)),
        (
            *(DENSE, {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}, "actor.virtual_pipeline_parallel"),
            ("actor.pipeline_parallel", "model.path"),
        ),
        (
            DENSE,
            {"pipeline_parallel": 2, "virtual_pipeline_parallel": 3, "megatron": BOTH_ENDS},
            "actor.virtual_pipeline_parallel",
            ("actor.pipeline_parallel", "model.path", *(f"actor.megatron.{name}" for name in BOTH_ENDS)),
        ),
        (
            DENSE,
            {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2, "megatron": {FIRST: 2, LAST: 4}},
            "actor.virtual_pipeline_parallel",
            ("actor.pipeline_parallel",),
        ),
        (DENSE, {"expert_parallel": 2}, "actor.expert_parallel", ("model.path",)),
        (DENSE, {"expert_tensor_parallel": 1}, "actor.expert_tensor_parallel", ("model.path",)),
        (EXPERTS, {"expert_parallel": 3, "data_parallel": 3}, "actor.expert_parallel", ("model.path",)),
        (EXPERTS, {"expert_parallel": 4}, "actor.expert_parallel", RANKS),
        (
            EXPERTS,
            {"tensor_parallel": 4, "data_parallel": 3, "expert_parallel": 2, "expert_tensor_parallel": 3},
            "actor.expert_parallel",
            RANKS,
        ),
        (EXPERTS, {"expert_tensor_parallel": 5, "data_parallel": 5}, "actor.expert_tensor_parallel", ("model.path",)),
        (
            *(EXPERTS, {"tensor_parallel": 2, "sequence_parallel": False}, "actor.sequence_parallel"),
            ("actor.tensor_parallel",),
        ),
    ],
)
def test_a_division_that_fails_is_told_alone_with_what_it_rests_on(model, options, field, also):
    (problem,) = division_problems(ActorSection(**options), read_model_shape(model))
    assert (problem.field, problem.also) == (field, also)


@pytest.mark.parametrize(
    ("layers", "stages", "options", "found"),
    [
        (6, 4, {FIRST: 1, LAST: 1}, [1, 2, 2, 1]),
        (6, 2, {LAST: 6}, [0, 6]),
        (6, 2, {FIRST: 2, LAST: 4}, [2, 4]),
        (6, 2, {FIRST: 2, LAST: 3}, None),
        (6, 3, {FIRST: 7}, None),
        (6, 3, {FIRST: 0}, None),
        (6, 3, {FIRST: True}, None),
        (6, 1, {FIRST: 6}, None),
        (6, 4, BOTH_ENDS, [1, 2, 2, 1]),
        (7, 4, {"account_for_embedding_in_pipeline_split": True}, [1, 2, 2, 2]),
        (7, 4, {"account_for_loss_in_pipeline_split": True}, [2, 2, 2, 1]),
        (1, 1, BOTH_ENDS, [1]),
        (1, 3, BOTH_ENDS, [0, 1, 0]),
        (6, 3, {FIRST: 2, **BOTH_ENDS}, None),
        (7, 3, {}, None),
        (6, 3, {}, [2, 2, 2]),
    ],
)
def test_stages_have_so_many_layers(layers, stages, options, found):
    assert stage_layers(layers, stages, options) == found


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ((8, 2, 2, {}), [[range(2), range(4, 6)], [range(2, 4), range(6, 8)]]),
        ((6, 2, 2, BOTH_ENDS), [[range(1), range(3, 5)], [range(1, 3), range(5, 6)]]),
        ((6, 2, 3, BOTH_ENDS), None),
        ((7, 2, 1, {}), None),
        ((6, 2, 2, {LAST: 2}), [[range(2), range(3, 5)], [range(2, 3), range(5, 6)]]),
        ((6, 2, 2, {FIRST: 2, LAST: 4}), None),
        ((6, 2, 1, {FIRST: 2, LAST: 4}), [[range(2)], [range(2, 6)]]),
        ((6, 3, 1, {FIRST: 2, LAST: 2}), [[range(2)], [range(2, 4)], [range(4, 6)]]),
    ],
)
def test_parts_of_stages_have_these_layers(arguments, found):
    assert part_layers(*arguments) == found
