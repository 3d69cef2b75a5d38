"""Write the soaks' tables beside benchmarks/results/sglang_soak*.json from them, so that no number was typed.

    python benchmarks/soak_page.py

Place in the data flow: after `sglang_soak.py --json`, with any --sync. It refuses results that have problems: a soak
that failed has no page.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("sglang_soak*.json"))
_HOW = {
    "distributed": "broadcast over gloo",
    "shards": "sent from shards to shards",
    "differences": "sent from shards to shards as differences (4 % of them change in a step)",
}
_MEANING = {
    "kill_idle": "SIGKILL (main process, scheduler, or all) while no request is at the server",
    "kill_serving": "SIGKILL within 5 ms of a request for rollouts",
    "kill_sync": "SIGKILL at a random call of a weight update, from pause to continue",
    "stop": "SIGSTOP of the scheduler or of all processes; never continued",
    "http_500": "status 500 to 1 to 8 requests for rollouts, or to one call of a weight update",
    "reset": "TCP reset, before the server got the request or in place of its answer; counts as above",
    "slow_down": "every forward pass lasts 5 or 90 s longer",
}
MARKS = ("<!-- soak: python benchmarks/soak_page.py -->", "<!-- end of soak -->")
_TEMPLATE = """{steps} steps of the tests' tiny task: a Megatron actor with tensor parallelism 2, two SGLang
{sglang} servers on the CPU ({cpu_count} cores, shared with other work), weights {how} after every step,
`max_staleness` {staleness} with {correction}, `pause` {pause}; seed {seed}, {injected} faults.

| fault | what | injected | noticed | recovered | until noticed, median (longest) | until recovered, median (longest) |
|---|---|---|---|---|---|---|
{rows}

| what | result |
|---|---|
{ranks}{sent}| servers given up, started again; requests made again | {fenced}, {restarts}; {retries} |
| why they were given up | {fences} |
| steps at which admitted = trained + filtered + dropped + outstanding did not hold | {unbalanced} |
| groups admitted | {admitted} |
| trained, filtered, dropped, outstanding at the end | {trained}, {filtered}, {dropped}, {outstanding} |
| groups lost, recorded twice | {lost}, {twice} |
| log-probs of all {tokens:,} recorded tokens, computed again by transformers with the weights of \
the version they name ({versions} versions): largest difference | {difference:.1e} |
| the same with the weights of a neighbouring version | {median:.2g} (median over versions; least {least:.2g}) |
| the run; a step without a fault (median); what faults cost the loop in all \
| {minutes:.0f} minutes; {step:.1f} s; {loop:.0f} s |
"""


def tables(result: Mapping[str, Any]) -> str:
    """The tables of a soak that passed."""
    setup, books, weights, time = result["setup"], result["books"], result["weights"], result["time"]
    last = books["last_step"]
    return _TEMPLATE.format(
        **{key: setup[key] for key in ("steps", "sglang", "cpu_count", "staleness", "pause", "seed")},
        how=_HOW[setup.get("sync", "distributed")],
        correction="TIS" if setup["staleness"] else "no correction",
        injected=sum(row["injected"] for row in result["faults"].values()),
        ranks=_of_ranks(result["ranks"]) if "ranks" in result else "",
        sent=_of_sent(result["sent"]) if "sent" in result else "",
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


def _of_ranks(row: Mapping[str, Any]) -> str:
    signals = ", ".join(f"{count} by {name}" for name, count in row["signals"].items())
    times = f"{row['replaced_s']['median']:.1f} ({row['replaced_s']['longest']:.1f}) s"
    return (
        f"| ranks of the trainer that died, whatever the servers did ({signals}); replaced; until then, median "
        f"(longest) | {row['ended']}; {row['replaced']}; {times} |\n"
    )


def _of_sent(row: Mapping[str, Any]) -> str:
    return (
        f"| bytes of weights that were sent, of those that they stand for | {row['bytes'] / 1e6:.2f} of "
        f"{row['whole_bytes'] / 1e6:.2f} MB ({row['bytes'] / row['whole_bytes']:.1%}) |\n"
    )


def _row(kind: str, row: Mapping[str, Any]) -> str:
    times = [f"{row[key]['median']:.1f} ({row[key]['longest']:.1f}) s" for key in ("noticed_s", "healed_s")]
    counts = [str(row[key]) for key in ("injected", "noticed", "healed")]
    return "| " + " | ".join([f"`{kind}`", _MEANING[kind], *counts, *times]) + " |"


def write(results: Path) -> None:
    """Put a soak's tables into its page. Raises SystemExit: the soak failed, or there is no page with the marks."""
    result, page = json.loads(results.read_text()), results.with_suffix(".md")
    if result["problems"]:
        raise SystemExit(f"{results} is of a soak that failed: {result['problems']}")
    before, mark, rest = page.read_text().partition(MARKS[0] + "\n")
    if not mark or MARKS[1] not in rest:
        raise SystemExit(f"{page} has no lines {MARKS[0]} and {MARKS[1]}")
    page.write_text(before + mark + tables(result) + MARKS[1] + rest.partition(MARKS[1])[2])
    print(f"wrote {page}")


def main() -> None:
    for results in RESULTS:
        write(results)


if __name__ == "__main__":
    main()
