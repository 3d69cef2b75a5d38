"""What holds for the repository as a whole: nothing of one machine in it, requirements, links, quoted errors."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import setuptools
from syntax import parsed

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_daro"

# Written in parts, so that this file does not hold what it looks for.
HOSTS = [
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("files", "pythonhosted", "org"),
        ("deb", "debian", "org"),
        ("registry", "npmjs", "org"),
        ("download", "pytorch", "org"),
        ("huggingface", "co"),
    )
]
MACHINE_PATHS = [r"(?<![\w.])/" + name + r"\b" for name in ("work", "root")]
WORKPLACE = [
    a + b
    for a, b in (
        (r"(?i)\b(?:sub-?|AI |coding )ag", r"ents?\b"),
        (r"\bbrief", r"ing\b"),
        (r"\bBRIEF", r"\.md"),
        (r"\.lib", r"rary\b"),
    )
]
FORBIDDEN = [re.compile(pattern) for pattern in [*map(re.escape, HOSTS), *MACHINE_PATHS, *WORKPLACE]]


NOT_REQUIRED = {
    "transformer_engine": "extra gpu",
    "wandb": "extra wandb",
    "openai": "extra agents",
    "pydantic_core": "pinned by pydantic",
    "annotated_types": "part of pydantic's interface",
    "markupsafe": "part of jinja2's interface",
    "latex2sympy2_extended": "pinned by math-verify, which is pinned",
    "verl": "the host of plugins/verl.py, installed by whoever uses it",
    "tensordict": "verl's batches",
    "slime": "the host of plugins/slime.py",
    "roll": "the host of plugins/roll.py",
    "dacite": "ROLL's configuration",
    "fla": "kernels of linear attention on GPUs, installed by whoever wants them",
    "mooncake": "what carries weights over RDMA, and its package depends on the CUDA version",
    "hydra": "ROLL's configuration",
    "omegaconf": "ROLL's configuration",
    "sympy": "torch and math-verify both require it; their results are sympy objects",
}
NOT_IMPORTED = {
    "tokenizers": "transformers loads tokenizer.json with it",
    "triton": "Megatron-core 0.18 and later import it",
}


def tracked(*patterns: str) -> list[Path]:
    """Committed files, and new ones that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"needs a git checkout: {error}")
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text_of(path: Path) -> str:
    """The text of a file; empty for a binary one."""
    content = path.read_bytes()
    return "" if b"\0" in content else content.decode("utf-8", errors="replace")


def findings(text: str) -> list[str]:
    """What a text says that belongs to one machine, one registry or one workplace."""
    return [match.group() for pattern in FORBIDDEN for match in pattern.finditer(text)]


def test_nothing_of_one_machine_or_one_registry():
    files = tracked()
    found = {name_of(path): findings(text_of(path)) for path in files}
    assert {name: what for name, what in found.items() if what} == {}


def test_the_search_finds_what_it_should():
    assert findings("see /wor" + "k/x") and findings("/roo" + "t/.config") and findings("https://" + HOSTS[0])
    assert findings("../.lib" + "rary") and not findings("tests/root /workers a/work rootless framework")


def declared() -> dict[str, str]:
    """Distribution name in lower case with hyphens -> requirement line of requirements.txt."""
    lines = (line.split("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines())
    return {canonical(re.split(r"[=<>!~\[ ]", line)[0]): line for line in lines if line}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.fixture
def setup_arguments(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What setup.py hands to setuptools."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: given.update(arguments))
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(ROOT / "setup.py"), run_name="__main__")
    return given


def test_setup_and_requirements_agree(setup_arguments):
    assert setup_arguments["install_requires"] == list(declared().values())
    assert set(setup_arguments["extras_require"]) == {"gpu", "dev", "wandb", "agents"}
    assert all(re.search(r"[=<>]", line) for line in declared().values()), "every requirement has a tested range"
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    packages = {ROOT / name.replace(".", "/") for name in setup_arguments["packages"]}
    assert folders == packages, "a folder with code and without __init__.py is not installed"


def imported_names(paths: list[Path]) -> set[str]:
    """First parts of the dotted names that are imported."""
    names: set[str] = set()
    for path in paths:
        for node in ast.walk(parsed(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.split(".")[0])
    return names


def test_what_the_package_imports_is_required_and_the_reverse():
    third_party = imported_names(list(PACKAGE.rglob("*.py"))) - set(sys.stdlib_module_names) - {PACKAGE.name}
    owners = packages_distributions()
    distributions = {name: {canonical(d) for d in owners.get(name, [name])} for name in third_party}
    missing = {n for n, owned in distributions.items() if not owned & set(declared())} - set(NOT_REQUIRED)
    assert missing == set(), "imported by the package, but not in requirements.txt"
    used = set().union(*distributions.values()) | set(NOT_IMPORTED)
    assert set(declared()) - used == set(), "in requirements.txt, but imported nowhere"


LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
MENTION = re.compile(r"(?<![\w/.])((?:docs|tests|benchmarks|examples|tools|megatron_daro|\.ci)/[\w./-]*\w)")


def anchors(markdown: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+)$", markdown, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path: Path) -> list[str]:
    """Links and mentioned paths of a page that lead nowhere."""
    text = path.read_text()
    broken = [name for name in MENTION.findall(text) if not (ROOT / name).exists() and not name.startswith(RESULTS)]
    for groups in LINK.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        target = next(filter(None, groups))
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        file, _, anchor = target.partition("#")
        goal = path.parent / file if file else path
        if not goal.exists() or (anchor and anchor not in anchors(goal.read_text())):
            broken.append(target)
    return broken


RESULTS = "benchmarks/results"
"""Written by the benchmarks; a result that nobody measured yet is not there."""


@pytest.mark.parametrize(
    "path",
    [
        *sorted(ROOT.glob("*.md")),
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "examples").glob("*/*.md")),
        ROOT / "tests" / "README.md",
    ],
    ids=name_of,
)
def test_every_link_leads_somewhere(path):
    assert broken_links(path) == []


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One\n[a](#one) [b](#two) [c](missing.md) `docs/missing.md` and ![d](picture.svg)\n")
    assert broken_links(page) == ["docs/missing.md", "#two", "missing.md", "picture.svg"]


FILE = re.compile(r"(?<![\w/.*<>-])([\w./-]*\w\.py)\b")
FOLDER = re.compile(r"(?<![\w/.*<>-])([\w./-]*\w/)(?![\w.*])")
MAP_LINE = re.compile(r"^([a-z_0-9]+(?:, [a-z_0-9]+)*)  +\S", re.MULTILINE)
NOT_OURS = re.compile(
    r"(python/)?(torch|triton|megatron/core|sglang|srt|verl|NEMO_RL)/"
    r"|(moe|ssm|transformer)/|(layers|managers|configs|models|clients|envs)/"
    r"|(train|train_rl|(examples/)?(run_grpo|run_grpo_single_controller|start_rlvr_pipeline))\.py$"
    r"|(SEQLEN_BALANCING|conversion_mapping|fp8_utils|patch_torch|qwen3_moe|runtime_context)\.py$"
    r"|(loss_functions|megatron_policy_worker)\.py$"
    r"|(my_losses|loss_case)\.py$"
)
"""Files of other projects, by the folder or the name under which a text of ours calls them; files of the reader."""


def missing_files(text: str, path: Path) -> list[str]:
    """Python files that a text of `path` names and that are not there.

    A name is relative to the repository, the package, a folder around `path`, or one that the text itself names. A
    file that the text shows (`# name.py` on top of its code) is there.
    """
    shown = set(re.findall(r"^# (\w+\.py)$", text, re.MULTILINE))
    names = [name for name in dict.fromkeys(FILE.findall(text)) if name not in shown and not NOT_OURS.match(name)]
    roots = [PACKAGE, *(parent for parent in path.parents if parent == ROOT or ROOT in parent.parents)]
    named = [root / name for root in roots for name in [*FILE.findall(text), *FOLDER.findall(text)]]
    folders = {place.parent if place.is_file() else place for place in named if place.exists()}
    return [name for name in names if not any((folder / name).is_file() for folder in [*roots, *folders])]


def missing_modules(text: str, folder: Path) -> list[str]:
    """Modules that the map of a package names in its first column and that are not in its folder."""
    names = [name for names in MAP_LINE.findall(text) for name in names.split(", ")]
    return [name for name in names if not (folder / f"{name}.py").is_file() and not (folder / name).is_dir()]


PAGES = ("*.md", "docs/*.md", "examples/**/*.md", "tests/README.md", "megatron_daro/plugins/README.md")


def test_files_that_a_page_names_are_there():
    pages = sorted({page for pattern in PAGES for page in ROOT.glob(pattern)} - {ROOT / "CHANGELOG.md"})
    missing = {name_of(page): missing_files(page.read_text(), page) for page in pages}
    assert {name: files for name, files in missing.items() if files} == {}


def test_files_that_a_module_docstring_names_are_there():
    missing = {}
    for path in tracked("*.py"):
        text = ast.get_docstring(parsed(path.read_text())) or ""
        maps = missing_modules(text, path.parent) if path.name == "__init__.py" else []
        missing[name_of(path)] = missing_files(text, path) + maps
    assert {name: files for name, files in missing.items() if files} == {}


def test_a_missing_file_is_found(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "here.py").touch()
    page = tmp_path / "page.md"
    text = "`controller.py`, `actor/loss.py`, in `docs/` gone.py; tests/gone.py, srt/theirs.py\n# my.py\nsee my.py\n"
    assert missing_files(text, page) == ["gone.py", "tests/gone.py"]
    assert missing_modules("here, gone  what they do\nother   -\na sentence\n", tmp_path / "one") == ["gone", "other"]


def test_the_readme_leads_to_every_page():
    text = (ROOT / "README.md").read_text()
    pages = [f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")]
    assert [page for page in pages if f"({page})" not in text] == []


def quoted_errors() -> list[str]:
    """The headings of docs/troubleshooting.md that quote a message."""
    return re.findall(r"^### `(.+)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)


def message_texts() -> list[str]:
    """Every text in the package, with `...` where a value stands."""
    texts = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(parsed(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                texts.append("".join(p.value if isinstance(p, ast.Constant) else "..." for p in node.values))
    return [" ".join(text.split()) for text in texts]


def test_the_errors_that_troubleshooting_quotes_are_those_of_the_code():
    texts = message_texts()
    quoted = quoted_errors()
    strange = [
        (quote, part)
        for quote in quoted
        for part in (piece.strip() for piece in quote.split("..."))
        if len(part) >= 4 and not any(part in text for text in texts)
    ]
    assert strange == []


def test_shell_scripts_parse():
    scripts = [*tracked("*.sh"), ROOT / ".ci" / "run"]
    for script in scripts:
        done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr


def test_licence_is_whole():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "APPENDIX" in text


def test_base_names_of_test_files_are_unique():
    """There are no packages in tests/: of two files with one name pytest imports one and refuses the other."""
    places: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path.name != "conftest.py":  # pytest gives those the names of their folders
            places.setdefault(path.name, []).append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
