"""Turns a group of samples into HTTP requests: the bodies of /generate.

One request carries all samples of a group, so that they share the prompt's cache; if answers continue from different
lengths, each has a request of its own. If a request streams, the server sends each answer when it has ended.
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
    """One HTTP request for some samples of a group. name: of the request. cache_key: see `calls_of`. ids: the server's
    names of the samples. streams: whether each sample is sent as it ends, instead of all at the end. adapter: name of
    the adapter to use; empty: none. seed: see `_seed_of`; None: the samples have none."""

    request: GroupRequest
    name: str
    cache_key: str
    ids: tuple[str, ...]
    streams: bool = False
    adapter: str = ""
    seed: int | None = None

    @property
    def body(self) -> dict[str, Any]:
        """The body of /generate, made only when it is sent, since it lists every token."""
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
        """Return the sampling parameters for all samples, or, with a seed, those of each.

        A stream sends an event at the first token of each sample, every `stream_interval` tokens (here more than any
        answer has), and at its end. Source: `accept` in sglang/srt/managers/scheduler_components/output_streamer.py,
        0.5.23.
        """
        request, room = self.request, self.request.room(self.request.indices[0])
        common = _sampling(request.sampling, room) | ({"stream_interval": room + 1} if self.streams else {})
        if self.seed is None:
            return common
        return [common | {"sampling_seed": _seed_of(self.seed, request, index)} for index in request.indices]


def calls_of(
    request: GroupRequest, name: str, *, seed: int, cache_key: str, streams: bool = False, adapter: str = ""
) -> list[Call]:
    """Return the HTTP requests for a group: one for all samples, or one for each if they continue from different
    lengths.

    Args:
        request: what is asked.
        name: of the request, not used before. seed: of sampling.
        cache_key: requests share cached prefixes only with requests of the same key. With one key per weight version no
            request uses a prefix computed by older weights, however long that stays in the cache.
        streams: whether the server can stream so that the last event of an answer has all of it.
        adapter: name of the adapter to use; empty: none.
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
    """Return one HTTP request for all samples of a request, which must continue from equal lengths."""
    # The server numbers the samples of a batch itself. An abort ends every request whose id begins with the given text:
    # with these ids, at most others of the same group, which are aborted together anyway.
    partial = {i: rollout for i, rollout in request.partial.items() if i in request.indices}
    request = replace(request, partial=partial)
    ids = tuple(f"{name}_{i}" for i in range(len(request.indices)))
    return Call(request, name, cache_key, ids, streams and len(ids) > 1, adapter, seed)


def tokens_so_far(request: GroupRequest, index: int) -> Sequence[int]:
    """Return the tokens of a sample's answer that exist already."""
    earlier = request.partial.get(index)
    return () if earlier is None else earlier.tokens[earlier.prompt_length :].tolist()


def length_so_far(request: GroupRequest, index: int) -> int:
    """Return how many tokens of a sample's answer exist already."""
    earlier = request.partial.get(index)
    return 0 if earlier is None else earlier.response_length


def _seed_of(seed: int, request: GroupRequest, index: int) -> int:
    """Return 31 bits that differ between the samples of a prompt. Servers started with enable_deterministic_inference
    would give all of them the same answer with one seed; other servers ignore the seed."""
    words = struct.pack(">4q", seed, request.group_id, request.draw, index)
    return zlib.crc32(words) & 0x7FFFFFFF


def _sampling(sampling: SamplingParams, room: int) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_new_tokens": room,
        "stop_token_ids": list(sampling.stop_token_ids),
        # ignore_eos makes a server ignore stop_token_ids too, so it is set only if there are none; then no token ends
        # an answer. Otherwise the model's own end token also does, as in the configuration.
        "ignore_eos": not sampling.stop_token_ids,
        "skip_special_tokens": False,
        **({"stop": list(sampling.stop)} if sampling.stop else {}),
    }
