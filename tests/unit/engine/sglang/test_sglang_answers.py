"""What a server is asked for one group, and what becomes of its answer: rollouts, or a request that is made again."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace

import numpy as np
import pytest
from sglang_pool import VOCAB, collect, expected, group
from sglang_stub_fleets import Weights, first, rig, run, serving
from stub_server import StubServer, answered, answering, one_ends_early, written

from megatron_daro.errors import EngineError
from megatron_daro.types import Rollout


def answers_of(tmp_path, request, replies=None, *, changed=None, count=1, stub=None, **options):
    """What the engine makes of a request where the first try is answered so, by default as the stub does.

    changed: does something to the stub's answers of the first try. Returns (rollouts, bodies, how often was asked
    again).
    """

    async def scenario():
        async with serving(tmp_path, *([stub] if stub else []), count=count, **options) as fleet:
            (server,) = fleet.stubs
            bodies = []

            async def answer(asked, body):
                bodies.append(body)
                given = server.generated(body) if replies is None or len(bodies) > 1 else replies
                if changed and len(bodies) == 1:
                    changed(given)
                return await answered(asked, body, given)

            server.answers["/generate"] = answer
            rollouts = await collect(fleet.engine, [request])
            return rollouts, bodies, fleet.engine.metrics()["engine/retries"]

    return run(scenario())


def one(ids, reason="stop", spans=((1, None),), **meta):
    """A server's answer of one sample. spans: (version, tokens), None: all."""
    told, begin = [], 0
    for version, tokens in spans:
        end = begin + (len(ids) if tokens is None else tokens)
        told.append({"version": str(version), "start": begin, "end": end})
        begin = end
    return {
        "output_ids": list(ids),
        "meta_info": {
            "finish_reason": {"type": reason},
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "weight_versions": told,
            **meta,
        },
    }


def cut(index, ids, version=1):
    """What an abort left of a rollout of group 0."""
    tokens = np.array([*group(0).prompt.tokens, *ids], np.int32)
    ones, logprobs = np.ones(len(ids), np.uint8), np.full(len(ids), -2.0, np.float32)
    return Rollout("p0", 0, 0, index, tokens, 3, ones, logprobs, "abort", version)


@pytest.mark.parametrize(
    ("sampling", "sent"),
    [
        ({"temperature": 0.7, "top_p": 0.9, "stop_token_ids": (2,)},
         {"temperature": 0.7, "top_p": 0.9, "stop_token_ids": [2], "ignore_eos": False}),
        ({"stop_token_ids": ()}, {"ignore_eos": True, "skip_special_tokens": False}),
        ({"stop": ("</a>",)}, {"stop": ["</a>"]}),
    ],
    ids=["sampling", "nothing ends it early", "stop texts"],
)  # fmt: skip
def test_a_server_gets_the_sampling_of_the_request(tmp_path, sampling, sent):
    _, (body,), _ = answers_of(tmp_path, group(0, count=2, **sampling))
    assert body["input_ids"] == [list(group(0).prompt.tokens)] * 2 and body["return_logprob"]
    for sampling in body["sampling_params"]:
        assert sent.items() <= sampling.items() and sampling["max_new_tokens"] == 12


def test_each_sample_has_a_seed_that_follows_from_the_runs_and_the_request_alone(tmp_path):
    """Without one a server that was started with enable_deterministic_inference draws with 42 for each."""

    def seeds(request, seed):
        _, bodies, _ = answers_of(tmp_path, request, seed=seed)
        return [one["sampling_seed"] for body in bodies for one in body["sampling_params"]]

    both = seeds(group(0, count=2), 3)
    assert len(set(both)) == 2 and all(0 <= seed < 2**31 for seed in both)
    alone = replace(group(0, count=2), indices=(1,))
    assert seeds(alone, 3) == both[1:] and not set(seeds(group(0, count=2), 4)) & set(both)


def test_samples_that_may_get_different_numbers_of_tokens_are_requests_of_their_own(tmp_path):
    request = replace(group(0, count=4), limits={0: 3, 1: 3, 2: 5}, partial={2: cut(2, [1, 1]), 3: cut(3, [4])})
    rollouts, bodies, _ = answers_of(tmp_path, request)
    asked = [(body["input_ids"][0][3:], body["sampling_params"][0]["max_new_tokens"]) for body in bodies]
    assert sorted(asked) == [([], 3), ([], 3), ([1, 1], 3), ([4], 11)]
    ended = [(r.response_length, r.finish_reason) for r in rollouts]
    assert ended == [(3, "segment"), (3, "segment"), (5, "segment"), (12, "length")]


def test_a_partial_rollout_is_continued(tmp_path):
    request = replace(group(0, count=1), partial={0: cut(0, [1, 1], version=0)})
    ((rollout,), _, _) = answers_of(tmp_path, request, [one([4, 2])])
    assert rollout.tokens[3:].tolist() == [1, 1, 4, 2] and rollout.prompt_length == 3
    assert rollout.logprobs.tolist() == [-2.0, -2.0, -0.5, -0.5] and rollout.text == "1 1 4 2"
    assert rollout.version_spans == ((0, 2), (1, 2)) and rollout.weight_version == 0


def test_a_server_that_aborts_a_partial_rollout_before_its_next_token_is_no_stranger(tmp_path):
    request = replace(group(0, count=1), partial={0: cut(0, [1, 1], version=0)})
    ((rollout,), _, asked_again) = answers_of(tmp_path, request, [one([], "abort", spans=())])
    assert (rollout.version_spans, rollout.finish_reason, asked_again) == (((0, 2), (1, 10)), "length", 1)


WORDS = {1: "7", 2: "</a>", 3: "a>\n", 4: "</", 5: "<", 6: "/", 7: "a", 8: ">"}


def spelled(ids):
    return "".join(WORDS[i] for i in ids)


def test_an_answer_ends_at_the_token_that_completes_a_stop_text(tmp_path):
    """As SGLang answers: whole tokens, and more where it was spelled in more tokens than the server looks at. Of one
    that began before an abort it knows nothing."""
    request = group(0, count=4, stop=("</a>",), max_new_tokens=6)
    replies = [one([1, 2]), one([1, 4, 3]), one([1, 5, 6, 7, 8, 1], "length"), one([1, 1])]
    rollouts, _, _ = answers_of(tmp_path, request, replies, decode=spelled)
    assert [r.tokens[3:].tolist() for r in rollouts] == [[1, 2], [1, 4, 3], [1, 5, 6, 7, 8], [1, 1]]
    assert [r.text for r in rollouts] == ["7</a>", "7</a>", "7</a>", "77"]
    assert {r.finish_reason for r in rollouts} == {"stop"} and [len(r.logprobs) for r in rollouts] == [2, 3, 5, 2]
    request = replace(group(0, count=1, stop=("</a>",)), partial={0: cut(0, [1, 4])})
    ((rollout,), _, _) = answers_of(tmp_path, request, [one([3, 1, 1])], decode=spelled)
    assert (rollout.tokens[3:].tolist(), rollout.text, rollout.finish_reason) == ([1, 4, 3], "7</a>", "stop")


@pytest.mark.parametrize(
    ("spans", "version", "kept"),
    [
        (((1, 1), (2, 0), (2, 2)), 1, ((1, 1), (2, 2))),
        (((2, 3),), 2, ((2, 3),)),
        ((), 1, ((1, 3),)),  # a server that tells none has those of the request
    ],
    ids=["an update on the way", "weights of after the update", "tells none"],
)
def test_tokens_are_of_the_weights_that_the_server_names(tmp_path, spans, version, kept):
    async def scenario():
        weights = Weights(1)
        async with serving(tmp_path, count=1, updated=weights) as fleet:
            (server,), asked, updated = fleet.stubs, asyncio.Event(), asyncio.Event()

            async def answer(request, body):
                asked.set()
                await updated.wait()
                return await answered(request, body, [one([1, 2, 3], spans=spans)])

            server.answers["/generate"] = answer
            working = asyncio.create_task(collect(fleet.engine, [group(0, count=1)]))
            await asked.wait()
            del server.answers["/generate"]
            await fleet.publish(weights, 2)
            updated.set()
            (rollout,) = await working
            assert (rollout.weight_version, rollout.version_spans) == (version, kept)

    run(scenario())


def no(part):
    return lambda replies: replies[1]["meta_info"].pop(part)


def spans_of(*lengths):
    return one([1], spans=[(1, length) for length in lengths])["meta_info"]["weight_versions"]


def changed(part, value):
    return lambda replies: replies[1]["meta_info"].update({part: value})


BAD = {
    "ids without log-probs": lambda replies: replies[1]["output_ids"].append(3),
    "other ids": lambda replies: replies[1].update(output_ids=[5] * 12),
    "no log-probs": no("output_token_logprobs"),
    "log-prob above 0": changed("output_token_logprobs", [[0.5, token, None] for token in range(3, 15)]),
    "log-prob nan": changed("output_token_logprobs", [[float("nan"), token, None] for token in range(3, 15)]),
    "log-prob null": changed("output_token_logprobs", [[None, token, None] for token in range(3, 15)]),
    "finish reason": changed("finish_reason", {"type": "error"}),
    "spans of fewer tokens": changed("weight_versions", [{"version": "1", "start": 0, "end": 3}]),
    "version that is no number": changed("weight_versions", [{"version": "new", "start": 0, "end": 12}]),
    "no meta_info": lambda replies: replies[1].pop("meta_info"),
    "an id below 0": lambda replies: replies.__setitem__(1, one([3, -5])),
    "an id beyond the vocabulary": lambda replies: replies.__setitem__(1, one([3, VOCAB])),
    "an id that is no number": lambda replies: replies.__setitem__(1, one([3, "4"])),
    "log-prob that float32 cannot hold": changed("output_token_logprobs", [[-1e300, i, None] for i in range(3, 15)]),
    "log-prob as text": changed("output_token_logprobs", [["-0.5", token, None] for token in range(3, 15)]),
    "finish reason as text": changed("finish_reason", "stop"),
    "status as text": changed("finish_reason", {"type": "abort", "status_code": "bad"}),
    "a span of fewer than no tokens": changed("weight_versions", spans_of(-3, 15)),
    "spans that overlap": changed("weight_versions", [*spans_of(6), *spans_of(6)]),
    "spans as text": changed("weight_versions", "1"),
    "more tokens than asked for": lambda replies: replies.__setitem__(1, one([3] * 13, "length")),
}


@pytest.mark.parametrize("change", BAD.values(), ids=list(BAD))
@pytest.mark.parametrize("sends_deltas", [False, True], ids=["streamed", "at once"])
def test_an_answer_that_does_not_fit_is_asked_for_again(tmp_path, change, sends_deltas):
    expect, stub = expected(tmp_path, vocabulary=VOCAB), {"info": {"incremental_streaming_output": sends_deltas}}
    rollouts, _, retries = answers_of(tmp_path, group(0, count=2), changed=change, expect=expect, stub=stub)
    assert [r.tokens[3:].tolist() for r in rollouts] == [list(range(3, 15))] * 2 and retries == 1


@pytest.mark.parametrize(
    "content", [[], [one([1])] * 3, {"text": "a"}, [{"output_ids": [1]}, "text"]], ids=["few", "many", "none", "form"]
)
def test_a_reply_that_is_no_list_of_answers_is_asked_for_again(tmp_path, content):
    async def scenario():
        async with serving(tmp_path, count=1) as fleet:
            first(fleet.stubs[0], 1, answering(200, content))
            assert len(await collect(fleet.engine, [group(0, count=2)])) == 2
            assert fleet.engine.metrics()["engine/retries"] == 1

    run(scenario())


def test_what_the_decoder_raises_is_no_fault_of_the_server(tmp_path):
    def decode(ids):
        raise ValueError("no such token")

    async def scenario():
        async with serving(tmp_path, count=1, decode=decode) as fleet:
            with pytest.raises(ValueError, match="no such token"):
                await collect(fleet.engine, [group(0, count=1)])
            assert fleet.stubs[0].calls["/generate"] == 1

    run(scenario())


def experts(numbers):
    return base64.b64encode(np.array(numbers, dtype=np.int32).tobytes()).decode()


ROUTED = replace(group(0, count=1, routed_experts=(2, 3), max_new_tokens=2), indices=(3,))


def test_experts_of_every_token_but_the_last_are_asked_for_and_stored(tmp_path):
    (rollout,), (body,), _ = answers_of(tmp_path, ROUTED, [one([10, 11], routed_experts=experts(range(24)))])
    assert body["return_routed_experts"] is True
    experts_TLK = rollout.routed_experts.read()
    assert experts_TLK.shape == (5, 2, 3) and len(rollout.routed_experts) == 5
    assert experts_TLK[:4].ravel().tolist() == list(range(24)) and (experts_TLK[4] == -1).all()
    (file,) = tmp_path.rglob("*.npy")
    assert np.load(file).dtype == np.uint8


@pytest.mark.parametrize(
    "told",
    [{}, {"routed_experts": experts(range(23))}, {"routed_experts": experts([-1, *range(23)])},
     {"routed_experts": experts([2**15, *range(23)])}],
    ids=["none", "of too few tokens", "below 0", "too large"],
)  # fmt: skip
def test_experts_that_cannot_be_are_refused(tmp_path, told):
    async def scenario():
        async with serving(tmp_path, count=1) as fleet:
            fleet.stubs[0].answers["/generate"] = answering(200, [one([10, 11], "length", **told)])
            with pytest.raises(EngineError, match="expert"):
                await collect(fleet.engine, [ROUTED])

    run(scenario())


def test_a_probe_asks_for_log_probs_of_given_tokens_and_of_some_sampled_ones(tmp_path):
    async def scenario():
        async with rig(tmp_path, count=1) as fleet:
            await fleet.publish(Weights(1), 1)
            (body,) = fleet.stubs[0].bodies
            prompt, given = body["input_ids"]
            assert given[: len(prompt)] == prompt and len(given) == 64 and body["logprob_start_len"] == 0
            assert body["extra_key"] == body["rid"], "it finds no prefix of another request"
            assert body["sampling_params"]["temperature"] == 1.0 and body["sampling_params"]["ignore_eos"]

    run(scenario())


def test_prompts_of_each_version_have_a_cache_key_of_their_own(tmp_path):
    async def scenario():
        weights = Weights(3)
        async with serving(tmp_path, count=1, updated=weights) as fleet:
            await collect(fleet.engine, [group(0, count=1)])
            await fleet.publish(weights, 4)
            fleet.stubs[0].bodies[1:] = []
            await collect(fleet.engine, [group(0, count=1), group(1, count=1)])
            before, *after = [body["extra_key"] for body in fleet.stubs[0].bodies]
            assert len(set(after)) == 1 and before not in after

    run(scenario())


@pytest.mark.parametrize(("sends_deltas", "count", "interval"), [(False, 2, 7), (False, 1, None), (True, 2, None)])
def test_answers_are_streamed_where_the_server_sends_them_whole(tmp_path, sends_deltas, count, interval):
    """And asked for at once of one that sends only what is new; the same tokens anyhow."""
    stub = {"info": {"incremental_streaming_output": sends_deltas}}
    rollouts, (body,), _ = answers_of(tmp_path, group(0, count=count, max_new_tokens=6), stub=stub)
    assert [r.tokens[3:].tolist() for r in rollouts] == [[3, 4, 5, 6, 7, 8]] * count
    assert {(r.finish_reason, r.weight_version) for r in rollouts} == {("length", 1)}
    assert body["stream"] == (interval is not None)
    assert {one.get("stream_interval") for one in body["sampling_params"]} == {interval}


def test_room_is_given_back_when_an_answer_has_ended(tmp_path):
    """So that the next group begins although one answer of the first goes on."""

    async def scenario():
        async with serving(tmp_path, count=1, max_tokens_in_flight=58) as fleet:
            (stub,) = fleet.stubs
            # 3 of the prompt and 4 of 16: a sample is reckoned with 7 tokens before any answer came.
            stub.answers["/generate"], let_go_on = one_ends_early(stub)
            long = asyncio.create_task(collect(fleet.engine, [group(0, count=8, max_new_tokens=16)]))
            await fleet.until(lambda: stub.calls["/generate"] == 1)
            stub.answers.clear()
            assert len(await collect(fleet.engine, [group(1, count=1, max_new_tokens=2)])) == 1 and not long.done()
            let_go_on.set()
            assert len(await long) == 8

    run(scenario())


def test_room_is_given_back_too_where_answers_are_requests_of_their_own(tmp_path):
    async def scenario():
        async with serving(tmp_path, count=1, max_tokens_in_flight=58) as fleet:
            (stub,) = fleet.stubs
            stub.gate.clear()
            first(stub, 1, lambda request, body: answered(request, body, stub.generated(body)))
            request = replace(group(0, count=8, max_new_tokens=16), limits={7: 15})
            long = asyncio.create_task(collect(fleet.engine, [request]))
            await fleet.until(lambda: stub.running == 7)
            first(stub, 1, lambda request, body: answered(request, body, stub.generated(body)))
            assert len(await collect(fleet.engine, [group(1, count=1, max_new_tokens=2)])) == 1 and not long.done()
            stub.gate.set()
            assert len(await long) == 8

    run(scenario())


def test_of_a_stream_that_breaks_what_had_ended_is_kept(tmp_path):
    async def broken(stub, request):
        return await written(request, [stub.one([1, 2]) | {"index": 0}], breaks=True)

    async def scenario():
        async with serving(tmp_path) as fleet:
            stub = fleet.stubs[0]
            first(stub, 1, lambda request, body: broken(stub, request))
            rollouts = await collect(fleet.engine, [group(0, count=3)])
            assert [r.index for r in rollouts] == [0, 1, 2]
            assert rollouts[0].tokens[3:].tolist() == [1, 2], "it is not asked for again"
            assert [len(body["input_ids"]) for stub in fleet.stubs for body in stub.bodies] == [2]

    run(scenario())


def test_of_requests_of_their_own_one_that_fails_is_made_again_alone(tmp_path):
    """Also where it fails before the others have ended."""

    async def scenario():
        async with serving(tmp_path) as fleet:
            stub, other = fleet.stubs
            stub.gate.clear()
            first(stub, 1, answering(500))
            asking = asyncio.create_task(collect(fleet.engine, [replace(group(0, count=3), limits={2: 5})]))
            await fleet.until(lambda: stub.calls["/generate"] == 3 and stub.running == 2)
            stub.gate.set()
            assert [r.index for r in await asking] == [0, 1, 2]
            assert [len(stub.bodies), len(other.bodies)] == [2, 1], "what had ended is not asked for again"

    run(scenario())


def test_of_requests_of_their_own_none_runs_on_when_one_is_refused(tmp_path):
    async def scenario():
        async with serving(tmp_path, count=1) as fleet:
            (stub,) = fleet.stubs
            stub.gate.clear()
            first(stub, 1, answering(400))
            with pytest.raises(EngineError, match="refused"):
                await collect(fleet.engine, [replace(group(0, count=3), limits={2: 5})])
            await fleet.until(lambda: not stub.running)

    run(scenario())


@pytest.mark.parametrize(
    "event",
    [{"index": 0, "meta_info": {"finish_reason": "stop"}}, one([1]) | {"index": -1},
     {"error": {"message": "no", "code": "invalid_request"}}],
    ids=["form", "index", "error with a code as text"],
)  # fmt: skip
def test_a_stream_whose_events_have_another_form_is_asked_for_again(tmp_path, event):
    async def odd(request, body):
        return await written(request, [event])

    async def scenario():
        async with serving(tmp_path, count=1) as fleet:
            first(fleet.stubs[0], 1, odd)
            assert len(await collect(fleet.engine, [group(0, count=2)])) == 2

    run(scenario())


@pytest.mark.parametrize(("status", "asked"), [(503, 2), (400, 1)])
def test_a_status_within_a_stream_is_what_it_would_be_without(tmp_path, status, asked):
    async def refusing(request, body):
        answer = StubServer().one([], "abort")
        answer["meta_info"]["finish_reason"] |= {"status_code": status, "message": "queue is full"}
        return await answered(request, body, [answer] * 2)

    async def scenario():
        async with serving(tmp_path) as fleet:
            first(fleet.stubs[0], 1, refusing)
            if status == 503:
                assert len(await collect(fleet.engine, [group(0, count=2)])) == 2
            else:
                with pytest.raises(EngineError, match="queue is full"):
                    await collect(fleet.engine, [group(0, count=2)])
            assert sum(stub.calls["/generate"] for stub in fleet.stubs) == asked

    run(scenario())


def test_what_a_server_says_cannot_act_on_a_terminal(tmp_path):
    refused = {"error": {"message": "no\x1b[2J\x07"}}
    reason = {"type": "abort", "status_code": 400, "message": "no\x1b[2J"}

    async def said(reply):
        async with serving(tmp_path, count=1) as fleet:
            fleet.stubs[0].answers["/generate"] = reply
            with pytest.raises(EngineError) as raised:
                await collect(fleet.engine, [group(0, count=2)])
            return str(raised.value)

    async def in_a_stream(request, body):
        return await written(request, [one([]) | {"index": 0, "meta_info": {"finish_reason": reason}}])

    for reply in (answering(400, refused), in_a_stream):
        words = run(said(reply))
        assert r"no\x1b[2J" in words and words.isprintable()
