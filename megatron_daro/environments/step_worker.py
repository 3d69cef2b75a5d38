"""The program of an environment's worker: makes the user's object, and answers `reset` and `step`.

SteppedConversations -> (this) -> a step in JSON. Limits and protocol are those of every worker (worker_pool/child.py).
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from functools import partial
from typing import Any

from megatron_daro.environments.step import StepEnvironment
from megatron_daro.environments.stepping import checked
from megatron_daro.errors import ConfigError, RolloutError
from megatron_daro.own_class import import_own_class, make_own
from megatron_daro.types import Prompt
from megatron_daro.worker_pool.child import REFUSED, Answer, main


def answer(kind: str, environment: StepEnvironment, request: dict[str, Any]) -> dict[str, Any]:
    """Reply to one request. What the class raises becomes part of the reply; what it returns is compared with the
    Protocol."""
    method = request["kind"]
    if method == "notice":
        notice = getattr(environment, "notice", "")
        return {"reason": "ok", "notice": notice if isinstance(notice, str) else ""}
    began = time.perf_counter()
    try:
        if method == "reset":
            step = environment.reset(prompt_of(request["prompt"]))
        else:
            step = environment.step(request["state"], request["answer"])
    except MemoryError:
        raise
    except Exception as error:  # The border of the process: it costs one conversation, which is counted.
        return {"reason": "failed", "error": f"{type(error).__name__}: {error}"}
    try:
        plain = asdict(checked(kind, method, step))
        plain["rewards"] = dict(plain["rewards"])
        json.dumps(plain, allow_nan=False)
        return {"reason": "ok", "step": plain, "seconds": time.perf_counter() - began}
    except (TypeError, ValueError) as error:
        text = f"environment.kind: {kind}: {method} returned a state or reward that is no JSON ({error})"
        return {"reason": REFUSED, "error": f"{text}; allowed: what json.dumps takes, finite; fix: correct the class"}
    except RolloutError as error:
        return {"reason": REFUSED, "error": str(error)}


def prompt_of(fields: dict[str, Any]) -> Prompt:
    """Return the prompt, without tokens."""
    messages = fields["messages"]
    return Prompt(
        **{
            **fields,
            "messages": None if messages is None else tuple(messages),
            "alternatives": tuple(fields["alternatives"]),
        }
    )


def load(settings: dict[str, Any]) -> Answer:
    """Make the user's object. Raises ConfigError: its class does not fit, or its constructor raised."""
    kind, options = settings["kind"], settings["options"]
    own = step_environment_class(kind, options)
    environment = make_own("environment.kind", kind, own, options, options="environment.options", error=ConfigError)
    return partial(answer, kind, environment)


def step_environment_class(kind: str, options: dict[str, Any]) -> type[StepEnvironment]:
    """Import the class. Raises ConfigError: it does not fit `StepEnvironment`."""
    return import_own_class(
        "environment.kind",
        kind,
        builtin="single_turn, agent, verifiers:TASKSET, module:function (async def)",
        protocol=StepEnvironment,
        methods={"reset": 1, "step": 2},
        arguments=options,
        options="environment.options",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], load))
