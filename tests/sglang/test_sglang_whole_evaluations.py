"""`megatron-daro eval` through two SGLang servers that it starts, one of which is killed in the middle.

Heavy: a server killed under training (test_sglang_train_runs.py) and a killed evaluation (tests/fault) are the cheaper
proofs of the same code. It takes the shared servers down, so it comes late in the folder.
"""

from __future__ import annotations

import json

import pytest
import tiny_task
from cli_runs import servers, started
from sglang_pool import cpu_servers

from megatron_daro.workshop.evaluate.answers import kept, part_files

pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(1800)]

START_LIMIT_S = 400
SAMPLES = 200


def test_an_evaluation_outlives_the_kill_of_a_server(tiny: tiny_task.TinyTask, tmp_path, pool):
    sglang = cpu_servers()
    pool.down()
    out = tmp_path / "out"
    words = ["eval", str(tiny.config), "engine.kind=sglang", "engine.replicas=2"]
    words += [f"engine.sglang.python={sglang['python']}", f"engine.sglang.arguments={json.dumps(sglang['arguments'])}"]
    words += ["--hf", str(tiny.model), "--out", str(out), "--template", "none"]
    words += ["--set", f"digits={tiny.directory / 'held_out.jsonl'}", "--samples", str(SAMPLES), "--k", "8"]
    with started(words, tmp_path / "log") as run:
        run.wait_until(lambda: bool(part_files(out)), "a part of the answers", START_LIMIT_S)
        servers(run)[0].kill()
        finished = run.finish()
        assert run.left_behind() == []
    assert finished.code == 0, finished.stderr
    assert len(kept(out)) == 10 * SAMPLES
    (found,) = json.loads((out / "summary.json").read_text())["sets"].values()
    # The base model answers d or d + 1 with equal chance.
    assert 0.3 < found["metrics"][f"avg@{SAMPLES}"]["mean"] < 0.7 and found["metrics"]["pass@8"]["mean"] > 0.9
    assert found["truncated"] < 0.05
