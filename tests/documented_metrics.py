"""The metric keys that docs/metrics.md names."""

from __future__ import annotations

import re
from pathlib import Path

DOCUMENTED = re.findall(r"^[*|] `([^`]+)` [(|]", (Path(__file__).parents[1] / "docs/metrics.md").read_text(), re.M)


def _pattern(key: str) -> re.Pattern[str]:
    """`{k}` stands for anything within a part of the path, here and in the package's f-strings."""
    return re.compile("[^/]+".join(re.escape(part) for part in re.split(r"\{[^}]*\}", key)))


def is_documented(key: str) -> bool:
    plain = re.sub(r"\{[^}]*\}", "x", key)
    return any(_pattern(d).fullmatch(plain) or _pattern(key).fullmatch(d) for d in DOCUMENTED)
