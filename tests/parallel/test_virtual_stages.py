"""Virtual pipeline stages: exact with any number of micro-batches, stages of any size, and parts without layers.

The other files of this directory have a layout with them among theirs: algorithms, experts, checkpoints, steps.
"""

from __future__ import annotations

import megatron_tasks
import numpy as np
import policy_tasks
import pytest
import torch
from safetensors.torch import load_file
from small_models import random_batch, save_model
from test_gradients_exact import merged, reference_gradients, relative_difference
from test_logprobs_models import TOLERANCE, plain_logprobs


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A tied model of eight layers: directory, log-probs, loss and gradients of one process."""
    directory = tmp_path_factory.mktemp("qwen2_deep")
    model, batch = save_model("qwen2_deep", directory), random_batch()
    loss, _, gradients = reference_gradients(model, batch, "daro")
    return directory, plain_logprobs(model, batch), loss, gradients


ACCOUNTED = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"


@pytest.mark.parametrize(
    ("sizes", "micro_batches", "megatron"),
    [
        # Fewer than stages: filled up. Not a multiple of the stages: groups of another size.
        *[({"pipeline": 2, "virtual_pipeline": 2}, number, {}) for number in (1, 2, 3, 5)],
        *[({"pipeline": 4, "virtual_pipeline": 2}, number, {}) for number in (3, 4, 6, 7, 9)],
        ({"pipeline": 2, "virtual_pipeline": 4}, 6, {}),
        ({"pipeline": 2, "virtual_pipeline": 2}, 3, {FIRST: 2}),
        ({"pipeline": 3, "virtual_pipeline": 2}, 4, {FIRST: 2, LAST: 2}),
        # Ten layers are counted, and the first of the embedding and the last of the loss are none.
        ({"pipeline": 2, "virtual_pipeline": 5}, 2, ACCOUNTED),
        ({"tensor": 2, "pipeline": 2, "virtual_pipeline": 2}, 3, {}),
        ({"context": 2, "pipeline": 2, "virtual_pipeline": 2}, 3, {}),
        ({"data": 2, "pipeline": 2, "virtual_pipeline": 4}, 3, {}),
    ],
)
def test_gradients_logprobs_and_weights(rank_pool, deep, sizes, micro_batches, megatron):
    from megatron_daro.actor.parallel import Layout

    directory, logprobs, loss, gradients = deep
    results = rank_pool.run(
        policy_tasks.experts,
        Layout(**sizes),
        path=directory,
        batch=random_batch(),
        num_micro_batches=micro_batches,
        algorithm={"name": "daro"},
        megatron=megatron,
    )
    assert relative_difference(merged(results), gradients) < 1e-5
    found = [result["logprobs"] for result in results if result["logprobs"] is not None]
    assert len(found) == len(results) // sizes["pipeline"]
    for column in found:
        np.testing.assert_allclose(column, logprobs, rtol=0, atol=TOLERANCE)
    assert {round(result["policy_loss"] / loss, 5) for result in results} == {1.0}
    norm = np.sqrt(sum(float((value.astype(np.float64) ** 2).sum()) for value in gradients.values()))
    assert {round(result["grad_norm"] / norm, 5) for result in results} == {1.0}
    exported = {name: value for result in results if result["sends"] for name, value in result["exported"].items()}
    stored = load_file(directory / "model.safetensors")
    assert set(exported) == set(stored)
    assert all(torch.equal(exported[name], stored[name]) for name in stored)


def test_what_is_on_its_way_is_kept_when_the_schedule_frees_the_output(rank_pool):
    from megatron_daro.actor.parallel import Layout

    _, received = rank_pool.run(megatron_tasks.freed_on_the_way, Layout(pipeline=2))
    assert received == list(range(1000))


@pytest.mark.parametrize("virtual", [1, 2])
def test_stages_tell_each_other_no_shapes(rank_pool, deep, virtual):
    from megatron_daro.actor.parallel import Layout

    layout = Layout(pipeline=2, virtual_pipeline=virtual)
    assert rank_pool.run(megatron_tasks.shapes_between_stages, layout, path=deep[0], batch=random_batch()) == [0, 0]
