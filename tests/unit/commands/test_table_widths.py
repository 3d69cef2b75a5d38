"""Tables of a terminal: whole on 100 columns, cut between columns on fewer, and times that add up."""

from __future__ import annotations

import json
import re

import pytest
from rich.cells import cell_len
from weightless import save_tiny_model

from megatron_daro import cli
from megatron_daro.observe.table import table_text
from megatron_daro.workshop.evaluate import measuring

MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}
SERVERS = ["engine.kind=sglang", "engine.replicas=2", "engine.sglang.tensor_parallel=4", "actor.tensor_parallel=8"]


@pytest.fixture
def planned(tmp_path, capsys):
    """What `plan` prints with these further words."""
    recipe, model = tmp_path / "run.yaml", tmp_path / "config.json"
    recipe.write_text("model: {path: /models/llama}\ndata: {train: [a.jsonl]}\nrollout: {max_response_tokens: 4096}\n")
    model.write_text(json.dumps(MODEL))

    def plan(*words: str) -> str:
        assert cli.main(["plan", str(recipe), *words, "--gpus", "16", "--model-config", str(model)]) == 0
        return capsys.readouterr().out

    return plan


@pytest.fixture
def evaluated(tmp_path, capsys, monkeypatch):
    """What `eval` prints of three metrics on two sets with long names."""
    metrics = {name: {"mean": 0.5, "low": 0.412, "high": 0.588} for name in ("mean", "pass@8", "maj@8")}
    names = ("answered", "ran_on", "truncated", "silent", "code", "reflecting", "with_one", "these", "others")
    one = {"problems": 500, "metrics": metrics, "length": 2345.0, "truncated": 0.1, "no_answer": 0.05}
    one |= {"behaviour": dict.fromkeys(names, 0.123), "by_level": []}
    summary = {"sets": {"math_500_of_level_5": one, "olympiads": one}, "mean": metrics}
    monkeypatch.setattr(measuring, "measure", lambda plan, notices: summary)
    model, problems = save_tiny_model(tmp_path / "base"), tmp_path / "mine.jsonl"
    problems.write_text('{"problem": "1=", "answer": "1"}\n')

    def evaluate() -> str:
        assert cli.main(["eval", "--hf", str(model), "--set", f"mine={problems}"]) == 0
        return capsys.readouterr().out.partition("written:")[0]

    return evaluate


@pytest.mark.parametrize(("columns", "most"), [(80, 80), (100, 100), (240, 100)])
def test_tables_are_no_wider_than_the_terminal_nor_than_100_columns(planned, evaluated, monkeypatch, columns, most):
    monkeypatch.setenv("COLUMNS", str(columns))
    for text in (planned(*SERVERS, "--sync", "--price", "2"), evaluated()):
        assert max(map(cell_len, text.splitlines())) <= most
        assert "…" not in text, "nothing is left out"


def test_cells_stay_whole_where_a_table_is_cut(planned, evaluated, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = evaluated()
    assert text.count("50.0% [41.2%, 58.8%]") == 9 and text.count("math_500_of_level_5") >= 3
    assert re.search(r"\d \d \d \d \d \d to \d x \d", planned(*SERVERS, "--sync"))


@pytest.mark.parametrize("longest", range(1, 12))
def test_no_cell_of_a_table_is_cut_off(longest):
    rows = [[f"{row}{column}:".ljust(3 + column % longest, "9") for column in range(14)] for row in "ab"]
    text = table_text([f"c{column}" for column in range(14)], rows, left=1)
    assert [cell for row in rows for cell in row if cell not in text.split()] == []


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_seconds_of_a_step_add_up(planned, staleness):
    text = planned("--best", "1", f"rollout.max_staleness={staleness}")
    head, _, row = text.partition("seconds of a step\n")[2].splitlines()[:3]
    seconds = dict(zip(head.split(), map(float, row.split()[1:]), strict=True))
    trained = seconds["log-probs"] + seconds["train"]
    both = max(trained, seconds["generate"]) if staleness else trained + seconds["generate"]
    assert seconds["fixed"] > 0
    assert both + seconds["sync"] + seconds["hand-over"] + seconds["fixed"] == pytest.approx(seconds["step"], abs=0.3)
