"""An evaluation gives servers no weights: what would leave them with random ones is refused before anything starts."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from megatron_daro.config import Config
from megatron_daro.config.sections import SGLangSection
from megatron_daro.errors import ConfigError
from megatron_daro.workshop.evaluate import measuring
from megatron_daro.workshop.evaluate.measuring import ask_all


def test_servers_that_wait_for_blocks_are_refused():
    engine = SimpleNamespace(sglang=SGLangSection(fp8_blocks=True))
    plan = SimpleNamespace(config=SimpleNamespace(engine=engine))
    with pytest.raises(
        ConfigError, match=r"engine\.sglang\.fp8_blocks: got true; allowed: false: nobody sends weights"
    ):
        ask_all(plan, notices=None)


@pytest.mark.parametrize(("kind", "beside_driver"), [("embedded", True), ("sglang", False)])
def test_the_verifiers_are_beside_the_driver_where_the_engine_is_in_it(monkeypatch, tmp_path, kind, beside_driver):
    class EnoughSeenError(Exception):
        pass

    def verdicts(section, **options):
        raise EnoughSeenError(options)

    data = {"train": ("t",)}
    config = Config.model_validate(
        {"model": {"path": "m"}, "data": data, "engine": {"kind": kind}, "trainer": {"run_dir": str(tmp_path)}}
    )
    monkeypatch.setattr(measuring.parts, "rollout_engine", lambda *arguments: None)
    monkeypatch.setattr(measuring, "Verdicts", verdicts)
    with pytest.raises(EnoughSeenError) as caught:
        asyncio.run(measuring._run(measuring.Plan(config, {}, ()), None, (), SimpleNamespace(warn=print)))
    (options,) = caught.value.args
    assert options["beside_driver"] is beside_driver and options["logs"].parent == tmp_path


@pytest.mark.parametrize("content", [None, b"", b'{"files', b"\xff"])
def test_without_a_whole_note_of_what_was_converted_it_is_converted_again(tmp_path, content):
    note = tmp_path / "note.json"
    if content is not None:
        note.write_bytes(content)
    assert measuring._read_note(note) is None
    note.write_text('{"files": {}}')
    assert measuring._read_note(note) == {"files": {}}


@pytest.mark.parametrize("has_config", [True, False])
def test_a_model_that_servers_have_elsewhere_is_refused(monkeypatch, tmp_path, has_config):
    async def told(urls):
        return {url: {"model_path": str(tmp_path), "weight_version": "3"} for url in urls}

    monkeypatch.setattr(measuring, "_told", told)
    urls = ("http://127.0.0.1:1", "http://127.0.0.1:2")
    if has_config:
        (tmp_path / "config.json").write_text("{}")
        model = measuring.of_servers(urls, None)
        assert (model.path, model.urls, model.weights["served"]["weight_version"]) == (tmp_path, urls, "3")
    else:
        with pytest.raises(ConfigError, match=r"which is not on this machine; .* fix: model\.path=DIR"):
            measuring.of_servers(urls, None)
