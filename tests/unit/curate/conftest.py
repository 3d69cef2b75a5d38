"""`megatron-daro curate` on rows made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from curated_rows import Curated, write_problems

from megatron_daro.cli import main


@pytest.fixture
def curate(tmp_path):
    """Curates (text, answer, ...) rows; `held_out`: rows of an evaluation set named exam."""
    runs = iter(range(100))

    def run(*cases: tuple[str, ...], options: str = "", held_out: Sequence[tuple[str, ...]] = ()) -> Curated:
        folder = tmp_path / str(next(runs))
        folder.mkdir()
        file = write_problems(folder / "train.jsonl", cases)
        words = [*(["--verifier", "none"] if "--verifier" not in options else []), *options.split()]
        if held_out:
            words += ["--against", str(write_problems(folder / "exam.jsonl", held_out))]
        assert main(["curate", str(file), "--out", str(folder / "out"), *words]) == 0
        return Curated(folder / "out", len(cases))

    return run
