"""RUN/hf of a run: when it is written, and what it never replaces. The writing itself: tests/e2e, tests/unit/sync."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from megatron_daro.config.sections import TrainerSection
from megatron_daro.errors import ConfigError, SyncError
from megatron_daro.runtime import run_directory
from megatron_daro.sync.plan import ORIGIN_FILE, SendReport


class Policy:
    """Is asked for files; held says whether the weights could change meanwhile."""

    def __init__(self):
        self.files, self.held = [], False

    @asynccontextmanager
    async def hold(self):
        self.held = True
        yield 0
        self.held = False

    async def write(self, files):
        assert self.held
        self.files.append(files)
        return SendReport(2_000_000)


class Notices(list):
    notice = warn = list.append


@pytest.fixture
def section(tmp_path):
    return TrainerSection(run_dir=tmp_path, export_hf=True)


def exported(section, step):
    section.hf_dir.mkdir()
    (section.hf_dir / ORIGIN_FILE).write_text(json.dumps({"step": step}))


@pytest.mark.parametrize(("there", "due"), [(None, True), (4, True), (8, False)])
def test_it_is_written_unless_it_is_there_from_this_step(section, there, due):
    if there is not None:
        exported(section, there)
    policy, notices = Policy(), Notices()
    assert run_directory.exports_due(section, 8) == [section.hf_dir] * due
    asyncio.run(run_directory.export_writer(section, policy, notices)(8))
    assert [(files.directory, files.step) for files in policy.files] == [(section.hf_dir, 8)] * due
    off = section.model_copy(update={"export_hf": False})
    assert not run_directory.exports_due(off, 8) and run_directory.export_writer(off, policy, notices) is None


def test_the_critic_goes_into_a_directory_of_its_own(tmp_path):
    section, policy, notices = TrainerSection(run_dir=tmp_path, export_critic=True), Policy(), Notices()
    assert run_directory.exports_due(section, 8) == [tmp_path / "hf_critic"]
    asyncio.run(run_directory.export_writer(section, policy, notices)(8))
    assert [(files.directory, files.what) for files in policy.files] == [(tmp_path / "hf_critic", "critic")]
    both = section.model_copy(update={"export_hf": True})
    asyncio.run(run_directory.export_writer(both, policy, notices)(8))
    assert [files.what for files in policy.files[1:]] == ["policy", "critic"]
    (tmp_path / "hf_critic").mkdir()
    with pytest.raises(ConfigError, match=r"trainer\.export_critic.*hf_critic"):
        run_directory.require_replaceable_export(section)


def test_adapters_go_into_a_directory_of_their_own(tmp_path):
    section, policy = TrainerSection(run_dir=tmp_path, export_adapter=True), Policy()
    assert run_directory.exports_due(section, 8) == [tmp_path / "adapter"]
    asyncio.run(run_directory.export_writer(section, policy, Notices())(8))
    (files,) = policy.files
    assert (files.directory, files.what) == (tmp_path / "adapter", "adapter")


@pytest.mark.parametrize("content", [None, "", "[]", '{"step": "x"}'])
def test_what_is_no_export_is_never_replaced(section, content):
    section.hf_dir.mkdir()
    if content is not None:
        (section.hf_dir / ORIGIN_FILE).write_text(content)
    with pytest.raises(ConfigError, match=r"trainer\.export_hf"):
        run_directory.require_replaceable_export(section)
    policy = Policy()
    with pytest.raises(SyncError, match="hf"):
        asyncio.run(run_directory.export_writer(section, policy, Notices())(8))
    assert policy.files == []
    run_directory.require_replaceable_export(section.model_copy(update={"export_hf": False}))


def test_the_rest_of_an_export_that_did_not_end_goes_and_nothing_else(section, tmp_path):
    exported(section, 8)
    for name in (".hf.partial", ".hf.replaced", ".hf_critic.partial", "checkpoints"):
        (tmp_path / name).mkdir()
    run_directory.remove_unfinished_export(section)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "hf"]
