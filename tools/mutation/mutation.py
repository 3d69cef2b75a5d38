"""Mutation testing: changes one place of a module at a time and asks whether its tests notice.

Place in the data flow: a developer runs it by hand -> mutants (mutants.py) in temporary copies of the tree -> a
table of killed and surviving ones, and the survivors as diffs. It never touches the checkout and is not part of CI.
A killed mutant is one for which pytest fails, crashes, or does not end in time (counted apart, as hung). What cannot be
told from the original by any test stands in equivalent.toml with its reason; it is not run and not counted.

    python tools/mutation/mutation.py --sample 40 --seed 1                # 40 mutants of each module
    python tools/mutation/mutation.py --module algo --module data/packing # all mutants of these
    python tools/mutation/mutation.py --list                              # modules, number of mutants, tests
    python tools/mutation/mutation.py --everything --sample 100 --seed 19 # 100 of the whole package

Why not cosmic-ray's or mutmut's own runner: both start an interpreter for each mutant, which imports torch and Megatron
for longer than the tests take. Here torch is imported once, and every mutant runs in a fork of that process.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import re
import signal
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mutants import Mutant, changed_lines, find_mutants
from mutation_runs import ROOT, Copy, MutationError, Runner, Score

EQUIVALENT = Path(__file__).with_name("equivalent.toml")
PRELOAD = (
    "torch",
    "numpy",
    "hypothesis",
    "hypothesis.strategies",
    "pydantic",
    "pyarrow.parquet",
    "safetensors.torch",
    "transformers",
    "math_verify",
    "sympy",
    "ray",
    "aiohttp",
    "pytest_timeout",
    "_pytest.pytester",
    "xml.etree.ElementTree",
    "rich.console",
    "yaml",
)
"""Imported once, before the forks."""
_GOLDEN = "tests/golden/test_algo_golden.py"
_ALGO, _ROLLOUT, _DATA = "tests/unit/algo/test_algo_", "tests/unit/rollout/test_", "tests/unit/data/test_"
_SGLANG, _LOSS = "tests/unit/engine/sglang/test_sglang_", "tests/parallel/test_loss_terms.py::"
_TABLE: dict[str, tuple[str, ...]] = {
    "algo/advantages.py": (_GOLDEN, f"{_ALGO}advantages.py", f"{_ALGO}shaping.py"),
    "algo/algorithm.py": (_GOLDEN, f"{_ALGO}states.py", f"{_ALGO}weighting.py", f"{_ALGO}learning.py"),
    "algo/corrections.py": (f"{_ALGO}corrections.py", _GOLDEN, f"{_ALGO}objective.py"),
    "algo/difficulty.py": (_GOLDEN, f"{_ALGO}difficulty.py"),
    "algo/difficulty_weights.py": (
        *(_GOLDEN, f"{_ALGO}difficulty_weights.py"),
        *(f"{_ALGO}difficulty.py", f"{_ALGO}states.py"),
    ),
    "algo/histories.py": (_GOLDEN, f"{_ALGO}states.py"),
    "algo/pass_rate_rules.py": (_GOLDEN, f"{_ALGO}states.py", f"{_ALGO}weighting.py"),
    "algo/objective.py": (
        *(_GOLDEN, f"{_ALGO}surrogate.py"),
        *(f"{_ALGO}objective.py", f"{_ALGO}trust_regions.py"),
    ),
    "algo/surrogate.py": (_GOLDEN, f"{_ALGO}surrogate.py", f"{_ALGO}objective.py"),
    "algo/weighting.py": (_GOLDEN, f"{_ALGO}weighting.py", f"{_ALGO}learning.py"),
    "actor/step.py": (
        f"{_LOSS}test_terms_equal_the_reference[cp2_dp2-all]",
        f"{_LOSS}test_terms_equal_the_reference[cp2_dp2-gspo]",
        f"{_LOSS}test_terms_equal_the_reference[pp2-all_gspo]",
        f"{_LOSS}test_without_old_logprobs_the_ratio_is_exactly_one[single-all]",
    ),
    "data/schedule.py": (f"{_DATA}schedule.py",),
    "data/packing.py": (
        f"{_DATA}packing.py",
        f"--deselect={_DATA}packing.py::test_slices_match_the_chunks_megatrons_rope_takes",  # imports Megatron
    ),
    "rollout/ledger.py": (f"{_ROLLOUT}ledger.py",),
    "rollout/sampler.py": tuple(f"{_ROLLOUT}{name}.py" for name in ("sampler", "partial_groups", "no_signal")),
    "sync/buckets.py": ("tests/unit/sync/test_buckets.py", "tests/unit/sync/test_sync_transports.py"),
    "engine/sglang/update.py": (f"{_SGLANG}update.py", f"{_SGLANG}update_checks.py"),
}
MODULES = {f"megatron_daro/{name}": tests for name, tests in _TABLE.items()}
"""Module -> the tests that belong to it, fastest first."""

_UNSEEN = (
    "workshop/report/",
    "workshop/curate/output.py",
    "workshop/evaluate/compare.py",
    "workshop/plan/scaling.py",
    "workshop/rehearse/report.py",
)
"""Plots and pages: people look at them. The start of a module's path in the package."""
_PARALLEL, _FAULT = "tests/parallel/test_", "tests/fault/test_"
_FURTHER: dict[str, tuple[str, ...]] = {
    "actor/": tuple(
        f"{_PARALLEL}{name}.py"
        for name in ("train_steps", "loss_terms", "logprobs_models", "checkpoints", "host_memory", "routing_replay")
    ),
    "actor/model.py": (f"{_PARALLEL}experts.py", f"{_PARALLEL}virtual_stages.py"),
    "actor/step.py": (f"{_PARALLEL}nonfinite_steps.py",),
    "algo/": ("tests/golden",),
    "workshop/check_loss/": (f"{_PARALLEL}check_loss.py",),
    "cli.py": (f"{_FAULT}bad_inputs.py",),
    "commands/": ("tests/unit/test_cli.py",),
    "commands/analyze.py": ("tests/unit/analyze",),
    "commands/check_layout.py": ("tests/unit/actor/test_world_check.py",),
    "commands/check_loss.py": (f"{_PARALLEL}check_loss.py",),
    "commands/convert.py": ("tests/unit/test_convert_command.py",),
    "commands/curate.py": ("tests/unit/curate",),
    "commands/doctor.py": ("tests/unit/test_doctor.py",),
    "commands/rehearse.py": ("tests/e2e/test_rehearsals.py",),
    "commands/submit.py": ("tests/unit/slurm",),
    "config/": ("tests/unit/test_cli.py", "tests/unit/examples/test_recipes.py"),
    "controller.py": ("tests/unit/rollout", "tests/unit/test_background_save.py"),
    "convert/": ("tests/unit/test_convert_command.py", f"{_PARALLEL}converted_checkpoints.py"),
    "engine/": ("tests/contract/test_engine_contract.py", "tests/unit/sync"),
    "workshop/check_layout.py": ("tests/unit/actor/test_world_check.py",),
    "workshop/convert/": ("tests/unit/convert", "tests/unit/test_convert_command.py"),
    "workshop/evaluate/": ("tests/unit/commands/test_evaluate_command.py",),
    "families/": ("tests/unit/convert/test_model_shape.py", "tests/unit/config"),
    "workshop/plan/": ("tests/unit/commands/test_plan_command.py",),
    "plugins/": ("tests/contract/test_host_contracts.py", "tests/plugins"),
    "recovery.py": (f"{_FAULT}damaged_checkpoints.py",),
    "workshop/rehearse/": ("tests/e2e/test_rehearsals.py",),
    "reward/": (f"{_FAULT}reward_pool_faults.py",),
    "rollout/": ("tests/unit/test_controller.py",),
    "runtime/": ("tests/unit/test_run_directory.py", "tests/unit/test_interrupts.py", "tests/e2e/test_train_runs.py"),
    "runtime/policy_group.py": (f"{_PARALLEL}policy_group.py",),
    "runtime/sglang_group.py": ("tests/sglang/test_sglang_train_runs.py",),
    "workshop/curate/pass_rates.py": ("tests/unit/curate/test_sampled.py",),
    "sync/": ("tests/unit/engine/sglang/test_sglang_update.py", "tests/unit/test_controller.py"),
    "worker_pool/": ("tests/unit/reward", "tests/unit/rollout/test_stepping.py", f"{_FAULT}reward_pool_faults.py"),
}
"""Start of a module's path in the package -> tests beside those of its folder in tests/unit."""

Key = tuple[str, str, str]
"""Module, lines taken away, lines put there: what a mutant is, wherever its lines stand."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A mutant drawn from the whole package. equivalent: it stands in equivalent.toml."""

    module: str
    mutant: Mutant
    source: str
    changed: str
    equivalent: bool

    def __str__(self) -> str:
        removed, added = changed_lines(self.source, self.changed)
        return f"{self.module}:{self.mutant.line}\n  - {removed}\n  + {added}"


def load_equivalent(path: Path) -> dict[Key, str]:
    """Mutants that no test can tell from the original -> the reason."""
    entries = tomllib.loads(path.read_text()).get("mutant", [])
    return {(entry["module"], entry["removed"], entry["added"]): entry["reason"] for entry in entries}


def outdated(source: str, module: str, equivalent: Mapping[Key, str]) -> list[Key]:
    """Entries of a module that are no mutant of it any more."""
    wanted = {key for key in equivalent if key[0] == module}
    lines = source.splitlines()
    for mutant in find_mutants(source) if wanted else ():
        line = " ".join(lines[mutant.line - 1].split())
        if any(line in removed for _, removed, _ in wanted) and (changed := mutant.apply(source)):
            wanted.discard((module, *changed_lines(source, changed)))
    return sorted(wanted)


def chosen_mutants(source: str, sample: int | None, random_order: random.Random) -> Iterator[tuple[Mutant, str]]:
    """Mutants and their texts, each text once; in random order where a sample is wanted."""
    mutants, seen = find_mutants(source), set()
    if sample is not None:
        random_order.shuffle(mutants)
    for mutant in mutants:
        changed = mutant.apply(source)
        if changed is not None and changed not in seen:
            seen.add(changed)
            yield mutant, changed


def submit_module(
    runner: Runner,
    score: Score,
    source: str,
    equivalent: Mapping[Key, str],
    *,
    sample: int | None,
    seed: int,
    usual_s: float,
) -> None:
    """Tests the mutants of one module: all, or a sample of those that are not equivalent."""
    submitted = 0
    for mutant, changed in chosen_mutants(source, sample, random.Random(f"{seed} {score.module}")):
        if submitted == sample:
            break
        if (score.module, *changed_lines(source, changed)) in equivalent:
            score.equivalent += 1
            continue
        runner.submit(score, mutant, source, changed, limit_s=30 + 10 * usual_s)
        submitted += 1


def run(
    root: Path,
    modules: Mapping[str, Sequence[str]],
    *,
    equivalent: Mapping[Key, str],
    sample: int | None = None,
    seed: int = 0,
    jobs: int = 1,
) -> list[Score]:
    """Tests mutants of modules.

    Args:
        root: a git checkout; only read.
        modules: module -> its tests, as arguments of pytest, both relative to the root.
        equivalent: see `load_equivalent`.
        sample: how many mutants of each module; None: all.
        seed: of the sample.
        jobs: how many at a time.

    Raises:
        MutationError: the tests fail without a mutant, or load something else than the copy.
    """
    scores = [Score(module) for module in modules]
    with tempfile.TemporaryDirectory(prefix="mutation-") as temporary:
        copies = [Copy.of(root, Path(temporary, str(i))) for i in range(jobs)]
        runner = Runner(copies, modules)
        try:
            for score in scores:
                source = (root / score.module).read_text(encoding="utf-8")
                score.mutants = len(find_mutants(source))
                usual = runner.usual_seconds(score.module)
                print(f"{score.module}: {score.mutants} mutants; its tests take {usual:.1f} s", flush=True)
                for key in outdated(source, score.module, equivalent):
                    print(f"no mutant any more, remove it from {EQUIVALENT.name}: {key}")
                submit_module(runner, score, source, equivalent, sample=sample, seed=seed, usual_s=usual)
            runner.drain()
        except KeyboardInterrupt:
            print("interrupted; what was tested so far:")
        finally:
            runner.close()
    return scores


def code_modules(root: Path) -> list[str]:
    """Every module but plots and pages."""
    package = root / "megatron_daro"
    names = sorted(path.relative_to(package).as_posix() for path in package.rglob("*.py"))
    return [f"megatron_daro/{name}" for name in names if not name.startswith(_UNSEEN)]


def package_tests(root: Path, module: str) -> tuple[str, ...]:
    """Test files of a module's package: those of its folder, those that name the module, and what `_FURTHER` adds;
    those that name it come first."""
    name = module.removeprefix("megatron_daro/")
    package = name.removeprefix("workshop/").split("/")[0].removesuffix(".py")
    dotted = name.removesuffix(".py").replace("/", ".")
    parent, _, stem = f"megatron_daro.{dotted}".rpartition(".")
    naming = re.compile(rf"megatron_daro\.{re.escape(dotted)}\b|from {re.escape(parent)} import [^\n]*\b{stem}\b")
    cheap = [path for folder in ("unit", "golden", "contract") for path in (root / "tests" / folder).rglob("test_*.py")]
    nearest = {path for path in cheap if naming.search(path.read_text(encoding="utf-8")) or stem in path.stem}
    others = set((root / "tests/unit" / package).rglob("test_*.py"))
    for start, tests in _FURTHER.items():
        if name.startswith(start):
            for path in (root / test for test in tests):
                others |= set(path.rglob("test_*.py")) if path.is_dir() else {path}
    ordered = sorted(nearest) + sorted(others - nearest)
    return tuple(path.relative_to(root).as_posix() for path in ordered)


def draw(root: Path, modules: Sequence[str], equivalent: Mapping[Key, str], sample: int, seed: int) -> list[Drawn]:
    """Mutants of the whole package: code lines drawn without putting back, and one mutant of each. Equivalent ones are
    drawn, too, but not run."""
    sources = {module: (root / module).read_text(encoding="utf-8") for module in modules}
    of_line: dict[tuple[str, int], list[Mutant]] = {}
    for module, source in sources.items():
        for mutant in find_mutants(source):
            of_line.setdefault((module, mutant.line), []).append(mutant)
    order = random.Random(f"{seed} everything")
    lines, drawn = list(of_line), []
    order.shuffle(lines)
    for module, line in lines:
        mutant = order.choice(of_line[module, line])
        changed = mutant.apply(sources[module])
        if changed is not None:
            known = (module, *changed_lines(sources[module], changed)) in equivalent
            drawn.append(Drawn(module, mutant, sources[module], changed, known))
        if len(drawn) == sample:
            break
    return drawn


def run_drawn(root: Path, drawn: Sequence[Drawn], *, jobs: int, limit_s: float) -> list[Score]:
    """Test drawn mutants with the tests of their packages; one score a package. In the end the tests that killed run
    once without a mutant: all of each package's beforehand would take as long as many mutants."""
    tests = {one.module: package_tests(root, one.module) for one in drawn}
    scores: dict[str, Score] = {}
    with tempfile.TemporaryDirectory(prefix="mutation-") as temporary:
        runner = Runner([Copy.of(root, Path(temporary, str(i))) for i in range(jobs)], tests)
        try:
            for one in drawn:
                package = one.module.split("/")[1].removesuffix(".py")
                score = scores.setdefault(package, Score(package))
                score.mutants += 1
                score.equivalent += one.equivalent
                if not one.equivalent:
                    runner.submit(score, one.mutant, one.source, one.changed, limit_s, module=one.module)
            runner.drain()
            withdraw(
                scores.values(), runner.failing(sorted({test for score in scores.values() for test in score.killers}))
            )
        except MutationError as error:
            print(f"error: {error}")
        except KeyboardInterrupt:
            print("interrupted; what was tested so far:")
        finally:
            runner.close()
    return list(scores.values())


def withdraw(scores: Iterable[Score], failing: set[str]) -> None:
    """Count as survivors the mutants that only tests killed which fail without a mutant, too."""
    for score in scores:
        sound = {mutant for test, mutants in score.killers.items() if test not in failing for mutant in mutants}
        for test in sorted(failing & score.killers.keys()):
            for mutant in score.killers[test]:
                if mutant not in sound and mutant not in score.survivors:
                    print(f"survived, since {test} fails without it, too: {mutant}")
                    score.survivors.append(mutant)
                    score.verdicts["killed"] -= 1
                    score.verdicts["survived"] += 1


def table(scores: Sequence[Score]) -> str:
    """The result as a Markdown table."""
    rows = ["| module | mutants | tested | killed | hung | survived | equivalent | percent | s each |"]
    rows.append("|---|---|---|---|---|---|---|---|---|")
    for score in scores:
        v, each = score.verdicts, score.seconds / max(score.run, 1)
        rows.append(
            f"| {score.module.removeprefix('megatron_daro/')} | {score.mutants} | {score.run} | {v['killed']} "
            f"| {v['hung']} | {v['survived']} | {score.equivalent} | {score.percent:.0f} | {each:.1f} |"
        )
    tested, survived = sum(score.run for score in scores), sum(score.verdicts["survived"] for score in scores)
    rows.append(f"\n{tested} tested, {survived} survived: {100 * (tested - survived) / max(tested, 1):.1f} % killed")
    return "\n".join(rows)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--module", action="append", help="part of a module's path, several times; without it: all")
    parser.add_argument("--sample", type=int, help="mutants of each module; without it: all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--at-least", type=float, default=90.0, help="percent killed, else the exit status is 1")
    parser.add_argument("--list", action="store_true", help="only say what there is")
    parser.add_argument(
        "--everything",
        action="store_true",
        help="draw --sample mutants from the whole package, and run those of --module",
    )
    parser.add_argument("--limit-s", type=float, default=1200, help="of one mutant, with --everything")
    options = parser.parse_args(arguments)
    if options.jobs < 1 or (options.sample is not None and options.sample < 1):
        parser.error("--jobs and --sample: allowed is 1 or more")
    if options.everything and options.sample is None:
        parser.error("--everything: needs --sample")
    options.modules = {
        name: tests for name, tests in MODULES.items() if any(part in name for part in options.module or [""])
    }
    if not options.modules and not options.everything:
        parser.error(f"--module: got {options.module}, allowed are parts of {', '.join(MODULES)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.everything:
        drawn = draw(ROOT, code_modules(ROOT), load_equivalent(EQUIVALENT), options.sample, options.seed)
        drawn = [one for one in drawn if any(part in one.module for part in options.module or [""])]
    if options.list and options.everything:
        print(*drawn, sep="\n")
        return 0
    if options.list:
        for name, tests in options.modules.items():
            print(f"{name}: {len(find_mutants((ROOT / name).read_text()))} mutants; {' '.join(tests)}")
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in PRELOAD:
        importlib.import_module(name)
    try:
        if options.everything:
            scores = run_drawn(ROOT, drawn, jobs=options.jobs, limit_s=options.limit_s)
        else:
            known = load_equivalent(EQUIVALENT)
            scores = run(
                ROOT, options.modules, equivalent=known, sample=options.sample, seed=options.seed, jobs=options.jobs
            )
    except MutationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(scores))
    return int(any(score.percent < options.at_least for score in scores))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
