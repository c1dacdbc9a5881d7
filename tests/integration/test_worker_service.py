"""The two ends of the step stream, on real gRPC: what each refuses, keeps, repeats, and how the other's end is seen."""

import asyncio
import contextlib
import dataclasses
import signal
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from microtome.actors import wire
from microtome.actors.link import INCARNATION_KEY, SECRET_KEY, LinkSettings
from microtome.actors.remains import Loss
from microtome.actors.worker import SERVICE_NAME, WorkerProcess
from microtome.planner.errors import BadConfig, WorkerLost
from microtome.planner.events import StepDone, StepFailed, WorkerGone
from microtome.planner.types import Annotate, Incarnation, SequenceId, StepNumber, StepPlan, StepResult
from microtome.v1 import worker_pb2 as pb
from microtome.v1 import worker_pb2_grpc
from tests.support.fake_executor import method_table
from tests.support.plan_script import PlanScript
from tests.support.tcp_proxy import tcp_proxy
from tests.support.worker_child import worker_child
from tests.support.worker_link import SECRET, Driver, GatedExecutor, eventually, running_worker, worker_spec

CALL_S = 10  # no call below takes nearly as long
OURS = ((SECRET_KEY, SECRET),)
QUICK = LinkSettings(reconnect_timeout_s=0.5)


class Raw:
    """A caller that speaks the protocol by hand, with no limits and none of the client's manners."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = worker_pb2_grpc.WorkerStub(channel)

    async def describe(self) -> pb.DescribeResponse:
        return await self.stub.Describe(pb.DescribeRequest(), metadata=OURS, timeout=CALL_S)

    async def snapshot(self) -> wire.Snapshot:
        call = self.stub.Snapshot(pb.SnapshotRequest(), metadata=OURS, timeout=CALL_S)
        return wire.snapshot_from_messages([message async for message in call])

    async def answers(self, plans: Iterable[StepPlan]) -> list[StepResult | wire.StepFault]:
        """Send all, close, and collect what comes."""
        messages = [wire.plan_to_message(plan) for plan in plans]
        call = self.stub.Steps(iter_of(messages), metadata=OURS, timeout=CALL_S)
        return [wire.answer_from_message(message) async for message in call]


async def iter_of(messages: Iterable[pb.StepPlan]) -> AsyncIterator[pb.StepPlan]:
    for message in messages:
        yield message


@contextlib.asynccontextmanager
async def raw_caller(address: str) -> AsyncIterator[Raw]:
    options = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield Raw(channel)


def script_of(executor: GatedExecutor, **settings: Any) -> PlanScript:
    return PlanScript(executor.describe(), **settings)


def padded(plan: StepPlan, size: int) -> StepPlan:
    """The same plan, with a note that makes its message exactly `size` bytes."""
    for note_bytes in range(max(0, size - 200), size):
        longer = dataclasses.replace(plan, ops=(*plan.ops, Annotate(SequenceId(1), b"." * note_bytes)))
        if wire.plan_to_message(longer).ByteSize() == size:
            return longer
    raise AssertionError(f"no note makes the message {size} bytes")


# --- who may call ---


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        ((SECRET_KEY, ""),),
        ((SECRET_KEY, SECRET[:-1]),),
        ((SECRET_KEY, SECRET[:-1] + "f"),),
        ((SECRET_KEY, SECRET + "0"),),
        ((SECRET_KEY, SECRET), (SECRET_KEY, "other")),
    ],
    ids=["none", "empty", "short", "wrong", "long", "two"],
)
async def test_a_caller_without_the_secret_is_refused_by_every_method(metadata: tuple[tuple[str, str], ...]) -> None:
    async with running_worker() as worker, grpc.aio.insecure_channel(worker.endpoint.address) as channel:
        stub, health = worker_pb2_grpc.WorkerStub(channel), health_pb2_grpc.HealthStub(channel)
        plan = wire.plan_to_message(script_of(worker.executor).next())

        async def drain(call: Any) -> None:
            async for _ in call:
                pass

        for attempt in (
            lambda: stub.Describe(pb.DescribeRequest(), metadata=metadata, timeout=CALL_S),
            lambda: drain(stub.Snapshot(pb.SnapshotRequest(), metadata=metadata, timeout=CALL_S)),
            lambda: drain(stub.Steps(iter_of([plan]), metadata=metadata, timeout=CALL_S)),
            lambda: health.Check(health_pb2.HealthCheckRequest(), metadata=metadata, timeout=CALL_S),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await attempt()
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert SECRET not in str(refused.value)
        assert worker.executor.steps_run == []


async def test_a_client_with_another_secret_cannot_connect() -> None:
    async with running_worker() as worker:
        with pytest.raises(WorkerLost, match=rf"worker-0 at {worker.endpoint.address}: UNAUTHENTICATED"):
            await Driver(worker.endpoint, secret="00" * 32).client.connect()


async def test_a_client_cannot_connect_where_nobody_listens_or_another_incarnation_does() -> None:
    async with running_worker() as worker:
        other = dataclasses.replace(worker.endpoint, incarnation=Incarnation("0" * 32))
        with pytest.raises(WorkerLost, match=f"incarnation {worker.endpoint.incarnation} answers, not 0000"):
            await Driver(other).client.connect()
        gone = worker.endpoint
    with pytest.raises(WorkerLost, match=f"{gone.address}: UNAVAILABLE"):
        await Driver(gone).client.connect()


# --- which plans run ---


async def test_a_plan_for_another_incarnation_or_table_is_refused_and_nothing_is_touched() -> None:
    async with running_worker() as worker, raw_caller(worker.endpoint.address) as raw:
        script = script_of(worker.executor)
        first = script.next()
        assert isinstance((await raw.answers([first]))[0], StepResult)
        before = await raw.snapshot()
        second = script.next()
        stale = dataclasses.replace(second, incarnation=Incarnation("f" * 32))
        other_table = dataclasses.replace(second, table_digest=second.table_digest + 1)
        for fault in await raw.answers([stale, other_table]):
            assert isinstance(fault, wire.StepFault)
            assert fault.refused
        assert await raw.snapshot() == before
        assert worker.executor.steps_run == [1]
        assert worker.ended == []
        assert isinstance((await raw.answers([second]))[0], StepResult)


async def test_plans_run_in_order_and_are_answered_in_order() -> None:
    async with running_worker() as worker, Driver(worker.endpoint) as driver:
        script = script_of(worker.executor)
        for _ in range(100):
            driver.client.send(script.next())
        assert await driver.answered(100) == list(range(1, 101))
        assert worker.executor.steps_run == list(range(1, 101))


async def test_the_newest_steps_are_answered_again_and_not_run_again() -> None:
    async with running_worker() as worker, raw_caller(worker.endpoint.address) as raw:
        script = script_of(worker.executor)
        plans = [script.next() for _ in range(3)]
        first = await raw.answers(plans)
        assert await raw.answers([plans[1], plans[2], plans[2]]) == [first[1], first[2], first[2]]
        assert worker.executor.steps_run == [1, 2, 3]


async def test_steps_that_skip_ahead_or_are_too_old_are_refused() -> None:
    link = LinkSettings(max_unanswered_steps=2)
    async with running_worker(spec=worker_spec(link=link)) as worker, raw_caller(worker.endpoint.address) as raw:
        script = script_of(worker.executor)
        plans = [script.next() for _ in range(6)]
        await raw.answers(plans[:4])
        old, ahead, repeat, due = await raw.answers([plans[1], plans[5], plans[3], plans[4]])
        assert isinstance(old, wire.StepFault)
        assert "step 2 is too old to be repeated, the newest that ran is 4" in old.message
        assert isinstance(ahead, wire.StepFault)
        assert "step 6 skips ahead, the newest that ran is 4" in ahead.message
        assert isinstance(repeat, StepResult)
        assert isinstance(due, StepResult)
        assert worker.executor.steps_run == [1, 2, 3, 4, 5]


async def test_an_operation_that_is_not_known_here_is_refused_in_its_turn() -> None:
    async with running_worker() as worker, raw_caller(worker.endpoint.address) as raw:
        script = script_of(worker.executor)
        first, second = (wire.plan_to_message(script.next()) for _ in range(2))
        newer = pb.StepPlan.FromString(second.SerializeToString() + b"\x22\x02\x7a\x00")
        call = raw.stub.Steps(iter_of([first, newer, second]), metadata=OURS, timeout=CALL_S)
        answers = [wire.answer_from_message(message) async for message in call]
        assert [isinstance(answer, StepResult) for answer in answers] == [True, False, True]
        assert "an operation of a kind that is not known" in answers[1].message


async def test_a_step_that_the_executor_refuses_leaves_the_worker_as_it_was() -> None:
    async with running_worker(GatedExecutor(refuse_at=2)) as worker, Driver(worker.endpoint) as driver:
        script = script_of(worker.executor)
        first, second = script.next(), script.next()
        driver.client.send(first)
        driver.client.send(second)
        await driver.until(lambda: len(driver.events) == 2)
        (failure,) = driver.failures
        assert (failure.step, failure.refused, failure.message) == (2, True, "step 2 is refused as scripted")
        driver.client.send(second)
        assert await driver.answered(2) == [1, 2]
        assert worker.ended == []
        assert driver.client.gone is None


# --- what it tells ---


async def test_a_worker_describes_itself_and_what_it_holds() -> None:
    async with running_worker() as worker, Driver(worker.endpoint) as driver:
        assert driver.joined is not None
        assert driver.joined.capability == worker.executor.describe()
        assert (driver.joined.held, driver.joined.last_step) == ((), 0)
        script = script_of(worker.executor, note=b"mine")
        for _ in range(3):
            driver.client.send(script.next())
        await driver.answered(3)
        async with raw_caller(worker.endpoint.address) as raw:
            snapshot = await raw.snapshot()
        assert snapshot.last_step == 3
        assert snapshot.sequences == worker.executor.snapshot()
        assert snapshot.sequences[0].note == b"mine"


async def test_a_driver_that_starts_anew_finds_what_the_worker_holds_and_goes_on() -> None:
    async with running_worker() as worker:
        script = script_of(worker.executor)
        async with Driver(worker.endpoint) as before:
            for _ in range(3):
                before.client.send(script.next())
            await before.answered(3)
        async with Driver(worker.endpoint) as after:
            assert after.joined is not None
            assert after.joined.last_step == 3
            assert after.joined.held == worker.executor.snapshot()
            after.client.send(script.next())
            assert await after.answered(1) == [4]


async def test_the_snapshot_holds_steps_that_were_under_way_when_the_driver_died() -> None:
    async with running_worker() as worker:
        script = script_of(worker.executor)
        worker.executor.gate.clear()
        async with Driver(worker.endpoint) as before:
            before.client.send(script.next())
            before.client.send(script.next())
            await eventually(lambda: worker.executor.begun.acquire(blocking=False))
        after = Driver(worker.endpoint)
        connecting = asyncio.create_task(after.__aenter__())
        await asyncio.sleep(0.1)
        worker.executor.gate.set()
        await connecting
        assert after.joined is not None
        # A plan is the worker's once it has been read: the second may have been, or not.
        assert after.joined.last_step in (1, 2)
        assert after.joined.held == worker.executor.snapshot()
        await after.client.close()


async def test_a_snapshot_larger_than_one_message_arrives_whole() -> None:
    spec = worker_spec(link=LinkSettings(max_message_bytes=50_000))
    async with running_worker(spec=spec) as worker, Driver(worker.endpoint, link=spec.link) as driver:
        script = script_of(worker.executor, note=b"n" * 30_000)
        plan = script.next()
        driver.client.send(plan)
        second = dataclasses.replace(
            plan,
            step=StepNumber(2),
            ops=tuple(dataclasses.replace(op, sequence=SequenceId(2)) for op in plan.ops),
            sequences=[2],
            cells=[cell + 1000 for cell in plan.cells],
        )
        driver.client.send(second)
        await driver.answered(2)
        async with Driver(worker.endpoint, link=spec.link) as again:
            assert again.joined is not None
            assert [len(held.note) for held in again.joined.held] == [30_000, 30_000]


async def test_health_tells_whether_a_step_finishes() -> None:
    spec = worker_spec(hang_timeout_s=0.3)
    async with running_worker(spec=spec) as worker, grpc.aio.insecure_channel(worker.endpoint.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def becomes(status: int) -> None:
            async with asyncio.timeout(CALL_S):
                while True:
                    for name in ("", SERVICE_NAME):
                        request = health_pb2.HealthCheckRequest(service=name)
                        answer = await stub.Check(request, metadata=OURS, timeout=CALL_S)
                        if answer.status != status:
                            break
                    else:
                        return
                    await asyncio.sleep(0.01)

        await becomes(health_pb2.HealthCheckResponse.SERVING)
        await asyncio.sleep(1.0)  # idle for more than thrice the time: probes alone keep it healthy
        await becomes(health_pb2.HealthCheckResponse.SERVING)
        worker.executor.gate.clear()
        async with Driver(worker.endpoint) as driver:
            driver.client.send(script_of(worker.executor).next())
            await becomes(health_pb2.HealthCheckResponse.NOT_SERVING)
            worker.executor.gate.set()
            await becomes(health_pb2.HealthCheckResponse.SERVING)


# --- the link breaks, the worker lives ---


async def test_a_broken_link_is_taken_up_again_and_each_step_runs_once() -> None:
    async with (
        running_worker() as worker,
        tcp_proxy(worker.endpoint.address) as proxy,
        Driver(worker.endpoint, address=proxy.address) as driver,
    ):
        script = script_of(worker.executor)
        driver.client.send(script.next())
        await driver.answered(1)
        worker.executor.gate.clear()
        driver.client.send(script.next())
        driver.client.send(script.next())
        await eventually(lambda: worker.executor.begun.acquire(blocking=False))
        proxy.cut()
        worker.executor.gate.set()
        assert await driver.answered(3) == [1, 2, 3]
        assert worker.executor.steps_run == [1, 2, 3]
        driver.client.send(script.next())
        assert await driver.answered(4) == [1, 2, 3, 4]
        assert driver.client.gone is None


async def test_an_answer_lost_on_the_way_is_given_again_from_what_is_stored() -> None:
    async with running_worker() as worker, tcp_proxy(worker.endpoint.address) as proxy:
        # The proxy answers no pings while it holds: they must not be what breaks the link.
        link = LinkSettings(keepalive_ms=60_000)
        async with Driver(worker.endpoint, address=proxy.address, link=link) as driver:
            script = script_of(worker.executor)
            worker.executor.gate.clear()
            driver.client.send(script.next())
            driver.client.send(script.next())
            await eventually(lambda: worker.executor.begun.acquire(blocking=False))
            await asyncio.sleep(0.05)  # until the second plan is there too
            proxy.hold()
            worker.executor.gate.set()
            await eventually(lambda: worker.executor.steps_run == [1, 2])
            await asyncio.sleep(0.05)
            assert driver.events == []
            proxy.cut()
            assert await driver.answered(2) == [1, 2]
            assert worker.executor.steps_run == [1, 2]


async def test_a_link_that_breaks_while_idle_is_taken_up_again_as_often_as_it_does() -> None:
    async with (
        running_worker() as worker,
        tcp_proxy(worker.endpoint.address) as proxy,
        Driver(worker.endpoint, address=proxy.address) as driver,
    ):
        script = script_of(worker.executor)
        for round_ in range(1, 4):
            accepted = proxy.accepted
            proxy.cut()
            await eventually(lambda accepted=accepted: proxy.accepted > accepted)
            driver.client.send(script.next())
            await driver.answered(round_)
        assert driver.steps_done == [1, 2, 3]
        assert driver.client.gone is None


async def test_a_link_that_breaks_again_and_again_over_the_same_step_is_given_up() -> None:
    async with (
        running_worker() as worker,
        tcp_proxy(worker.endpoint.address) as proxy,
        Driver(worker.endpoint, address=proxy.address) as driver,
    ):
        worker.executor.gate.clear()
        driver.client.send(script_of(worker.executor).next())
        await eventually(lambda: worker.executor.begun.acquire(blocking=False))
        async with asyncio.timeout(20):
            while driver.client.gone is None:
                proxy.cut()
                await asyncio.sleep(0.1)
        assert "UNAVAILABLE" in driver.client.gone
        assert proxy.accepted > 2  # the step stream's and the snapshot's connection, and at least one more


async def test_a_link_that_does_not_come_back_is_given_up() -> None:
    async with (
        running_worker() as worker,
        tcp_proxy(worker.endpoint.address) as proxy,
        Driver(worker.endpoint, address=proxy.address, link=QUICK) as driver,
    ):
        proxy.forwarding = False
        proxy.cut()
        assert "UNAVAILABLE" in await driver.lost()
        assert [type(event) for event in driver.events] == [WorkerGone]
        driver.client.send(script_of(worker.executor).next())
        assert worker.executor.steps_run == []


async def test_a_link_that_goes_silent_is_broken_by_pings() -> None:
    async with (
        running_worker() as worker,
        tcp_proxy(worker.endpoint.address) as proxy,
        Driver(worker.endpoint, address=proxy.address, link=QUICK) as driver,
    ):
        proxy.hold()
        cause = await driver.lost()
        assert "ping timeout" in cause


async def test_a_newer_driver_ends_the_older_ones_stream_and_the_older_one_stays_away() -> None:
    async with running_worker() as worker, Driver(worker.endpoint) as older:
        script = script_of(worker.executor)
        older.client.send(script.next())
        await older.answered(1)
        async with Driver(worker.endpoint) as newer:
            assert "a newer step stream has taken over" in await older.lost()
            newer.client.send(script.next())
            assert await newer.answered(1) == [2]
            assert newer.client.gone is None
        assert older.steps_done == [1]


# --- the worker ends ---


async def test_a_killed_worker_is_gone_and_nothing_else_is_posted() -> None:
    with worker_child(worker_spec("fake:step_ms=10000")) as child:
        async with Driver(child.endpoint) as driver:
            assert driver.joined is not None
            script = PlanScript(driver.joined.capability)
            driver.client.send(script.next())
            driver.client.send(script.next())
            await asyncio.sleep(0.2)
            child.kill()
            await driver.lost()
            assert [type(event) for event in driver.events] == [WorkerGone]
            assert driver.events[0].incarnation == child.endpoint.incarnation


async def test_a_worker_that_dies_inside_a_step_is_gone_after_the_steps_it_answered() -> None:
    with worker_child(worker_spec("fake:die_at=3")) as child:
        async with Driver(child.endpoint) as driver:
            assert driver.joined is not None
            script = PlanScript(driver.joined.capability)
            for _ in range(4):
                driver.client.send(script.next())
            await driver.lost()
            # The first two were answered by the worker; whether both answers left it in time is the network's business.
            assert driver.steps_done == [1, 2][: len(driver.steps_done)]
            assert driver.failures == []


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
async def test_a_stopped_worker_is_gone_and_its_late_answers_are_dropped(busy: bool) -> None:
    with worker_child(worker_spec("fake:step_ms=300")) as child:
        async with Driver(child.endpoint, link=QUICK) as driver:
            assert driver.joined is not None
            script = PlanScript(driver.joined.capability)
            if busy:
                driver.client.send(script.next())
                await asyncio.sleep(0.1)
            child.signal(signal.SIGSTOP)
            await driver.lost()
            child.signal(signal.SIGCONT)
            await asyncio.sleep(0.5)
            assert [type(event) for event in driver.events] == [WorkerGone]


async def test_a_worker_whose_step_hangs_is_gone_though_its_link_is_well() -> None:
    async with running_worker() as worker, Driver(worker.endpoint, hang_timeout_s=0.4) as driver:
        script = script_of(worker.executor)
        driver.client.send(script.next())
        await driver.answered(1)
        worker.executor.gate.clear()
        driver.client.send(script.next())
        assert (await driver.lost()).startswith("hung: step 2 has no result after")
        worker.executor.gate.set()
        await eventually(lambda: worker.executor.steps_run == [1, 2])
        assert driver.steps_done == [1]


async def test_a_step_is_not_a_hang_while_its_predicted_time_lasts() -> None:
    slow = method_table((4,), 4)
    slow = dataclasses.replace(slow, methods=(dataclasses.replace(slow.methods[0], cost_us=60_000_000),))
    executor = GatedExecutor(table=slow)
    async with running_worker(executor) as worker, Driver(worker.endpoint, hang_timeout_s=0.1) as driver:
        executor.gate.clear()
        driver.client.send(script_of(executor).next())
        await asyncio.sleep(0.5)
        assert driver.client.gone is None
        executor.gate.set()
        assert await driver.answered(1) == [1]


async def test_a_process_known_to_be_dead_is_gone_at_once() -> None:
    async with running_worker() as worker, Driver(worker.endpoint) as driver:
        driver.client.process_ended("killed by its node")
        assert driver.client.gone == "killed by its node"
        assert driver.client.loss is Loss.DIED
        assert [type(event) for event in driver.events] == [WorkerGone]
        driver.client.process_ended("again")
        assert len(driver.events) == 1


async def test_a_failed_step_is_told_then_the_worker_ends_and_later_plans_do_not_run() -> None:
    with worker_child(worker_spec("fake:fail_at=2")) as child:
        async with Driver(child.endpoint) as driver:
            assert driver.joined is not None
            script = PlanScript(driver.joined.capability)
            for _ in range(4):
                driver.client.send(script.next())
            cause = await driver.lost()
            assert cause == "step 2 failed: step 2 fails as scripted"
            assert [type(event) for event in driver.events] == [StepDone, StepFailed, WorkerGone]
            (failure,) = driver.failures
            assert (failure.step, failure.refused) == (2, False)
            assert child.ended() == "step 2 failed: step 2 fails as scripted"
            assert child.exit_status == 1


async def test_a_failed_worker_ends_even_when_nobody_listens_and_runs_nothing_more() -> None:
    async with running_worker(GatedExecutor(fail_at=2)) as worker:
        script = script_of(worker.executor)
        worker.executor.gate.clear()
        async with Driver(worker.endpoint) as driver:
            for _ in range(3):
                driver.client.send(script.next())
            await eventually(lambda: worker.executor.begun.acquire(blocking=False))
            await asyncio.sleep(0.05)  # until the other plans are there too
        worker.executor.gate.set()
        await eventually(lambda: bool(worker.ended))
        assert worker.ended == ["step 2 failed: step 2 fails as scripted"]
        assert worker.executor.steps_run == [1]


async def test_a_failed_probe_ends_the_worker_and_the_driver_hears_why() -> None:
    spec = worker_spec(hang_timeout_s=0.3)
    async with running_worker(spec=spec) as worker, Driver(worker.endpoint) as driver:
        worker.executor.fail_probe = True
        assert "an idle probe failed: the probe fails as scripted" in await driver.lost()
        await eventually(lambda: bool(worker.ended))
        assert worker.ended == ["an idle probe failed: the probe fails as scripted"]


# --- nobody drives it ---


async def test_a_worker_that_hears_no_driver_ends_itself() -> None:
    with worker_child(worker_spec(orphan_timeout_s=0.5)) as child:
        assert child.ended() == "no driver was heard for 0.5 s"
        assert child.exit_status == 1


async def test_a_worker_waits_for_its_driver_as_long_as_the_stream_is_open() -> None:
    async with running_worker(spec=worker_spec(orphan_timeout_s=0.3)) as worker:
        driver = Driver(worker.endpoint)
        async with driver:
            await asyncio.sleep(1.0)
            assert worker.ended == []
            driver.client.send(script_of(worker.executor).next())
            await driver.answered(1)
        await eventually(lambda: bool(worker.ended))
        assert worker.ended == ["no driver was heard for 0.3 s"]


async def test_callers_without_the_secret_do_not_count_as_a_driver() -> None:
    spec = worker_spec(orphan_timeout_s=0.5)
    async with running_worker(spec=spec) as worker, grpc.aio.insecure_channel(worker.endpoint.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        async with asyncio.timeout(CALL_S):
            while not worker.ended:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await stub.Describe(pb.DescribeRequest(), timeout=1)
                await asyncio.sleep(0.01)


async def test_a_driver_that_falls_silent_without_a_goodbye_leaves_the_worker_alone() -> None:
    # its node is lost: nothing closes the connection
    spec = worker_spec(link=LinkSettings(driver_keepalive_ms=200), orphan_timeout_s=0.3)
    async with (
        running_worker(spec=spec) as worker,
        tcp_proxy(worker.endpoint.address) as proxy,
        Driver(worker.endpoint, address=proxy.address, link=LinkSettings(keepalive_ms=60_000)),
    ):
        proxy.hold()
        await eventually(lambda: bool(worker.ended))
        assert worker.ended == ["no driver was heard for 0.3 s"]


# --- TLS ---


@pytest.fixture(scope="module")
def tls_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Settings that name a certificate, its key and the authority that signed it; and another authority's."""
    folder = tmp_path_factory.mktemp("tls")
    ours, theirs = trustme.CA(), trustme.CA()
    ours.cert_pem.write_to_path(str(folder / "authority.pem"))
    for name, authority in (("ours", ours), ("theirs", theirs)):
        issued = authority.issue_cert("microtome.internal")
        issued.private_key_pem.write_to_path(str(folder / f"{name}.key"))
        issued.cert_chain_pems[0].write_to_path(str(folder / f"{name}.pem"))
    return {"folder": str(folder)}


def tls_link(folder: str, whose: str = "ours", name: str = "microtome.internal") -> LinkSettings:
    return LinkSettings(
        call_timeout_s=3,
        tls_certificate=f"{folder}/{whose}.pem",
        tls_key=f"{folder}/{whose}.key",
        tls_authority=f"{folder}/authority.pem",
        tls_name=name,
    )


async def test_steps_run_under_mutual_tls(tls_files: dict[str, str]) -> None:
    link = tls_link(tls_files["folder"])
    async with running_worker(spec=worker_spec(link=link)) as worker, Driver(worker.endpoint, link=link) as driver:
        script = script_of(worker.executor)
        for _ in range(3):
            driver.client.send(script.next())
        assert await driver.answered(3) == [1, 2, 3]


async def test_under_tls_a_caller_without_our_certificate_is_refused_though_it_has_the_secret(
    tls_files: dict[str, str],
) -> None:
    folder = tls_files["folder"]
    async with running_worker(spec=worker_spec(link=tls_link(folder))) as worker:
        strangers = [LinkSettings(call_timeout_s=3), tls_link(folder, "theirs"), tls_link(folder, name="other.name")]
        for link in strangers:
            with pytest.raises(WorkerLost):
                await Driver(worker.endpoint, link=link).client.connect()
        async with Driver(worker.endpoint, link=tls_link(folder)) as driver:
            assert driver.joined is not None


async def test_a_tls_file_that_cannot_be_used_is_named(tls_files: dict[str, str]) -> None:
    folder = tls_files["folder"]
    absent = dataclasses.replace(tls_link(folder), tls_key=f"{folder}/absent.key")
    binary = dataclasses.replace(tls_link(folder), tls_authority="/bin/true")
    for link, sentence in (
        (absent, f"tls_key '{folder}/absent.key' cannot be read: No such file"),
        (binary, "tls_authority '/bin/true' is not a PEM file"),
    ):
        process = WorkerProcess(worker_spec(link=link), lambda cause: None)
        with pytest.raises(BadConfig, match=sentence):
            await process.start()
        await process.stop()
        async with running_worker() as worker:
            with pytest.raises(BadConfig, match=sentence):
                await Driver(worker.endpoint, link=link).client.connect()


# --- how large a message may be ---

LIMIT = 50_000
LIMITED = LinkSettings(max_message_bytes=LIMIT)


async def test_a_plan_at_the_limit_is_run_and_one_byte_more_is_not_sent() -> None:
    async with (
        running_worker(spec=worker_spec(link=LIMITED)) as worker,
        Driver(worker.endpoint, link=LIMITED) as driver,
    ):
        script = script_of(worker.executor)
        driver.client.send(padded(script.next(), LIMIT - 1))
        driver.client.send(padded(script.next(), LIMIT))
        third = script.next()
        driver.client.send(padded(third, LIMIT + 1))
        await driver.until(lambda: len(driver.events) == 3)
        assert driver.steps_done == [1, 2]
        (failure,) = driver.failures
        assert (failure.step, failure.refused) == (3, True)
        assert failure.message == f"the plan takes {LIMIT + 1} bytes, max_message_bytes is {LIMIT}"
        driver.client.send(third)
        assert await driver.answered(3) == [1, 2, 3]


async def test_a_refusal_of_a_plan_that_was_not_sent_waits_for_its_turn() -> None:
    async with (
        running_worker(spec=worker_spec(link=LIMITED)) as worker,
        Driver(worker.endpoint, link=LIMITED) as driver,
    ):
        script = script_of(worker.executor)
        worker.executor.gate.clear()
        driver.client.send(script.next())
        driver.client.send(padded(script.next(), LIMIT + 1))
        await eventually(lambda: worker.executor.begun.acquire(blocking=False))
        await asyncio.sleep(0.05)
        assert driver.events == []
        worker.executor.gate.set()
        await driver.until(lambda: len(driver.events) == 2)
        assert [type(event) for event in driver.events] == [StepDone, StepFailed]


async def test_the_worker_itself_takes_a_message_at_the_limit_and_refuses_one_byte_more() -> None:
    async with running_worker(spec=worker_spec(link=LIMITED)) as worker, raw_caller(worker.endpoint.address) as raw:
        script = script_of(worker.executor)
        plans = [padded(script.next(), LIMIT - 1), padded(script.next(), LIMIT)]
        assert [type(answer) for answer in await raw.answers(plans)] == [StepResult, StepResult]
        third = script.next()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await raw.answers([padded(third, LIMIT + 1)])
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert worker.executor.steps_run == [1, 2]
        assert isinstance((await raw.answers([third]))[0], StepResult)


@pytest.mark.parametrize(("spare", "fits"), [(1, True), (0, True), (-1, False)])
async def test_the_driver_takes_an_answer_at_the_limit_and_refuses_one_byte_more(spare: int, fits: bool) -> None:
    async with (
        running_worker() as worker,
        Driver(worker.endpoint) as driver,
    ):
        driver.client.send(script_of(worker.executor, note=b"n" * 20_000).next())
        await driver.answered(1)
        async with raw_caller(worker.endpoint.address) as raw:
            (message,) = wire.snapshot_to_messages(await raw.snapshot(), 2**20)
        limited = LinkSettings(max_message_bytes=message.ByteSize() + spare)
        second = Driver(worker.endpoint, link=limited)
        if fits:
            joined = await second.client.connect()
            assert len(joined.held) == 1
            await second.client.close()
        else:
            with pytest.raises(WorkerLost, match="RESOURCE_EXHAUSTED"):
                await second.client.connect()


# --- it does not start ---


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (worker_spec(executor="no.such.module:build"), "executor 'no.such.module:build' cannot be loaded"),
        (worker_spec(executor="tests.support.fake_executor:nothing"), "fake_executor:nothing' cannot be loaded"),
        (worker_spec("llama"), "model 'llama' is not 'fake'"),
        (worker_spec(host="192.0.2.1"), "worker worker-0: cannot bind to 192.0.2.1"),
        (
            worker_spec(link=LinkSettings(max_message_bytes=40_959)),
            "max_message_bytes 40959 is below the 40960 that a sequence of max_session_tokens 4096 can take",
        ),
    ],
)
async def test_what_cannot_work_is_found_before_the_worker_is_ready(spec: Any, sentence: str) -> None:
    process = WorkerProcess(spec, lambda cause: None)
    with pytest.raises(BadConfig, match=sentence):
        await process.start()
    assert process.endpoint is None
    await process.stop()


async def test_an_accepted_stream_names_the_incarnation_before_any_plan() -> None:
    async with running_worker() as worker, raw_caller(worker.endpoint.address) as raw:
        call = raw.stub.Steps(metadata=OURS, timeout=CALL_S)
        assert dict(await call.initial_metadata())[INCARNATION_KEY] == worker.endpoint.incarnation
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK
