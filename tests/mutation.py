"""Mutation testing: changes one place of a module at a time and asks whether its tests notice.

Place in the data flow: a developer runs it by hand -> mutants (tests/mutants.py) in temporary copies of the tree -> a
table of killed and surviving ones, and the survivors as diffs. It never touches the checkout and is not part of CI.
A killed mutant is one for which pytest fails, crashes, or does not end in time (counted apart, as hung). What cannot be
told from the original by any test stands in mutation_equivalent.toml with its reason; it is not run and not counted.

    python tests/mutation.py --sample 40 --seed 1                # 40 mutants of each module
    python tests/mutation.py --module algo --module data/packing # all mutants of these
    python tests/mutation.py --list                              # modules, number of mutants, tests

Why not cosmic-ray's or mutmut's own runner: both start an interpreter for each mutant, which imports torch and Megatron
for longer than the tests take. Here torch is imported once, and every mutant runs in a fork of that process.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import signal
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mutants import Mutant, changed_lines, find_mutants
from mutation_runs import ROOT, Copy, MutationError, Runner, Score

EQUIVALENT = Path(__file__).with_name("mutation_equivalent.toml")
PRELOAD = (
    "torch",
    "numpy",
    "hypothesis",
    "hypothesis.strategies",
    "pydantic",
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
    "algo/adam.py": (_GOLDEN, f"{_ALGO}states.py", f"{_ALGO}difficulty.py"),
    "algo/advantages.py": (_GOLDEN, f"{_ALGO}advantages.py"),
    "algo/algorithm.py": (_GOLDEN, f"{_ALGO}states.py", f"{_ALGO}weighting.py", f"{_ALGO}learning.py"),
    "algo/corrections.py": (f"{_ALGO}corrections.py", _GOLDEN, f"{_ALGO}objective.py"),
    "algo/difficulty.py": (_GOLDEN, f"{_ALGO}difficulty.py"),
    "algo/difficulty_weights.py": (_GOLDEN, f"{_ALGO}difficulty_weights.py", f"{_ALGO}difficulty.py"),
    "algo/histories.py": (_GOLDEN, f"{_ALGO}states.py"),
    "algo/lengths.py": (_GOLDEN, f"{_ALGO}states.py"),
    "algo/objective.py": (_GOLDEN, f"{_ALGO}objective.py"),
    "algo/pass_rate_rules.py": (_GOLDEN, f"{_ALGO}states.py", f"{_ALGO}weighting.py"),
    "algo/regularizers.py": (_GOLDEN, f"{_ALGO}surrogate.py", f"{_ALGO}objective.py"),
    "algo/shaping.py": (f"{_ALGO}shaping.py",),
    "algo/surrogate.py": (_GOLDEN, f"{_ALGO}surrogate.py", f"{_ALGO}objective.py"),
    "algo/trust_regions.py": (f"{_ALGO}trust_regions.py",),
    "algo/weighting.py": (_GOLDEN, f"{_ALGO}weighting.py", f"{_ALGO}learning.py"),
    "actor/loss.py": (
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

Key = tuple[str, str, str]
"""Module, lines taken away, lines put there: what a mutant is, wherever its lines stand."""


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
    options = parser.parse_args(arguments)
    if options.jobs < 1 or (options.sample is not None and options.sample < 1):
        parser.error("--jobs and --sample: allowed is 1 or more")
    options.modules = {
        name: tests for name, tests in MODULES.items() if any(part in name for part in options.module or [""])
    }
    if not options.modules:
        parser.error(f"--module: got {options.module}, allowed are parts of {', '.join(MODULES)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.list:
        for name, tests in options.modules.items():
            print(f"{name}: {len(find_mutants((ROOT / name).read_text()))} mutants; {' '.join(tests)}")
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in PRELOAD:
        importlib.import_module(name)
    try:
        equivalent = load_equivalent(EQUIVALENT)
        scores = run(
            ROOT, options.modules, equivalent=equivalent, sample=options.sample, seed=options.seed, jobs=options.jobs
        )
    except MutationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(scores))
    return int(any(score.percent < options.at_least for score in scores))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
