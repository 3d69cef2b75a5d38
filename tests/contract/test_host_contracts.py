"""The call sites and signatures of other frameworks that the adapters rely on, read from their sources.

One file per host in `hosts/`. A host is found as an installed package, or as a checkout that its environment variable
names; it is parsed, never imported. An upstream change turns a test red here before a user meets it.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import tomllib
from pathlib import Path

import pytest
from syntax import parsed

CONTRACTS = sorted((Path(__file__).parent / "hosts").glob("*.toml"))


def sources(contract):
    """The folder that holds the host's packages; None where the host is not here."""
    if os.environ.get(contract["variable"]):
        return Path(os.environ[contract["variable"]])
    spec = importlib.util.find_spec(contract["package"])
    return Path(spec.origin).parents[1] if spec and spec.origin else None


def arguments_of(tree, name):
    """Names of a function's arguments in order; None where there is no such function."""
    *classes, function = name.split(".")
    for part in classes:
        tree = next((n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == part), ast.Module([], []))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function:
            given = node.args
            return [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return None


def squeezed(text):
    return " ".join(text.split())


def breaches(contract, root):
    """Every clause of a contract that the sources do not keep, as sentences."""
    found = []
    for clause in [*contract.get("function", ()), *contract.get("text", ())]:
        path = root / clause["file"]
        if not path.is_file():
            found.append(f"{clause['file']} is gone")
            continue
        source = path.read_text(encoding="utf-8")
        if "text" in clause:
            if squeezed(clause["text"]) not in squeezed(source):
                found.append(f"{clause['file']} has no `{clause['text']}` ({clause['why']})")
            continue
        got = arguments_of(parsed(source), clause["name"])
        if got is None or got[: len(clause["arguments"])] != clause["arguments"]:
            found.append(f"{clause['file']}: {clause['name']} takes {got}, expected {clause['arguments']}")
    return found


@pytest.mark.parametrize("path", CONTRACTS, ids=lambda path: path.stem)
def test_the_host_keeps_what_the_adapter_relies_on(path):
    contract = tomllib.loads(path.read_text(encoding="utf-8"))
    root = sources(contract)
    if root is None:
        pytest.skip(f"{contract['host']} is not installed; {contract['variable']} may name a checkout")
    assert breaches(contract, root) == []


def files_of(contract):
    return sorted({clause["file"] for clause in [*contract.get("function", ()), *contract.get("text", ())]})


@pytest.mark.parametrize("path", CONTRACTS, ids=lambda path: path.stem)
def test_the_host_is_a_version_whose_files_were_looked_at(path):
    """Recorded for the newest release and for main; any other version is skipped here and must keep the clauses."""
    contract = tomllib.loads(path.read_text(encoding="utf-8"))
    root, pins = sources(contract), contract.get("sha256", {})
    assert set(pins) <= set(contract["versions"]) and len(set(pins.values())) == len(pins)
    if root is None or not pins:
        pytest.skip(f"{contract['host']} is not installed; {contract['variable']} may name a checkout")
    digest = hashlib.sha256(b"".join((root / file).read_bytes() for file in files_of(contract))).hexdigest()
    if digest not in pins.values():
        pytest.skip(f"these files of {contract['host']} are of none of {', '.join(pins)}: {digest}")


@pytest.mark.parametrize("path", CONTRACTS, ids=lambda path: path.stem)
def test_every_contract_is_whole(path):
    contract = tomllib.loads(path.read_text(encoding="utf-8"))
    assert contract["versions"]
    assert {"host", "package", "variable", "versions", "text"} <= set(contract)
    assert all(set(c) == {"file", "name", "arguments"} for c in contract.get("function", ()))
    assert all(set(c) == {"file", "why", "text"} for c in contract["text"])


def test_a_broken_clause_is_found(tmp_path):
    (tmp_path / "a.py").write_text("class C:\n    def f(self, x, *, y): ...\ndef g():\n    return  1\n")
    kept = {
        "function": [{"file": "a.py", "name": "C.f", "arguments": ["self", "x"]}],
        "text": [{"file": "a.py", "why": "", "text": "return 1"}],
    }
    assert breaches(kept, tmp_path) == []
    broken = {
        "function": [
            {"file": "a.py", "name": "C.f", "arguments": ["self", "z"]},
            {"file": "a.py", "name": "C.g", "arguments": []},
            {"file": "b.py", "name": "g", "arguments": []},
        ],
        "text": [{"file": "a.py", "why": "it counts", "text": "return 2"}],
    }
    assert len(breaches(broken, tmp_path)) == 4
