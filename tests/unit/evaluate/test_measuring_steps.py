"""The steps of a measurement: whose weights, what is asked, what is said meanwhile, and what is kept where it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from answering import SeededEngine, digits

from megatron_daro.config import Config
from megatron_daro.data.stops import Stops
from megatron_daro.errors import ConfigError, EngineError, ModelError, WorkerError
from megatron_daro.reward.pool import RewardPool
from megatron_daro.types import Prompt, Verdict
from megatron_daro.workshop.evaluate import measuring, results
from megatron_daro.workshop.evaluate.answers import Answer, AnswerStore, kept, part_files, questions_of, requests
from megatron_daro.workshop.evaluate.measuring import MeasuredModel, Plan
from megatron_daro.workshop.evaluate.results import ProblemScore
from megatron_daro.workshop.evaluate.tables import summary_text, table_text


class Said(list):
    """Collects notices."""

    def notice(self, text):
        self.append(text)

    warn = notice


@pytest.mark.parametrize(
    ("config", "dtype"),
    [({"dtype": "float32"}, "fp32"), ({"torch_dtype": "float32"}, "fp32"), ({"dtype": "float16"}, "bf16"), ({}, "bf16"),
     ({"dtype": "bfloat16", "torch_dtype": "float32"}, "bf16")],
)  # fmt: skip
def test_weights_are_computed_in_the_type_they_are_kept_in(tmp_path, config, dtype):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert MeasuredModel(tmp_path, {}).dtype == dtype


def test_a_directory_without_weights_is_no_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"--hf: .* has no \*\.safetensors; give a directory with weights"):
        measuring.of_directory(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"x")
    found = measuring.of_directory(tmp_path)
    assert found.path == tmp_path and list(found.weights["files"]) == ["model.safetensors"] and found.urls == ()


@pytest.fixture
def conversions(monkeypatch):
    """Conversions that were asked for, in place of them."""
    import megatron_daro.convert.plan
    import megatron_daro.workshop.convert.conversion

    done: list[object] = []

    def convert(plan, target, **options):
        options.pop("progress")("phase", 0.5)
        done.append((plan, options))
        target.mkdir()

    monkeypatch.setattr(megatron_daro.convert.plan, "plan_to_hf", lambda *given: given)
    monkeypatch.setattr(megatron_daro.workshop.convert.conversion, "convert", convert)
    monkeypatch.setattr(measuring.os, "cpu_count", lambda: 16)
    return done


def test_a_checkpoint_is_converted_once_and_again_when_it_changes(tmp_path, conversions, monkeypatch):
    checkpoint, out, said = tmp_path / "step_1", tmp_path / "out" / "deep", Said()
    checkpoint.mkdir()
    (checkpoint / "b.distcp").write_text("1")
    (checkpoint / "a.distcp").write_text("2")
    (checkpoint / "folder").mkdir()
    found = measuring.of_checkpoint(checkpoint, tmp_path / "config", out, said)
    assert found.path == out / "model" and list(found.weights["checkpoint"]["files"]) == ["a.distcp", "b.distcp"]
    assert said == [f"{checkpoint} is written as a Hugging Face directory to {out}/model"]
    plan = (checkpoint, tmp_path / "config", None, 5 * 10**9)
    assert conversions == [(plan, {"processes": 4, "verify": False})]
    (out / "model" / "old").touch()
    assert measuring.of_checkpoint(checkpoint, tmp_path / "config", out, said) == found and len(conversions) == 1
    (checkpoint / "a.distcp").write_text("3")
    monkeypatch.setattr(measuring.os, "cpu_count", lambda: None)
    assert measuring.of_checkpoint(checkpoint, tmp_path / "config", out, said).weights != found.weights
    assert len(conversions) == 2 and conversions[1][1]["processes"] == 1 and not (out / "model" / "old").exists()


def test_a_checkpoint_of_a_run_is_verified_and_known_by_its_manifest(tmp_path, conversions, monkeypatch):
    steps: list[object] = []
    monkeypatch.setattr(measuring.recovery, "verify", lambda path: steps.append(("verify", path)))
    monkeypatch.setattr(measuring, "_check_tokenizer", lambda *given: steps.append(given))
    (tmp_path / measuring.recovery.MANIFEST).write_text("x")
    found = measuring.of_checkpoint(tmp_path, tmp_path / "config", tmp_path / "out", Said())
    assert list(found.weights["checkpoint"]) == ["manifest"]
    assert steps == [("verify", tmp_path), (tmp_path, tmp_path / "config")]


def test_the_tokenizer_of_a_checkpoint_must_be_the_runs(monkeypatch, tmp_path):
    saved = {"bound_files": {"tokenizer.json": "1", "config.json": "2"}}
    monkeypatch.setattr(measuring.recovery, "read_provenance", lambda path: saved)
    monkeypatch.setattr(measuring.restart_audit, "tokenizer_files", lambda path: files)
    files = {"tokenizer.json": "1", "added.json": "9"}
    measuring._check_tokenizer(tmp_path, tmp_path)
    files = {"tokenizer.json": "3", "vocab.json": "9"}
    with pytest.raises(ModelError, match=r"another tokenizer than that of .* \(tokenizer\.json differs\)"):
        measuring._check_tokenizer(tmp_path, tmp_path)
    saved = None
    measuring._check_tokenizer(tmp_path, tmp_path)


@pytest.fixture
def servers(monkeypatch):
    """What each server says of its model; an error is raised."""
    facts: dict[str, object] = {}

    class Client:
        def __init__(self, url):
            self.url = url

        async def __aenter__(self):
            return self

        async def __aexit__(self, *_):
            return None

        async def model_info(self, *, timeout_s):
            assert timeout_s == 30.0
            if isinstance(facts[self.url], Exception):
                raise facts[self.url]
            return facts[self.url]

    monkeypatch.setattr(measuring, "SGLangClient", Client)
    return facts


def test_servers_must_answer_and_have_one_model(tmp_path, servers):
    (tmp_path / "config.json").write_text("{}")
    servers["http://a"] = {"model_path": str(tmp_path), "weight_version": 3, "other": 1}
    servers["http://b"] = dict(servers["http://a"])
    found = measuring.of_servers(["http://a", "http://b"], None)
    assert found.weights == {"served": {"model_path": str(tmp_path), "weight_version": "3"}}
    assert (found.path, found.urls) == (tmp_path, ("http://a", "http://b"))
    servers["http://b"] = {"model_path": "/x"}
    with pytest.raises(ConfigError, match=r"different models \(http://a: .*, weights 3; http://b: /x, weights \)"):
        measuring.of_servers(["http://a", "http://b"], tmp_path)
    servers["http://b"] = EngineError("refused")
    with pytest.raises(EngineError, match=r"--urls: http://b does not answer \(refused\); allowed: SGLang servers"):
        measuring.of_servers(["http://a", "http://b"], None)


def config_in(place: Path, **sections: object) -> Config:
    eval_sets = [{"name": "digits", "path": str(place / "d.jsonl"), "rollouts_per_prompt": 4}]
    (place / "d.jsonl").write_text("{}\n")
    tree = {"model": {"path": str(place)}, "data": {"train": ("x",), "eval": eval_sets}, "engine": {"kind": "embedded"}}
    return Config.model_validate(tree | {"trainer": {"run_dir": str(place / "out")}, **sections})


def test_what_an_evaluation_is_made_of_decides_its_answers(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring.restart_audit, "tokenizer_files", lambda path: {"t": path.name})
    monkeypatch.setattr(measuring.restart_audit, "digest", lambda path: f"digest of {path.name}")
    config = config_in(tmp_path, engine={"kind": "embedded", "seed": 5}, reward={"verifier": "exact", "marker": "#"})
    found = measuring._made_of(Plan(config, {"files": 1}, (1,)), Stops((7, 9)))
    (one,) = config.data.eval
    assert found == {
        "weights": {"files": 1}, "tokenizer": {"t": tmp_path.name},
        "sets": {"digits": {"file": "digest of d.jsonl", "template": "data", "temperature": one.temperature,
                            "top_p": one.top_p, "samples": 4}},
        "max_response_tokens": config.rollout.max_response_tokens, "stop_token_ids": [7, 9], "seed": 5,
        "engine": "embedded",
        "verifier": {"verifier": "exact", "strict": True, "marker": "#", "refuse_restated": False},
        "notes": {"model": str(tmp_path), "urls": []},
    }  # fmt: skip
    own = config_in(tmp_path, reward={"verifier": "a:B", "options": {"x": 1}})
    found = measuring._made_of(Plan(own, {}, ()), Stops((7,), ("</answer>",)))
    assert found["stop"] == ["</answer>"] and found["verifier"]["options"] == {"x": 1}


@pytest.mark.parametrize(
    ("template", "chat", "asks"), [("data", "chat", True), ("data", "plain", False), ("none", "chat", False)]
)
def test_everything_that_is_asked_is_asked_once_and_the_same(tmp_path, monkeypatch, template, chat, asks):
    config = config_in(tmp_path, engine={"kind": "embedded", "seed": 5}, rollout={"max_response_tokens": 7})
    (one,) = config.data.eval
    data = config.data.model_copy(
        update={"eval": (one.model_copy(update={"template": template}),), "prompt_template": chat}
    )
    config = config.model_copy(update={"data": data})
    seen: dict[str, object] = {}

    def load(path, trust, *, chat_template):
        seen["load"] = path, trust, chat_template
        return "tokenizer"

    def until_whole(plan, tokenizer, questions, notices):
        seen["asked"] = tokenizer, questions

    monkeypatch.setattr(measuring, "load_tokenizer", load)
    monkeypatch.setattr(measuring, "answer_stops", lambda config, tokenizer: Stops((0,)))
    monkeypatch.setattr(measuring, "held_out_sets", lambda data, tokenizer, notices: [digits()])
    monkeypatch.setattr(measuring, "_made_of", lambda plan, stops: {"sets": {}, "stops": list(stops.token_ids)})
    monkeypatch.setattr(measuring, "_ask_until_whole", until_whole)
    (tmp_path / "out").mkdir()
    plan = Plan(config, {}, (1,))
    sets, questions = measuring.ask_all(plan, Said())
    assert seen["load"] == (tmp_path, False, asks) and seen["asked"] == ("tokenizer", questions) and len(sets) == 1
    assert len(questions) == 10 and {(q.sampling.seed, q.sampling.max_new_tokens) for q in questions} == {(5, 7)}
    assert results.read(tmp_path / "out")["stops"] == [0]
    monkeypatch.setattr(measuring, "_made_of", lambda plan, stops: {"sets": {}, "stops": [1]})
    with pytest.raises(measuring.DaroError, match="another evaluation"):
        measuring.ask_all(plan, Said())


def asked_of(*sets):
    return questions_of(sets, seed=0, max_new_tokens=8, stops=Stops((0,)))


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A plan whose questions are answered here; `small.run` may be replaced."""
    (tmp_path / "out").mkdir()
    plan, questions, processes = Plan(config_in(tmp_path), {}, ()), asked_of(digits(samples=2)), []

    async def run(plan, tokenizer, questions, notices):
        await small.answer(plan, questions)

    async def answer(plan, questions, engine=None):
        with RewardPool("exact", workers=0) as pool:
            parts = measuring.Parts(
                engine or SeededEngine(), pool, AnswerStore(plan.out), None, lambda answer: None, 60.0
            )
            await measuring.ask(parts, requests(questions, kept(plan.out)), questions)

    @contextlib.contextmanager
    def cluster(count):
        processes.append(count)
        yield

    monkeypatch.setattr(measuring, "_run", run)
    monkeypatch.setattr(measuring, "cluster", cluster)
    small = SimpleNamespace(plan=plan, questions=questions, processes=processes, answer=answer)
    return small


def test_nothing_is_started_where_every_answer_is_kept(small):
    said = Said()
    measuring._ask_until_whole(small.plan, None, small.questions, said)
    assert said == [] and len(small.processes) == 1 and small.processes[0] >= 1
    measuring._ask_until_whole(small.plan, None, small.questions, said)
    assert said == [f"{small.plan.out} has all 20 answers already"] and len(small.processes) == 1


@pytest.mark.parametrize("error", [WorkerError("engine 0 died"), KeyboardInterrupt()])
def test_where_it_ends_early_it_says_what_is_kept(small, monkeypatch, error):
    async def run(plan, tokenizer, questions, notices):
        with contextlib.suppress(EngineError):
            await small.answer(plan, questions, SeededEngine(fails_after=7))
        raise error

    monkeypatch.setattr(measuring, "_run", run)
    said, words = Said(), f"7 of 20 answers are kept in {small.plan.out}: the same command goes on from there"
    with pytest.raises(type(error)) as caught:
        measuring._ask_until_whole(small.plan, None, small.questions, said)
    assert (said, str(caught.value)) == ([], f"engine 0 died; {words}") if str(error) else said == [words]
    said.clear()
    with pytest.raises(type(error)):
        measuring._ask_until_whole(small.plan, None, small.questions, said)
    assert said[0] == f"{small.plan.out} has 7 of 20 answers; asking for the others"


def test_a_measurement_ends_with_its_summary(small, monkeypatch):
    held_out = digits(samples=2)

    def ask_all(plan, notices):
        measuring._ask_until_whole(plan, None, small.questions, notices)
        return [held_out], small.questions

    monkeypatch.setattr(measuring, "ask_all", ask_all)
    config = config_in(small.plan.out.parent, reward={"verifier": "exact"}, engine={"kind": "embedded", "seed": 4})
    summary = measuring.measure(Plan(config, {}, (1, 2)), Said())
    assert json.loads((small.plan.out / "summary.json").read_text()) == summary
    assert list(summary["sets"]["digits"]["metrics"]) == ["avg@2", "pass@1", "pass@2", "maj@2"]
    with pytest.raises(measuring.DaroError, match="--k: got 8"):
        measuring.measure(Plan(config, {}, (8,)), Said())


@pytest.fixture
def engines(monkeypatch, small):
    """Parts in place of processes: `engines.engine` answers, and what was closed is written down."""
    monkeypatch.undo()
    closed: list[str] = []

    class Part:
        def __init__(self, name):
            self.name = name

        async def close(self):
            closed.append(self.name)

    class Scorer(Part):
        async def score_async(self, pairs):
            with RewardPool("exact", workers=0) as pool:
                return pool.score(pairs)

    async def start(placement, engine, scorer):
        closed.append("started")

    engine = SeededEngine()
    engine.close = Part("engine").close  # type: ignore[attr-defined]
    placement = SimpleNamespace(close=lambda: closed.append("placement"))
    monkeypatch.setattr(measuring.Placement, "of_engines", lambda engines, limits: placement)
    monkeypatch.setattr(measuring.parts, "rollout_engine", lambda *given: found.engine)
    monkeypatch.setattr(measuring.parts, "start_engine", start)
    monkeypatch.setattr(measuring, "Verdicts", lambda section, **options: Scorer("scorer"))
    found = SimpleNamespace(engine=engine, closed=closed)
    return found


def test_engine_and_verifiers_are_closed_when_all_is_answered(small, engines):
    said = Said()
    asyncio.run(measuring._run(small.plan, None, small.questions, said))
    assert len(kept(small.plan.out)) == 20 and engines.closed == ["started", "engine", "scorer", "placement"]
    assert said[-1].startswith("20 of 20 answers, ") and said[-1].endswith(" tokens/s, 0 min left")


def test_what_an_engine_never_answers_is_counted(small, engines):
    engines.engine._aborted = (1,)
    with pytest.raises(EngineError, match="no answer to 10 requests, though it was asked 2 times"):
        asyncio.run(measuring._run(small.plan, None, small.questions, Said()))
    assert engines.closed[-3:] == ["engine", "scorer", "placement"] and len(kept(small.plan.out)) == 10
    assert len(engines.engine.asked) == 30


def test_servers_keep_their_weights_and_have_256_requests_each_under_way(small, engines, monkeypatch):
    seen: list[object] = []

    class Served(SeededEngine):
        fleet = SimpleNamespace(servers=(1, 2, 3))

        def serve_as_loaded(self):
            seen.append("as loaded")

        async def close(self):
            return None

    async def ask(parts, pending, questions):
        seen.append(parts.window)
        raise EngineError("enough")

    monkeypatch.setattr(measuring, "SGLangEngine", Served)
    monkeypatch.setattr(measuring, "ask", ask)
    engines.engine = Served()
    with pytest.raises(EngineError, match="enough"):
        asyncio.run(measuring._run(small.plan, None, small.questions, Said()))
    assert seen == ["as loaded", 768]


def test_how_far_it_is_is_said_every_half_minute_and_at_the_end(monkeypatch):
    now, said = [100.0], []
    monkeypatch.setattr(measuring.time, "monotonic", lambda: now[0])
    told = measuring._Told(4, said.append)
    for seconds, right in ((29.9, True), (0.1, False), (30.0, True), (1.0, False)):
        now[0] += seconds
        told(Answer(None, SimpleNamespace(response_length=600), Verdict(right, 0.0, "")))  # type: ignore[arg-type]
    assert said == [
        "2 of 4 answers, 50.0% right, 40 tokens/s, 0 min left",
        "3 of 4 answers, 66.7% right, 30 tokens/s, 0 min left",
        "4 of 4 answers, 50.0% right, 39 tokens/s, 0 min left",
    ]
    slow = measuring._Told(1000, said.append)
    now[0] += 60
    slow(Answer(None, SimpleNamespace(response_length=6), Verdict(True, 0.0, "")))  # type: ignore[arg-type]
    assert said[-1].endswith("100.0% right, 0 tokens/s, 999 min left")


def test_answers_are_due_after_two_seconds_and_a_hundredth_of_the_time(monkeypatch, tmp_path):
    now = [1000.0]
    monkeypatch.setattr("megatron_daro.workshop.evaluate.answers.time.monotonic", lambda: now[0])
    store = AnswerStore(tmp_path)
    now[0] += 2
    assert not store.due
    store.add(Answer(None, None, None))  # type: ignore[arg-type]
    assert store.due and len(store.take()) == 1 and not store.due
    store.add(Answer(None, None, None))  # type: ignore[arg-type]
    now[0] += 1.9
    assert not store.due
    now[0] += 0.1
    assert store.due
    now[0] += 1000
    store.take()
    store.add(Answer(None, None, None))  # type: ignore[arg-type]
    now[0] += 10
    assert not store.due
    now[0] += 0.2
    assert store.due


def test_a_store_goes_on_behind_the_parts_that_are_there(tmp_path):
    folder = tmp_path / "answers"
    folder.mkdir()
    (folder / "part_000007.parquet.tmp").touch()
    (folder / "part_000003.parquet").touch()
    store = AnswerStore(tmp_path)
    store.write([])
    assert [path.name for path in folder.iterdir()] == ["part_000003.parquet"] and store.written == 0
    (folder / "part_000003.parquet").unlink()
    (question, *_) = asked_of(digits(samples=2))
    engine = SeededEngine()
    rollouts = [engine._rollout(requests([question], ())[index], index) for index in range(2)]
    store.write([Answer(question.prompt, one, Verdict(True, 1.0, "")) for one in rollouts])
    assert [path.name for path in part_files(tmp_path)] == ["part_000004.parquet"] and store.written == 2
    assert kept(tmp_path) == {(question.group_id, 0), (question.group_id, 1)}


def test_a_problem_is_known_by_its_words_and_golds():
    def name(text, *golds):
        prompt = Prompt("x", golds[0], "file", text=text, tokens=(1,), alternatives=tuple(golds[1:]))
        held_out = type(digits())(digits().section, (prompt,))
        (question,) = asked_of(held_out)
        return question.prompt.id, question.group_id

    assert name("a  b\n", "1") == name("a b", "1") != name("a c", "1") and name("a b", "1") != name("a b", "1", "2")
    assert len(name("a", "1")[0]) == 16 and -(2**62) <= name("a", "1")[1] < 0


def score(**fields: object) -> ProblemScore:
    base = {"set": "s", "problem": "p", "level": "", "statement": "", "gold": "", "samples": 4, "correct": 2}
    base |= {"majority": "", "majority_right": 0.0, "length": 10.0, "length_right": 8.0, "length_wrong": 12.0}
    return ProblemScore(**base | {"truncated": 0, "no_answer": 0, **fields})


def test_how_answers_end_is_a_share_of_all():
    rows = [
        score(truncated=2, ran_on=1, stopped_without_answer=1, code=1, reflecting=2, reflecting_right=2),
        score(correct=1, samples=6),
    ]
    assert results.behaviour(rows) == {
        "answered": 0.7, "ran_on": 0.1, "cut_off": 0.1, "without_answer": 0.1, "code": 0.1, "reflecting": 0.2,
        "reflecting_problems": 0.5, "accuracy_reflecting": 1.0, "accuracy_others": 0.125,
    }  # fmt: skip
    assert results.behaviour([score()])["accuracy_reflecting"] is None


def test_difficulty_is_the_sets_own_or_the_measured():
    rows = [
        score(level="2", length=10.0),
        score(level="1", correct=4, length_wrong=None),
        score(level="2", length=30.0),
    ]
    assert results.by_level(rows) == [
        {"by": "level", "level": "1", "problems": 1, "accuracy": 1.0, "length": 10.0, "length_right": 8.0,
         "length_wrong": None},
        {"by": "level", "level": "2", "problems": 2, "accuracy": 0.5, "length": 20.0, "length_right": 8.0,
         "length_wrong": 12.0},
    ]  # fmt: skip
    rates = results.by_level([score(correct=0), score(correct=4), score(correct=1), score(correct=3)])
    assert [(row["by"], row["level"]) for row in rates] == [
        ("pass rate", name) for name in ("0", "up to 1/4", "up to 3/4", "1")
    ]


def test_half_a_character_is_written_as_a_question_mark():
    assert results._column(["a\ud800"]).to_pylist() == ["a?"] and results._column([1, None]).to_pylist() == [1, None]


def test_an_evaluation_of_another_format_is_refused(tmp_path):
    for text in ('{"format": 2}', "[]"):
        (tmp_path / "evaluation.json").write_text(text)
        with pytest.raises(results.DataError, match="is of another format; allowed: 1"):
            results.read(tmp_path)
    (tmp_path / "evaluation.json").write_text("{")
    with pytest.raises(results.DataError, match="is no directory of an evaluation"):
        results.read(tmp_path)


def test_the_tables_of_a_summary():
    estimate = {"mean": 0.5, "low": 0.25, "high": 0.75}
    behaviour = dict.fromkeys(results.behaviour([score()]), 0.125) | {"accuracy_others": None}
    level = {
        "by": "level",
        "level": "3",
        "problems": 7,
        "accuracy": 0.25,
        "length": 9.6,
        "length_right": None,
        "length_wrong": 11,
    }
    one = {"problems": 5, "metrics": {"avg@4": estimate}, "length": 10.4, "truncated": 0.1, "no_answer": 0.2}
    summary = {
        "sets": {"a": {**one, "behaviour": behaviour, "by_level": [level]}},
        "mean": {"avg@4": estimate},
        "templates": {"r1": {"metrics": {}, "length": 3.2, "behaviour": behaviour}},
    }
    lines = [line.split() for line in summary_text(summary).splitlines()]
    assert ["a", "5", "50.0%", "[25.0%,", "75.0%]", "10", "10.0%", "20.0%"] in lines
    assert ["mean", "of", "sets", "50.0%", "[25.0%,", "75.0%]"] in lines
    assert ["a", "level", "3", "7", "25.0%", "10", "11"] in lines and ["r1", "3", "12.5%", "12.5%"] in lines
    assert ["a", *["12.5%"] * 8] in lines
    drawn = table_text(["n", "v"], [["x\n", "1"], ["long", "23"]], left=1).splitlines()
    assert [line.rstrip() for line in drawn] == drawn and drawn[0].split() == ["n", "v"] and len(drawn) == 4
    assert drawn[2].split() == ["x\\n", "1"] and drawn[2].index("x") == drawn[3].index("long")
    assert drawn[2].index("1") == drawn[3].index("3")
