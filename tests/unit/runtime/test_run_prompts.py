"""The prompts of a run: an evaluation set loses no row in silence, training data may."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_task

from megatron_daro.config import Config, DataSection, EvalSet
from megatron_daro.data.orders import Curriculum, Epochs, Prioritised
from megatron_daro.data.stops import Stops
from megatron_daro.data.templates import TEMPLATES
from megatron_daro.data.tokenizer import load_tokenizer
from megatron_daro.errors import ConfigError, DataError, ModelError
from megatron_daro.runtime.inputs import (
    answer_stops,
    ends_at_texts,
    held_out_sets,
    planned_prompts,
    training_prompts,
    weights_digest,
)

GOOD = [{"problem": "1=", "answer": "1"}, {"problem": "2=", "answer": ["2", "3"]}]
NO_ANSWER, TOO_LONG = {"problem": "3="}, {"problem": "3==========", "answer": "3"}
SURROGATE = {"problem": "\ud800=", "answer": "3"}


def source_of(*given, **options):
    source, _ = training_prompts(*given, **options)
    return source


class Said(list):
    """Notices as a list."""

    notice = warn = list.append


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    tiny_task.save_tokenizer(directory, tiny_task.SYMBOLS)
    return load_tokenizer(directory)


def section(tmp_path: Path, lines: list, **options) -> DataSection:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    held_out = EvalSet(name="digits", path=path, **options)
    return DataSection(train=(path,), prompt_template="plain", max_prompt_tokens=4, eval=(held_out,))


def configured(data: DataSection, model: str = ".", **options) -> Config:
    """A configuration with these data; only what the order of the prompts needs is real."""
    return Config(model={"path": model}, data=data, **options)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (NO_ANSWER, "answer"),
        (SURROGATE, "surrogate"),
        (TOO_LONG, "max_prompt_tokens = 4"),
    ],
)
def test_an_evaluation_set_that_would_lose_a_row_is_refused_unless_asked_for(tmp_path, tokenizer, bad, says):
    data, said = section(tmp_path, [*GOOD, bad]), Said()
    with pytest.raises(DataError, match=rf"data\.eval\.0 \(digits\): 1 of 3 .*rows.jsonl.*{says}") as caught:
        held_out_sets(data, tokenizer, said)
    assert "data.eval.0.drop_unusable=true" in str(caught.value)
    (kept,) = held_out_sets(section(tmp_path, [*GOOD, bad], drop_unusable=True), tokenizer, said)
    assert [p.answers for p in kept.prompts] == [("1",), ("2", "3")]


def test_the_first_problems_only_are_no_loss(tmp_path, tokenizer):
    (kept,) = held_out_sets(section(tmp_path, [*GOOD, GOOD[0]], max_prompts=2), tokenizer, Said())
    assert len(kept.prompts) == 2


def test_a_named_template_writes_training_data_and_the_sets_that_are_asked_as_they_are(tmp_path, tokenizer):
    data = section(tmp_path, GOOD).model_copy(update={"prompt_template": "none"})
    source = source_of(configured(data), tokenizer, [], notices=Said())
    plain = source_of(configured(section(tmp_path, GOOD)), tokenizer, [], notices=Said())
    assert [p.tokens for p in source.next(2)] == [p.tokens for p in plain.next(2)]
    (kept,) = held_out_sets(data, tokenizer, Said())
    assert kept.template is TEMPLATES["none"] and kept.prompts[0].tokens == tuple(tokenizer.encode("1="))
    with pytest.raises(ModelError, match="template qwen-math"):
        held_out_sets(data.model_copy(update={"prompt_template": "qwen-math"}), tokenizer, Said())


def test_r1_ends_answers_at_its_closing_tag_for_which_servers_need_a_tokenizer(tmp_path, tokenizer):
    data = section(tmp_path, GOOD).model_copy(update={"prompt_template": "r1"})
    stops = answer_stops(configured(data, rollout={"stop": ("==",)}), tokenizer)
    assert stops == Stops((tokenizer.eos_token_id,), ("==", "</answer>"))
    assert not ends_at_texts(configured(section(tmp_path, GOOD)), Stops((1,)))
    assert ends_at_texts(configured(section(tmp_path, GOOD, template="r1")), Stops((1,)))
    engine = {"kind": "sglang", "sglang": {"arguments": {"skip_tokenizer_init": True}}}
    with pytest.raises(ConfigError, match="skip_tokenizer_init: got true"):
        answer_stops(configured(data, engine=engine), tokenizer)
    answer_stops(configured(section(tmp_path, GOOD), engine=engine), tokenizer)


def test_training_data_lose_rows_and_say_so(tmp_path, tokenizer):
    said = Said()
    source = source_of(
        configured(section(tmp_path, [*GOOD, NO_ANSWER, TOO_LONG, SURROGATE])), tokenizer, [], notices=said
    )
    assert len(source) == 2
    assert sum("dropped 1" in line for line in said) == 3, said


def test_a_set_with_other_rows_than_published_is_refused(tmp_path, tokenizer):
    assert held_out_sets(section(tmp_path, GOOD, rows=2), tokenizer, Said())
    with pytest.raises(DataError, match=r"data\.eval\.0 \(digits\): .* 2 .*allowed: 3"):
        held_out_sets(section(tmp_path, GOOD, rows=3), tokenizer, Said())


def test_a_set_has_its_own_template(tmp_path, tokenizer):
    data = section(tmp_path, GOOD, template="none").model_copy(update={"template": "{prompt}="})
    (kept,) = held_out_sets(data, tokenizer, Said())
    assert [len(p.tokens) for p in kept.prompts] == [2, 2]  # without the = of the training data's template
    with pytest.raises(ModelError, match="template chat"):
        held_out_sets(section(tmp_path, GOOD, template="chat"), tokenizer, Said())


RATED = [{**GOOD[0], "pass_rate": 0.75, "pass_rate_samples": 8, "pass_rate_model": "other", "pass_rate_weights": "aa"}]


def test_an_order_by_pass_rates_needs_them(tmp_path, tokenizer):
    data = section(tmp_path, [*RATED, GOOD[1]]).model_copy(update={"order": "curriculum"})
    with pytest.raises(DataError, match=r"data\.order: got curriculum.* 1 of 2"):
        source_of(configured(data), tokenizer, [], notices=Said())


def test_only_problems_of_a_band_of_pass_rates(tmp_path, tokenizer):
    rows = [{"problem": str(i), "answer": "1", "pass_rate": i / 4} for i in range(5)]
    data, said = section(tmp_path, rows).model_copy(update={"pass_rates": (0.25, 0.5)}), Said()
    source = source_of(configured(data), tokenizer, [], notices=said)
    assert sorted(p.text for p in source.next(2)) == ["1", "2"] and len(source) == 2
    assert any("data.pass_rates [0.25, 0.5]" in line and "3 of 5" in line for line in said)
    empty = data.model_copy(update={"pass_rates": (0.8, 0.9)})
    with pytest.raises(DataError, match="1 easier and 4 harder"):
        source_of(configured(empty), tokenizer, [], notices=Said())
    unrated = section(tmp_path, [*RATED, GOOD[1]]).model_copy(update={"pass_rates": (0.25, 0.9)})
    with pytest.raises(DataError, match=r"data\.pass_rates: got \[0\.25, 0\.9\].* 1 of 2"):
        source_of(configured(unrated), tokenizer, [], notices=Said())


def test_several_environments_take_their_share_of_the_prompts(tmp_path, tokenizer):
    rows = [{"problem": f"{i}=", "answer": "1", "data_source": "gsm" if i else "digits"} for i in range(4)]
    data = section(tmp_path, rows)
    sums = {"name": "sums", "sources": ["gsm"], "kind": "single_turn"}
    named = [{"name": "digits", "weight": 3}, {**sums, "weight": 1}]
    source, again = (source_of(configured(data, environments=named), tokenizer, [], notices=Said()) for _ in range(2))
    assert [p.source for p in source.next(8)] == ["digits", "digits", "gsm", "digits"] * 2
    again.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert [p.text for p in again.next(6)] == [p.text for p in source.next(6)]
    unweighted = [{"name": "digits"}, sums]
    source = source_of(configured(data, environments=unweighted), tokenizer, [], notices=Said())
    assert sorted(p.source for p in source.next(4)) == ["digits", "gsm", "gsm", "gsm"]
    with pytest.raises(DataError, match=r"data\.train: .*'gsm'.*environments"):
        source_of(configured(data, environments=named[:1]), tokenizer, [], notices=Said())
    with pytest.raises(DataError, match=r"environments: other has no problem"):
        other = {"name": "other", "weight": 1}
        source_of(configured(data, environments=[*named, other]), tokenizer, [], notices=Said())


def test_each_environment_has_problems_of_its_own(tmp_path, tokenizer):
    """One text is a problem in each; with turns in each once for every answer, as a game hides another word."""
    answers = {"plain": "11", "sums": "23", "game": "121"}
    rows = [
        {"problem": "1=", "answer": answer, "data_source": name, "pass_rate": int(answer) / 4}
        for name, each in answers.items()
        for answer in each
    ]
    data, said = section(tmp_path, rows).model_copy(update={"pass_rates": (0.0, 0.5)}), Said()
    play = {"kind": "agent", "command": ["play"]}
    several = configured(data, environments=[{"name": "plain"}, {"name": "sums"}, {"name": "game", **play}])
    source = source_of(several, tokenizer, [], notices=said)
    kept = source.next(len(source))
    assert sorted((p.source, p.answer) for p in kept) == [("game", "1"), ("game", "2"), ("plain", "1")]
    assert len({p.id for p in kept}) == 3
    assert sum("dropped 2" in line for line in said) == 2, said
    alone = source_of(configured(section(tmp_path, rows), environment=play), tokenizer, [], notices=Said())
    assert sorted(p.answer for p in alone.next(len(alone))) == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("order", "kind"), [("epochs", Epochs), ("curriculum", Curriculum), ("prioritised", Prioritised)]
)
def test_the_order_of_the_configuration(tmp_path, tokenizer, order, kind):
    data = section(tmp_path, RATED).model_copy(update={"order": order})
    config = configured(data, trainer={"steps": 30, "minibatches_per_batch": 4}, rollout={"prompts_per_batch": 5})
    source = source_of(config, tokenizer, [], notices=Said())
    assert type(source) is kind and planned_prompts(config) == 40
    if order == "curriculum":
        assert source.state_dict()["ramp"] == 20
    if order == "prioritised":
        unrated = source_of(
            configured(section(tmp_path, GOOD[:1]).model_copy(update={"order": order})), tokenizer, [], notices=Said()
        )
        assert source.state_dict()["columns"]["failure"] != unrated.state_dict()["columns"]["failure"]


def test_pass_rates_of_another_model_are_said(tmp_path, tokenizer):
    model = tmp_path / "mine"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    said = Said()
    source_of(configured(section(tmp_path, [*RATED, GOOD[1]]), str(model)), tokenizer, [], notices=said)
    own = weights_digest(model)
    assert any("other (weights aa)" in line and f"mine (weights {own})" in line for line in said)
    assert any("1 of 2 problems" in line for line in said)
    said.clear()
    rows = [RATED[0] | {"pass_rate_weights": own}]
    source_of(configured(section(tmp_path, rows), str(model)), tokenizer, [], notices=said)
    assert not any(own in line for line in said)
