"""Whether a server is what the run needs: what it says of itself -> what is wrong with it.

`report_of` asks a server; `problems` judges the report, gives all reasons at once, and asks nothing. Each server is
vetted after its first token and before its first weights (starting.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_daro.config.sections import SGLangSection
from megatron_daro.engine.sglang import fp8_blocks
from megatron_daro.engine.sglang.adapters import unfit_for
from megatron_daro.engine.sglang.client import ServerFacts, SGLangClient, UnreachableError
from megatron_daro.engine.sglang.interpreter import LAST_TESTED, OLDEST_SGLANG, dotted, version_number
from megatron_daro.engine.sglang.replies import Tokens, read
from megatron_daro.errors import EngineError, RefusedError

NEEDED_CALLS = (
    "/generate",
    "/abort_request",
    "/pause_generation",
    "/continue_generation",
    "/flush_cache",
    "/update_weight_version",
)
MEMORY_CALLS = ("/release_memory_occupation", "/resume_memory_occupation")
_CALL_S = 10.0
_TOKENIZER_TEXT = "If 3x + 4 = 10, then x = 2."
# The oldest version known to refuse a bias beyond its vocabulary, instead of crashing.
_VOCABULARY_VERSION = (0, 5, 20)


class UnusableServerError(EngineError):
    """A server is not what the run needs, and a restart would not change that."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What every server must be.

    model_path: of the policy. model_type, vocabulary: of its config.json (None: not compared). longest_prompt, longest:
    tokens of a prompt, and of a prompt with its answer. encode: text -> ids of the trainer's tokenizer. shares_gpus: it
    takes turns with the trainer, so it must be able to release its memory. reads_text: answers end at texts, which a
    server without a tokenizer refuses. adapter: PEFT's configuration of the adapters that it gets; empty: it gets whole
    weights.
    """

    model_path: Path
    model_type: str
    longest_prompt: int
    longest: int
    encode: Callable[[str], list[int]] | None = None
    vocabulary: int | None = None
    shares_gpus: bool = False
    reads_text: bool = False
    adapter: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServerReport:
    """What a server says of itself.

    model_type: empty if it does not say. encoded: ids of `_TOKENIZER_TEXT` by its tokenizer; None if it has none, or
    does not say. other_vocabulary: how many tokens its model has, if not as many as expected; empty if as many, or if
    that is not known.
    """

    facts: ServerFacts
    model_type: str = ""
    encoded: tuple[int, ...] | None = None
    other_vocabulary: str = ""


async def report_of(client: SGLangClient, facts: ServerFacts, expected: Expected) -> ServerReport:
    """Ask a server for the rest of its report. Raises EngineError: it does not describe its model."""
    model = await client.model_info(timeout_s=_CALL_S)
    encoded, other_vocabulary = None, ""
    if facts.has_tokenizer and expected.encode and "/tokenize" in facts.calls:
        encoded = await _encoded(client)
    if expected.vocabulary and version_number(facts.version) >= _VOCABULARY_VERSION:
        other_vocabulary = await _other_vocabulary(client, expected.vocabulary)
    return ServerReport(facts, model.get("model_type", ""), encoded, other_vocabulary)


async def _encoded(client: SGLangClient) -> tuple[int, ...] | None:
    try:
        reply = await client.post("/tokenize", {"prompt": _TOKENIZER_TEXT}, timeout_s=_CALL_S)
        return tuple(read(Tokens, reply).tokens)
    except EngineError:
        return None


async def _other_vocabulary(client: SGLangClient, vocabulary: int) -> str:
    """Ask for a logit bias on the first token id beyond the vocabulary, which a server must refuse, naming the last id
    that it allows. Returns the size of its vocabulary if that differs; empty if not, or if it is not known."""
    bias = {"max_new_tokens": 1, "logit_bias": {str(vocabulary): 0.0}}
    try:
        await client.post("/generate", {"input_ids": [0], "sampling_params": bias}, timeout_s=_CALL_S)
    except UnreachableError:
        return ""
    except RefusedError as error:
        largest = re.search(r"logit_bias .*\[0, (\d+)\]", str(error))
        return "" if largest is None or int(largest[1]) == vocabulary - 1 else str(int(largest[1]) + 1)
    return f"more than {vocabulary}"


def problems(report: ServerReport, expected: Expected, options: SGLangSection) -> list[str]:
    """Return every reason why a server cannot be used; empty if it can."""
    facts = report.facts
    wrong = _missing_calls(facts, expected, options) + _too_short(facts, expected)
    if options.fp8_blocks:
        wrong += _no_fp8_blocks(facts)
    wrong += _other_parameters(facts, options)
    if expected.adapter:
        wrong += unfit_for(expected.adapter, facts)
    if report.model_type and report.model_type != expected.model_type:
        wrong.append(
            f"it serves a model of type {report.model_type!r}; allowed: {expected.model_type!r}, as model.path"
        )
    if expected.reads_text and not facts.has_tokenizer:
        wrong.append(
            "it was started with --skip-tokenizer-init, and answers end at texts (rollout.stop or a template's); "
            "start it without"
        )
    if report.encoded is not None and expected.encode is not None:
        wrong += _other_tokenizer(list(report.encoded), expected.encode(_TOKENIZER_TEXT))
    if report.other_vocabulary:
        wrong.append(
            f"its model has a vocabulary of {report.other_vocabulary} tokens, that of model.path "
            f"{expected.vocabulary}; serve the same model"
        )
    return wrong


def untested(facts: ServerFacts) -> str:
    """Return what the user is told of a version newer than those tested with this package; empty for any other."""
    if version_number(facts.version) <= LAST_TESTED:
        return ""
    return f"SGLang {facts.version}, newer than {dotted(LAST_TESTED)}, the newest that was tested"


def _missing_calls(facts: ServerFacts, expected: Expected, options: SGLangSection) -> list[str]:
    version, first, wrong = version_number(facts.version), dotted(OLDEST_SGLANG), []
    if version and version < OLDEST_SGLANG:
        wrong.append(f"it is SGLang {facts.version}; allowed: {first} or newer")
    of_memory = MEMORY_CALLS if expected.shares_gpus else ()
    for calls, fix in (
        (NEEDED_CALLS, ""),
        (options.transport.calls, ", or another engine.sglang.sync"),
        (of_memory, ", or engine.colocate=false"),
    ):
        missing = [call for call in calls if call not in facts.calls]
        if missing:
            wrong.append(
                f"SGLang {facts.version} lacks {', '.join(missing)}; allowed: {first} or newer, over HTTP{fix}"
            )
    return wrong


def _too_short(facts: ServerFacts, expected: Expected) -> list[str]:
    wrong = []
    if 0 < facts.max_input_tokens < expected.longest_prompt:
        wrong.append(
            f"its longest prompt is {facts.max_input_tokens} tokens, data.max_prompt_tokens is "
            f"{expected.longest_prompt}; raise its context_length or max_total_tokens, or lower data.max_prompt_tokens"
        )
    if 0 < facts.context_tokens < expected.longest - 8:
        wrong.append(
            f"its context is about {facts.context_tokens} tokens, prompt and answer may be {expected.longest}; raise "
            "its context_length or max_total_tokens, or lower rollout.max_response_tokens"
        )
    return wrong


def _no_fp8_blocks(facts: ServerFacts) -> list[str]:
    if version_number(facts.version) < fp8_blocks.FIRST_SGLANG or not facts.has_checksums:
        got = f"SGLang {facts.version} cannot tell which of its matrices are fp8 blocks"
        oldest = dotted(fp8_blocks.FIRST_SGLANG)
        return [f"{got}; allowed with engine.sglang.fp8_blocks: {oldest} or newer, with /weights_checker"]
    if facts.quantization != "fp8":
        arguments = " ".join(f"--{name.replace('_', '-')} '{v}'" for name, v in fp8_blocks.fp8_arguments().items())
        return [f"it does not wait for fp8 blocks; allowed: a server started with {arguments}"]
    return []


def _other_parameters(facts: ServerFacts, options: SGLangSection) -> list[str]:
    """Check the version for transports whose ranks write into a server's parameters, and so must know their layout."""
    only = options.transport.only_sglang
    if not only or version_number(facts.version) == only:
        return []
    return [
        f"where SGLang {facts.version} keeps its weights is not known; allowed with engine.sglang.sync {options.sync}: "
        f"{dotted(only)}; install it, or set engine.sglang.sync=distributed"
    ]


def _other_tokenizer(ids: list[int], expected_ids: list[int]) -> list[str]:
    if ids == expected_ids or ids[1:] == expected_ids:
        return []
    return [
        f"its tokenizer writes {_TOKENIZER_TEXT!r} as {ids[:8]}..., that of model.path as {expected_ids[:8]}...; serve "
        "the same model, or start the server with --skip-tokenizer-init"
    ]
