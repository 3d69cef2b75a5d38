"""A group of samples becomes HTTP requests: the bodies of /generate.

One request carries all samples of a group, so that they share the prompt's cache; where answers go on from different
lengths, each has its own. A server sends each answer when it has ended, where the request streams.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_daro.types import GroupRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request for some samples of a group. name: of the request. cache_key: of its prefixes. ids: what the
    server calls the samples. streams: whether each is sent when it has ended, and not with the last. adapter: its
    weights, by name; empty: those of the server alone. seed: see `_seed_of`; None: the samples have none."""

    request: GroupRequest
    name: str
    cache_key: str
    ids: tuple[str, ...]
    streams: bool = False
    adapter: str = ""
    seed: int | None = None

    @property
    def body(self) -> dict[str, Any]:
        """The body of /generate: made when it is sent, since it lists every token."""
        request = self.request
        prefixes = [tokens_so_far(request, index) for index in request.indices]
        return {
            "rid": self.name,
            "extra_key": self.cache_key,
            "input_ids": [[*request.prompt.tokens, *prefix] for prefix in prefixes],
            "sampling_params": self._sampling(),
            "return_logprob": True,
            "stream": self.streams,
            **({"return_routed_experts": True} if request.sampling.routed_experts else {}),
            **({"lora_path": self.adapter} if self.adapter else {}),
        }

    def _sampling(self) -> dict[str, Any] | list[dict[str, Any]]:
        """Return the sampling of all samples, or, with a seed, that of each.

        A stream tells the first token of each sample, then all so far every `stream_interval` tokens, of which no
        answer has as many, and its end. Source: `accept` in
        sglang/srt/managers/scheduler_components/output_streamer.py, 0.5.23.
        """
        request, room = self.request, self.request.room(self.request.indices[0])
        common = _sampling(request.sampling, room) | ({"stream_interval": room + 1} if self.streams else {})
        if self.seed is None:
            return common
        return [common | {"sampling_seed": _seed_of(self.seed, request, index)} for index in request.indices]


def calls_of(
    request: GroupRequest, name: str, *, seed: int, cache_key: str, streams: bool = False, adapter: str = ""
) -> list[Call]:
    """Return the HTTP requests for a group: one for all samples, or one for each where they resume at different
    lengths.

    Args:
        request: what is asked.
        name: of the request, not used before. seed: of sampling.
        cache_key: prefixes are found in the server's cache, and left there, only by requests with the same key. With
            one key per weight version no prompt meets a prefix of older weights, however long that stays in the cache.
        streams: whether the server sends each of several answers whole when it has ended.
        adapter: name of the weights, where these are one.
    """
    lengths = {(length_so_far(request, index), request.room(index)) for index in request.indices}
    parts = [request.indices] if len(lengths) == 1 else [(index,) for index in request.indices]
    return [
        call_of(
            replace(request, indices=part),
            f"{name}.{part[0]}",
            cache_key,
            streams=streams,
            adapter=adapter,
            seed=seed,
        )
        for part in parts
    ]


def call_of(
    request: GroupRequest,
    name: str,
    cache_key: str,
    *,
    streams: bool = False,
    adapter: str = "",
    seed: int | None = None,
) -> Call:
    """Return one HTTP request for all samples of a group, which begin at equal lengths."""
    # The server numbers the samples of a batch itself. It aborts every request whose id begins with the given text:
    # here at most others of the same group, which are aborted together.
    partial = {i: rollout for i, rollout in request.partial.items() if i in request.indices}
    request = replace(request, partial=partial)
    ids = tuple(f"{name}_{i}" for i in range(len(request.indices)))
    return Call(request, name, cache_key, ids, streams and len(ids) > 1, adapter, seed)


def tokens_so_far(request: GroupRequest, index: int) -> Sequence[int]:
    """What is there of a sample's answer already."""
    earlier = request.partial.get(index)
    return () if earlier is None else earlier.tokens[earlier.prompt_length :].tolist()


def length_so_far(request: GroupRequest, index: int) -> int:
    """How many tokens that are."""
    earlier = request.partial.get(index)
    return 0 if earlier is None else earlier.response_length


def _seed_of(seed: int, request: GroupRequest, index: int) -> int:
    """Return 31 bits that differ between samples of a problem: with one seed they would all be the same answer on
    servers that were started with enable_deterministic_inference; others look at none."""
    words = struct.pack(">4q", seed, request.group_id, request.draw, index)
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
