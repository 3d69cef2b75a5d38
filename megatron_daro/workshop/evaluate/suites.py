"""Which sets of problems are asked: suites of published sets, and files of the user's own.

`--suite math6 --suite-dir DIR` names files that tools/fetch_eval_suite.py wrote; SUITES says how many rows each must
have. `--set name=path` names one file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_daro.config.problems import did_you_mean, nearest_paths
from megatron_daro.config.sections import EvalSet
from megatron_daro.errors import ConfigError

TEMPERATURE, TOP_P = 0.6, 0.95
"""How sets are sampled by default: as DeepSeek-R1 reports (arXiv 2501.12948, section 3)."""
_KINDS = (".jsonl", ".json", ".parquet", ".jsonl.gz", ".jsonl.zst")


@dataclass(frozen=True, slots=True)
class Member:
    """One set of a suite. stem: how its file's name begins. rows: how many it must have."""

    name: str
    stem: str
    rows: int


SUITES: dict[str, tuple[Member, ...]] = {
    "math6": (
        Member("aime24", "aime24", 30),
        Member("aime25", "aime25", 30),
        Member("amc23", "amc23", 40),
        Member("math500", "math500", 500),
        Member("minerva", "minerva", 272),
        Member("olympiadbench", "olympiadbench", 675),
    )
}
"""AIME 2024 and 2025, AMC 2023, MATH-500, Minerva's OCW problems, OlympiadBench's open text-only mathematics."""


def suite_sets(suite: str, folder: Path) -> list[EvalSet]:
    """Return the sets of a suite.

    Args:
        suite: a name of SUITES. folder: where tools/fetch_eval_suite.py wrote its files.

    Raises:
        ConfigError: no such suite, or a file is missing, or several files match.
    """
    if suite not in SUITES:
        near = did_you_mean(nearest_paths(suite, tuple(SUITES)), "write one of these names")
        raise ConfigError(f"--suite: got {suite!r}; allowed: {', '.join(SUITES)}; fix: {near}")
    return [
        EvalSet(
            name=member.name,
            path=_file(member.stem, folder, suite),
            rows=member.rows,
            temperature=TEMPERATURE,
            top_p=TOP_P,
            template="chat",
        )
        for member in SUITES[suite]
    ]


def named_sets(texts: Sequence[str]) -> list[EvalSet]:
    """Return the sets of texts `name=path`. Raises ConfigError for another form."""
    sets = []
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            raise ConfigError(f"--set: got {text!r}; allowed: NAME=FILE; fix: --set mine=problems.jsonl")
        if not Path(path).is_file():
            raise ConfigError(f"--set {name}: {path} is not there; allowed: a file of problems; fix: check the path")
        try:
            one = EvalSet(name=name, path=Path(path), temperature=TEMPERATURE, top_p=TOP_P, template="chat")
        except ValueError as error:
            raise ConfigError(
                f"--set: got the name {name!r}; allowed: letters, digits, _ . and -; fix: give it another name"
            ) from error
        sets.append(one)
    return sets


def check_names(sets: Sequence[EvalSet]) -> None:
    """Refuse sets that share a name. Raises ConfigError."""
    shared = [name for name, count in Counter(one.name for one in sets).items() if count > 1]
    if shared:
        files = "; ".join(f"{one.name}: {one.path}" for one in sets if one.name in shared)
        raise ConfigError(
            f"evaluation sets: got the name {', '.join(shared)} more than once ({files}); allowed: names that differ, "
            "since results are kept by name; fix: rename one with --set NAME=FILE"
        )


def _file(stem: str, folder: Path, suite: str) -> Path:
    files = sorted(path for path in folder.glob(f"{stem}*") if path.name.endswith(_KINDS))
    if len(files) == 1:
        return files[0]
    got = f"{len(files)} files {stem}* ({', '.join(path.name for path in files)})" if files else f"no file {stem}*"
    raise ConfigError(
        f"--suite {suite}: got {got} in {folder}; allowed: one; fix: python tools/fetch_eval_suite.py --out {folder}, "
        "and --suite-dir with that folder"
    )
