"""The layers of the stages and of their virtual parts, against Megatron's own answer."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_daro.config.stages import part_layers, stage_layers

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
BOTH_ENDS = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}


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
