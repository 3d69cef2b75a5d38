"""The lab: DARO and its rivals side by side, on this machine.

    bash examples/lab/run.sh [--arms grpo,daro,...] [--worlds skewed,...] [--seeds 5] [--processes 2] [--out runs/lab]
    bash examples/lab/run.sh --quick            # seconds: two small worlds, a few arms, two seeds
    bash examples/lab/run.sh --first-seed 5 --rates examples/lab/results    # other seeds, at rates found before
    bash examples/lab/run.sh --page examples/lab/results --out runs/lab    # the page of results that are there

Every arm gets its learning rate from the same small search, on seeds that the comparison does not use; nothing else is
tuned. Place in the data flow: worlds x arms -> runs in worker processes -> OUT/*.parquet -> OUT/lab.html. Refuses
unknown names before anything starts; finished runs are kept in OUT/finished.jsonl, so an interrupted lab goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import multiprocessing
import os
import shlex
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import results
import tiny_run
from arms import BASELINE, arm_names, build, control, needs_a_limit, needs_several_updates, options_of
from closed_exact import refusal
from closed_run import run_arm
from closed_world import MAX_TOKENS, Dials
from results import Job, Outcome
from tiny_run import ModelDials
from worlds import DEFAULT, WORLDS

from megatron_daro.errors import ConfigError, DaroError

QUICK_ARMS = (BASELINE, "dapo", "daro", "daro_token")
QUICK_WORLDS = ("skewed", "balanced")
_CODE = {
    "closed": ("closed_world.py", "closed_run.py", "closed_exact.py", "closed_critic.py"),
    "tiny": ("tiny_run.py", "one_process.py", "chains.py", "chains.yaml"),
    "smollm2": (
        *("tiny_run.py", "one_process.py", "smollm2.py"),
        *(f"../smollm2/{name}" for name in ("config.yaml", "from_gguf.py", "short_problems.py")),
    ),
}
"""Kind of world -> its code in the lab."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be run, on `seeds` seeds from `first_seed` on. A quick plan takes a fraction of each closed-form
    world, of the search and of the seeds. controls: arms at other learning rates than their own, ARM@RATE; None: the
    baseline at the rates of the search."""

    arms: tuple[str, ...]
    worlds: tuple[str, ...]
    seeds: int
    quick: bool = False
    first_seed: int = 0
    controls: tuple[str, ...] | None = None

    def dials(self, world: str) -> Dials | ModelDials:
        """Return the dials of a world."""
        dials = WORLDS[world].dials
        if self.quick and isinstance(dials, Dials):
            return dataclasses.replace(dials, steps=20, problems=128, held_out=128)
        return dials

    def arms_in(self, world: str) -> list[str]:
        """Return the arms of one world, without those that differ from the baseline only off-policy if the world is
        on-policy, those that treat truncated answers if none are truncated, and those whose expected gradient is no
        formula if gradients are exact."""
        dials, chosen = self.dials(world), WORLDS[world].arms
        arms = [arm for arm in self.arms if chosen is None or arm in chosen]
        arms = [arm for arm in arms if not (isinstance(dials, Dials) and needs_a_limit(arm))]
        exact = isinstance(dials, Dials) and dials.gradients == "exact"
        arms = [arm for arm in arms if dials.updates > 1 or not needs_several_updates(arm)]
        return [arm for arm in arms if not (exact and refusal(build(arm, rollouts=8, max_tokens=MAX_TOKENS)[0]))]

    def tuning(self) -> list[Job]:
        """Return a job for every arm, in every world that has several learning rates, at each of them."""
        return [
            Job(WORLDS[world].kind, world, arm, "tune", seed, rate)
            for world in self.worlds
            if len(WORLDS[world].rates) > 1
            for arm in self.arms_in(world)
            for rate in (WORLDS[world].rates[:2] if self.quick else WORLDS[world].rates)
            for seed in (WORLDS[world].tuning_seeds[:1] if self.quick else WORLDS[world].tuning_seeds)
        ]

    def comparison(self, tuned: Iterable[Outcome]) -> list[Job]:
        """Return jobs for every arm at its own learning rate, and the controls, on the seeds of the comparison."""
        given = {(w, arm): rate for w in self.worlds for rate in WORLDS[w].rates for arm in self.arms_in(w)}
        best = given | results.best_rates(tuned)
        return [
            Job(WORLDS[world].kind, world, arm, "compare", seed, rate)
            for world in self.worlds
            for arm, rate in [*((arm, best[world, arm]) for arm in self.arms_in(world)), *self._controls(world, best)]
            for seed in range(self.first_seed, self.first_seed + self.seeds)
        ]

    def _controls(self, world: str, best: Mapping[tuple[str, str], float]) -> list[tuple[str, float]]:
        """Return the controls that were asked for by name; else the baseline at the other rates of the search, or with
        a language model, where a run is expensive, at twice its own. Empty in a quick plan, or if nothing was
        searched."""
        if self.quick or len(WORLDS[world].rates) == 1:
            return []
        if self.controls is not None:
            given = [(name, float(name.partition("@")[2])) for name in self.controls]
            return [(name, rate) for name, rate in given if rate != best[world, name.partition("@")[0]]]
        rates = WORLDS[world].rates if WORLDS[world].kind == "closed" else (2 * best[world, BASELINE],)
        return [(control(rate), rate) for rate in rates if rate != best[world, BASELINE]]


class Store:
    """Finished runs of a folder, one line each. A line is used again only if everything it depends on is the same."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._path = folder / "finished.jsonl"
        self._code = {kind: _code_fingerprint(kind) for kind in _CODE}
        self._found: dict[str, dict] = {}
        for line in self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else ():
            try:
                entry = json.loads(line)
                self._found[entry["key"]] = entry
            except (ValueError, KeyError, TypeError):
                continue  # the last line of a lab that was killed

    def key(self, job: Job, dials: Dials | ModelDials) -> str:
        """Return a key that changes with the job, its world, the arm's options and the code."""
        options = options_of(job.arm)
        content = [dataclasses.astuple(job), dataclasses.asdict(dials), options, self._code[job.kind]]
        own = Path(__file__).parent / f"{options['name'].partition(':')[0]}.py"
        content += [own.read_text(encoding="utf-8")] if ":" in options["name"] and own.exists() else []
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def get(self, job: Job, dials: Dials | ModelDials) -> Outcome | None:
        """Return a finished run, or None."""
        entry = self._found.get(self.key(job, dials))
        return None if entry is None else Outcome(job, entry["records"], entry["ended"], entry["cpu_seconds"])

    def put(self, outcome: Outcome, dials: Dials | ModelDials) -> None:
        """Keep a finished run."""
        entry: dict[str, Any] = {"key": self.key(outcome.job, dials), "records": outcome.records}
        entry |= {"ended": outcome.ended, "cpu_seconds": outcome.cpu_seconds}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def run_job(job: Job, dials: Dials | ModelDials, folder: Path) -> Outcome:
    """Do one run, in this process. `folder`: for the files of a language model."""
    began = time.process_time()
    if isinstance(dials, ModelDials):
        run = tiny_run.run_arm(dials, job.arm, job.learning_rate, job.seed, folder / job.world)
    else:
        run = run_arm(dials, job.arm, job.learning_rate, job.seed, every=max(1, dials.steps // 30))
    cpu_seconds = round(run.cpu_seconds + time.process_time() - began, 2)  # the same in memory and in the file
    return Outcome(job, run.records, run.ended, cpu_seconds)


def run_all(jobs: Sequence[Job], plan: Plan, store: Store, processes: int) -> Iterator[Outcome]:
    """Yield the outcomes of all jobs, stored ones first; print a line for every tenth of the others."""
    missing = []
    for job in jobs:
        kept = store.get(job, plan.dials(job.world))
        if kept is None:
            missing.append(job)
        else:
            yield kept
    began, portion = time.monotonic(), -(-len(missing) // 10)
    for done, outcome in enumerate(_in_processes(missing, plan, store.folder, processes), start=1):
        store.put(outcome, plan.dials(outcome.job.world))
        yield outcome
        if done % portion == 0:
            print(f"    {done} of {len(missing)} runs, {time.monotonic() - began:.0f} s", flush=True)


def _in_processes(jobs: Sequence[Job], plan: Plan, folder: Path, processes: int) -> Iterator[Outcome]:
    """Yield the outcomes as they come. Base models are built first, so that no two runs build the same one."""
    worlds = {job.world: plan.dials(job.world) for job in jobs}
    bases = [(dials, folder / world) for world, dials in worlds.items() if isinstance(dials, ModelDials)]
    if processes == 1 or len(jobs) < 2:
        for base in bases:
            tiny_run.base_of(*base)
        yield from (run_job(job, plan.dials(job.world), folder) for job in jobs)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), initializer=_end_with_the_lab) as pool:
        try:
            for built in [pool.submit(tiny_run.base_of, *base) for base in bases]:
                built.result()
            for future in as_completed([pool.submit(run_job, j, plan.dials(j.world), folder) for j in jobs]):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _end_with_the_lab() -> None:
    """End this worker process when the lab's ends, even by a kill, of which the workers would not be told."""
    lab = multiprocessing.parent_process()
    assert lab is not None

    def watch() -> None:
        lab.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_lab(
    plan: Plan, out: Path, processes: int, command: str, rates: Path | None = None, beside: Path | None = None
) -> Path:
    """Tune, compare, write the results and the page. Return the page.

    Args:
        plan, out, processes: what, where, on how many processes. command: for the page. rates: a folder of results
            whose search for learning rates is used where it has the run. beside: a folder of results that stay as
            they are in the files; an arm that it has in a world is not compared there again.
    """
    from page import write_page

    store, began = Store(out), time.monotonic()
    tuning = plan.tuning()
    known = {o.job: o for o in (results.read(rates)[0] if rates else [])}
    earlier, tuning = [known[job] for job in tuning if job in known], [job for job in tuning if job not in known]
    print(f"tuning: {len(tuning)} runs of {len(plan.arms)} arms in {len(plan.worlds)} worlds", flush=True)
    tuned = [*earlier, *run_all(tuning, plan, store, processes)]
    there = results.read(beside)[0] if beside else []
    compared = {(o.job.world, o.job.arm) for o in there if o.job.purpose == "compare"}
    comparison = [job for job in plan.comparison(tuned) if (job.world, job.arm) not in compared]
    print(f"comparison: {len(comparison)} runs", flush=True)
    found = list(run_all(comparison, plan, store, processes))
    note = {"command": command, "plan": json.dumps(dataclasses.asdict(plan))}
    note["dials"] = json.dumps({w: dataclasses.asdict(plan.dials(w)) for w in plan.worlds})
    ordered = sorted([*tuned, *found], key=lambda o: (comparing_order(o.job, plan), o.job.key))
    note["cpu_seconds"] = json.dumps(cpu_seconds(ordered))
    if beside:
        ordered, note = joined(beside, ordered, note)
    results.write(out, ordered, note)
    path = write_page(out, out / "lab.html")
    print(
        f"CPU seconds of all runs: {note['cpu_seconds']}; that is {cpu_minutes(ordered) / 2:.0f} minutes of two cores"
    )
    print(f"{time.monotonic() - began:.0f} s; the page: {path}")
    return path


def joined(folder: Path, outcomes: Iterable[Outcome], note: Mapping[str, str]) -> tuple[list[Outcome], dict[str, str]]:
    """Return the results in a folder, then those of arms that its worlds lack; and a note with the folder's dials where
    both have a world, and with commands, plans and CPU seconds of both."""
    there, its_note = results.read(folder)
    known = {(o.job.world, o.job.arm) for o in there}
    new = [o for o in outcomes if (o.job.world, o.job.arm) not in known]
    seconds = json.loads(its_note.get("cpu_seconds", "{}"))
    seconds |= {world: seconds.get(world, 0) + more for world, more in cpu_seconds(new).items()}
    dials = {**json.loads(note["dials"]), **json.loads(its_note.get("dials", "{}"))}
    both = {name: f"{its_note.get(name, '')}; {note[name]}" for name in ("command", "plan")}
    return [*there, *new], {**both, "dials": json.dumps(dials), "cpu_seconds": json.dumps(seconds)}


def cpu_seconds(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """Return world -> CPU seconds of its runs, whenever they ran; without the base models."""
    found: dict[str, float] = {}
    for outcome in outcomes:
        found[outcome.job.world] = found.get(outcome.job.world, 0.0) + outcome.cpu_seconds
    return {world: round(seconds) for world, seconds in found.items()}


def cpu_minutes(outcomes: Iterable[Outcome]) -> float:
    """Return the CPU time of runs in all worlds, in minutes."""
    return sum(outcome.cpu_seconds for outcome in outcomes) / 60


def comparing_order(job: Job, plan: Plan) -> tuple[int, int]:
    """Return the places of world and arm in the plan, so that files do not depend on which run finished first."""
    return plan.worlds.index(job.world), plan.arms.index(job.arm.partition("@")[0])


def _code_fingerprint(kind: str) -> str:
    """Return a hash of what a run's numbers depend on: the lab's code of this kind of world, the algorithms."""
    import megatron_daro.algo

    here, algo = Path(__file__).parent, Path(megatron_daro.algo.__file__).parent
    files = [*(here / name for name in _CODE[kind]), *sorted(algo.glob("*.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _controls(text: str, arms: Sequence[str], rates: Sequence[float]) -> tuple[str, ...]:
    """Return the names ARM@RATE in a list with commas; a rate may be half the search's lowest to twice its highest."""
    lowest, highest = min(rates) / 2, 2 * max(rates)
    names = tuple(dict.fromkeys(name for name in text.split(",") if name))
    for name in names:
        arm, _, rate = name.partition("@")
        try:
            fits = arm in arms and lowest <= float(rate) <= highest
        except ValueError:
            fits = False
        if not fits:
            allowed = f"ARM@RATE with one of {', '.join(arms)} and a rate from {lowest:g} to {highest:g}"
            raise ConfigError(f"--controls: got {name}, allowed are {allowed}")
    return names


def _names(text: str, allowed: Sequence[str], what: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name for name in text.split(",") if name))
    unknown = [name for name in names if name not in allowed]
    if unknown or not names:
        raise ConfigError(f"--{what}: got {', '.join(unknown) or 'nothing'}, allowed are {', '.join(allowed)}")
    return names


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, Plan]:
    """Parse the command line.

    Raises:
        ConfigError: an unknown arm or world, or the baseline is missing.
    """
    parser = argparse.ArgumentParser(prog="examples/lab/run.sh", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arms", help="names with commas between; default all")
    parser.add_argument("--worlds", help=f"names with commas between; default {','.join(DEFAULT)}")
    parser.add_argument("--seeds", type=int, default=0, help="seeds of the comparison; default 5")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them; default 0")
    parser.add_argument("--rates", type=Path, metavar="RESULTS", help="take the search for learning rates from there")
    parser.add_argument("--beside", type=Path, metavar="RESULTS", help="keep these, and add arms that they lack")
    parser.add_argument("--controls", help="ARM@RATE,...: these in the place of the baseline at other learning rates")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, default=Path("runs/lab"))
    parser.add_argument("--quick", action="store_true", help="seconds: small worlds, few arms, two seeds")
    parser.add_argument("--page", type=Path, metavar="RESULTS", help="only write the page of results that are there")
    given = parser.parse_args(arguments)
    arms = _names(given.arms or ",".join(QUICK_ARMS if given.quick else arm_names()), arm_names(), "arms")
    if BASELINE not in arms:
        arms = (BASELINE, *arms)
    worlds = _names(given.worlds or ",".join(QUICK_WORLDS if given.quick else DEFAULT), list(WORLDS), "worlds")
    controls = None
    if given.controls is not None:
        controls = _controls(given.controls, arms, [rate for world in worlds for rate in WORLDS[world].rates])
    seeds = given.seeds or (2 if given.quick else 5)
    if given.seeds < 0 or given.processes < 1:
        raise ConfigError(f"--seeds, --processes: got {given.seeds}, {given.processes}, allowed are 1 or more")
    last, searched = given.first_seed + seeds - 1, min(s for world in worlds for s in WORLDS[world].tuning_seeds)
    if given.first_seed < 0 or last >= searched:
        raise ConfigError(
            f"--first-seed: got {given.first_seed} for {seeds} seeds, allowed is 0 to {searched - seeds}: those from "
            f"{searched} on are the search's"
        )
    return given, Plan(arms, worlds, seeds, given.quick, given.first_seed, controls)


def main(arguments: Sequence[str]) -> int:
    """Run the lab. Return the exit code: 2 after an error."""
    try:
        given, plan = parse(arguments)
        if given.page:
            from page import write_page

            given.out.mkdir(parents=True, exist_ok=True)
            print(f"the page: {write_page(given.page, given.out / 'lab.html')}")
            return 0
        command = "bash examples/lab/run.sh " + shlex.join(arguments)
        run_lab(plan, given.out, given.processes, command, given.rates, given.beside)
    except DaroError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
