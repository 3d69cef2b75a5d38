#!/usr/bin/env python3
"""Fetch the files of the evaluation suite `math6` from where they are published, and check them.

    python tools/fetch_eval_suite.py --out eval_data

Each file is taken at a fixed commit; its SHA-256 and its number of rows must be those below. A file that is there
already and right is left alone, so a broken fetch is repeated by the same command. The problems belong to their
authors (AIME and AMC to the MAA, Minerva's to MIT OpenCourseWare under CC BY-NC-SA): look at the terms of each before
you pass them on. Standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

MIRROR = "https://raw.githubusercontent.com"
_TRIES, _TIMEOUT_S, _PAUSE_S = 3, 60.0, 2.0


@dataclass(frozen=True)
class Source:
    """One file. path: in the repository at the commit. rows: number of its lines."""

    repository: str
    commit: str
    path: str
    sha256: str
    rows: int

    def url(self, mirror: str) -> str:
        """Return its address."""
        return f"{mirror.rstrip('/')}/{self.repository}/{self.commit}/{self.path}"


_QWEN = ("QwenLM/Qwen2.5-Math", "a45202bd16f1ec06f433442dc1152d0074773465")
SOURCES: dict[str, Source] = {
    "aime24": Source(
        *_QWEN,
        "evaluation/data/aime24/test.jsonl",
        "af2b8bd2aa911b6333ad0df32f3ca05c7ae8ed10f1731f4372c8ae26990bf7ac",
        30,
    ),
    "aime25": Source(
        "inclusionAI/AReaL",
        "04ab6018c4ef43919348efdc52ba6b679a14ce88",
        "evaluation/data/aime25/test.jsonl",
        "b4e273c02d3e7fe1b74b59eae768fc8230bfb0f79539890cb56f4361caac0331",
        30,
    ),
    "amc23": Source(
        *_QWEN,
        "evaluation/data/amc23/test.jsonl",
        "43707e1ca784602d8479de24ee8ce36609dbebc46dd152b0b12a46611aa898a4",
        40,
    ),
    "math500": Source(
        "hkust-nlp/simpleRL-reason",
        "cf1c7858bfc145a27aa733e75d930d34f0d318a6",
        "examples/simplelr_math_eval/data/math500/test.jsonl",
        "35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132",
        500,
    ),
    "minerva": Source(
        *_QWEN,
        "evaluation/data/minerva_math/test.jsonl",
        "0e656b430d3a0a1dab6aa853f453ba3805e28e2cabe4fc72486a897cc09d8ba2",
        272,
    ),
    "olympiadbench": Source(
        *_QWEN,
        "evaluation/data/olympiadbench/test.jsonl",
        "bb8c1e38a16ea9eacb77530315a674d883f267fbff79183effc53681b4fcc416",
        675,
    ),
}


class FetchError(Exception):
    """A file could not be fetched, or is not the one that was published."""


def checked(name: str, content: bytes) -> bytes:
    """Return the content if it is that of this set. Raises FetchError."""
    source, found = SOURCES[name], hashlib.sha256(content).hexdigest()
    rows = sum(bool(line.strip()) for line in content.splitlines())
    if (found, rows) != (source.sha256, source.rows):
        raise FetchError(
            f"{name}: got {len(content)} bytes with {rows} rows and SHA-256 {found}; allowed: {source.rows} rows and "
            f"{source.sha256}; fetch again, and if it stays so, the publisher changed the file"
        )
    return content


def fetched(name: str, mirror: str) -> bytes:
    """Return a file from its publisher. Raises FetchError after some tries."""
    url = SOURCES[name].url(mirror)
    for attempt in range(_TRIES):
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
                return checked(name, answer.read())
        except OSError as error:  # URLError and timeouts are OSErrors
            if attempt + 1 == _TRIES:
                raise FetchError(f"{name}: {url}: {error}; look at the network, or give --from a folder") from error
            time.sleep(_PAUSE_S * 2**attempt)
    raise AssertionError("unreachable")


def copied(name: str, folder: Path) -> bytes:
    """Return the published file from a folder, whatever it is called there. Raises FetchError where it is missing."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() == SOURCES[name].sha256:
            return checked(name, content)
    raise FetchError(
        f"{name}: no file in {folder} has the SHA-256 {SOURCES[name].sha256}; leave --from out to fetch it"
    )


def main(arguments: list[str] | None = None) -> int:
    """Fetch what is missing. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("eval_data"), help="folder for the files")
    parser.add_argument("--from", dest="folder", type=Path, help="folder with the files, where there is no network")
    parser.add_argument("--mirror", default=MIRROR, help="another host with the same paths")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        for name, source in SOURCES.items():
            target = args.out / f"{name}.jsonl"
            if target.is_file() and hashlib.sha256(target.read_bytes()).hexdigest() == source.sha256:
                print(f"{target}: there already, {source.rows} rows")
                continue
            content = copied(name, args.folder) if args.folder else fetched(name, args.mirror)
            temporary = target.with_name(target.name + ".tmp")
            temporary.write_bytes(content)
            temporary.replace(target)
            print(f"{target}: {source.rows} rows")
    except (FetchError, OSError) as error:
        print(f"fetch_eval_suite.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
