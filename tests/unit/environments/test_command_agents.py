"""Agents that are programs: one process a rollout, what it says at its end, and what it leaves behind."""

from __future__ import annotations

import os
import socket as server
import sys
from pathlib import Path

import pytest
import sandboxed
from agent_forms import assert_exact, run, tokenizer

from megatron_daro.config import EnvironmentSection
from megatron_daro.environments import verifiers_worker
from megatron_daro.environments.agents import CommandAgents
from megatron_daro.sandbox import Sandbox

AGENT = """
import json, os, subprocess, sys, time, urllib.request
problem = json.load(sys.stdin)
how = problem["options"]["how"]
def say(messages, stream=False):
    body = json.dumps({"model": "m", "messages": messages, "stream": stream}).encode()
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, head)
    return urllib.request.urlopen(request)
if how == "silent":
    sys.exit(0)
asked = [{"role": "user", "content": problem["statement"]}]
reply = json.load(say(asked))["choices"][0]["message"]
if how == "crash":
    sys.exit("no such tool")
if how == "memory":
    kept = bytearray(300 * 2**20)
    time.sleep(60)
if how == "hang" and not os.path.exists(problem["options"]["marker"]):
    open(problem["options"]["marker"], "w").close()
    subprocess.Popen(["sleep", "3601"], start_new_session=True)
    time.sleep(60)
if how == "leave":
    subprocess.Popen(["sleep", "3602"], start_new_session=True)
if how == "stream":
    stream = say([*asked, reply, {"role": "user", "content": "And?"}], stream=True)
    lines = [json.loads(l[6:]) for l in stream.read().decode().split("\\n\\n") if l.startswith("data: {")]
    reply = {"content": "".join(one["choices"][0]["delta"].get("content") or "" for one in lines)}
if how == "dies":
    say([*asked, reply, {"role": "user", "content": "And?"}], stream=True).read(20)
    os.kill(os.getpid(), 9)
if how in ("file", "torn"):
    with open(os.environ["REWARD_JSON"], "w") as file:
        file.write('{"reward": 0.125}' if how == "file" else "{")
print("talk")
print(json.dumps({"reward": 0.5, "correct": reply["content"] == "Answer", "rewards": {"style": 0.25}}))
"""

LOOKS = """
import json, os, resource, urllib.request
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
def ask(path, body=None):
    return json.load(urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, body, head)))
model = ask("/models")["data"][0]["id"]
body = json.dumps({"model": model, "messages": [{"role": "user", "content": "x"}]}).encode()
assert ask("/chat/completions", body)["model"] == model
assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
assert "SYMPY_GROUND_TYPES" not in os.environ
assert {*os.environ["NO_PROXY"].split(",")} == {"example.org", "127.0.0.1", "localhost"}
print(json.dumps({"answer": os.environ["MINE"]}))
"""


TRIES = """
import json, os, pathlib, socket, subprocess, urllib.request
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
body = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, head)
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
options, tried = json.load(open(0))["options"], {}
def tries(name, what):
    try:
        what()
    except OSError:
        return
    tried[name] = 1
tries("own_folder", lambda: pathlib.Path(os.environ["HOME"], "note").write_text("mine"))
tries("temporary", lambda: subprocess.run("echo x > $TMPDIR/file && cat $TMPDIR/file", shell=True, check=True))
tries("ports", lambda: socket.create_connection(("127.0.0.1", options["port"])))
tries("network", lambda: socket.create_connection(("192.0.2.1", 80), timeout=5))
tries("unix", lambda: socket.socket(socket.AF_UNIX))
tries("started_in", lambda: open("written", "w"))
tries("agent_file", lambda: open(options["file"], "a"))
tries("others", lambda: open(options["secret"]).read())
tries("processes", lambda: os.kill(options["pid"], 0))
subprocess.Popen(["sleep", "3603"], start_new_session=True)
os.symlink(options["outcome"], os.environ["REWARD_JSON"])
print(json.dumps({"correct": said == "Answer", "rewards": tried}))
"""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return tokenizer(tmp_path_factory.mktemp("tokenizer"))


def alive(seconds: str) -> bool:
    """Whether a `sleep` of so many seconds runs."""
    wanted = f"sleep\0{seconds}\0"
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_text() == wanted:
                return True
        except OSError:
            continue
    return False


def held(tokens, tmp_path, how, indices, **section):
    (tmp_path / "agent.py").write_text(AGENT)
    section = {"command": (sys.executable, str(tmp_path / "agent.py")), "options": {"how": how}, **section}
    running = CommandAgents(EnvironmentSection(kind="agent", **section))
    return run(tokens, running, lambda read, request: "Answer", indices=indices, **section)


def test_a_program_is_trained_on_what_it_sampled_more_of_them_than_places(tokens, tmp_path):
    rollouts, engine, counts, _ = held(tokens, tmp_path, "stream", (0, 1, 2), workers=2)
    assert_exact(rollouts, engine)
    assert len(engine.answers) == 6 and counts["environment/restarted"] == 0
    for rollout in rollouts:
        assert (rollout.verdict.correct, rollout.verdict.reward) == (True, 0.75) and rollout.contexts == ()
        assert dict(rollout.verdict.rewards) == {"style": 0.25}


@pytest.mark.parametrize(
    ("how", "reason", "section"),
    [
        ("silent", "no_call", {}),
        ("crash", "crash", {}),
        ("dies", "crash", {}),
        ("torn", "outcome", {}),
        ("memory", "memory", {"memory_mib": 200}),
    ],
)
def test_a_program_that_fails_costs_its_rollout_and_leaves_nothing(tokens, tmp_path, how, reason, section):
    rollouts, _, counts, progress = held(tokens, tmp_path, how, (0,), workers=1, **section)
    assert [rollout.finish_reason for rollout in rollouts] == ["abort"]
    failed = {name: count for name, count in counts.items() if count and name != "environment/restarted"}
    assert failed == {"environment/failed": 1, f"environment/failed/{reason}": 1}
    if how == "crash":
        assert "exit status 1; it said: no such tool" in progress.messages[0]


def test_what_a_program_writes_into_its_file_counts_before_its_last_line(tokens, tmp_path):
    [rollout], _, _, _ = held(tokens, tmp_path, "file", (0,), workers=1)
    assert (rollout.verdict.correct, rollout.verdict.reward, rollout.verdict.rewards) == (False, 0.125, ())


def test_a_program_that_hangs_gives_its_place_to_the_next(tokens, tmp_path):
    section = {"workers": 1, "timeout_s": 8.0, "options": {"how": "hang", "marker": str(tmp_path / "hung")}}
    rollouts, _, counts, _ = held(tokens, tmp_path, "hang", (0, 1), **section)
    assert sorted(rollout.finish_reason for rollout in rollouts) == ["abort", "stop"]
    assert counts["environment/timeouts"] == 1 and not alive("3601")


def test_what_a_program_leaves_ends_with_it(tokens, tmp_path):
    [rollout], _, _, _ = held(tokens, tmp_path, "leave", (0,), workers=1)
    assert rollout.verdict.correct and not alive("3602")


def test_a_program_has_the_variables_of_the_run_and_no_bound_of_addresses(tokens, tmp_path, monkeypatch):
    monkeypatch.setenv("MINE", "kept")
    monkeypatch.setenv("NO_PROXY", "example.org")
    section = {"command": (sys.executable, "-c", LOOKS), "workers": 1}
    running = CommandAgents(EnvironmentSection(kind="agent", **section))
    [rollout], _, _, _ = run(tokens, running, lambda read, request: "Answer", indices=(0,), **section)
    assert rollout.verdict.correct  # the verifier judged the answer that it named


def test_a_taskset_without_problems_to_list_is_an_error_in_words(capsys):
    assert verifiers_worker.write_problems(["no-such-tasks"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("environment.kind: verifiers:no-such-tasks") and not said.out


def test_a_program_in_a_sandbox_reaches_the_endpoint_and_its_own_folder_and_nothing_else(tokens, tmp_path):
    sandboxed.require(Sandbox())
    agent, secret, outcome = (tmp_path / name for name in ("agent.py", "secret", "outcome"))
    agent.write_text(TRIES)
    agent.chmod(0o666)  # its user may write to it, where files are not read-only
    secret.write_text("words")
    outcome.write_text('{"reward": -1}')
    socket = str(tmp_path / "endpoint")
    with server.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        options = {"port": listener.getsockname()[1], "pid": os.getpid()}
        options |= {"file": str(agent), "secret": str(secret), "outcome": str(outcome)}
        section = {"command": (sys.executable, str(agent)), "options": options, "workers": 2, "sandbox": True}
        running = CommandAgents(EnvironmentSection(kind="agent", **section), socket=socket)
        rollouts, engine, counts, progress = run(
            tokens, running, lambda read, request: "Answer", indices=(0, 1, 2), socket=socket, **section
        )
    assert counts["environment/failed"] == 0, progress.messages
    assert_exact(rollouts, engine)
    for rollout in rollouts:
        assert rollout.verdict.correct and dict(rollout.verdict.rewards) == {"own_folder": 1, "temporary": 1}
    assert not alive("3603") and not Path("written").exists()
