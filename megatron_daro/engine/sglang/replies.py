"""What a server may say: one schema of each reply, with its types, ranges and sums; and what becomes of an answer.

    JSON -> `read` or `read_sample` -> records that can be trusted -> `rollouts_of`: Rollout

Everything that a server says is read by a schema of this file (what must fit a request is compared where that was
made), and its text is made printable on the way in: what it puts into a message may not act on a terminal. Unknown keys
are ignored, since each SGLang has more. Tokens of rollouts are taken as ids, never through text, with log-probs and
weight versions.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from megatron_daro.data.stops import until_end
from megatron_daro.engine.sglang.request import tokens_so_far
from megatron_daro.errors import EngineError
from megatron_daro.observe.logs import safe_text
from megatron_daro.routed_experts import ExpertsFolder, StoredExperts
from megatron_daro.types import GroupRequest, Rollout, joined_spans

_LONGEST_TEXT = 300
_LARGEST_ID = int(np.iinfo(np.int32).max)
_LEAST_LOGPROB = float(np.finfo(np.float32).min)
# Rounding of a token that is all but certain.
_ABOVE_ZERO = 1e-3


class BadAnswerError(EngineError):
    """A server's answer is not one to what was asked."""


def printable(text: object) -> str:
    """Return what a server says on one line, cut, with nothing in it that a terminal would obey."""
    return safe_text(" ".join(str(text).split()), _LONGEST_TEXT, one_line=True)


Text = Annotated[str, AfterValidator(printable)]
Count = Annotated[int, Field(strict=True, ge=0)]
TokenId = Annotated[int, Field(strict=True, ge=0, le=_LARGEST_ID)]
# Finite as float32 too.
Logprob = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=_LEAST_LOGPROB, le=_ABOVE_ZERO)]


class _Reply(BaseModel):
    model_config = ConfigDict(frozen=True)


class FinishReason(_Reply):
    """Why a sample ended. status_code: that an aborted request would be answered with, did it not stream."""

    type: Literal["stop", "length", "abort"]
    status_code: int | None = None
    message: Text | None = None


class VersionSpan(_Reply):
    """Tokens [start, end) of a sample, by weights of this version."""

    version: Annotated[str, Field(pattern=r"^(default|[0-9]{1,18})$")]
    start: Count
    end: Count


class MetaInfo(_Reply):
    """What a server says of a sample. output_token_logprobs: (log-prob, id, text) of each token."""

    finish_reason: FinishReason | None = None
    output_token_logprobs: Annotated[list[tuple[Logprob, TokenId, Any]], Field(fail_fast=True)] | None = None
    weight_versions: list[VersionSpan] | None = None
    routed_experts: str | None = None


class Sample(_Reply):
    """The answer of one sample: sampled tokens with one log-prob each, and the versions that sampled them."""

    meta_info: MetaInfo
    output_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = None

    @cached_property
    def ids(self) -> list[int]:
        """Sampled ids."""
        return [token for _, token, _ in self.meta_info.output_token_logprobs or ()]

    @model_validator(mode="after")
    def _sums(self) -> Sample:
        ids, begin = self.ids, 0
        if self.output_ids is not None and self.output_ids != ids:
            raise ValueError(
                f"{len(self.output_ids)} output_ids, but log-probs of {len(ids)} tokens that are not the same; "
                "allowed: one log-prob per sampled token"
            )
        # `compute_weight_version_spans` in sglang/srt/utils/weight_versions.py, 0.5.23: each begins where the last one
        # ends.
        spans = self.meta_info.weight_versions or ()
        for span in spans:
            if span.start != begin or span.end < begin:
                raise ValueError(f"its weight versions {_shown(spans)} do not follow each other")
            begin = span.end
        if spans and begin != len(ids):
            raise ValueError(
                f"its weight versions {_shown(spans)} are of another number of tokens than the {len(ids)} it gave"
            )
        return self


class GivenMeta(_Reply):
    """What a server says of an input. input_token_logprobs: (log-prob, id, text) of each token from
    `logprob_start_len` on; of the first it knows nothing."""

    input_token_logprobs: Annotated[list[tuple[Logprob | None, TokenId, Any]], Field(fail_fast=True)]


class GivenText(_Reply):
    """The answer of one input whose own log-probs were asked for."""

    meta_info: GivenMeta


class EventMeta(_Reply):
    """Why the sample of an event ended; None: it goes on."""

    finish_reason: FinishReason | None


class StreamEvent(_Reply):
    """What an event of a stream is about; that of a sample which has ended is a `Sample` too. index: of the sample in
    the request."""

    index: Count
    meta_info: EventMeta


class InternalState(_Reply):
    """Of one scheduler."""

    max_total_num_tokens: Count | None = None


class ServerInfo(_Reply):
    """The answer of /server_info."""

    version: Text
    device: Text | None = None
    dtype: Text | None = None
    max_total_num_tokens: Count | None = None
    max_req_input_len: Count | None = None
    context_length: Count | None = None
    tp_size: Annotated[int, Field(strict=True, ge=1)] | None = None
    skip_tokenizer_init: bool | None = None
    quantization: Text | None = None
    incremental_streaming_output: bool | None = None
    enable_lora: bool | None = None
    max_lora_rank: Count | None = None
    lora_target_modules: list[Text] | None = None
    internal_states: list[InternalState] | None = None


class OpenAPI(_Reply):
    """The answer of /openapi.json: the calls that a server has."""

    paths: dict[str, Any] = Field(default_factory=dict)


class Tokens(_Reply):
    """The answer of /tokenize."""

    tokens: list[TokenId]


class RankChecksums(_Reply):
    """Of the tensors of one rank, by their names."""

    checksums: dict[Text, str]


class Checksums(_Reply):
    """The answer of /weights_checker."""

    ranks: Annotated[list[RankChecksums], Field(min_length=1)]


_Kind = TypeVar("_Kind", bound=_Reply)


def read(kind: type[_Kind], content: object) -> _Kind:
    """Return a reply as a record.

    Args:
        kind: its schema. content: the JSON.

    Raises:
        BadAnswerError: with the first field that is wrong, what it was, and what it must be.
    """
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(map(str, first["loc"]))
    if first["type"] == "value_error":
        raise BadAnswerError(printable(first["msg"].removeprefix("Value error, ")))
    got = "nothing" if first["type"] == "missing" else printable(_cut(first["input"]))
    raise BadAnswerError(f"the answer has another form: {field or 'all of it'}: got {got}; {first['msg']}")


def read_sample(content: object, *, room: int, vocabulary: int | None) -> Sample:
    """Return the answer of one sample.

    Args:
        content: the JSON. room: tokens that were asked for at most. vocabulary: number of token ids; None: not known.

    Raises:
        BadAnswerError: it is none to what was asked.
    """
    sample = read(Sample, content)
    ids = sample.ids
    if len(ids) > room:
        raise BadAnswerError(f"{len(ids)} tokens; asked for at most {room}")
    largest = max(ids, default=0)
    if vocabulary is not None and largest >= vocabulary:
        raise BadAnswerError(f"token id {largest}; allowed: 0 to {vocabulary - 1}, the vocabulary of model.path")
    return sample


def read_checksums(content: object) -> list[dict[str, str]]:
    """Return the answer of /weights_checker: of each rank, name -> checksum. Raises BadAnswerError."""
    return [rank.checksums for rank in read(Checksums, content).ranks]


def read_routed_experts(encoded: str) -> np.ndarray:
    """Return the experts that a server chose, int32, flat, from its base64. Raises BadAnswerError."""
    try:
        return np.frombuffer(base64.b64decode(encoded, validate=True), dtype="<i4")
    except ValueError as error:
        raise BadAnswerError(f"its routed_experts are no int32 numbers in base64: {error}") from None


def read_given_logprobs(content: object, tokens: Sequence[int]) -> np.ndarray:
    """Read the log-probs of given tokens, float32 [R], from the answer to a request with `logprob_start_len`.

    A server says nothing of the token at `logprob_start_len` itself, and writes 0 for the last id of its vocabulary,
    beside the right log-prob. Source: `[None] + input_token_logprobs[:-1]` and `x if x < self.model_config.vocab_size -
    1 else 0`, lines 38 and 54 of sglang/srt/managers/scheduler_components/logprob_result_processor.py, 0.5.23.

    Args:
        content: the JSON of one input. tokens: those that follow the one at `logprob_start_len`.

    Raises:
        BadAnswerError: the answer has no such log-probs, or those of other tokens.
    """
    pairs = read(GivenText, content).meta_info.input_token_logprobs[1:]
    ids = [token for _, token, _ in pairs]
    logprobs = [logprob for logprob, _, _ in pairs if logprob is not None]
    mismatched = {(written, token) for written, token in zip(ids, tokens, strict=False) if written != token}
    if len(ids) != len(logprobs):
        raise BadAnswerError(f"the answer has log-probs of {len(logprobs)} of {len(ids)} given tokens; allowed: of all")
    if len(ids) != len(tokens) or len(mismatched) > 1 or any(written != 0 for written, _ in mismatched):
        raise BadAnswerError(f"the answer has log-probs of {len(ids)} tokens that are not the {len(tokens)} given ones")
    return np.array(logprobs, dtype=np.float32)


def error_message(body: object, content: bytes) -> str:
    """What a server says of a call that it did not accept, on one line, cut.

    Args:
        body: its JSON; None where it is none. content: its bytes.
    """
    if not isinstance(body, dict):
        return printable(content.decode(errors="replace"))
    error = body.get("error", body)
    return printable(error.get("message", error) if isinstance(error, dict) else error)


def error_status(event: object) -> int | None:
    """The status that an event of a stream stands for, where it says what went wrong; None of any other event."""
    if not isinstance(event, dict) or not isinstance(event.get("error"), dict):
        return None
    code = event["error"].get("code")
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def printable_values(content: object) -> Mapping[str, str]:
    """Return the texts of a JSON object, printable and uncut: paths are among them; nothing of anything else."""
    texts = content if isinstance(content, dict) else {}
    return {key: safe_text(value, one_line=True) for key, value in texts.items() if isinstance(value, str)}


def _shown(spans: Sequence[VersionSpan]) -> str:
    return ", ".join(f"{span.version}: {span.start} to {span.end}" for span in spans[:8])


def _cut(value: object) -> str:
    """Return the beginning of a value, which may be megabytes."""
    if isinstance(value, str | bytes):
        return repr(value[:80])
    if isinstance(value, list | dict | tuple):
        return f"{type(value).__name__} of {len(value)}"
    return repr(value)[:80]


# What a server calls its weights before the first update, unless it was started with another --weight-version.
_LOADED = "default"


def rollouts_of(
    request: GroupRequest,
    answers: object,
    *,
    version: int,
    loaded: int | None,
    decode: Callable[[Sequence[int]], str],
    vocabulary: int | None = None,
    experts: ExpertsFolder | None = None,
) -> tuple[Rollout, ...]:
    """Return the rollouts of one answer, in the order of the request's indices; each as far as it came.

    Args:
        request: what was asked. answers: the JSON answer.
        version: weight version for servers that do not tell spans (the oldest that the request can have seen).
        loaded: version of tokens of the weights that the server loaded by itself, see `Question`.
        decode: token ids -> text.
        vocabulary: number of the model's token ids; None: not known.
        experts: where those that the server chose are written to; needed where the request asks for them.

    Raises:
        BadAnswerError: the answer has another shape, tokens and log-probs disagree, or it is of weights that no server
            may have any more.
    """
    if not isinstance(answers, list) or len(answers) != len(request.indices):
        got = f"{len(answers)} answers" if isinstance(answers, list) else type(answers).__name__
        raise BadAnswerError(f"group {request.group_id}: asked for {len(request.indices)} samples, got {got}")
    versions, parts = _Versions(version, loaded), []
    for index, answer in zip(request.indices, answers, strict=True):
        try:
            sample = read_sample(answer, room=request.room(index), vocabulary=vocabulary)
            parts.append(_rollout(request, index, sample, versions, experts))
        except BadAnswerError as error:
            raise BadAnswerError(f"group {request.group_id} sample {index}: {error}") from None
    # Not above: what `decode` raises is no fault of the server, and asking again does not mend it.
    return tuple(_whole(request, part, decode) for part in parts)


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
        version_spans=spans,
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
    experts = read_routed_experts(encoded)
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
    """Return what was generated now, after what the request has of the same rollout, up to where it ends.

    A server looks for a stop text in the last tokens that it generated itself, one more than the text's own encoding
    has: of one that began before an abort, or was spelled in more tokens, it knows nothing and goes on. Source:
    `Req._check_str_based_finish` and `_stop_match_tail_len` in sglang/srt/managers/schedule_batch.py, 0.5.23.
    """
    earlier = request.partial.get(part.index)
    text = decode([*tokens_so_far(request, part.index), *part.tokens[part.prompt_length :].tolist()])
    whole = replace(part, text=text) if earlier is None else earlier.extended(part, text)
    return until_end(whole, request, decode)


@dataclass(frozen=True, slots=True)
class _Versions:
    """oldest: what the request can have seen. loaded: the version of what servers name "default"."""

    oldest: int
    loaded: int | None

    def number(self, text: str) -> int:
        """Return the version that a server names."""
        if text != _LOADED:
            return int(text)
        if self.loaded is None:
            raise BadAnswerError("it answered with the weights that it was started with; it was given others since")
        return self.loaded


def _spans(sample: Sample, versions: _Versions) -> tuple[tuple[int, int], ...]:
    """(weight version, tokens) in order; none where a server does not tell them: those older than 0.5.22 tell the last
    version only, which is not to be trusted."""
    reported_spans = sample.meta_info.weight_versions or ()
    return joined_spans([(versions.number(span.version), span.end - span.start) for span in reported_spans])
