"""A server's replies become rollouts: tokens taken as ids, never through text, with log-probs and weight versions.

Replies have passed their schemas (replies.py) before anything is taken from them; those that do not fit the request are
rejected here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_daro.data.stops import until_repeated, until_stop
from megatron_daro.engine.sglang.replies import BadAnswerError, Sample, read_routed_experts, read_sample
from megatron_daro.engine.sglang.request import tokens_so_far
from megatron_daro.routed_experts import ExpertsFolder, StoredExperts
from megatron_daro.types import GroupRequest, Rollout

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
    """Return what was generated now, after what the request has of the same rollout, up to its first stop text or to
    where it repeats itself.

    A server looks for a stop text in the last tokens that it generated itself, one more than the text's own encoding
    has: of one that began before an abort, or was spelled in more tokens, it knows nothing and goes on. Source:
    `Req._check_str_based_finish` and `_stop_match_tail_len` in sglang/srt/managers/schedule_batch.py, 0.5.23.
    """
    earlier = request.partial.get(part.index)
    text = decode([*tokens_so_far(request, part.index), *part.tokens[part.prompt_length :].tolist()])
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
