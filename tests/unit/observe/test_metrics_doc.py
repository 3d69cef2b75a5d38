"""docs/metrics.md names every metric key that the package writes or reads in the families that it names, and no key
twice. What a whole run wrote is looked at in tests/e2e/test_train_runs.py."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from documented_metrics import DOCUMENTED, is_documented
from syntax import parsed
from synthetic_run import write_synthetic_run

from megatron_daro.observe import read_metrics

ROOT = Path(__file__).resolve().parents[3]
FAMILIES = tuple(sorted({key.split("/")[0] + "/" for key in DOCUMENTED if "/" in key}))


def _literal(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else "{}" for v in node.values)
    return None


def _keys_in(path: Path) -> set[str]:
    nodes = list(ast.walk(parsed(path.read_text())))
    parts = {id(v) for node in nodes if isinstance(node, ast.JoinedStr) for v in node.values}
    texts = (_literal(node) for node in nodes if id(node) not in parts)
    return {t for t in texts if t and t.startswith(FAMILIES) and re.fullmatch(r"[a-z0-9_{}]+(/[a-z0-9_{}]+)+", t)}


def test_every_key_in_the_package_is_documented():
    # host_metrics.py has names that other frameworks give to what they log.
    files = sorted(p for p in (ROOT / "megatron_daro").rglob("*.py") if p.name != "host_metrics.py")
    found = {key: path.relative_to(ROOT) for path in files for key in _keys_in(path)}
    assert len(found) > 30, "the search itself finds nothing"
    # A family without its last part is a prefix that code adds `/{k}` to.
    undocumented = {k: p for k, p in found.items() if not is_documented(k) and not is_documented(k + "/{k}")}
    assert undocumented == {}


def test_the_synthetic_run_of_these_tests_uses_documented_keys_only(tmp_path):
    run = write_synthetic_run(tmp_path, steps=20, with_rollouts=False)
    used = {key for row in read_metrics(run) for key in row}
    assert {k for k in used if not is_documented(k)} == set()


def test_no_key_is_documented_twice():
    assert len(DOCUMENTED) == len(set(DOCUMENTED))
