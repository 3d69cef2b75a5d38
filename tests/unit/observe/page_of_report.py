"""`megatron-daro report` as it is typed, and the facts of the page that it writes."""

from __future__ import annotations

import base64
import gzip
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megatron_daro.cli import main


class Page(HTMLParser):
    """What a browser's parser would see: elements with attributes, the text of scripts, and the visible text."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.text = file.read_text(encoding="utf-8")
        self.elements: list[tuple[str, dict]] = []
        self.scripts: list[str] = []
        self.visible = ""
        self._inside = ""
        self.feed(self.text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        if tag == "script" and self.elements[-1][1].get("id") == "library":  # the browser unpacks it
            self.packed = self.scripts[-1]
            self.scripts[-1] = gzip.decompress(base64.b64decode(self.packed)).decode()
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.visible += data

    @property
    def figures(self) -> dict[str, dict[str, Any]]:
        """The plots by their titles, as plotly draws them."""
        titles = re.findall(r"<figure><h3>(.*?)</h3>", self.text)
        return dict(zip(titles, json.loads(self.scripts[0], parse_constant=pytest.fail), strict=True))

    def traces(self, title: str) -> dict[str, tuple[list, list]]:
        """The lines of a plot by their names: x, y."""
        return {trace["name"]: (trace["x"], trace["y"]) for trace in self.figures[title]["data"]}

    @property
    def steps_with_samples(self) -> list[str]:
        return re.findall(r"<h3>Step (\d+)</h3>", self.text)


def report_of(run: Path, *options: str) -> Page:
    """The page of a run."""
    assert main(["report", str(run), *options]) == 0
    return Page(run / "report.html")
