"""GroupRequest -> /generate -> Rollouts: what is asked, and which answers are refused."""

import asyncio
import base64
from dataclasses import replace

import numpy as np
import pytest

from megatron_daro.engine.sglang import generation
from megatron_daro.engine.sglang.generation import BadAnswerError
from megatron_daro.routed_experts import ExpertsFolder
from megatron_daro.types import GroupRequest, Prompt, Rollout, SamplingParams

PROMPT = Prompt(id="p", answer="", source="", tokens=(7, 8, 9))


def request_of(indices=(0, 1), partial=None, **sampling):
    options = {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 10, "stop_token_ids": (2,), **sampling}
    return GroupRequest(4, 1, PROMPT, indices, SamplingParams(**options), partial or {})


def cut(index, ids, version=3):
    """What an abort left of a rollout."""
    return Rollout(
        prompt_id="p", group_id=4, attempt=0, index=index, tokens=np.array([7, 8, 9, *ids], dtype=np.int32),
        prompt_length=3, loss_mask=np.ones(len(ids), dtype=np.uint8),
        logprobs=np.full(len(ids), -2.0, dtype=np.float32), finish_reason="abort", weight_version=version,
    )  # fmt: skip


def answer(ids, spans=None, reason="stop", **changes):
    meta = {
        "finish_reason": {"type": reason},
        "output_token_logprobs": [[-0.5, token, None] for token in ids],
        "weight_version": "5",
    }
    meta |= {} if spans is None else {"weight_versions": spans}
    return {"output_ids": list(ids), "meta_info": meta | changes}


def span(version, start, end):
    return {"version": version, "start": start, "end": end}


def rollouts(request, answers, version=5, loaded=None, decode=str, **options):
    return generation.rollouts(request, answers, version=version, loaded=loaded, decode=decode, **options)


def test_one_call_for_all_samples_of_a_group():
    (call,) = generation.calls(request_of((2, 5)), "name", cache_key="weights-3")
    assert call.body == {
        "rid": "name.2",
        "extra_key": "weights-3",
        "input_ids": [[7, 8, 9], [7, 8, 9]],
        "sampling_params": {
            "temperature": 0.7, "top_p": 0.9, "max_new_tokens": 10, "stop_token_ids": [2], "ignore_eos": False,
            "skip_special_tokens": False,
        },
        "return_logprob": True,
        "stream": False,
    }  # fmt: skip
    assert call.ids == ("name.2_0", "name.2_1")


def test_stop_texts_are_sent_and_an_answer_ends_at_the_token_that_completes_one():
    """As SGLang answers: whole tokens, and more where it was spelled in more tokens than the server looks at."""
    request = request_of((0, 1, 2, 3), stop=("</a>",), max_new_tokens=6)
    (call,) = generation.calls(request, "name", cache_key="weights-3")
    assert call.body["sampling_params"]["stop"] == ["</a>"]
    words = {1: "7", 2: "</a>", 3: "a>\n", 4: "</", 5: "<", 6: "/", 7: "a", 8: ">"}
    replies = [answer([1, 2]), answer([1, 4, 3]), answer([1, 5, 6, 7, 8, 1], reason="length"), answer([1, 1])]
    found = rollouts(request, replies, decode=lambda ids: "".join(words[i] for i in ids))
    assert [one.tokens[3:].tolist() for one in found] == [[1, 2], [1, 4, 3], [1, 5, 6, 7, 8], [1, 1]]
    assert [one.text for one in found] == ["7</a>", "7</a>", "7</a>", "77"]
    assert {one.finish_reason for one in found} == {"stop"} and [len(one.logprobs) for one in found] == [2, 3, 5, 2]


def test_a_stop_text_that_began_before_an_abort_ends_the_answer():
    """The server, which looks at its own tokens only, went on."""
    request = request_of((0,), {0: cut(0, [1, 4])}, stop=("</a>",))
    words = {1: "7", 3: "a>", 4: "</"}
    (one,) = rollouts(request, [answer([3, 1, 1])], decode=lambda ids: "".join(words[i] for i in ids))
    assert (one.tokens[3:].tolist(), one.text, one.finish_reason) == ([1, 4, 3], "7</a>", "stop")
    assert one.logprobs.tolist() == [-2.0, -2.0, -0.5] and one.spans == ((3, 2), (5, 1))


def test_without_stop_tokens_nothing_ends_an_answer_early():
    (call,) = generation.calls(request_of(stop_token_ids=()), "name", cache_key="weights-3")
    assert call.body["sampling_params"]["ignore_eos"] is True


def test_samples_that_resume_at_different_lengths_are_asked_for_each_with_what_is_left():
    request = request_of((0, 1, 2), {0: cut(0, [1, 1]), 2: cut(2, [4, 4, 4])})
    calls = generation.calls(request, "name", cache_key="weights-3")
    assert [call.request.indices for call in calls] == [(0,), (1,), (2,)]
    assert [call.body["input_ids"] for call in calls] == [[[7, 8, 9, 1, 1]], [[7, 8, 9]], [[7, 8, 9, 4, 4, 4]]]
    assert [call.body["sampling_params"]["max_new_tokens"] for call in calls] == [8, 10, 7]
    assert len({call.body["rid"] for call in calls}) == 3


def test_samples_that_resume_at_one_length_are_asked_for_together():
    (call,) = generation.calls(request_of((0, 1), {0: cut(0, [1]), 1: cut(1, [4])}), "name", cache_key="weights-3")
    assert call.body["input_ids"] == [[7, 8, 9, 1], [7, 8, 9, 4]]
    assert call.body["sampling_params"]["max_new_tokens"] == 9


def test_rollouts_have_the_servers_tokens_and_logprobs():
    first, second = rollouts(
        request_of(), [answer([1, 2], [span("5", 0, 2)]), answer([3], [span("5", 0, 1)], "length")]
    )
    assert (first.index, second.index, first.attempt, first.group_id) == (0, 1, 1, 4)
    assert first.tokens.tolist() == [7, 8, 9, 1, 2] and first.tokens.dtype == np.int32
    assert first.logprobs.tolist() == [-0.5, -0.5] and first.loss_mask.tolist() == [1, 1]
    assert (first.finish_reason, second.finish_reason) == ("stop", "length")
    assert (first.weight_version, first.version_spans, first.text) == (5, (), "[1, 2]")


def test_spans_of_an_update_on_the_way_are_kept_and_the_oldest_is_the_version():
    (rollout,) = rollouts(request_of((0,)), [answer([1, 2, 3], [span("5", 0, 1), span("6", 1, 1), span("7", 1, 3)])])
    assert rollout.version_spans == ((5, 1), (7, 2)) and rollout.weight_version == 5


@pytest.mark.parametrize(("keeps_cache", "version"), [(True, 4), (False, 5)])
def test_a_prompt_that_waited_in_a_server_which_keeps_its_cache_is_as_old_as_its_request(keeps_cache, version):
    """The server may have begun to read it with the weights of then, though it answered with later ones only."""
    told = [answer([1, 2, 3], [span("5", 0, 3)])]
    (rollout,) = rollouts(request_of((0,)), told, version=4, keeps_cache=keeps_cache)
    assert rollout.weight_version == version and rollout.spans == ((5, 3),)


def test_a_server_that_tells_no_spans_gets_the_version_at_the_request():
    (rollout,) = rollouts(request_of((0,)), [answer([1, 2])], version=4)
    assert (rollout.weight_version, rollout.version_spans) == (4, ())


def test_the_weights_a_server_was_started_with_count_only_before_the_first_update():
    given = [answer([1], [span("default", 0, 1)])]
    assert rollouts(request_of((0,)), given, loaded=0)[0].weight_version == 0
    with pytest.raises(BadAnswerError, match="started with"):
        rollouts(request_of((0,)), given, loaded=None)


def test_a_partial_rollout_is_continued():
    partial = {0: cut(0, [1, 1])}
    (rollout,) = rollouts(request_of((0,), partial), [answer([4, 2], [span("5", 0, 2)])])
    assert rollout.tokens.tolist() == [7, 8, 9, 1, 1, 4, 2] and rollout.prompt_length == 3
    assert rollout.logprobs.tolist() == [-2.0, -2.0, -0.5, -0.5]
    assert rollout.version_spans == ((3, 2), (5, 2)) and rollout.weight_version == 3
    assert rollout.text == "[1, 1, 4, 2]" and rollout.continues(partial[0])


def test_a_limit_is_what_the_server_may_generate_and_no_more():
    """Samples that may get different numbers of tokens are requests of their own."""
    most = request_of((0,)).sampling.max_new_tokens
    request = replace(request_of((0, 1, 2), {2: cut(2, [1, 1])}), limits={0: 3, 1: 3, 2: 4})
    made = generation.calls(request, "name", cache_key="key")
    assert [(call.request.indices, call.body["sampling_params"]["max_new_tokens"]) for call in made] == [
        ((0,), 3), ((1,), 3), ((2,), 2)
    ]  # fmt: skip
    (alone,) = generation.calls(replace(request_of((0, 1)), limits={0: 3, 1: 3}), "name", cache_key="key")
    assert alone.body["sampling_params"]["max_new_tokens"] == 3 < most
    with pytest.raises(BadAnswerError, match="3 tokens; asked for at most 2"):
        rollouts(replace(request_of((0,)), limits={0: 2}), [answer([4, 2, 1], [span("5", 0, 3)])])


def test_a_partial_rollout_that_got_nothing_further_stays_what_it_was():
    (rollout,) = rollouts(request_of((0,), {0: cut(0, [1, 1])}), [answer([], [], "abort")])
    assert rollout.tokens.tolist() == [7, 8, 9, 1, 1] and rollout.finish_reason == "abort"
    assert rollout.weight_version == 3


@pytest.mark.parametrize("reason", [None, {"type": "abort"}])
def test_an_abort_before_the_first_token_is_an_empty_rollout(reason):
    (rollout,) = rollouts(request_of((0,)), [answer([], finish_reason=reason, output_token_logprobs=None)])
    assert (rollout.finish_reason, rollout.response_length) == ("abort", 0)


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ([answer([1])], "asked for 2 samples, got 1 answers"),
        ([answer([1])] * 3, "got 3 answers"),
        ({"error": "x"}, "got dict"),
        (None, "got NoneType"),
        ([answer([1]), {"output_ids": [1]}], "another form"),
        ([answer([1]), "text"], "another form"),
        ([answer([1]), answer([1], [{"version": "new", "start": 0, "end": 1}])], "another form"),
        ([answer([1]), answer([1], finish_reason={"type": "error"})], "finish reason 'error'"),
        ([answer([1]), answer([1, 2]) | {"output_ids": [1]}], "1 output_ids, but log-probs of 2 tokens"),
        ([answer([1]), answer([1, 2]) | {"output_ids": [1, 3]}], "not the same"),
        ([answer([1]), answer([1], output_token_logprobs=[[None, 1, None]])], "another form"),
    ],
)
def test_an_answer_of_another_form_is_refused(answers, text):
    with pytest.raises(BadAnswerError, match=text):
        rollouts(request_of(), answers)


def test_what_the_decoder_raises_is_not_taken_for_a_bad_answer():
    def decode(ids):
        raise ValueError("no such token")

    with pytest.raises(ValueError, match="no such token"):
        rollouts(request_of((0,)), [answer([1])], decode=decode)


def told(number):
    """What a server says of so many experts, numbered from 0."""
    return base64.b64encode(np.arange(number, dtype=np.int32).tobytes()).decode()


def test_experts_are_asked_for_and_those_of_every_token_but_the_last_are_told(tmp_path):
    request = request_of((0,), routed_experts=(2, 3))
    (call,) = generation.calls(request, "name", cache_key="weights-3")
    assert call.body["return_routed_experts"] is True
    folder = ExpertsFolder(tmp_path)
    (rollout,) = rollouts(request, [answer([10, 11], routed_experts=told(4 * 6))], experts=folder)
    experts_TLK = rollout.routed_experts.read()
    assert experts_TLK.shape == (5, 2, 3) and len(rollout.routed_experts) == 5
    assert experts_TLK[:4].ravel().tolist() == list(range(24))
    assert (experts_TLK[4] == -1).all()
    (one,) = folder.path.rglob("*.npy")
    assert np.load(one).dtype == np.uint8


@pytest.mark.parametrize(
    ("given", "words"),
    [({}, "--enable-return-routed-experts"), ({"routed_experts": told(23)}, "23 experts of 5 tokens; allowed: 4")],
)
def test_experts_that_are_not_told_are_missed(given, words, tmp_path):
    request, folder = request_of((0,), routed_experts=(2, 3)), ExpertsFolder(tmp_path)
    with pytest.raises(BadAnswerError, match=words):
        rollouts(request, [answer([10, 11], **given)], experts=folder)
    (aborted,) = rollouts(request, [answer([10, 11], reason="abort", **given)], experts=folder)
    assert aborted.routed_experts is None


def test_spans_must_cover_the_tokens():
    with pytest.raises(BadAnswerError):
        rollouts(request_of((0,)), [answer([1, 2, 3], [span("5", 0, 2)])])


def test_more_tokens_than_asked_for_are_refused():
    with pytest.raises(BadAnswerError):
        rollouts(request_of((0,), max_new_tokens=2), [answer([1, 2, 3], [span("5", 0, 3)])])


@pytest.mark.parametrize("value", [float("nan"), 0.5])
def test_logprobs_must_be_numbers_up_to_zero(value):
    with pytest.raises(BadAnswerError):
        rollouts(request_of((0,)), [answer([1], output_token_logprobs=[[value, 1, None]])])


def test_with_a_seed_each_sample_has_its_own_that_follows_from_the_request_alone():
    def seeds(indices, **sampling):
        (call,) = generation.calls(request_of(indices, **sampling), "name", cache_key="weights-3")
        return [one["sampling_seed"] for one in call.body["sampling_params"]]

    both = seeds((0, 1), seed=3)
    assert len(set(both)) == 2 and all(0 <= seed < 2**31 for seed in both)
    assert [*seeds((0,), seed=3), *seeds((1,), seed=3)] == both  # however the samples are asked for
    assert not set(seeds((0, 1), seed=4)) & set(both)
    assert len(set(seeds(range(1000), seed=3))) == 1000


class CountingClient:
    """Notes the turn of the event loop in which each request begins."""

    def __init__(self):
        self.began, self._turn = [], 0

    def next_turn(self):
        self._turn += 1
        asyncio.get_running_loop().call_soon(self.next_turn)

    async def post(self, path, body, *, timeout_s):
        self.began.append(self._turn)
        return [answer([1]), answer([2])]


def test_groups_that_may_all_go_on_at_once_each_begin_in_a_turn_of_the_loop_of_their_own():
    """Opening a connection takes the loop's time; between two of them everything else has its turn."""

    async def ask_all():
        client, answers = CountingClient(), generation.DirectAnswers(str)
        answers._clients["url"] = client
        calls = tuple(generation.calls(request_of(), "name", cache_key=""))
        client.next_turn()
        question = generation.Question("url", calls, 5, None, 10.0)
        await asyncio.gather(*(answers.ask(question) for _ in range(100)))
        return client.began

    began = asyncio.run(ask_all())
    assert len(began) == len(set(began)) == 100


@pytest.mark.parametrize(("longest", "count"), [(1, 2), (2, 2), (63, 63), (64, 64), (1000, 64)])
def test_the_given_text_of_probes_is_the_same_everywhere_and_no_longer_than_a_prompt_may_be(longest, count):
    text = generation.probe_text(1000, longest=longest)
    assert len(text) == count and text == generation.probe_text(1000, longest=1000)[:count]
    assert all(type(token) is int and 0 <= token < 1000 for token in text)
    assert max(generation.probe_text(3, longest=64)) == 2


def test_a_probe_asks_of_given_tokens_and_for_some_behind_their_beginning():
    given = tuple(range(20))
    request, body = generation.probe_call(given, "name", temperature=0.7)
    assert body["input_ids"] == [list(range(8)), list(given)] and body["logprob_start_len"] == 0
    assert (body["rid"], body["extra_key"], body["stream"], body["return_logprob"]) == ("name", "name", False, True)
    assert (request.group_id, request.attempt, request.indices, request.prompt.tokens) == (-1, 0, (0,), given[:8])
    sampling = body["sampling_params"]
    assert (sampling["temperature"], sampling["top_p"], sampling["max_new_tokens"]) == (0.7, 1.0, 16)
    assert sampling["ignore_eos"] is True


def probe_answers(given, sampled=16, **changes):
    pairs = [[None, given[0], None], *([-0.25 * i, token, None] for i, token in enumerate(given[1:]))]
    meta = {"input_token_logprobs": pairs} | changes
    return [answer(range(sampled), reason="length"), {"meta_info": meta}]


def test_a_probe_is_two_rollouts():
    given = (4, 5, 6, 7)
    request, _ = generation.probe_call(given, "name", temperature=1.0)
    fixed, sampled = generation.probe_rollouts(request, given, probe_answers(given))
    assert fixed.tokens.tolist() == [4, 5, 6, 7] and fixed.tokens.dtype == np.int32 and fixed.prompt_length == 1
    assert fixed.logprobs.tolist() == [0.0, -0.25, -0.5] and fixed.logprobs.dtype == np.float32
    assert fixed.loss_mask.tolist() == [1, 1, 1] and fixed.loss_mask.dtype == np.uint8
    assert sampled.tokens.tolist() == [*given, *range(16)] and sampled.weight_version == 0


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (probe_answers((4, 5, 6), sampled=15), "asked for 16 tokens, got 15"),
        (probe_answers((4, 5, 6))[0], "has no log-probs of the given tokens"),
        (probe_answers((4, 5, 6), input_token_logprobs=[[None, 4, None], [None, 5, None]]), "has no log-probs"),
        (probe_answers((4, 5, 7)), "not the 2 given ones"),
    ],
)
def test_a_probe_that_is_answered_otherwise_is_refused(answers, words):
    request, _ = generation.probe_call((4, 5, 6), "name", temperature=1.0)
    with pytest.raises(BadAnswerError, match=words):
        generation.probe_rollouts(request, (4, 5, 6), answers)


@pytest.mark.parametrize(
    ("numbers", "words"), [([-1, 5], "experts numbered -1 to 5"), ([0, 2**15], "experts numbered 0 to 32768")]
)
def test_experts_whose_numbers_cannot_be_are_refused(tmp_path, numbers, words):
    encoded = base64.b64encode(np.array(numbers, dtype=np.int32).tobytes()).decode()
    request = replace(request_of((0,), routed_experts=(1, 1), max_new_tokens=3), prompt=replace(PROMPT, tokens=(7,)))
    with pytest.raises(BadAnswerError, match=rf"{words}; allowed: from 0"):
        rollouts(request, [answer([1, 2], routed_experts=encoded)], experts=ExpertsFolder(tmp_path))


def test_experts_are_stored_under_the_name_of_their_rollout(tmp_path):
    request = replace(request_of((3,), routed_experts=(1, 1)), prompt=replace(PROMPT, tokens=(7,)))
    edge = base64.b64encode(np.array([0, 2**15 - 1], dtype=np.int32).tobytes()).decode()
    (one,) = rollouts(request, [answer([1, 2], routed_experts=edge)], experts=ExpertsFolder(tmp_path))
    assert one.routed_experts.read().ravel().tolist() == [0, 2**15 - 1, -1]
    (alone,) = rollouts(request, [answer([], routed_experts="")], experts=ExpertsFolder(tmp_path))
    assert alone.routed_experts is not None and len(alone.routed_experts) == 1


@pytest.mark.parametrize(
    ("reason", "error", "words"),
    [
        ({"type": "stop"}, None, ""),
        ({"type": "abort", "status_code": None}, None, ""),
        ({"type": "stop", "status_code": 500}, None, ""),
        ({"type": "abort", "status_code": 399}, None, ""),
        ({"type": "abort", "status_code": 600}, None, ""),
        (
            {"type": "abort", "status_code": 400, "message": "no"},
            generation.RefusedError,
            "url/generate: status 400: no",
        ),
        ({"type": "abort", "status_code": 499}, generation.RefusedError, "status 499: "),
        ({"type": "abort", "status_code": 500}, generation.UnreachableError, "status 500: "),
        ({"type": "abort", "status_code": 599}, generation.UnreachableError, "status 599: "),
    ],
)
def test_a_status_within_a_stream_means_what_it_means_outside(reason, error, words):
    if error is None:
        assert generation._check_status("url", reason) is None
        return
    with pytest.raises(error, match=words):
        generation._check_status("url", reason)


def test_what_a_worker_asked_is_closed_with_it():
    async def scenario():
        answers = generation.DirectAnswers(str)
        client = answers._clients["url"] = generation.SGLangClient("http://127.0.0.1:9")
        client._answers.add(closed := Closing())
        await answers.start()
        await answers.close()
        await answers.close()
        return closed.times, answers._clients, answers.restarts

    assert asyncio.run(scenario()) == (1, {}, 0)


class Closing:
    """Counts how often it was closed."""

    times = 0

    def close(self):
        self.times += 1
