"""Whole runs of `megatron-daro train` whose rollouts come from two SGLang servers, which are killed on the way."""

from __future__ import annotations

import ipaddress
import time

import psutil
import pytest
from books import assert_books_add_up
from cli_runs import last_step, servers, started
from safetensors.torch import load_file
from sglang_pool import SERVER_ENVIRONMENT, cpu_servers

from megatron_daro.observe.metrics import read_metrics
from megatron_daro.rollout.recorder import read_step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

START_LIMIT_S = 400
STEPS = 12


@pytest.fixture
def config(tiny, tmp_path, pool):
    """The tiny task on two servers; those that other tests share are ended, so that not four run at once."""
    sglang = cpu_servers(stall_timeout_s=60, sync_timeout_s=120, request_timeout_s=120, env=SERVER_ENVIRONMENT)
    pool.down()

    def write(max_restarts=20, **sections):
        # What servers sample is not the same twice: with few rounds the filter can leave a batch smaller than asked.
        changes = {
            "engine": {"kind": "sglang", "replicas": 2, "sglang": sglang | {"max_restarts": max_restarts}},
            "rollout": {"max_refill_rounds": 20},
        }
        return tiny.write_config(tmp_path / "sglang.yaml", changes | sections)

    return write


@pytest.mark.heavy
def test_a_run_outlives_the_kill_of_a_server(config, tmp_path, record_property):
    began, run_dir = time.monotonic(), tmp_path / "run"
    path = config(trainer={"steps": STEPS, "save_every_steps": 0, "eval_every_steps": STEPS})
    with started(["train", path, f"trainer.run_dir={run_dir}"], tmp_path / "log") as run:
        run.wait_until(lambda: last_step(run_dir) >= 2, "second step", START_LIMIT_S)
        assert run.named("ray::ServerWorker") and run.named("ray::TrainWorker")
        listening, stores = listeners(run.processes()), store_ports(run)
        killed_after, victim = last_step(run_dir), servers(run)[0]
        victim.kill()
        finished = run.finish()
        assert run.left_behind() == []
    assert finished.code == 0, finished.stderr
    record_property(f"seconds of the run: {STEPS} steps on two servers, one killed", round(time.monotonic() - began))
    lines = read_metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    for line in lines[1:]:
        assert_books_add_up(line)
        assert line["rollout/staleness_mean"] == 0
        assert line["mismatch/logprob_abs_mean"] < 1e-4
        assert line["sync/bytes"] > 0
    assert lines[-1]["rollout/groups_trained"] == 4 * STEPS
    assert "incomplete" not in finished.stdout, finished.stdout  # each group found a server that answered it whole
    # The death is seen at the latest by the weight update of the step that ends next.
    assert killed_after < STEPS and "fenced" in " ".join(lines[-1])
    assert lines[-1]["engine/fenced"] >= 1 and lines[-1]["engine/restarts"] >= 1
    assert lines[killed_after]["engine/servers"] == 2
    assert min(line["engine/servers"] for line in lines[killed_after:]) == 1
    for step in range(1, STEPS + 1):
        versions = {r.weight_version for group, _ in read_step(run_dir, step) for r in group.rollouts}
        assert versions == {step - 1}
    assert tells_why(finished.stdout)
    assert_loopback(listening, but=stores)


@pytest.mark.heavy
def test_a_stale_run_gets_its_servers_back_and_ends_when_none_may_be_started_again(config, tmp_path, record_property):
    began, run_dir = time.monotonic(), tmp_path / "run"
    path = config(
        max_restarts=1,
        trainer={"steps": 100000, "save_every_steps": 0},
        rollout={"prompts_per_batch": 4, "rollouts_per_prompt": 4, "max_response_tokens": 4}
        | {"max_staleness": 1, "keep_surplus": True, "oversampling": 1.5},
        algorithm={"correction": {"kind": "tis"}},
    )
    with started(["train", path, f"trainer.run_dir={run_dir}"], tmp_path / "log") as run:
        run.wait_until(lambda: last_step(run_dir) >= 2, "second step", START_LIMIT_S)
        servers(run)[0].kill()
        run.wait_until(lambda: latest(run_dir)["engine/servers"] == 1, "step with one server")
        run.wait_until(lambda: latest(run_dir)["engine/servers"] == 2, "step with both again", START_LIMIT_S)
        before = last_step(run_dir)
        for process in servers(run):
            process.kill()
        # The first has used up its restarts; the run waits for the second, and goes on with it.
        run.wait_until(lambda: last_step(run_dir) > before + 1, "a step after all were gone", START_LIMIT_S)
        for process in servers(run):
            process.kill()
        finished = run.finish()
        assert run.left_behind() == []
    record_property("seconds of the run: one server back, then all killed", round(time.monotonic() - began))
    assert finished.code == 1
    assert "EngineError: all 2 SGLang servers are gone" in finished.last_line
    assert tells_why(finished.last_line)
    lines = read_metrics(run_dir)[1:]
    for line in lines:
        assert_books_add_up(line)
        assert line["rollout/staleness_mean"] <= 1
        assert line["mismatch/logprob_abs_mean"] < 1  # weights of at most one step before; a stranger's would be far
    assert max(line["rollout/staleness_mean"] for line in lines) > 0
    assert lines[-1]["engine/fenced"] >= 1 and lines[-1]["engine/restarts"] >= 1


@pytest.mark.heavy
def test_a_run_with_adapters_sends_them_alone_and_outlives_the_kill_of_a_server(config, tmp_path):
    """Nothing but `lora` is said: servers get their arguments and the transport from it."""
    run_dir, path = tmp_path / "run", config(trainer={"steps": 6, "save_every_steps": 0, "eval_every_steps": 6})
    options = [f"trainer.run_dir={run_dir}", "lora.rank=4", "lora.alpha=12", "actor.optimizer.learning_rate=1e-2"]
    with started(["train", path, *options, "trainer.export_adapter=true"], tmp_path / "log") as run:
        run.wait_until(lambda: last_step(run_dir) >= 2, "second step", START_LIMIT_S)
        servers(run)[0].kill()
        finished = run.finish()
    assert finished.code == 0, finished.stderr
    assert "lora.rank" not in finished.stderr, "no weights are merged"
    adapter = load_file(run_dir / "adapter" / "adapter_model.safetensors")
    lines = read_metrics(run_dir)[1:]
    assert {line["sync/bytes"] for line in lines} == {sum(tensor.nbytes for tensor in adapter.values())}
    assert max(line["mismatch/logprob_abs_mean"] for line in lines) < 1e-5
    assert lines[-1]["engine/restarts"] >= 1
    for step in range(1, 7):
        versions = {r.weight_version for group, _ in read_step(run_dir, step) for r in group.rollouts}
        assert versions == {step - 1}


def tells_why(text):
    """Why a killed server was given up: whoever asked it first says so, and that may be any of three."""
    return any(cause in text for cause in ("signal 9", "weight update", "requests in a row failed"))


def latest(run_dir):
    return read_metrics(run_dir)[-1]


def listeners(processes):
    """(command line, address) of every listening TCP and every bound UDP socket."""
    found = []
    for process in processes:
        try:
            command = " ".join(process.cmdline())[:100]
            connections = process.net_connections(kind="inet")
        except psutil.NoSuchProcess:
            continue
        for connection in connections:
            unconnected = connection.status == psutil.CONN_LISTEN or (
                connection.status == psutil.CONN_NONE and not connection.raddr
            )
            if unconnected and connection.laddr:
                found.append((f"{command} port {connection.laddr.port}", connection.laddr.ip))
    return found


def store_ports(run):
    """Ports of the stores by which SGLang's own ranks find each other. PyTorch makes these listen on every interface,
    and SGLang has no option against it."""
    commands = [process.cmdline() for process in servers(run)]
    return {words[words.index("--nccl-port") + 1] for words in commands}


def assert_loopback(listening, but):
    """Nobody else can connect, except to these ports."""
    assert len(listening) > 5, "Ray and the servers must show up here, or this looks in the wrong place"
    outside = [f"{who} on {ip}" for who, ip in listening if not is_loopback(ip) and who.split()[-1] not in but]
    assert outside == []


def is_loopback(ip):
    address = ipaddress.ip_address(ip)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
