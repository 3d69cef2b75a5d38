"""`megatron-daro check-loss` on small losses: the exit status, what is found, and the script that repeats it.

Which mistakes it finds and how it names them is in tests/parallel/test_check_loss.py.
"""

from __future__ import annotations

import pytest
import torch

from megatron_daro.cli import main
from megatron_daro.workshop.check_loss.samples import SampleColumns, local_positions

LOSSES = """
import torch


def token_losses(batch):
    old = torch.where(batch.mask_T, batch.old_logprobs_T, 0.0)
    ratio = torch.exp(torch.where(batch.mask_T, batch.logprobs_T, 0.0) - old)
    return torch.where(batch.mask_T, -ratio * batch.advantages_T, 0.0)


def exact(batch, step):
    return token_losses(batch).sum(), batch.mask_T.sum(), {}


def of_a_micro_batch(batch, step):
    tokens = batch.mask_T.sum().clamp(min=1)
    return token_losses(batch).sum() / tokens, torch.ones(()), {}


def detached(batch, step):
    return token_losses(batch).sum().detach(), batch.mask_T.sum(), {}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with the losses."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_losses.py").write_text(LOSSES)
    return tmp_path


def check(function, *options):
    return main(["check-loss", f"own_losses:{function}", "--per-token", "on", "--seconds", "0", *options])


@pytest.mark.heavy
def test_an_exact_loss_passes(folder, capsys):
    assert check("exact") == 0
    assert "differs" not in capsys.readouterr().out and not (folder / "loss_case.py").exists()


@pytest.mark.heavy
def test_a_denominator_of_a_micro_batch_is_found_and_a_script_repeats_it(folder, capsys):
    assert check("of_a_micro_batch", "--script", "case.py") == 1
    printed = capsys.readouterr().out
    assert "micro-batch" in printed and "differs" in printed and "case.py" in printed
    script = (folder / "case.py").read_text()
    compile(script, "case.py", "exec")
    assert "own_losses:of_a_micro_batch" in script


def test_a_loss_without_a_gradient_is_found_before_any_layout_is_tried(folder, capsys):
    assert check("detached") == 1
    printed = capsys.readouterr().out
    assert "no gradient" in printed and "per-token" not in printed and not (folder / "loss_case.py").exists()


def test_what_is_no_loss_or_no_input_is_refused(folder, capsys):
    assert check("nothing") == 1
    assert "own_losses:nothing" in capsys.readouterr().err
    assert check("exact", "--uses", "advantages,values") == 1
    assert "values" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("size", "wanted"), [(1, [[0, 1, 2, 3, 4]]), (2, [[4], [0, 1, 2, 3]]), (4, [[], [4], [0, 3], [1, 2]])]
)
def test_context_parallel_ranks_hold_two_chunks_of_the_whole_sample(size, wanted):
    # Three tokens of prompt and five of answer; the position of a token is that of the one before it: 2 .. 6 of 8.
    column = SampleColumns(*(torch.zeros(5),) * 5, prompt=3)
    assert [local_positions(column, rank, size).tolist() for rank in range(size)] == wanted
