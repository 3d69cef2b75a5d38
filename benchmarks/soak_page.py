"""Writes docs/soak.md from benchmarks/results/sglang_soak.json, so that no number in it was typed.

    python benchmarks/soak_page.py

Place in the data flow: after `sglang_soak.py --json`. It refuses results that have problems: a soak that failed has no
page.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "sglang_soak.json", ROOT / "docs" / "soak.md"
_MEANING = {
    "kill_idle": "SIGKILL (main process, scheduler, or all) while no request is at the server",
    "kill_serving": "SIGKILL within 5 ms of a request for rollouts",
    "kill_sync": "SIGKILL at a random call of a weight update, from pause to continue",
    "stop": "SIGSTOP of the scheduler or of all processes; never continued",
    "http_500": "status 500 to 1 to 8 requests for rollouts, or to one call of a weight update",
    "reset": "TCP reset, before the server got the request or in place of its answer; counts as above",
    "slow_down": "every forward pass lasts 5 or 90 s longer",
}
_TEMPLATE = """# Soak: {steps} steps on real SGLang servers under faults

What happened in one long run in which servers were killed, stopped and slowed, and their answers broken. Written by
`benchmarks/soak_page.py` from `benchmarks/results/sglang_soak.json`; what servers and engine do about a fault is on the
page [rollouts](rollouts.md#when-a-server-fails).

## What was done

The tiny task of the tests trained for {steps} steps: a Megatron actor with tensor parallelism 2, two SGLang {sglang}
servers on the CPU ({cpu_count} cores, shared with other work), weights broadcast over gloo after every step,
`max_staleness` {staleness} with {correction}, `pause` {pause}. Between everything that talks to a server and the server
stands a small proxy. A schedule (seed {seed}) draws kind, server, moment and variant of each of {injected} faults; each
begins only when both servers serve, so a server is always left. Deadlines are short: 20 s for a request, 30 s without a
token, 60 s for a call of a weight update.

A fault counts as noticed when the engine did something about it: gave the server up, or made the request or call again.
One that kills or stops must end in a server given up. It counts as recovered when both servers serve again with the
policy's weights.

## Faults

| fault | what | injected | noticed | recovered | until noticed, median (longest) | until recovered, median (longest) |
|---|---|---|---|---|---|---|
{rows}

Servers were given up {fenced} times, for: {fences}. They were started again {restarts} times, and {retries} requests
for rollouts were made again. Recovery is mostly the start of a server: half a minute of imports on an idle machine,
longer here, beside other work.

## Books

Checked after every step from `metrics.jsonl`: admitted = trained + filtered + dropped + outstanding. Checked at the end
from the recorded rollouts: each group id once.

| | |
|---|---|
| steps at which the equation did not hold | {unbalanced} |
| groups admitted | {admitted} |
| trained, filtered, dropped, outstanding at the end | {trained}, {filtered}, {dropped}, {outstanding} |
| groups lost | {lost} |
| groups recorded twice | {twice} |

## Weights

No answer may come from stale or half-replaced weights. The weights of every version were kept, and the log-prob of
each of the {tokens:,} recorded tokens was computed again with transformers, with the weights of the version that the
rollout names ({versions} versions). Largest difference: {difference:.1e}. With the weights of a neighbouring version
it is {median:.2g} (median over versions; least {least:.2g}): an answer of another version shows.

## Time

The run took {minutes:.0f} minutes. A step without a fault took {step:.1f} s (median); faults cost the training
loop {loop:.0f} s more in all, since one server goes on while the other starts. The rest is the soak's own waiting for
both servers, so that the next fault hits a whole fleet.

## To repeat it

    bash tools/sglang_cpu_env.sh
    python benchmarks/sglang_soak.py --json && python benchmarks/soak_page.py

`--steps 30 --each 1 --at-least 1` is a short one. `--seed`, `--staleness` and `--pause` change what is drawn and how
the run works. The script fails if a fault went unnoticed too often, a server did not come back, or anything above does
not hold.
"""


def page(result: Mapping[str, Any]) -> str:
    """The page of a soak that passed."""
    setup, books, weights, time = result["setup"], result["books"], result["weights"], result["time"]
    last = books["last_step"]
    return _TEMPLATE.format(
        **{key: setup[key] for key in ("steps", "sglang", "cpu_count", "staleness", "pause", "seed")},
        correction="TIS" if setup["staleness"] else "no correction",
        injected=sum(row["injected"] for row in result["faults"].values()),
        rows="\n".join(_row(kind, row) for kind, row in result["faults"].items()),
        fenced=sum(result["fences"].values()),
        fences=", ".join(f"{reason} ({count})" for reason, count in sorted(result["fences"].items())),
        restarts=result["restarts"],
        retries=result["retries"],
        unbalanced=0,  # a soak with one has problems
        **last,
        lost=books["lost"],
        twice=books["twice"],
        tokens=weights["tokens"],
        versions=weights["versions"],
        difference=weights["largest_difference"],
        **weights["to_neighbouring_versions"],
        minutes=result["seconds"] / 60,
        step=time["median_step_s"],
        loop=time["lost_s"],
    )


def _row(kind: str, row: Mapping[str, Any]) -> str:
    times = [f"{row[key]['median']:.1f} ({row[key]['longest']:.1f}) s" for key in ("noticed_s", "healed_s")]
    counts = [str(row[key]) for key in ("injected", "noticed", "healed")]
    return "| " + " | ".join([f"`{kind}`", _MEANING[kind], *counts, *times]) + " |"


def main() -> None:
    result = json.loads(RESULTS.read_text())
    if result["problems"]:
        raise SystemExit(f"{RESULTS} is of a soak that failed: {result['problems']}")
    PAGE.write_text(page(result))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
