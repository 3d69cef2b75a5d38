"""The mutation script itself: its own operators, what it leaves alone, and the verdicts on a tiny module."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray", reason="needs cosmic-ray, which the extra `dev` installs")

TOOL = Path(__file__).parents[2] / "tools/mutation"
sys.path.insert(0, str(TOOL))
import mutation  # noqa: E402
from mutants import changed_lines, find_mutants  # noqa: E402
from mutation_runs import Score, Survivor  # noqa: E402

TINY = """
def join(first: int | None, second):
    if first is None:
        raise ValueError(f"got {first}, allowed is {second + 1}")
    return first + second


def is_long(number):
    return number > 10


def count_down(number):
    while number > 0:
        number -= 1
    return number
"""
TEST = """
import pytest
from tiny import count_down, is_long, join

def test_tiny():
    assert join(2, 3) == 5 and is_long(20) and not is_long(5) and count_down(3) == 0
    with pytest.raises(ValueError):
        join(None, 1)
"""
RUN = """
import json, sys, tempfile
from pathlib import Path
import mutants, mutation
from mutation_runs import Copy, Runner, Score

root = Path(sys.argv[1])
equivalent = {("tiny.py", "return number > 10", "return number > 11"): "only for the test"}
operators = ("ReplaceBinaryOperator", "ReplaceComparisonOperator_Gt_GtE", "NumberReplacer", "DropStatement")
find = mutants.find_mutants
lines = (4, 5, 9)
mutation.find_mutants = lambda source: [m for m in find(source) if m.operator.startswith(operators) and m.line in lines]
[score] = mutation.run(root, {"tiny.py": ["test_tiny.py"]}, equivalent=equivalent, jobs=2)
with tempfile.TemporaryDirectory() as folder:
    runner = Runner([Copy.of(root, Path(folder))], {"tiny.py": ["test_tiny.py"]})
    slow, source = Score("tiny.py"), (root / "tiny.py").read_text()
    [mutant] = [m for m in find(source) if m.operator == "DropStatement" and m.line == 14]
    runner.submit(slow, mutant, source, mutant.apply(source), limit_s=3)
    runner.drain()
print(json.dumps([score.verdicts, score.equivalent, sorted(s.added for s in score.survivors), slow.verdicts]))
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tiny.py").write_text(TINY)
    (tmp_path / "test_tiny.py").write_text(TEST)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True, timeout=60)
    return tmp_path


def run_python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    folder = Path(mutation.__file__).parent
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)


def test_killed_surviving_equivalent_and_hanging_mutants(tree):
    done = run_python(RUN, str(tree))
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts, equivalent, survivors, slow = json.loads(done.stdout.splitlines()[-1])
    assert verdicts == {"killed": 2, "hung": 0, "survived": 2}, done.stdout
    assert equivalent == 1 and survivors == ["return number > 9", "return number >= 10"]
    assert slow == {"killed": 0, "hung": 1, "survived": 0}
    assert "survived: tiny.py:9\n  - return number > 10\n  + return number >= 10" in done.stdout
    assert (tree / "tiny.py").read_text() == TINY


def test_tests_that_fail_without_a_mutant_are_an_error(tree):
    (tree / "tiny.py").write_text(TINY.replace("first + second", "first"))
    program = "import mutation; mutation.run(mutation.Path(r'%s'), {'tiny.py': ['test_tiny.py']}, equivalent={})"
    done = run_python(program % tree)
    assert "MutationError: tiny.py: its tests do not pass without a mutant (exit status 1)" in done.stderr


def test_a_module_that_ends_its_process_when_it_is_imported_is_killed(tree):
    (tree / "tiny.py").write_text(TINY + "\nLIMIT = 1\nif LIMIT == 2:\n    raise SystemExit(2)\n")
    program = (
        "import mutants, mutation; find = mutants.find_mutants; from pathlib import Path\n"
        "mutation.find_mutants = lambda s: [m for m in find(s) if m.line == 18 and 'Eq_NotEq' in m.operator]\n"
        "[score] = mutation.run(Path(r'%s'), {'tiny.py': ['test_tiny.py']}, equivalent={})\n"
        "print(score.verdicts['killed'], score.run)"
    )
    done = run_python(program % tree)
    assert done.stdout.splitlines()[-1:] == ["1 1"], done.stdout + done.stderr


def texts(source: str, operator: str) -> list[str]:
    """What an operator puts in the place of the lines that it changes."""
    source += "\n"
    found = (mutant.apply(source) for mutant in find_mutants(source) if mutant.operator == operator)
    return [changed_lines(source, changed)[1] for changed in found if changed is not None]


@pytest.mark.parametrize(
    ("operator", "source", "changed"),
    [
        ("DropMethodCall", "y = x.abs().sum(dim=1)", ["y = x.sum(dim=1)", "y = x.abs()"]),
        ("DropMethodCall", "import torch\ny = torch.ones(2)", []),
        ("DropMethodCall", "x.abs_()", []),
        ("DropStatement", "x.abs_()", ["pass"]),
        ("DropStatement", "self.x = 1\nx = 2\nx += 1", ["pass", "pass"]),
        ("DropStatement", "def f(x):\n    if x:\n        return 1\n    return 2", ["pass"]),
        ("DropKeyword", "f(x, eps=e, dim=1)", ["f(x, dim=1)", "f(x, eps=e)"]),
        ("DropKeyword", "f(eps=e)", ["f()"]),
        (
            "ReplaceAttribute",
            "y = x.loss_M\nz = x.abs_loss_M, x.bins_N",
            ["y = x.abs_loss_M", "z = x.loss_M, x.bins_N"],
        ),
        ("NumberReplacer", 'f"{x + 1} {y[0]}"', []),
        (
            "NumberReplacer",
            "@f(1)\ndef g(x: h[1], y=2): pass",
            ["def g(x: h[1], y= 3): pass", "def g(x: h[1], y= 1): pass"],
        ),
    ],
)
def test_operators(operator, source, changed):
    assert texts(source, operator) == changed


def test_annotations_texts_and_decorators_are_left_alone():
    lines = {mutant.line for mutant in find_mutants(TINY) if "Add" in mutant.operator and mutant.operator != "AddNot"}
    assert lines == {5}
    assert not [mutant for mutant in find_mutants(TINY) if mutant.line == 2]


def test_an_equivalent_mutant_is_known_wherever_its_lines_stand():
    [key] = [
        ("tiny.py", *changed_lines(TINY, m.apply(TINY))) for m in find_mutants(TINY) if m.operator.endswith("Add_Sub")
    ]
    assert key == ("tiny.py", "return first + second", "return first - second")
    assert mutation.outdated(TINY, "tiny.py", {key: "r"}) == []
    assert mutation.outdated("import math\n\n" + TINY, "tiny.py", {key: "r"}) == []
    assert mutation.outdated(TINY.replace("+ second", "- second"), "tiny.py", {key: "r"}) == [key]


def test_every_module_and_test_of_the_table_exists():
    root = mutation.ROOT
    for module, tests in mutation.MODULES.items():
        files = [test.removeprefix("--deselect=").split("::")[0] for test in tests]
        assert [name for name in (module, *files) if not (root / name).is_file()] == []
    entries = mutation.load_equivalent(mutation.EQUIVALENT)
    assert {module for module, _, _ in entries} <= set(mutation.code_modules(root)) and all(entries.values())


def test_a_draw_repeats_takes_no_line_twice_and_knows_the_tests_of_a_package():
    root = mutation.ROOT
    assert all((root / test).exists() for tests in mutation._FURTHER.values() for test in tests)
    modules = ["megatron_daro/reward/math.py", "megatron_daro/rollout/ledger.py"]
    drawn, again = (mutation.draw(root, modules, {}, 12, seed=1) for _ in range(2))
    assert drawn == again and len({(one.module, one.mutant.line) for one in drawn}) == len(drawn) == 12
    tests = [Path(test).stem for test in mutation.package_tests(root, modules[1])]
    assert tests.index("test_ledger") < tests.index("test_deadlines"), "what names the module comes first"
    assert not [name for name in mutation.code_modules(root) if "/report/" in name]


def test_workers_that_a_test_spawns_do_not_import_the_runner_again(tree, tmp_path):
    (tree / "test_tiny.py").write_text(
        "import multiprocessing, os\nimport tiny\n\n"
        "def test_spawned():\n"
        "    worker = multiprocessing.get_context('spawn').Process(target=os.getpid)\n"
        "    worker.start(), worker.join(60)\n"
        "    assert worker.exitcode == 0\n"
    )
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, mutation\n"
        "if __name__ == '__main__':\n"
        f"    mutation.run(pathlib.Path({str(tree)!r}), {{'tiny.py': ['test_tiny.py']}}, equivalent={{}}, sample=1)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(TOOL)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_only_a_broken_test_killed_counts_as_survived():
    score = Score("algo", verdicts={"killed": 2, "hung": 0, "survived": 0})
    by_both, by_broken = Survivor("a.py:1", "x", "y"), Survivor("a.py:2", "x", "y")
    score.killers = {"test_broken": [by_both, by_broken], "test_sound": [by_both]}
    mutation.withdraw([score], {"test_broken"})
    assert score.verdicts == {"killed": 1, "hung": 0, "survived": 1} and score.survivors == [by_broken]
