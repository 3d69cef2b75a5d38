"""A checkpoint written under one version of Megatron-core continues under another: both ways, both optimizers."""

from __future__ import annotations

import os
import subprocess
from importlib.metadata import version
from pathlib import Path

import checkpoint_exchange
import numpy as np
import pytest
from small_models import save_model

OTHER = os.environ.get("MEGATRON_DARO_OTHER_PYTHON", "")
pytestmark = pytest.mark.skipif(not OTHER, reason="no second Megatron-core here: tests/second_megatron.sh has one")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen2_exchange")
    save_model("qwen2_tied", directory)
    return directory


def there(what, model, checkpoint, layout, optimizer, out):
    """The same as checkpoint_exchange.trained, under the other version."""
    script = Path(checkpoint_exchange.__file__)
    command = [OTHER, str(script), what, str(model), str(checkpoint), layout, optimizer, str(out)]
    path = {"PYTHONPATH": str(script.parents[1])}  # what pytest adds by itself: tests/ beside the script's own folder
    done = subprocess.run(
        command, cwd=script.parent, env=os.environ | path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(out) as found:
        values = {name: found[name] for name in found.files}
    assert str(values.pop("megatron")) != version("megatron-core"), "both versions are the same: nothing is tested"
    return values


@pytest.mark.parametrize(("layout", "optimizer"), [("tp2", "distributed"), ("pp2", "plain")])
@pytest.mark.parametrize("written", ["here", "there"])
def test_a_checkpoint_of_one_version_continues_under_the_other(rank_pool, tmp_path, model, written, layout, optimizer):
    saved = tmp_path / "checkpoint"
    saved.mkdir()
    whole = checkpoint_exchange.trained(rank_pool, "whole", model, saved, layout, optimizer)
    if written == "here":
        checkpoint_exchange.trained(rank_pool, "save", model, saved, layout, optimizer)
        got = there("load", model, saved, layout, optimizer, tmp_path / "out.npz")
    else:
        there("save", model, saved, layout, optimizer, tmp_path / "out.npz")
        got = checkpoint_exchange.trained(rank_pool, "load", model, saved, layout, optimizer)
    assert set(got) == set(whole)
    for name in whole:
        np.testing.assert_allclose(got[name], whole[name], rtol=0, atol=1e-6, err_msg=name)
