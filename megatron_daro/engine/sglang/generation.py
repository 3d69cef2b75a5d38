"""Generation requests: a group becomes the body of /generate, and SGLang's reply becomes rollouts.

One HTTP request carries all samples of a group, so that they share the prompt's cache. Its answer is streamed: an event
for each sample that has ended, whose room on the server is given to others then, and which is kept if the server dies
before the others have ended. Sampled tokens are taken as ids, never through text. Replies that do not fit the request
are rejected (replies.py).

`DirectAnswers` posts requests and parses replies in its own process: in each of the run's answer workers
(runtime/node_workers.py), or in the engine's process where there are none. It knows nothing of fleets, retries or
other groups; what a failure means is for the engine to decide.
"""

from __future__ import annotations

import asyncio
import base64
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from megatron_daro.data.stops import until_repeated, until_stop
from megatron_daro.engine.sglang.client import SGLangClient, UnreachableError
from megatron_daro.engine.sglang.replies import (
    BadAnswerError,
    FinishReason,
    GivenText,
    Sample,
    StreamEvent,
    read,
    read_sample,
)
from megatron_daro.errors import EngineError, RefusedError
from megatron_daro.routed_experts import ExpertsFolder, StoredExperts
from megatron_daro.types import GroupRequest, Prompt, Rollout, SamplingParams

# Tokens that a server samples for a probe; few enough to cost nothing.
PROBE_TOKENS = 16
# Tokens that a probe gives; each is one more place where a step of the weights shows.
_GIVEN_TOKENS = 64
# Of these, the prompt of those that are sampled.
_PROMPT_TOKENS = 8
# What a server calls its weights before the first update, unless it was started with another --weight-version.
_LOADED = "default"


class CutStreamError(UnreachableError):
    """A stream broke. rollouts: the answers that had ended."""

    rollouts: tuple[Rollout, ...] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request for some samples of a group. name: of the request. cache_key: of its prefixes. ids: what the
    server calls the samples. streams: whether each is sent when it has ended, and not with the last."""

    request: GroupRequest
    name: str
    cache_key: str
    ids: tuple[str, ...]
    streams: bool = False

    @property
    def body(self) -> dict[str, Any]:
        """The body of /generate: made when it is sent, since it lists every token."""
        request = self.request
        prefixes = [_so_far(request, index) for index in request.indices]
        return {
            "rid": self.name,
            "extra_key": self.cache_key,
            "input_ids": [[*request.prompt.tokens, *prefix] for prefix in prefixes],
            "sampling_params": _sampling_of_each(request, self.streams),
            "return_logprob": True,
            "stream": self.streams,
            **({"return_routed_experts": True} if request.sampling.routed_experts else {}),
        }


def calls(request: GroupRequest, name: str, *, cache_key: str, streams: bool = False) -> list[Call]:
    """Return the HTTP requests for a group: one for all samples, or one for each where they resume at different
    lengths.

    Args:
        request: what is asked.
        name: of the request, not used before.
        cache_key: prefixes are found in the server's cache, and left there, only by requests with the same key. With
            one key per weight version no prompt meets a prefix of older weights, however long that stays in the cache.
        streams: whether the server sends each of several answers whole when it has ended.
    """
    lengths = {(_length_so_far(request, index), request.room(index)) for index in request.indices}
    parts = [request.indices] if len(lengths) == 1 else [(index,) for index in request.indices]
    return [_call(replace(request, indices=part), f"{name}.{part[0]}", cache_key, streams) for part in parts]


def _call(request: GroupRequest, name: str, cache_key: str, streams: bool = False) -> Call:
    # The server numbers the samples of a batch itself. It aborts every request whose id begins with the given text:
    # here at most others of the same group, which are aborted together.
    partial = {i: rollout for i, rollout in request.partial.items() if i in request.indices}
    request = replace(request, partial=partial)
    ids = tuple(f"{name}_{i}" for i in range(len(request.indices)))
    return Call(request, name, cache_key, ids, streams and len(ids) > 1)


def rollouts(
    request: GroupRequest,
    answers: object,
    *,
    version: int,
    loaded: int | None,
    decode: Callable[[Sequence[int]], str],
    vocabulary: int | None = None,
    keeps_cache: bool = False,
    experts: ExpertsFolder | None = None,
) -> tuple[Rollout, ...]:
    """Return the rollouts of one answer, in the order of the request's indices; each as far as it came.

    Args:
        request: what was asked. answers: the JSON answer.
        version: weight version for servers that do not tell spans (the oldest that the request can have seen).
        loaded: version of the weights that servers are started with; None where none may answer with these any more.
        decode: token ids -> text.
        vocabulary: number of the model's token ids; None: not known.
        keeps_cache: an update does not make the server read running and waiting prompts anew. All of an answer then
            counts as of `version` or older: what its prompt was read with, the spans of the answer do not say.
        experts: where those that the server chose are written to; needed where the request asks for them.

    Raises:
        BadAnswerError: the answer has another shape, tokens and log-probs disagree, or it is of weights that no server
            may have any more.
    """
    if not isinstance(answers, list) or len(answers) != len(request.indices):
        got = f"{len(answers)} answers" if isinstance(answers, list) else type(answers).__name__
        raise BadAnswerError(f"group {request.group_id}: asked for {len(request.indices)} samples, got {got}")
    versions, parts = _Versions(version, loaded, keeps_cache), []
    for index, answer in zip(request.indices, answers, strict=True):
        try:
            sample = read_sample(answer, room=request.room(index), vocabulary=vocabulary)
            parts.append(_rollout(request, index, sample, versions, experts))
        except BadAnswerError as error:
            raise BadAnswerError(f"group {request.group_id} sample {index}: {error}") from None
    # Not above: what `decode` raises is no fault of the server, and asking again does not mend it.
    return tuple(_whole(request, part, decode) for part in parts)


def _so_far(request: GroupRequest, index: int) -> Sequence[int]:
    earlier = request.partial.get(index)
    return () if earlier is None else earlier.tokens[earlier.prompt_length :].tolist()


def _length_so_far(request: GroupRequest, index: int) -> int:
    earlier = request.partial.get(index)
    return 0 if earlier is None else earlier.response_length


def _sampling_of_each(request: GroupRequest, streams: bool) -> dict[str, Any] | list[dict[str, Any]]:
    """Return the sampling of all samples, or, with a seed, that of each.

    A stream tells the first token of each sample, then all so far every `stream_interval` tokens, of which no answer
    has as many, and its end. Source: `accept` in sglang/srt/managers/scheduler_components/output_streamer.py, 0.5.23.
    """
    room = request.room(request.indices[0])
    common = _sampling(request.sampling, room) | ({"stream_interval": room + 1} if streams else {})
    if request.sampling.seed is None:
        return common
    return [common | {"sampling_seed": _seed_of(request, index)} for index in request.indices]


def _seed_of(request: GroupRequest, index: int) -> int:
    """Return 31 bits that differ between samples of a problem: with one seed they would all be the same answer."""
    words = struct.pack(">4q", request.sampling.seed or 0, request.group_id, request.attempt, index)
    return zlib.crc32(words) & 0x7FFFFFFF


def _sampling(sampling: SamplingParams, room: int) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_new_tokens": room,
        "stop_token_ids": list(sampling.stop_token_ids),
        # It would ignore stop_token_ids too. With some, the model's own end token ends an answer as well, as it does
        # in the configuration; without any, nothing does.
        "ignore_eos": not sampling.stop_token_ids,
        "skip_special_tokens": False,
        **({"stop": list(sampling.stop)} if sampling.stop else {}),
    }


def _rollout(
    request: GroupRequest,
    index: int,
    sample: Sample,
    versions: _Versions,
    experts: ExpertsFolder | None,
) -> Rollout:
    meta = sample.meta_info
    ids = np.array(sample.ids, dtype=np.int32)
    spans = _spans(sample, versions)
    oldest = min((v for v, _ in spans), default=versions.oldest)
    if versions.keeps_cache:
        oldest = min(oldest, versions.oldest)
    earlier = request.partial.get(index)
    so_far = np.asarray(request.prompt.tokens, dtype=np.int32) if earlier is None else earlier.tokens
    length = len(so_far) + len(ids)
    finish_reason = "abort" if meta.finish_reason is None else meta.finish_reason.type
    return Rollout(
        prompt_id=request.prompt.id,
        group_id=request.group_id,
        attempt=request.attempt,
        index=index,
        tokens=np.concatenate([so_far, ids]),
        prompt_length=len(so_far),
        loss_mask=np.ones(len(ids), dtype=np.uint8),
        logprobs=np.array([logprob for logprob, _, _ in meta.output_token_logprobs or ()], dtype=np.float32),
        finish_reason=finish_reason,
        weight_version=oldest,
        version_spans=() if spans in ((), ((oldest, len(ids)),)) else spans,
        routed_experts=_routed_experts(request, index, meta.routed_experts, length, finish_reason, experts),
    )


def _routed_experts(
    request: GroupRequest,
    index: int,
    encoded: str | None,
    tokens: int,
    finish_reason: str,
    folder: ExpertsFolder | None,
) -> StoredExperts | None:
    """Write the experts to their folder; the server tells all but those of the last token, in base64.

    Source: sglang/srt/state_capturer/routed_experts.py, 0.5.23. An aborted request may have none, or those of fewer
    tokens.
    """
    shape = request.sampling.routed_experts
    if shape is None or (encoded is None and finish_reason == "abort"):
        return None
    if encoded is None:
        raise BadAnswerError(
            "it does not say which experts it chose (actor.routing_replay); a server that is started by hand needs "
            "--enable-return-routed-experts"
        )
    try:
        experts = np.frombuffer(base64.b64decode(encoded, validate=True), dtype="<i4")
    except ValueError as error:
        raise BadAnswerError(f"its routed_experts are no int32 numbers in base64: {error}") from None
    if experts.size != (tokens - 1) * math.prod(shape) and finish_reason == "abort":
        return None
    if experts.size != (tokens - 1) * math.prod(shape):
        raise BadAnswerError(
            f"it tells {experts.size} experts of {tokens} tokens; allowed: {tokens - 1} * {shape[0]} layers * "
            f"{shape[1]} experts of a token; its model is another one"
        )
    if experts.size and not 0 <= int(experts.min()) <= int(experts.max()) <= np.iinfo(np.int16).max:
        raise BadAnswerError(f"it tells experts numbered {experts.min()} to {experts.max()}; allowed: from 0")
    assert folder is not None, "whoever asks for experts gives a folder for them"
    return folder.store((request.group_id, request.attempt, index), experts.reshape(-1, *shape), tokens)


def _whole(request: GroupRequest, part: Rollout, decode: Callable[[Sequence[int]], str]) -> Rollout:
    """Return what was generated now, after what the request has of the same rollout, up to its first stop text or to
    where it repeats itself.

    A server looks for a stop text in the last tokens that it generated itself, one more than the text's own encoding
    has: of one that began before an abort, or was spelled in more tokens, it knows nothing and goes on. Source:
    `Req._check_str_based_finish` and `_stop_match_tail_len` in sglang/srt/managers/schedule_batch.py, 0.5.23.
    """
    earlier = request.partial.get(part.index)
    text = decode([*_so_far(request, part.index), *part.tokens[part.prompt_length :].tolist()])
    whole = replace(part, text=text) if earlier is None else earlier.extended(part, text)
    return until_repeated(until_stop(whole, request.sampling.stop, decode), request.sampling.repetition, decode)


@dataclass(frozen=True, slots=True)
class _Versions:
    """oldest: what the request can have seen. loaded: what servers call their weights before any update. keeps_cache:
    whether its prompt may have been read with the oldest, though every token is of newer ones."""

    oldest: int
    loaded: int | None
    keeps_cache: bool = False

    def number(self, text: str) -> int:
        """Return the version that a server names."""
        if text != _LOADED:
            return int(text)
        if self.loaded is None:
            raise BadAnswerError("it answered with the weights that it was started with; it was given others since")
        return self.loaded


def _spans(sample: Sample, versions: _Versions) -> tuple[tuple[int, int], ...]:
    """(weight version, tokens) in order. Servers older than 0.5.22 tell the last version only: not to be trusted."""
    reported_spans, num_tokens = sample.meta_info.weight_versions, len(sample.ids)
    if not reported_spans:
        return ((versions.oldest, num_tokens),) if num_tokens else ()
    spans = [(versions.number(span.version), span.end - span.start) for span in reported_spans]
    return tuple((v, n) for v, n in spans if n > 0)


def _check_status(url: str, reason: FinishReason) -> None:
    """Raise what a status means that the server would answer with, did it not stream.

    Source: `_handle_abort_finish_reason` in sglang/srt/managers/tokenizer_manager.py, 0.5.23.
    """
    status = reason.status_code
    if status is None or reason.type != "abort" or not 400 <= status < 600:
        return
    kind = RefusedError if status < 500 else UnreachableError
    raise kind(f"{url}/generate: status {status}: {reason.message or ''}")


def probe_text(vocabulary: int, *, longest: int) -> tuple[int, ...]:
    """Token ids of the given text of probes: scattered over the vocabulary, the same in every run.

    Args:
        vocabulary: number of token ids. longest: tokens that a prompt may have.
    """
    count = max(2, min(_GIVEN_TOKENS, longest))
    return tuple(int(token) for token in np.random.default_rng(0).integers(0, vocabulary, count))


def probe_call(tokens: Sequence[int], name: str, *, temperature: float) -> tuple[GroupRequest, dict[str, Any]]:
    """Return (what is sampled, the body of /generate) of a probe: log-probs of given tokens, and of some sampled
    after them.

    Args:
        tokens: the given text. name: of the request; also its cache key, so that no prefix is ever found for it.
        temperature: of the sampled tokens.
    """
    prompt = Prompt(id="probe", answer="", source="", tokens=tuple(tokens[:_PROMPT_TOKENS]))
    request = GroupRequest(-1, 0, prompt, (0,), SamplingParams(temperature, 1.0, PROBE_TOKENS))
    body = _call(request, name, name).body
    return request, {**body, "input_ids": [list(prompt.tokens), list(tokens)], "logprob_start_len": 0}


def probe_rollouts(
    request: GroupRequest, given: Sequence[int], answers: object, vocabulary: int | None
) -> tuple[Rollout, Rollout]:
    """Return (the given text as the response to its first token, the tokens sampled after its beginning), with
    log-probs.

    Raises:
        BadAnswerError: the answer has another shape, or lacks tokens.
    """
    both: list[Any] = answers if isinstance(answers, list) else [answers]
    (sampled,) = rollouts(request, both[:1], version=0, loaded=None, decode=lambda ids: "", vocabulary=vocabulary)
    if sampled.response_length != PROBE_TOKENS:
        raise BadAnswerError(f"asked for {PROBE_TOKENS} tokens, got {sampled.response_length}")
    logprobs = given_logprobs(both[-1], given[1:])
    fixed = replace(
        sampled,
        tokens=np.asarray(given, dtype=np.int32),
        prompt_length=1,
        loss_mask=np.ones(len(logprobs), dtype=np.uint8),
        logprobs=logprobs,
    )
    return fixed, sampled


def given_logprobs(answer: object, tokens: Sequence[int]) -> np.ndarray:
    """Read the log-probs of given tokens, float32 [R], from an answer to a request with `logprob_start_len`.

    A server says nothing of the token at `logprob_start_len` itself, and writes 0 for the last id of its vocabulary,
    beside the right log-prob. Source: `[None] + input_token_logprobs[:-1]` and `x if x < self.model_config.vocab_size -
    1 else 0`, lines 38 and 54 of sglang/srt/managers/scheduler_components/logprob_result_processor.py, 0.5.23.

    Args:
        answer: the JSON of one input. tokens: those that follow the one at `logprob_start_len`.

    Raises:
        BadAnswerError: the answer has no such log-probs, or those of other tokens.
    """
    pairs = read(GivenText, answer).meta_info.input_token_logprobs[1:]
    ids = [token for _, token, _ in pairs]
    logprobs = [logprob for logprob, _, _ in pairs if logprob is not None]
    mismatched = {(written, token) for written, token in zip(ids, tokens, strict=False) if written != token}
    if len(ids) != len(logprobs):
        raise BadAnswerError(f"the answer has log-probs of {len(logprobs)} of {len(ids)} given tokens; allowed: of all")
    if len(ids) != len(tokens) or len(mismatched) > 1 or any(written != 0 for written, _ in mismatched):
        raise BadAnswerError(f"the answer has log-probs of {len(ids)} tokens that are not the {len(tokens)} given ones")
    return np.array(logprobs, dtype=np.float32)


class LostWorkerError(EngineError):
    """Who was asking the server is gone. The server is not to blame; another worker may ask again."""


@dataclass(frozen=True, slots=True)
class Question:
    """What the server at `url` is asked for one group.

    calls: the HTTP requests, posted at once. version: weight version for servers that do not tell spans. loaded:
    version of the weights that servers are started with; None where none may answer with these any more. keeps_cache:
    an update does not make the server read its prompts anew. vocabulary: of the model (`rollouts`).
    """

    url: str
    calls: tuple[Call, ...]
    version: int
    loaded: int | None
    timeout_s: float
    keeps_cache: bool = False
    vocabulary: int | None = None


class EndedAnswer(NamedTuple):
    """A sample that has ended. id: what the server calls it. tokens: of the answer, with those from before a resume."""

    id: str
    tokens: int


class Answers(Protocol):
    """Whoever puts questions to servers."""

    @property
    def restarts(self) -> int:
        """Workers that were started again, since the start."""
        ...

    async def start(self) -> None:
        """Become ready to ask; again is nothing. Raises DaroError."""
        ...

    def when_ended(self, take: Callable[[Sequence[EndedAnswer]], None]) -> None:
        """Has `take` called with answers that have ended, while others of their group are being generated."""
        ...

    async def ask(self, question: Question) -> tuple[Rollout, ...]:
        """Return the rollouts of all calls, in their order; when it is cancelled, the connections are closed.

        Raises:
            UnreachableError: connection, deadline or 5xx; CutStreamError after some answers. RefusedError: 4xx.
            BadAnswerError: the answer does not fit.
            LostWorkerError: nobody knows what became of the request.
        """
        ...

    async def close(self) -> None:
        """End what is being asked. May be called twice."""
        ...


class DirectAnswers:
    """Asks in this process, on the event loop of the caller."""

    restarts = 0

    def __init__(self, decode: Callable[[Sequence[int]], str], experts: ExpertsFolder | None = None) -> None:
        """Connect to nothing. Args: decode: token ids -> text. experts: where those that servers chose are written."""
        self._decode, self._experts = decode, experts
        self._clients: dict[str, SGLangClient] = {}
        self._turn = asyncio.Lock()
        self._ended: Callable[[Sequence[EndedAnswer]], None] = lambda ended: None

    def when_ended(self, take: Callable[[Sequence[EndedAnswer]], None]) -> None:
        """Has `take` called with each answer that has ended."""
        self._ended = take

    async def start(self) -> None:
        """Nothing is needed."""

    async def ask(self, question: Question) -> tuple[Rollout, ...]:
        """Return the rollouts of all calls. Raises as `Answers.ask` says."""
        client = self._clients.setdefault(question.url, SGLangClient(question.url))
        # Groups that wait for the same thing, such as new weights, all go on at once: a thousand connections opened in
        # one go keep the event loop from everything else for seconds. So each has a turn of the loop for itself.
        async with self._turn:
            await asyncio.sleep(0)
        # Awaited here: a gather that is cancelled from outside reports itself as an exception nobody looked at.
        answers = await asyncio.gather(*(self._answers(client, question, call) for call in question.calls))
        pairs = zip(question.calls, answers, strict=True)
        return tuple(rollout for call, one in pairs for rollout in self._rollouts(question, call.request, one))

    def _rollouts(self, question: Question, request: GroupRequest, answers: object) -> tuple[Rollout, ...]:
        return rollouts(
            request,
            answers,
            version=question.version,
            loaded=question.loaded,
            decode=self._decode,
            vocabulary=question.vocabulary,
            keeps_cache=question.keeps_cache,
            experts=self._experts,
        )

    async def _answers(self, client: SGLangClient, question: Question, call: Call) -> object:
        """Return the answers of one request, in the order of its samples. Raises as `Answers.ask` says."""
        if not call.streams:
            return await client.post("/generate", call.body, timeout_s=question.timeout_s)
        ended: dict[int, Sample] = {}
        try:
            return await self._streamed(client, call, question.timeout_s, ended)
        except UnreachableError as error:
            if not ended:
                raise
            cut = CutStreamError(str(error))
            request = replace(call.request, indices=tuple(call.request.indices[i] for i in sorted(ended)))
            cut.rollouts = self._rollouts(question, request, [ended[i] for i in sorted(ended)])
            raise cut from error

    async def _streamed(self, client: SGLangClient, call: Call, timeout_s: float, ended: dict[int, Sample]) -> object:
        """Return the answers of one request; ended: takes each, by its place among the samples, when it has ended."""
        async with aclosing(client.stream("/generate", call.body, timeout_s=timeout_s)) as events:
            async for event in events:
                if isinstance(event, list):  # it does not stream
                    return event
                about = read(StreamEvent, event)
                index, reason = about.index, about.meta_info.finish_reason
                if reason is None:
                    continue  # its first token
                if index >= len(call.ids):
                    raise BadAnswerError(f"an event of sample {index}; allowed: 0 to {len(call.ids) - 1}")
                _check_status(client.url, reason)
                ended[index] = read(Sample, event)
                if reason.type != "abort":
                    so_far = _length_so_far(call.request, call.request.indices[index])
                    self._ended([EndedAnswer(call.ids[index], so_far + len(ended[index].ids))])
        return [ended[index] for index in sorted(ended)]

    async def close(self) -> None:
        """Drop all connections."""
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.close()
