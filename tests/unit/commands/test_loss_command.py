"""`megatron-daro check-loss`: its exit status, the cause and the script, for what a search has found."""

from __future__ import annotations

import pytest

from megatron_daro.cli import main
from megatron_daro.workshop.check_loss import search
from megatron_daro.workshop.check_loss.cases import Case

LOSS = "my_losses:daro"
CASE = Case(1, 1, 2, (((0, 1),),), (3, 3), (4, 4))


@pytest.mark.parametrize(
    ("found", "status", "facts", "repeats"),
    [
        (search.Report(LOSS, [search.Row("one", True, 0.0)]), 0, ["exact: 1 cases"], False),
        (search.Report(LOSS, [], CASE, 0.12345, "a sum"), 1, ["a sum", "0.123", "--nproc-per-node 2"], True),
        (search.Report(LOSS, cause="it raised", error="ValueError: no"), 1, ["it raised", "ValueError: no"], False),
    ],
    ids=["exact", "wrong", "raises"],
)
def test_a_loss_that_is_not_exact_ends_with_1_and_a_script(
    monkeypatch, tmp_path, capsys, found, status, facts, repeats
):
    (tmp_path / "my_losses.py").write_text("def daro(batch, step): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(search, "check", lambda function, **options: found)
    script = tmp_path / "case.py"
    assert main(["check-loss", LOSS, "--script", str(script)]) == status
    out = capsys.readouterr().out
    assert [fact for fact in facts if fact not in out] == []
    assert script.exists() == repeats and (not repeats or LOSS in script.read_text())
