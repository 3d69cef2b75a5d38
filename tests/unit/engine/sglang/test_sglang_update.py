"""A weight update happened on a server, or the server is fenced: every call of it fails once, and nothing is mixed."""

from __future__ import annotations

import pytest
from aiohttp import web
from sglang_pool import collect, expected, group
from sglang_stub_fleets import Weights, rig, run
from stub_server import ALL_CALLS, answering, never, reset, times

from megatron_daro.errors import EngineError, LostSenderError, SyncError
from megatron_daro.sync.plan import SendReport

SESSION_CALLS = ("/begin_weight_update", "/end_weight_update")
CALLS = (
    "/pause_generation",
    "/begin_weight_update",
    "/end_weight_update",
    "/flush_cache",
    "/weights_checker",
    "/update_weight_version",
    "/continue_generation",
    "/generate",
)
WEIGHTS_CALL = "/update_weights_from_distributed"
ORDER = [*CALLS[:2], WEIGHTS_CALL, *CALLS[2:]]


@pytest.mark.parametrize(
    ("stub", "options", "order"),
    [
        pytest.param({}, {}, ORDER, id="0.5.23"),
        pytest.param(
            {"version": "0.5.20", "paths": set(ALL_CALLS) - {*SESSION_CALLS, "/weights_checker"}},
            {},
            [path for path in ORDER if path not in (*SESSION_CALLS, "/weights_checker")],
            id="0.5.20",
        ),
        pytest.param({}, {"verify": False}, [p for p in ORDER if p not in ("/weights_checker", "/generate")],
                     id="unverified"),
        pytest.param({}, {"sync": "disk"}, ["/pause_generation", "/update_weights_from_disk", "/flush_cache",
                     "/update_weight_version", "/continue_generation", "/generate"], id="disk"),
        pytest.param({}, {"sync": "tensor"}, ["/update_weights_from_tensor" if p == WEIGHTS_CALL else p for p in ORDER],
                     id="tensor"),
    ],
)  # fmt: skip
def test_the_order_of_the_calls_each_on_all_servers_before_the_next(tmp_path, weights, stub, options, order):
    async def scenario():
        async with rig(tmp_path, stub, stub, **options) as fleet:
            heard = []
            for server in fleet.stubs:
                server.order = heard
            metrics = await fleet.publish(weights, 3)
            assert heard == [path for path in order for _ in range(2)]
            assert fleet.states == ["serving", "serving"] and [s.version for s in fleet.servers] == [3, 3]
            assert (metrics["sync/servers"], metrics["sync/bytes"], metrics["timing/sync_send_s"]) == (2, 100, 0.5)
            (said,) = fleet.stubs[0].said["/update_weight_version"]
            assert said == {"new_version": "3", "abort_all_requests": False}

    run(scenario())


def test_requests_that_run_go_on_with_the_new_weights(tmp_path, weights):
    async def scenario():
        async with rig(tmp_path, {}, {}) as fleet:
            fleet.servers[1].tokens_in_flight = 100
            await fleet.publish(weights, 3)
            idle, other = (stub.said["/pause_generation"] for stub in fleet.stubs)
            assert idle == [{"mode": "abort"}] and other == [{"mode": "retract"}]

    run(scenario())


def test_each_target_has_ranks_of_its_own_after_the_senders(tmp_path, weights):
    async def scenario():
        wide = {"info": {"tp_size": 2}}
        async with rig(tmp_path, {}, wide, {}, bucket_mib=3, sync_timeout_s=50) as fleet:
            await fleet.publish(weights, 3)
            (plan,) = weights.plans
            assert [target.ranks for target in plan.targets] == [1, 2, 1]
            assert [t.url for t in plan.targets] == [stub.url for stub in fleet.stubs]
            assert (plan.bucket_bytes, plan.timeout_s) == (3 * 2**20, 50)

    run(scenario())


def failing_calls():
    for path in CALLS:
        # Of these two a refusal is an answer: a server that cannot tell, one that has requests to end first.
        answer = answering(500) if path in ("/weights_checker", "/flush_cache") else answering(400)
        yield pytest.param(path, answer, id=path)
    yield pytest.param("/begin_weight_update", reset, id="reset")


@pytest.mark.parametrize(("path", "answer"), failing_calls())
def test_a_server_that_fails_a_call_is_fenced_and_the_other_serves(tmp_path, weights, path, answer):
    async def scenario():
        async with rig(tmp_path) as fleet:
            sick, well = fleet.stubs
            sick.answers[path] = answer
            metrics = await fleet.publish(weights, 3)
            assert metrics["sync/servers"] == metrics["engine/servers"] == 1
            assert fleet.states == ["fenced", "serving"]
            assert f"{sick.url}{path}" in fleet.servers[0].reason
            assert any("server 0" in text for text in fleet.warnings)
            assert well.order == ORDER, "the other one is not disturbed"
            after = set(ORDER[ORDER.index(path) + 1 :]) - {"/end_weight_update"}  # with which a refused begin is met
            assert not after & set(sick.order), "it must not go on with what it has"
            asked_before = sick.calls["/generate"]
            rollouts = await collect(fleet.engine, [group(i) for i in range(3)])
            assert {r.weight_version for r in rollouts} == {3} and len(rollouts) == 12
            assert sick.calls["/generate"] == asked_before and well.calls["/generate"] == 4

    run(scenario())


def test_a_server_that_never_answers_is_fenced_at_the_deadline(tmp_path, weights):
    async def scenario():
        async with rig(tmp_path, sync_timeout_s=1) as fleet:
            fleet.stubs[0].answers["/pause_generation"] = never
            await fleet.publish(weights, 3)
            assert fleet.states == ["fenced", "serving"]
            assert f"{fleet.stubs[0].url}/pause_generation" in fleet.servers[0].reason

    run(scenario())


def test_a_call_on_a_connection_that_was_just_closed_is_made_once_more(tmp_path, weights):
    async def scenario():
        async with rig(tmp_path) as fleet:
            for path in CALLS[:-1]:
                content = {"ranks": [{"checksums": {}}]} if path == "/weights_checker" else {}
                fleet.stubs[0].answers[path] = times(1, reset, answering(200, content))
            fleet.stubs[0].weight_version = "3"  # its call is answered without effect above
            await fleet.publish(weights, 3)
            assert fleet.states == ["serving", "serving"]
            assert {fleet.stubs[0].calls[path] for path in CALLS[:-1]} == {2}

    run(scenario())


def test_a_server_that_refuses_the_weights_is_fenced_and_the_other_gets_all_again(tmp_path, weights):
    async def scenario():
        async with rig(tmp_path) as fleet:
            sick, well = fleet.stubs
            sick.answers[WEIGHTS_CALL] = answering(400, {"error": {"message": "size mismatch"}})
            for stub in fleet.stubs:
                for path in SESSION_CALLS:
                    stub.answers[path] = sessions_of(stub)
            await fleet.publish(weights, 3)
            assert fleet.states == ["fenced", "serving"]
            assert "size mismatch" in fleet.servers[0].reason and "model.path" in fleet.servers[0].reason
            assert [len(plan.targets) for plan in weights.plans] == [2, 1]
            begun = ["/pause_generation", "/begin_weight_update"]
            reopened = [*begun, "/end_weight_update", "/begin_weight_update"]
            assert well.order == [*begun, WEIGHTS_CALL, "/model_info", "/weights_checker", *reopened, *ORDER[2:]]
            assert "/continue_generation" not in sick.order

    run(scenario())


def sessions_of(stub):
    """As 0.5.21 and newer: one weight update is open at a time."""
    opened = getattr(stub, "opened", None)
    if opened is None:
        opened = stub.opened = []

    async def answer(request, body):
        if request.path == "/begin_weight_update":
            if opened:
                return web.json_response({"error": {"message": "a weight update is open"}}, status=400)
            opened.append(1)
        else:
            opened.clear()
        return web.json_response({"success": True})

    return answer


def test_a_server_that_dies_while_weights_are_sent_is_fenced_and_the_other_gets_all_again(tmp_path, weights):
    async def scenario():
        async with rig(tmp_path) as fleet:
            dying = fleet.stubs[0]

            async def die(request, body):
                dying.answers["/model_info"] = reset
                return await reset(request, body)

            dying.answers[WEIGHTS_CALL] = die
            await fleet.publish(weights, 3)
            assert fleet.states == ["fenced", "serving"] and fleet.servers[1].version == 3
            assert fleet.stubs[1].calls[WEIGHTS_CALL] == 2

    run(scenario())


@pytest.mark.parametrize("refuses", [False, True], ids=["answers", "refuses to say what it is"])
def test_a_sending_that_fails_for_no_ones_fault_is_tried_again(tmp_path, weights, refuses):
    async def scenario():
        async with rig(tmp_path) as fleet:
            if refuses:
                fleet.stubs[1].answers |= dict.fromkeys(("/model_info", "/get_model_info"), answering(404, {}))
            fleet.stubs[0].answers[WEIGHTS_CALL] = times(2, answering(500), answering(200, {}))
            await fleet.publish(weights, 3)
            assert fleet.states == ["serving", "serving"] and len(weights.plans) == 3
            assert fleet.engine.metrics()["engine/fenced"] == 0

    run(scenario())


def test_a_sending_that_always_fails_ends_with_what_everyone_said(tmp_path, weights):
    async def scenario():
        async with rig(tmp_path) as fleet:
            fleet.stubs[0].answers[WEIGHTS_CALL] = answering(500)
            with pytest.raises(SyncError, match=r"server 0.*status 500.*server 1"):
                await fleet.publish(weights, 3)
            assert len(weights.plans) == 3 and fleet.states == ["fenced", "fenced"]
            assert not any("/continue_generation" in stub.order for stub in fleet.stubs)
            with pytest.raises(EngineError, match="server 0"):
                await collect(fleet.engine, [group(0)])

    run(scenario())


def test_servers_read_the_files_of_one_version_and_only_the_last_is_kept(tmp_path, weights):
    async def scenario():
        async with rig(tmp_path, sync="disk", sync_dir=tmp_path / "elsewhere") as fleet:
            for version in (3, 4):
                await fleet.publish(weights, version)
            assert [d.name for d in weights.directories] == ["version_000003-0", "version_000004-1"]
            assert all("engine.sglang.sync_dir" in plan.remedy for plan in weights.plans)
            (folder,) = (tmp_path / "elsewhere").iterdir()
            assert list(folder.iterdir()) == weights.directories[1:]
            for stub in fleet.stubs:
                read = [body["model_path"] for body in stub.said["/update_weights_from_disk"]]
                assert read == [str(directory) for directory in weights.directories]
                assert not any(body["flush_cache"] for body in stub.said["/update_weights_from_disk"]), "it is below"
        assert not any((tmp_path / "elsewhere").iterdir()), "the engine is closed"

    run(scenario())


@pytest.mark.parametrize("sync_dir", [None, "elsewhere"])
def test_files_that_a_killed_process_of_the_run_left_go(tmp_path, weights, sync_dir):
    options = {"sync": "disk", "sync_dir": sync_dir and tmp_path / sync_dir}

    async def scenario():
        async with rig(tmp_path, **options) as fleet:
            await fleet.publish(weights, 2)
        (folder,) = {directory.parent for directory in weights.directories}
        for left in ("version_000002-0", ".version_000003-1.partial"):
            (folder / left).mkdir(parents=True)
        async with rig(tmp_path, **options) as fleet:
            await fleet.publish(weights, 3)
            assert list(folder.iterdir()) == weights.directories[1:]

    run(scenario())


def test_runs_that_share_a_directory_of_files_leave_each_others_alone(tmp_path, weights):
    async def scenario():
        options = {"sync": "disk", "sync_dir": tmp_path / "shared"}
        async with rig(tmp_path / "one" / "run", **options) as fleet:
            await fleet.publish(weights, 3)
            async with rig(tmp_path / "other" / "run", **options) as other:
                await other.publish(weights, 3)
            assert weights.directories[0].is_dir()

    run(scenario())


def test_a_server_that_cannot_read_the_files_is_fenced(tmp_path, weights):
    async def scenario():
        async with rig(tmp_path, sync="disk") as fleet:
            fleet.stubs[0].answers["/update_weights_from_disk"] = answering(400, {"message": "no such directory"})
            await fleet.publish(weights, 3)
            assert fleet.states == ["fenced", "serving"]
            assert "no such directory" in fleet.servers[0].reason

    run(scenario())


def test_weights_that_cannot_be_written_leave_no_server_paused_for_ever(tmp_path, weights):
    async def scenario():
        weights.broken = SyncError("no space left; free space, or set engine.sglang.sync_dir")
        async with rig(tmp_path, sync="disk") as fleet:
            with pytest.raises(SyncError, match="no space left"):
                await fleet.publish(weights, 3)
            assert fleet.states == ["fenced", "fenced"] and "no space left" in fleet.servers[0].reason

    run(scenario())


def test_a_refused_flush_ends_waiting_requests_and_is_tried_again(tmp_path, weights):
    async def scenario():
        async with rig(tmp_path) as fleet:
            stub = fleet.stubs[0]
            stub.answers["/flush_cache"] = times(2, answering(400), answering(200, {}))
            await fleet.publish(weights, 3)
            assert fleet.states == ["serving", "serving"]
            assert stub.said["/abort_request"] == [{"abort_all": True}] * 2
            assert fleet.stubs[1].calls["/abort_request"] == 0

    run(scenario())


def test_a_flush_that_is_always_refused_fences_the_server(tmp_path, weights):
    async def scenario():
        async with rig(tmp_path) as fleet:
            fleet.stubs[0].answers["/flush_cache"] = answering(400)
            await fleet.publish(weights, 3)
            assert fleet.states == ["fenced", "serving"]

    run(scenario())


class InterruptedAdapters(Weights):
    """Adapters whose first sending ends with the death of a rank."""

    async def export(self, plan):
        self.plans.append(plan)
        if len(self.plans) == 1:
            raise LostSenderError("rank 0 died")
        return SendReport(100, 0.5, apart=True)


def test_an_adapter_of_a_sending_that_broke_off_is_unloaded(tmp_path):
    adapter = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
    info = {"enable_lora": True, "max_lora_rank": 4, "lora_target_modules": adapter["target_modules"]}

    async def scenario():
        weights, expect = InterruptedAdapters(), expected(tmp_path, adapter=adapter)
        async with rig(tmp_path, {"info": info}, expect=expect, sync="adapters", verify=False) as fleet:
            (stub,) = fleet.stubs
            await fleet.publish(weights, 1)
            await fleet.until(lambda: stub.calls["/unload_lora_adapter"])
            first, second = (plan.details["lora_name"] for plan in weights.plans)
            assert stub.said["/unload_lora_adapter"] == [{"lora_name": first}]
            assert fleet.servers[0].adapter == second

    run(scenario())
