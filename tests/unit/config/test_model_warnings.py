"""Parts of a model's config.json that training leaves out are said at the start."""

from __future__ import annotations

import pytest

from megatron_daro.config import Hardware, check, resolve


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"output_router_logits": True, "router_aux_loss_coef": 0.02}, ["router_aux_loss_coef 0.02"]),
        ({"output_router_logits": True}, ["router_aux_loss_coef 0.001"]),
        ({"output_router_logits": True, "router_aux_loss_coef": 0.0}, []),
        ({"router_aux_loss_coef": 0.02}, []),
    ],
)
def test_training_without_the_balancing_loss_of_a_model_is_a_warning(run_files, asked, said):
    run_files.set_shape(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2, **asked)
    report = check(resolve(run_files.file, ()), Hardware("cpu", 4))
    lines = [str(warning) for warning in report.warnings]
    assert len(lines) == len(said)
    assert all(words in line and "training without it" in line for words, line in zip(said, lines, strict=True))
