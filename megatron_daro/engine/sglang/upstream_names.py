"""Prints, as one JSON object, which sglang an interpreter has, without importing it.

    python upstream_names.py

interpreter.py -> (this, in the interpreter of the servers) -> JSON on standard output. It uses
nothing outside the standard library and runs on Python 3.9 and newer.

Importing SGLang's ServerArgs takes 7 to 13 s and needs a working torch; reading its source takes 0.1 s. Most arguments
are declared as annotated fields (0.5.18: of the class ServerArgs; 0.5.20 and newer: of the classes in
arg_groups/fields), a few by calls of add_argument. The names of flags are collected from both.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any


def sources(root: Path) -> list[Path]:
    """Return the existing files among those that declare command-line arguments."""
    fields = sorted((root / "srt" / "arg_groups" / "fields").glob("*.py"))
    return [path for path in [root / "srt" / "server_args.py", *fields] if path.is_file()]


def flags(tree: ast.Module) -> set[str]:
    """Return the names of the flags that a file declares, without leading hyphens, with underscores."""
    words: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            words |= _field_flags(node.target.id, node.annotation)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            words |= {_flag_text(word) for word in node.args}
    return {name.lstrip("-").replace("-", "_") for name in words if name.startswith("--")}


def _field_flags(name: str, annotation: ast.expr) -> set[str]:
    """Return flags of `name: A[type, "help"]` or `name: A[type, Arg(...)]`; none for other annotations."""
    if not isinstance(annotation, ast.Subscript) or getattr(annotation.value, "id", "") not in ("A", "Annotated"):
        return set()
    metadata = annotation.slice.elts[1:] if isinstance(annotation.slice, ast.Tuple) else []
    for node in metadata:
        if not isinstance(node, ast.Call):
            return {f"--{name}"}  # Help text, written out or joined from parts.
        if getattr(node.func, "id", "") == "Arg":
            options = {word.arg: _literal(word.value) for word in node.keywords}
            if options.get("no_cli"):
                return set()
            own_flags = {options.get("cli_name") or f"--{name}", *(options.get("aliases") or [])}
            two_ways = any(getattr(word.value, "attr", "") == "BooleanOptionalAction" for word in node.keywords)
            return own_flags | {f"--no-{flag.lstrip('-')}" for flag in own_flags} if two_ways else own_flags
    return set()


def _flag_text(node: ast.expr) -> str:
    """Return the text of a flag; empty for anything other than a string literal."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def nccl_package() -> str | None:
    """Return the NCCL package installed with torch, as `package==version`; None if there is none: torch has no CUDA, or
    contains its own NCCL."""
    for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{name}=={importlib.metadata.version(name)}"
    return None


def has_mooncake() -> bool:
    """Whether Mooncake's transfer engine is installed, in any of its packages."""
    return importlib.util.find_spec("mooncake") is not None


def describe() -> dict[str, Any]:
    """Return `version` (None: not installed), `names`, `python`, `nccl`, `mooncake`; sglang is not imported."""
    packages = {"nccl": nccl_package(), "mooncake": has_mooncake()}
    python = ".".join(map(str, sys.version_info[:3]))
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return {"version": None, "names": [], "python": python, **packages}
    spec = importlib.util.find_spec("sglang")
    names: set[str] = set()
    for root in (spec.submodule_search_locations or []) if spec else []:
        for path in sources(Path(root)):
            names |= flags(ast.parse(path.read_text(encoding="utf-8")))
    return {"version": version if spec else None, "names": sorted(names), "python": python, **packages}


if __name__ == "__main__":
    # Do not look for sglang beside this file.
    sys.path[:] = [entry for entry in sys.path if entry != str(Path(__file__).resolve().parent)]
    print(json.dumps(describe()))
