"""A dry run says what the start would say, for real: both run here, up to where processes would begin."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import json
import os
import shutil
import signal
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny_task
import torch
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from loop_fakes import FakeProgress, make_rollout
from safetensors.torch import load_file, save_file
from stub_server import StubServer
from weightless import save_weights

from megatron_daro.algo.ppo import Ppo
from megatron_daro.checkpoints import STATE_FORMAT, Checkpoints
from megatron_daro.config import Config, check, loading, resolve, to_yaml
from megatron_daro.config.loading import ITEM
from megatron_daro.controller import RunOutcome
from megatron_daro.errors import CheckpointError, ConfigError, DaroError
from megatron_daro.observe.phases import Phases
from megatron_daro.observe.progress import Progress
from megatron_daro.rollout.recorder import RecordedMiniBatch, Recorder
from megatron_daro.runtime import preflight
from megatron_daro.runtime.context import RunContext
from megatron_daro.runtime.inputs import read_inputs
from megatron_daro.runtime.placement import Placement
from megatron_daro.runtime.policy_group import PolicyGroup
from megatron_daro.runtime.preflight import ENDS, begin, dry_run, taken_back_if_it_fails, with_template_date
from megatron_daro.runtime.provenance import provenance
from megatron_daro.runtime.run_directory import owned
from megatron_daro.types import Group, Prompt, Verdict

SHAPE = {
    "model_type": "qwen2",
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "hidden_size": 8,
    "intermediate_size": 16,
    "vocab_size": len(tiny_task.SYMBOLS),
    "max_position_embeddings": 64,
}
ROWS = [{"problem": f"{d}=", "answer": str(d)} for d in range(10)] * (2 * ENDS // 10 + 10)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_task.save_tokenizer(directory, tiny_task.SYMBOLS)
    (directory / "config.json").write_text(json.dumps(SHAPE))
    save_weights(directory)
    return directory


@pytest.fixture
def configured(tmp_path: Path, model: Path):
    """Writes a training file and resolves a configuration around it."""

    def configure(*overrides: str, content: bytes = lines(ROWS)) -> Config:
        (tmp_path / "train.jsonl").write_bytes(content)
        data = {"train": [str(tmp_path / "train.jsonl")], "prompt_template": "plain", "max_prompt_tokens": 4}
        tree = {"model": {"path": str(model)}, "data": data, "trainer": {"run_dir": str(tmp_path / "runs" / "one")}}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
        return resolve(tmp_path / "run.yaml", [override.format(here=tmp_path) for override in overrides])

    return configure


def lines(rows) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def parquet(rows) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


def zipped(content: bytes) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        archive.writestr("train.jsonl", content)
    return sink.getvalue()


def ends_with_the_same_error(config: Config, *, resume: bool = False, replay: Path | None = None) -> str:
    """The error of the dry run, which must be that of the start; neither leaves anything."""
    from megatron_daro.runtime.launch import train

    before = sorted(config.trainer.run_dir.parent.parent.rglob("*"))
    with pytest.raises(DaroError) as dry:
        dry_run(config, resume=resume, replay=replay)
    with pytest.raises(DaroError) as started:
        train(config, resume=resume, replay=replay)
    assert (type(dry.value), str(dry.value)) == (type(started.value), str(started.value))
    assert sorted(config.trainer.run_dir.parent.parent.rglob("*")) == before
    return str(started.value)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.prompt_template=chat", "chat template"),
        ("rollout.stop=['=<eos>']", "'=<eos>'"),
        ("rollout.stop_token_ids=[999]", "rollout.stop_token_ids"),
        ("data.max_prompt_tokens=1", "max_prompt_tokens"),
        ("trainer.run_dir={here}/run.yaml", "run.yaml is a file"),
        ("trainer.run_dir={here}/run.yaml/below", "run.yaml is a file"),
        ("engine.kind=sglang", "sglang"),
        ("engine={{kind: sglang, sglang: {{urls: ['http://127.0.0.1:9']}}}}", "127.0.0.1:9"),
        ("actor.megatron={{bucket_size: '1000'}}", "actor.megatron.bucket_size: got '1000'"),
        ("actor.megatron={{overlap_p2p_comm_warmup_flush: true}}", "Megatron-core refuses"),
        ("actor.megatron={{cpu_offloading: true}}", "cpu_offloading"),
        ("algorithm.name=none:Such", "none:Such"),
        ("algorithm.options.magnitud=abs", "algorithm.options.magnitud: got the unknown option"),
        ("data.eval=[{{name: a, path: '{here}/bad.jsonl'}}]", "drop_unusable"),
    ],
)
def test_a_field_that_cannot_work_is_found_before_anything_starts(configured, tmp_path, override, says):
    (tmp_path / "bad.jsonl").write_bytes(lines([ROWS[0], {"problem": "1="}]))
    assert says in ends_with_the_same_error(configured(override))


ELSEWHERE = ["cluster.nodes=1", "cluster.gpus_per_node=8"]
"""Other machines run it; without this the one that checks must have what the run needs."""


def test_shards_into_servers_that_keep_weights_elsewhere_are_refused_before_anything_starts(configured, monkeypatch):
    monkeypatch.setattr(preflight, "check_environments", lambda options: None)
    engine = "engine={{kind: sglang, sglang: {{sync: shards, arguments: {{enable_lora: true}}}}}}"
    assert "enable_lora" in ends_with_the_same_error(configured(engine))
    assert "enable_lora" in ends_with_the_same_error(configured(engine, *ELSEWHERE))


def test_a_server_without_lora_is_refused_before_anything_starts(configured):
    async def scenario():
        async with StubServer() as stub:
            sglang = f"{{{{kind: sglang, sglang: {{{{sync: adapters, urls: ['{stub.url}']}}}}}}}}"
            return await asyncio.to_thread(
                ends_with_the_same_error, configured(f"engine={sglang}", "lora.rank=2", "lora.targets=[q_proj,v_proj]")
            )

    assert "--enable-lora --max-lora-rank 2 --lora-target-modules q_proj v_proj" in asyncio.run(scenario())


@pytest.mark.parametrize("run_dir", ["/proc/one", "/proc/self/fd/one", "/sys/one"])
def test_a_run_directory_where_nobody_can_make_one_is_refused(configured, run_dir):
    if not Path("/sys").is_mount():
        pytest.skip("this machine has no sysfs")
    with pytest.raises(ConfigError, match=rf"trainer.run_dir: got '{run_dir}'"):
        dry_run(configured(f"trainer.run_dir={run_dir}"), resume=False, replay=None)


@pytest.mark.parametrize(
    ("option", "lacks"),
    [
        ("engine.kind=sglang", "sglang"),
        ("engine={{kind: sglang, sglang: {{urls: ['http://127.0.0.1:9']}}}}", "127.0.0.1:9"),
        ("environment.kind=none:Such", "none:Such"),
    ],
)
def test_what_a_login_node_lacks_is_said_and_no_error(configured, option, lacks):
    lines_ = dry_run(configured(option, *ELSEWHERE), resume=False, replay=None)
    (said,) = [line for line in lines_ if line.startswith("warning: ")]
    assert lacks in said


@pytest.mark.parametrize("option", ["reward.options.stict=false", "reward.verifier=none:Such"])
def test_a_verifier_that_no_machine_can_make_is_refused_on_a_login_node_too(configured, option):
    with pytest.raises(ConfigError, match=r"stict|none:Such"):
        dry_run(configured(option, *ELSEWHERE), resume=False, replay=None)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (gzip.compress(lines(ROWS))[:-9], "gzip"),
        (parquet(ROWS)[:-20], "Parquet"),
        (zipped(lines(ROWS)), "zip"),
        (lines(ROWS).decode().encode("utf-16"), "UTF-16"),
        (b"problem,answer\n1=,1\n", "JSON"),
        (parquet([{"instruction": "1=", "output": "1"}]), "instruction, output"),
        (b"[]", "train.jsonl"),
    ],
)
def test_a_file_that_cannot_be_used_is_found_before_anything_starts(configured, content, says):
    assert says in ends_with_the_same_error(configured(content=content))


def test_a_model_that_transformers_reads_as_another_is_found_before_anything_starts(configured, tmp_path):
    """A Mistral with `layer_types` is a Ministral there."""
    tiny_task.save_tokenizer(tmp_path / "ministral", tiny_task.SYMBOLS)
    shape = {**SHAPE, "model_type": "mistral", "sliding_window": None, "layer_types": ["full_attention"]}
    (tmp_path / "ministral" / "config.json").write_text(json.dumps(shape))
    save_weights(tmp_path / "ministral")
    told = ends_with_the_same_error(configured(f"model.path={tmp_path / 'ministral'}"))
    assert "'mistral'" in told and "'ministral'" in told


def test_a_prompt_with_a_token_beyond_the_embedding_is_found_before_anything_starts(configured, tmp_path):
    tiny_task.save_tokenizer(tmp_path / "short", tiny_task.SYMBOLS)
    largest = max(tiny_task.SYMBOLS.index(symbol) for symbol in "0123456789=")
    for vocab in (largest + 1, largest):
        (tmp_path / "short" / "config.json").write_text(json.dumps({**SHAPE, "vocab_size": vocab}))
        save_weights(tmp_path / "short")
        config = configured(f"model.path={tmp_path / 'short'}")
        if vocab > largest:
            dry_run(config, resume=False, replay=None)
    told = ends_with_the_same_error(config)
    assert f"token {largest} " in told and f"allowed: ids below {vocab}" in told


NORM, QUERY = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        (NORM, lambda tensor: None, "model.norm.weight is missing"),
        (QUERY, lambda tensor: tensor[:-1], "has shape [7, 8], config.json asks for [8, 8]"),
        (QUERY, lambda tensor: tensor.to(torch.int8), "is I8, allowed are F64, F32, F16, BF16 (Quantized models"),
        (QUERY, lambda tensor: tensor.to(torch.float8_e4m3fn), "is F8_E4M3, allowed are"),
        (QUERY + "_scale", lambda tensor: torch.ones(1), "q_proj.weight_scale of shape [1] is not a tensor of a qwen2"),
        (NORM, lambda tensor: tensor.fill_(float("nan")), "model.norm.weight holds NaN"),
        (NORM, lambda tensor: tensor.float().fill_(float("-inf")), "model.norm.weight holds NaN or inf"),
    ],
)
def test_weights_that_are_not_those_of_the_model_are_found_before_anything_starts(
    configured, model, tmp_path, name, change, says
):
    folder = tmp_path / "changed"
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = change(tensors.get(name))
    save_file({k: t.contiguous() for k, t in tensors.items() if t is not None}, folder / "model.safetensors")
    assert says in ends_with_the_same_error(configured(f"model.path={folder}"))


class OwnPpo(Ppo):
    """An algorithm of one's own with a critic."""

    name = "own_ppo"


@pytest.mark.parametrize("name", ["ppo", f"{__name__}:OwnPpo"])
def test_weights_that_are_not_those_of_the_critic_are_found_before_anything_starts(configured, model, tmp_path, name):
    shutil.copytree(model, tmp_path / "critic")
    tensors = load_file(tmp_path / "critic" / "model.safetensors")
    del tensors[NORM]
    save_file(tensors, tmp_path / "critic" / "model.safetensors")
    config = configured(f"algorithm.name={name}", f"algorithm.critic.path={tmp_path / 'critic'}")
    assert "model.norm.weight is missing" in ends_with_the_same_error(config)


def test_megatron_weights_of_another_model_are_found_before_anything_starts(configured, model, tmp_path):
    from megatron_daro import cli

    shape = {**SHAPE, "intermediate_size": 32}
    shutil.copytree(model, tmp_path / "wide")
    (tmp_path / "wide" / "config.json").write_text(json.dumps(shape))
    save_weights(tmp_path / "wide")
    out = tmp_path / "megatron"
    assert cli.main(["convert", "--hf", str(tmp_path / "wide"), "--out", str(out)]) == 0
    assert "linear_fc1.weight has shape" in ends_with_the_same_error(configured(f"model.megatron_weights={out}"))


def test_run_directories_that_hold_the_wrong_thing(configured, tmp_path):
    config = configured()
    assert str(config.trainer.run_dir) in ends_with_the_same_error(config, resume=True)
    config.trainer.run_dir.mkdir(parents=True)
    (config.trainer.run_dir / "metrics.jsonl").write_text("{}\n")
    assert "trainer.run_dir" in ends_with_the_same_error(config)
    (config.trainer.run_dir / "metrics.jsonl").unlink()
    with owned(config.trainer.run_dir, resume=False):
        assert f"process {os.getpid()}" in ends_with_the_same_error(config)
    (config.trainer.run_dir / "hf").mkdir()
    assert "trainer.export_hf: got true" in ends_with_the_same_error(configured("trainer.export_hf=true"))


@pytest.mark.parametrize("name", ["logs", "tensorboard", "rollouts", "checkpoints", "failed", "experts"])
def test_a_file_where_the_run_has_a_folder_is_found_before_anything_starts(configured, name):
    config = configured()
    config.trainer.run_dir.mkdir(parents=True)
    (config.trainer.run_dir / name).write_text("x")
    assert f"{name} in it is no directory" in ends_with_the_same_error(config)
    (config.trainer.run_dir / name).unlink()
    (config.trainer.run_dir / name).symlink_to("gone")
    assert f"{name} in it is no directory" in ends_with_the_same_error(config)


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "restarts.txt"])
def test_a_pipe_where_the_run_has_a_file_is_found_before_anything_starts(configured, name):
    config = configured()
    config.trainer.run_dir.mkdir(parents=True)
    os.mkfifo(config.trainer.run_dir / name)
    assert f"{name} in it is no file" in ends_with_the_same_error(config)


@pytest.mark.parametrize("target", ["one", "gone"])
def test_a_run_directory_that_is_a_link_to_nowhere_is_found_before_anything_starts(configured, target):
    config = configured()
    config.trainer.run_dir.parent.mkdir()
    config.trainer.run_dir.symlink_to(target)
    assert "is a link to what is not there" in ends_with_the_same_error(config)


def save_checkpoint(config: Config, *, known: bool = True, replay: Path | None = None, **state: object) -> Path:
    """One of step 3, with this state beside its format; `known`: it says what its run was made of."""
    made_of = provenance(config, replay) if known else None
    checkpoints = Checkpoints(config.trainer.run_dir, keep=1, provenance=made_of)

    async def write(directory: Path) -> None:
        (directory / "weights").write_text("x")

    notices = Progress(total_steps=1, rollouts_per_prompt=2, mode="off")
    return asyncio.run(checkpoints.save(3, write, {"format": STATE_FORMAT, "step": 3} | state, notices))


def test_a_checkpoint_that_the_run_cannot_go_on_from_is_found_before_anything_starts(configured):
    config, says = with_template_date(configured(), resume=False), "format None; allowed: "
    save_checkpoint(config, format=None)
    with pytest.raises(CheckpointError, match=says):
        dry_run(config, resume=True, replay=None)
    notices = Progress(total_steps=1, rollouts_per_prompt=2, mode="off")
    with pytest.raises(CheckpointError, match=says):
        begin(RunContext.of(config, notices, Phases()), resume=True, replay=None, width=80)
    assert not (config.trainer.run_dir / "config.yaml").exists()


def test_a_restart_that_the_audit_refuses_is_refused_by_a_dry_run_too(configured):
    config, other = (with_template_date(one, resume=False) for one in (configured(), configured("trainer.seed=1")))
    save_checkpoint(config)
    before = sorted(config.trainer.run_dir.rglob("*"))
    assert dry_run(config, resume=True, replay=None)
    with pytest.raises(CheckpointError, match=r"trainer\.seed"):
        dry_run(other, resume=True, replay=None)
    assert sorted(config.trainer.run_dir.rglob("*")) == before


def recorded(run: Path, length: int) -> Path:
    """A run that recorded one step, with groups of this size."""
    prompt = Prompt("p", "4", "unit", tokens=(1, 2))
    rollouts = tuple(make_rollout(1, 0, i, prompt, 0, length) for i in range(8))
    group = Group(1, prompt, rollouts, (Verdict(True, 1.0, "m"),) * 8)
    Recorder(run).write_step(1, {"trained": [group]}, RecordedMiniBatch(1, 1, 1, (1,), applied=True))
    return run


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_is_not_replayed_into_its_own_directory(configured, resume):
    config = configured()
    run_dir = recorded(config.trainer.run_dir, 2)
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    assert "--replay" in ends_with_the_same_error(config, resume=resume, replay=run_dir / ".." / run_dir.name)


@pytest.mark.parametrize(("was", "now"), [("a", "b"), ("a", None), (None, "a"), ("a", "copy")])
def test_a_replay_goes_on_with_its_own_recording_and_another_run_without_one(configured, tmp_path, was, now):
    config = with_template_date(configured(), resume=False)
    runs = {None: None, "a": recorded(tmp_path / "a", 2), "b": recorded(tmp_path / "b", 3)}
    runs["copy"] = shutil.copytree(tmp_path / "a", tmp_path / "copy")
    save_checkpoint(config, replay=runs[was])
    run = RunContext.of(config, Progress(total_steps=1, rollouts_per_prompt=2, mode="off"), Phases())
    if now == "copy":
        assert dry_run(config, resume=True, replay=runs[now])
        assert begin(run, resume=True, replay=runs[now], width=80).step == 3
        return
    with pytest.raises(CheckpointError, match="--replay"):
        dry_run(config, resume=True, replay=runs[now])
    with pytest.raises(CheckpointError, match="--replay"):
        begin(run, resume=True, replay=runs[now], width=80)


@pytest.mark.parametrize("known", [True, False])
def test_a_run_begins_at_its_newest_checkpoint_and_says_what_was_changed(configured, monkeypatch, known):
    config, changed = configured(), configured("trainer.keep_checkpoints=7")
    run_dir, said = config.trainer.run_dir, []
    for name in ("notice", "warn"):
        monkeypatch.setattr(Progress, name, lambda self, text: said.append(text))
    run_dir.mkdir(parents=True)
    notices = Progress(total_steps=1, rollouts_per_prompt=2, mode="off")
    run = RunContext.of(config, notices, Phases())
    start = begin(run, resume=False, replay=None, width=notices.width)
    assert (start.step, start.checkpoint, start.begins_again) == (0, None, False)
    assert (run_dir / "config.yaml").read_text() == to_yaml(config)
    start = begin(run, resume=True, replay=None, width=notices.width)
    assert start.begins_again and start.checkpoint is None
    assert "step 0" in said.pop()
    save_checkpoint(config, known=known)
    start = begin(RunContext.of(changed, notices, Phases()), resume=True, replay=None, width=notices.width)
    assert start.step == 3 and start.checkpoint.name == "step_000003" and not start.begins_again
    assert (run_dir / "config.yaml").read_text() == to_yaml(changed)
    assert said and ("trainer.keep_checkpoints" in "\n".join(said)) == known


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_dry_run_reads_the_ends_of_a_file_and_all_of_it_before_it_refuses(configured, pack):
    config = configured(content=pack(lines(ROWS)))
    found = dry_run(config, resume=False, replay=None)
    assert any(f"{2 * ENDS} rows" in line and "10 prompts" in line for line in found)
    # Both ends without an answer: the start would drop and count them, so a dry run must not refuse.
    bad_ends = lines([{"problem": "1="}] * ENDS + ROWS + [{"problem": "1="}] * ENDS)
    assert any(
        f"dropped {2 * ENDS}:" in line
        for line in dry_run(configured(content=pack(bad_ends)), resume=False, replay=None)
    )
    assert not config.trainer.run_dir.parent.exists()


def test_a_start_that_fails_later_leaves_no_directory_either(configured, monkeypatch):
    from megatron_daro.runtime import launch

    @contextlib.contextmanager
    def no_cluster(resources, **given):
        raise ConfigError("the Ray cluster has no room")
        yield

    monkeypatch.setattr(launch, "cluster", no_cluster)
    config = configured()
    with pytest.raises(ConfigError, match="no room"):
        launch.train(config)
    assert not config.trainer.run_dir.parent.exists()


def test_ctrl_c_ends_a_start_that_reads_a_checkpoint(configured, monkeypatch):
    from megatron_daro.runtime import launch

    async def start_all(*parts):
        pass

    async def load(policy, directory):
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(5)

    monkeypatch.setattr(launch, "cluster", lambda processes, **given: contextlib.nullcontext())
    monkeypatch.setattr(launch.parts, "start_all", start_all)
    monkeypatch.setattr(PolicyGroup, "load", load)
    config = with_template_date(configured("observe.progress=false"), resume=False)
    save_checkpoint(config)
    (config.trainer.run_dir / "config.yaml").write_text(to_yaml(config))
    assert launch.train(config, resume=True) == RunOutcome("stopped", 3)


@pytest.mark.parametrize("error", [ConfigError("x"), KeyboardInterrupt()])
def test_what_is_taken_back_and_what_stays(tmp_path, error):
    def fail(run_dir: Path, *files: str) -> None:
        with contextlib.suppress(ConfigError, KeyboardInterrupt), taken_back_if_it_fails(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
            for name in ("config.yaml", "tensorboard/events", "metrics.jsonl", *files):
                (run_dir / name).parent.mkdir(exist_ok=True)
                (run_dir / name).write_text("" if name == "metrics.jsonl" else "x")
            raise error

    fail(tmp_path / "runs" / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    fail(tmp_path / "logged", "logs/server_0.log")
    assert (tmp_path / "logged" / "config.yaml").exists()
    (tmp_path / "older").mkdir()
    fail(tmp_path / "older")
    assert list((tmp_path / "older").iterdir()) == []
    (tmp_path / "older" / "mine.txt").write_text("x")
    fail(tmp_path / "older")
    assert (tmp_path / "older" / "mine.txt").exists() and (tmp_path / "older" / "config.yaml").exists()


def values_of(field) -> st.SearchStrategy:
    """Allowed values and such as are not, judged by the annotation of a field."""
    annotation, _ = loading.strip(field.annotation)
    names = loading.choices(field.annotation, field.metadata)
    if names:
        return st.sampled_from([*names, "none:Such"])
    if annotation is bool:
        return st.booleans()
    if annotation in (int, float):
        return st.sampled_from([0, 1, 2, 3, 7, 10**6, 2**31, 2**32, 2**63 - 1, 2**64, -1, 0.5, 1e-300, 1e300])
    if annotation is dict:
        return st.dictionaries(st.sampled_from(["adam_eps", "no_such", "lr"]), st.just(1), max_size=1)
    return st.sampled_from(["=", "==", "{prompt}", "#{prompt}", "", "~/x", "/nowhere", ["="], ["<eos>", "=="], None])


FIELDS = {
    path: values_of(field)
    for path, field in loading.walk(Config)
    if ITEM not in path and not loading.is_section(loading.strip(field.annotation)[0]) and "megatron" not in path
    if path != "trainer.run_dir"  # which a start would make
}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.sampled_from(sorted(FIELDS)), st.none(), min_size=1, max_size=3).flatmap(
        lambda drawn: st.fixed_dictionaries({path: FIELDS[path] for path in drawn})
    )
)
@example({"trainer.seed": 7})
def test_what_passes_a_dry_run_can_be_put_together(configured, overrides):
    """Every part that a start makes before its first process; a field that a dry run overlooks fails here."""
    from megatron_daro.runtime import launch

    class StartedError(Exception):
        """All parts are there, and the first process would be started."""

    async def start(placement):
        raise StartedError

    base = configured()
    try:
        config = configured(
            *(f"{path}={json.dumps(value)}".replace("{", "{{").replace("}", "}}") for path, value in overrides.items())
        )
        if {*check(config).problems} - {*check(base).problems}:  # a dry run is of a configuration that was checked
            return
        dry_run(config, resume=False, replay=None)
    except DaroError:
        return
    assert not base.trainer.run_dir.exists()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(StartedError):
        patch.setattr(launch, "cluster", lambda processes, **given: contextlib.nullcontext())
        patch.setattr(Placement, "start", start)
        launch.train(config)


@pytest.mark.parametrize(
    ("field", "overrides"),
    [
        ("algorithm.turn_rewards", ["algorithm.name=rloo", "algorithm.turn_rewards=true"]),
        ("algorithm.turn_rewards", ["algorithm.name=ppo", "algorithm.turn_rewards=true"]),
        (
            "trainer.export_critic",
            ["algorithm.name=toy_algorithm:Toy", "algorithm.options={{baseline: 0.5}}", "trainer.export_critic=true"],
        ),
        (
            "algorithm.critic",
            [
                "algorithm.name=toy_algorithm:Toy",
                "algorithm.options={{baseline: 0.5}}",
                "algorithm.critic.offload=true",
            ],
        ),
    ],
)
def test_what_an_algorithm_has_not_is_refused_before_anything_starts(configured, field, overrides):
    own = ["environment.kind=toy_steps:Steps", "data.prompt_template=plain"]
    with pytest.raises(ConfigError, match=rf"{field}: got .*; allowed: .*; fix: "):
        dry_run(configured(*own, *overrides), resume=False, replay=None)


def test_an_agent_without_the_chat_template_is_refused_before_anything_starts(configured):
    with pytest.raises(ConfigError, match=r"data\.prompt_template: got 'plain'"):
        read_inputs(configured("environment.kind=asyncio:sleep"), FakeProgress())


def test_a_template_that_cannot_go_on_after_an_answer_is_refused_before_anything_starts(configured, model, tmp_path):
    forgets = shutil.copytree(model, tmp_path / "forgets")
    (forgets / "chat_template.jinja").write_text("{{ messages[-1]['content'] }}")
    chat = [f"model.path={forgets}", "data.prompt_template=chat", "data.max_prompt_tokens=100"]
    dry_run(configured(*chat), resume=False, replay=None)
    with pytest.raises(ConfigError, match=r"environment\.kind: the chat template"):
        dry_run(configured(*chat, "environment.kind=toy_steps:Steps"), resume=False, replay=None)


TWO_GPUS = ["cluster={{gpus_per_node: 2}}", "actor.data_parallel=2"]


def test_it_says_what_ranks_on_gpus_add_to_megatrons_options(configured):
    alone, two, own = (
        " ".join(dry_run(configured(*options), resume=False, replay=None))
        for options in ([], TWO_GPUS, [*TWO_GPUS, "actor.megatron={{overlap_grad_reduce: false}}"])
    )
    assert "overlap_grad_reduce=true" in two and "overlap_grad_reduce" not in alone + own
