"""What is refused by the embedded engine at its edges, where weights are placed, and its states from start to close."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from engine_checkpoints import VOCAB, save_small_model
from safetensors.torch import load_file

from megatron_daro.engine import embedded
from megatron_daro.engine.embedded import EmbeddedEngine, EmbeddedGenerator, Place, WeightStage, checkpoint_places
from megatron_daro.errors import EngineError, ModelError
from megatron_daro.sync.buckets import bucketize
from megatron_daro.types import GroupRequest, Prompt, SamplingParams


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen2")
    save_small_model(directory)
    return directory


@pytest.fixture(scope="module")
def generator(checkpoint):
    return EmbeddedGenerator(checkpoint, seed=0)


def request(group, tokens, *, count=2, attempt=0, **sampling):
    sampling = {"max_new_tokens": 6, "stop_token_ids": (), **sampling}
    prompt = Prompt(id=f"p{group}", answer="", source="", tokens=tuple(tokens))
    return GroupRequest(group, attempt, prompt, tuple(range(count)), SamplingParams(**sampling))


def test_what_an_engine_cannot_be_made_with_is_named(checkpoint, monkeypatch):
    with pytest.raises(EngineError, match="batch_size must be at least 1, got 0"):
        EmbeddedGenerator(checkpoint, seed=0, batch_size=0)
    with pytest.raises(EngineError, match="dtype must be one of fp32, bf16, got 'fp16'"):
        EmbeddedGenerator(checkpoint, seed=0, dtype="fp16")
    threads = []
    monkeypatch.setattr(embedded.torch, "set_num_threads", threads.append)
    EmbeddedGenerator(checkpoint, seed=0, batch_size=1)
    assert threads == []
    made = EmbeddedGenerator(checkpoint, seed=0, threads=1)
    assert threads == [1] and not made.model.training
    assert not any(parameter.requires_grad for parameter in made.model.parameters())


def test_weights_that_are_pickles_are_not_read(tmp_path, checkpoint):
    torch.save(load_file(checkpoint / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    with pytest.raises(ModelError, match="cannot be loaded"):
        EmbeddedGenerator(tmp_path, seed=0)


def test_weights_of_another_shape_are_refused(tmp_path, checkpoint):
    config = (checkpoint / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace(f'"vocab_size": {VOCAB}', f'"vocab_size": {VOCAB + 1}'))
    (tmp_path / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match="cannot be loaded"):
        EmbeddedGenerator(tmp_path, seed=0)


@pytest.mark.parametrize(
    "edge",
    [
        {"tokens": [0, VOCAB - 1], "stop_token_ids": (0, VOCAB - 1)},
        {"tokens": [1] * 250},
        {"tokens": [1], "max_new_tokens": 1, "temperature": 0.0, "top_p": 1.0},
        {"tokens": [1], "temperature": 1e9, "top_p": 1e-9},
    ],
)
def test_requests_at_the_edge_of_what_is_allowed_are_planned(generator, edge):
    (batch,) = generator.plan([request(0, **edge)])
    assert [row.index for row in batch] == [0, 1]


@pytest.mark.parametrize(
    ("edge", "words"),
    [
        ({"tokens": [1] * 251}, "251 prompt tokens and max_new_tokens 6; allowed: at least 1 and 256 together"),
        ({"tokens": [1], "temperature": float("inf")}, "temperature inf"),
        ({"tokens": [1], "top_p": 1.01}, r"top_p 1\.01; allowed: temperature >= 0"),
        ({"tokens": [1], "stop_token_ids": (VOCAB,)}, f"token {VOCAB} is outside the model's vocabulary of {VOCAB}"),
    ],
)
def test_requests_beyond_it_are_refused(generator, edge, words):
    with pytest.raises(EngineError, match=rf"prompt 'p0' \(group 0\): .*{words}"):
        generator.plan([request(0, **edge)])


def test_rows_are_batched_by_the_length_of_what_they_read_then_in_the_order_asked(checkpoint):
    generator = EmbeddedGenerator(checkpoint, seed=0, batch_size=3)
    batches = generator.plan([request(0, [1, 2]), request(1, [1]), request(2, [3, 4], count=1), request(3, [5])])
    assert [[(row.request.group_id, row.index) for row in batch] for batch in batches] == [
        [(1, 0), (1, 1), (3, 0)],
        [(3, 1), (0, 0), (0, 1)],
        [(2, 0)],
    ]
    assert generator.plan([]) == []
    with pytest.raises(EngineError, match=r"\(group, attempt, index\) \(0, 1, 0\) is asked for twice"):
        generator.plan([request(0, [1]), request(0, [1], attempt=1, count=1), request(0, [2], attempt=1)])


def test_a_failure_of_torch_says_what_to_lower(generator, monkeypatch):
    def fails(**options):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(generator.model, "generate", fails)
    with pytest.raises(EngineError, match=r"generating 2 rows failed: out of memory\. Lower engine\.embedded"):
        generator.generate_rows(generator.plan([request(0, [1, 2])])[0])


def test_a_model_without_a_known_family_has_its_tensors_under_their_own_names():
    places = checkpoint_places(torch.nn.Linear(2, 3))
    assert places == {"weight": Place("weight"), "bias": Place("bias")}


@pytest.mark.parametrize(("layers", "shown"), [(2, "0.weight, 0.bias, 1.weight, 1.bias"), (3, "0.weight, 0.bias, ")])
def test_a_few_names_are_said_of_what_a_model_has_and_of_what_it_lacks(layers, shown):
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(layers)))
    more = ", ..." if layers == 3 else ""
    stage = WeightStage(model)
    shown += "1.weight, 1.bias" if layers == 3 else ""
    with pytest.raises(EngineError) as caught:
        stage.add(next(iter(bucketize([("other", torch.zeros(1))], 100))))
    assert str(caught.value) == f"weight update: the model has no tensor other; it has {shown}{more}."
    with pytest.raises(EngineError) as caught:
        stage.check_complete()
    assert str(caught.value) == f"weight update: {2 * layers} of {2 * layers} tensors never came: {shown}{more}."


def weights_of(engine):
    return [(name, parameter.detach() * 2) for name, parameter in engine._generator.model.named_parameters()]


def test_an_update_is_opened_filled_and_committed_once(checkpoint):
    async def scenario():
        engine = EmbeddedEngine(checkpoint, seed=0, threads=1)
        await engine.start()
        with pytest.raises(EngineError, match="was started already"):
            await engine.start()
        buckets = list(bucketize(weights_of(engine), 10**6))
        for call in (engine.receive(buckets[0]), engine.commit_update(1)):
            with pytest.raises(EngineError, match="has no weight update open"):
                await call
        engine.open_update()
        await engine.receive(buckets[0])
        engine.open_update()  # the one before is forgotten
        with pytest.raises(EngineError, match="tensors never came"):
            await engine.commit_update(1)
        with pytest.raises(EngineError, match="has no weight update open"):
            await engine.commit_update(1)
        engine.open_update()
        for bucket in buckets:
            await engine.receive(bucket)
        expected = dict(weights_of(engine))
        await engine.commit_update(3)
        assert engine.weight_version == 3
        for name, parameter in engine._generator.model.named_parameters():
            assert torch.equal(parameter, expected[name]), name
        await engine.close()
        await engine.close()

    asyncio.run(scenario())


def test_an_engine_that_does_not_run_says_so_and_one_that_could_not_load_may_be_started_again(checkpoint, tmp_path):
    async def scenario():
        engine = EmbeddedEngine(tmp_path / "later", seed=0, threads=1, batch_size=7, dtype="bf16", decode=str)
        with pytest.raises(EngineError, match="not running"):
            _ = engine.weight_version
        with pytest.raises(EngineError, match="not running"):
            engine.open_update()
        await engine.abort()
        with pytest.raises(ModelError, match="not a directory"):
            await engine.start()
        while "embedded-engine" in "".join(thread.name for thread in threading.enumerate()):
            await asyncio.sleep(0.01)
        (tmp_path / "later").symlink_to(checkpoint)
        await engine.start()
        made = engine._generator
        assert (made.seed, made.batch_size, made._decode_text, made.model.dtype) == (0, 7, str, torch.bfloat16)
        assert engine.weight_version == 0
        assert "embedded-engine_0" in [thread.name for thread in threading.enumerate()]
        await engine.close()
        for call in (lambda: engine._run(lambda: 1), lambda: anext(engine.generate([request(0, [1])]))):
            with pytest.raises(EngineError, match="it was not started, or it was closed"):
                await call()

    asyncio.run(scenario())


def test_a_stream_of_groups_ends_with_the_last_and_aborts_reach_only_those_named(checkpoint):
    async def scenario():
        engine = EmbeddedEngine(checkpoint, seed=0, threads=1, batch_size=2)
        await engine.start()
        try:
            stream = engine.generate([request(g, [1 + g], max_new_tokens=3) for g in range(4)])
            whole = {rollouts[0].group_id: rollouts async for rollouts in stream}
            assert sorted(whole) == [0, 1, 2, 3] and all(len(rollouts) == 2 for rollouts in whole.values())
            stream = engine.generate([request(g, [1], max_new_tokens=200) for g in range(2)])
            asking = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            await engine.abort({0, 1})
            assert {one.finish_reason for one in await asking} == {"abort"}
            await stream.aclose()
            assert not engine._live
        finally:
            await engine.close()
        assert engine._generator is None

    asyncio.run(scenario())
