"""A weight update happened on a server, or the server is fenced: every call of it fails once, and nothing is mixed."""

from __future__ import annotations

import pytest
from aiohttp import web
from sglang_pool import collect, group
from sglang_stub_fleets import rig, run
from stub_server import ALL_CALLS, answering, never, reset, times

from megatron_daro.engine.sglang import update
from megatron_daro.errors import EngineError, SyncError
from megatron_daro.sync.plan import SendFailure, SendReport

SESSION_CALLS = ("/begin_weight_update", "/end_weight_update")
CALLS = {
    "/pause_generation": "pause",
    "/begin_weight_update": "begin",
    "/end_weight_update": "end",
    "/flush_cache": "flush the cache",
    "/weights_checker": "compare checksums",
    "/update_weight_version": "set the version",
    "/continue_generation": "continue",
    "/generate": "probe",
}
WEIGHTS_CALL = "/update_weights_from_distributed"
ORDER = [*list(CALLS)[:2], WEIGHTS_CALL, *list(CALLS)[2:]]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(update, "_FLUSH_PAUSE_S", 0.01)


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
        pytest.param({}, {"verify": False}, [p for p in ORDER if CALLS.get(p) not in ("compare checksums", "probe")],
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


@pytest.mark.parametrize("pause", ["retract", "in_place", "abort"])
@pytest.mark.parametrize("running", [True, False])
def test_servers_are_paused_as_configured_where_requests_run(tmp_path, weights, pause, running):
    async def scenario():
        async with rig(tmp_path, {}, {}, pause=pause) as fleet:
            fleet.servers[1].tokens_in_flight = 100 if running else 0
            await fleet.publish(weights, 3)
            idle, other = (stub.said["/pause_generation"] for stub in fleet.stubs)
            assert idle == [{"mode": "abort"}] and other == [{"mode": pause if running else "abort"}]

    run(scenario())


@pytest.mark.parametrize(
    ("device", "given", "mib"), [("cpu", None, 64), ("cuda", None, 256), ("cuda", 7, 7)], ids=["cpu", "gpu", "as given"]
)
def test_buckets_are_smaller_to_servers_on_a_cpu(tmp_path, weights, device, given, mib):
    async def scenario():
        async with rig(tmp_path, {}, {"info": {"device": device}}, bucket_mib=given) as fleet:
            await fleet.publish(weights, 3)
            assert [plan.bucket_bytes for plan in weights.plans] == [mib * 2**20]

    run(scenario())


def test_each_target_has_ranks_of_its_own_after_the_senders(tmp_path, weights):
    async def scenario():
        wide = {"info": {"tp_size": 2}}
        async with rig(tmp_path, {}, wide, {}, bucket_mib=3, sync_timeout_s=50) as fleet:
            await fleet.publish(weights, 3)
            (plan,) = weights.plans
            assert [(t.rank_offset, t.ranks) for t in plan.targets] == [(1, 1), (2, 2), (4, 1)]
            assert [t.url for t in plan.targets] == [stub.url for stub in fleet.stubs]
            assert (plan.world_size, plan.bucket_bytes, plan.timeout_s) == (5, 3 * 2**20, 50)

    run(scenario())


def failing_calls():
    for path, phase in CALLS.items():
        for name, answer in {"500": answering(500), "400": answering(400), "reset": reset}.items():
            # These two refusals are answers: a server that cannot tell, one that has requests to end first.
            if (path, name) not in {("/weights_checker", "400"), ("/flush_cache", "400")}:
                yield pytest.param(path, phase, answer, id=f"{phase}-{name}")


@pytest.mark.parametrize(("path", "phase", "answer"), failing_calls())
def test_a_server_that_fails_a_call_is_fenced_and_the_other_serves(tmp_path, weights, path, phase, answer):
    async def scenario():
        async with rig(tmp_path) as fleet:
            sick, well = fleet.stubs
            sick.answers[path] = answer
            metrics = await fleet.publish(weights, 3)
            assert metrics["sync/servers"] == metrics["engine/servers"] == 1
            assert fleet.states == ["fenced", "serving"]
            assert f"weight update, {phase}: {sick.url}{path}" in fleet.servers[0].reason
            assert any("server 0 is given up" in text for text in fleet.warnings)
            assert well.order == ORDER, "the other one is not disturbed"
            after = set(ORDER[ORDER.index(path) + 1 :]) - {"/end_weight_update"}  # with which a refused begin is met
            assert not after & set(sick.order), "it must not go on with what it has"
            asked_before = sick.calls["/generate"]
            rollouts = await collect(fleet.engine, [group(i) for i in range(3)])
            assert {r.weight_version for r in rollouts} == {3} and len(rollouts) == 12
            assert sick.calls["/generate"] == asked_before and well.calls["/generate"] == 4

    run(scenario())


@pytest.mark.parametrize("path", ["/pause_generation", "/generate"])
def test_a_server_that_never_answers_is_fenced_at_the_deadline(tmp_path, weights, path):
    async def scenario():
        async with rig(tmp_path, sync_timeout_s=3) as fleet:
            fleet.stubs[0].answers[path] = never
            await fleet.publish(weights, 3)
            assert fleet.states == ["fenced", "serving"]
            assert f"{CALLS[path]}: {fleet.stubs[0].url}{path}: no answer within 3 s" in fleet.servers[0].reason

    run(scenario())


def test_a_call_on_a_connection_that_was_just_closed_is_made_once_more(tmp_path, weights):
    async def scenario():
        async with rig(tmp_path) as fleet:
            for path in list(CALLS)[:-1]:
                content = {"ranks": [{"checksums": {}}]} if path == "/weights_checker" else {}
                fleet.stubs[0].answers[path] = times(1, reset, answering(200, content))
            fleet.stubs[0].weight_version = "3"  # its call is answered without effect above
            await fleet.publish(weights, 3)
            assert fleet.states == ["serving", "serving"]
            assert {fleet.stubs[0].calls[path] for path in list(CALLS)[:-1]} == {2}

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
            assert "weight update, send" in fleet.servers[0].reason and "size mismatch" in fleet.servers[0].reason
            assert "model.path" in fleet.servers[0].reason
            assert [len(plan.targets) for plan in weights.plans] == [2, 1] and weights.plans[1].world_size == 2
            begun = ["/pause_generation", "/begin_weight_update"]
            reopened = [*begun, "/end_weight_update", "/begin_weight_update"]
            assert well.order == [*begun, WEIGHTS_CALL, "/model_info", "/weights_checker", *reopened, *ORDER[2:]]
            assert "sent again from the beginning to: server 1" in " ".join(fleet.warnings)
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
            with pytest.raises(SyncError, match=r"took the weights of version 3 .*status 500") as caught:
                await fleet.publish(weights, 3)
            assert "server 0" in str(caught.value) and "server 1: weight update, send" in str(caught.value)
            assert len(weights.plans) == 3 and fleet.states == ["fenced", "fenced"]
            assert not any("/continue_generation" in stub.order for stub in fleet.stubs)
            with pytest.raises(EngineError, match="all 2 SGLang servers are gone"):
                await collect(fleet.engine, [group(0)])

    run(scenario())


def test_servers_read_the_files_of_one_version_and_only_the_last_is_kept(tmp_path, weights):
    async def scenario():
        async with rig(tmp_path, sync="disk", sync_dir=tmp_path / "elsewhere") as fleet:
            for version in (3, 4):
                await fleet.publish(weights, version)
            assert [d.name for d in weights.directories] == ["version_000003-0", "version_000004-1"]
            assert {plan.remedy for plan in weights.plans} == {"free space, or set engine.sglang.sync_dir"}
            assert sorted((tmp_path / "elsewhere").iterdir()) == weights.directories[1:]
            for stub in fleet.stubs:
                read = [body["model_path"] for body in stub.said["/update_weights_from_disk"]]
                assert read == [str(directory) for directory in weights.directories]
                assert not any(body["flush_cache"] for body in stub.said["/update_weights_from_disk"]), "it is below"

    run(scenario())


def test_a_server_that_cannot_read_the_files_is_fenced(tmp_path, weights):
    async def scenario():
        async with rig(tmp_path, sync="disk") as fleet:
            fleet.stubs[0].answers["/update_weights_from_disk"] = answering(400, {"message": "no such directory"})
            await fleet.publish(weights, 3)
            assert fleet.states == ["fenced", "serving"]
            assert "read the files" in fleet.servers[0].reason and "no such directory" in fleet.servers[0].reason

    run(scenario())


def test_weights_that_cannot_be_written_leave_no_server_paused_for_ever(tmp_path, weights):
    async def scenario():
        weights.broken = SyncError("no space left; free space, or set engine.sglang.sync_dir")
        async with rig(tmp_path, sync="disk") as fleet:
            with pytest.raises(SyncError, match="no space left"):
                await fleet.publish(weights, 3)
            assert fleet.states == ["fenced", "fenced"] and "no space left" in fleet.servers[0].reason

    run(scenario())


@pytest.mark.parametrize("refusals", [1, 19])
def test_a_refused_flush_ends_waiting_requests_and_is_tried_again(tmp_path, weights, refusals):
    async def scenario():
        async with rig(tmp_path) as fleet:
            stub = fleet.stubs[0]
            stub.answers["/flush_cache"] = times(refusals, answering(400), answering(200, {}))
            await fleet.publish(weights, 3)
            assert fleet.states == ["serving", "serving"]
            assert stub.said["/abort_request"] == [{"abort_all": True}] * refusals
            assert stub.calls["/flush_cache"] == refusals + 1
            assert fleet.stubs[1].calls["/abort_request"] == 0

    run(scenario())


def test_a_flush_that_is_always_refused_fences_the_server(tmp_path, weights):
    async def scenario():
        async with rig(tmp_path) as fleet:
            fleet.stubs[0].answers["/flush_cache"] = answering(400)
            await fleet.publish(weights, 3)
            assert fleet.states == ["fenced", "serving"] and fleet.stubs[0].calls["/flush_cache"] == 20
            assert "refused 20 times" in fleet.servers[0].reason

    run(scenario())


def test_paused_in_place_a_refused_flush_passes(tmp_path, weights):
    async def scenario():
        async with rig(tmp_path, pause="in_place") as fleet:
            fleet.stubs[0].answers["/flush_cache"] = answering(400)
            await fleet.publish(weights, 3)
            assert fleet.states == ["serving", "serving"]
            assert (fleet.stubs[0].calls["/flush_cache"], fleet.stubs[0].calls["/abort_request"]) == (1, 0)

    run(scenario())


@pytest.mark.parametrize(("options", "dtype"), [({}, "bfloat16"), ({"verify": False}, "")])
def test_what_is_sent_is_hashed_in_the_dtype_of_the_servers_where_it_is_verified(tmp_path, weights, options, dtype):
    async def scenario():
        stub = {"info": {"dtype": "bfloat16"}}
        async with rig(tmp_path, stub, stub, sync_timeout_s=50, **options) as fleet:
            fleet.servers[0].reason = "of an earlier day"
            plan = await fleet.engine.update(3).prepare()
            assert (plan.transport, plan.digest_dtype, plan.directory) == ("distributed", dtype, None)
            assert (plan.fp8_blocks, plan.layout, plan.shards_over) == ((), None, "tcp")
            assert fleet.servers[0].reason == "" and fleet.states == ["updating", "updating"]

    run(scenario())


def test_an_update_that_is_abandoned_leaves_no_server_waiting(tmp_path, weights):
    async def scenario():
        async with rig(tmp_path) as fleet:
            update = fleet.engine.update(3)
            await update.prepare()
            fleet.servers[1].reason = "it was slow"
            update.reject("server 2", "nobody")
            assert fleet.states == ["updating", "updating"]
            update.abandon(SyncError("the policy is gone"))
            assert [server.reason for server in fleet.servers] == ["weight update: the policy is gone", "it was slow"]
            assert fleet.states == ["fenced", "fenced"]

    run(scenario())


def test_an_answer_to_the_probe_that_is_rejected_costs_its_server_only(tmp_path, weights):
    async def scenario():
        async with rig(tmp_path) as fleet:
            update = fleet.engine.update(3)
            await update.prepare()
            await update.install(await weights.export(await update.prepare()))
            assert sorted(await update.probe()) == ["server 0", "server 1"]
            update.reject("server 1", "it differs")
            metrics = await update.accept()
            assert fleet.states == ["serving", "fenced"] and metrics["sync/servers"] == 1
            assert fleet.servers[1].reason == "weight update, probe: it differs"

    run(scenario())


def test_a_broken_sending_costs_those_that_lack_something_and_says_who_gets_it_again(tmp_path, weights):
    async def scenario():
        async with rig(tmp_path, count=3) as fleet:
            update = fleet.engine.update(3)
            await update.prepare()
            failures = {"server 1": SendFailure("unanswered", "no answer"), "server 2": SendFailure("refused", "shape")}
            fleet.stubs[1].answers["/weights_checker"] = answering(400)
            await update.blame(SendReport(0, 0, 0.0, failures=failures))
            assert fleet.states == ["updating", "updating", "fenced"]
            assert fleet.servers[2].reason.startswith("weight update, send: ")
            assert [server.reason for server in fleet.servers[:2]] == [
                "weight update, send: the group ended",
                f"weight update, send: {failures['server 1']}",
            ]
            assert "sent again from the beginning to: server 0, server 1" in fleet.warnings[-1]
            for stub in fleet.stubs[:2]:
                assert stub.said["/weights_checker"] == [{"action": "checksum", "skip_tensor_list": [""]}]

    run(scenario())


@pytest.mark.parametrize("has_checksums", [True, False])
def test_a_server_that_still_waits_for_a_broken_broadcast_is_given_up_where_it_can_be_seen(
    tmp_path, weights, monkeypatch, has_checksums
):
    monkeypatch.setattr(update, "_FREE_S", 0.5)

    async def scenario():
        paths = set(ALL_CALLS) - (set() if has_checksums else {"/weights_checker"})
        async with rig(tmp_path, {"paths": paths}, {"paths": paths}) as fleet:
            one = fleet.engine.update(3)
            await one.prepare()
            fleet.stubs[0].answers["/weights_checker"] = never
            await one.blame(SendReport(0, 0, 0.0, failures={"server 1": SendFailure("unanswered", "lost")}))
            assert fleet.states == ["fenced" if has_checksums else "updating", "updating"]
            if has_checksums:
                assert "it still waits for the broadcast that broke, after 0.5 s (another" in fleet.servers[0].reason

    run(scenario())


def test_where_nobody_is_left_nothing_is_sent_again(tmp_path, weights):
    async def scenario():
        async with rig(tmp_path) as fleet:
            one = fleet.engine.update(3)
            await one.prepare()
            failures = {server.name: SendFailure("refused", "shape") for server in fleet.servers}
            await one.blame(SendReport(0, 0, 0.0, failures=failures))
            assert "sent again from the beginning to: none" in fleet.warnings[-1]
            assert await one.prepare() is None
            with pytest.raises(SyncError, match=r"no SGLang server took the weights of version 3 \(server 0: "):
                await one.accept()

    run(scenario())
