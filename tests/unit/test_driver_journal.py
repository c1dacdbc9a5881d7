"""A service that keeps a journal: what it has lived through runs again without a difference."""

import asyncio
import io
import json
from pathlib import Path

import grpc.aio
import pytest
from rich.console import Console

from microtome import replaying
from microtome.actors.driver import DriverHost
from microtome.errors import InvalidRequest
from microtome.planner.control import Control
from microtome.planner.errors import BadConfig
from microtome.planner.events import Event, Instruction, Submit, WorkerGone, WorkerJoined
from microtome.planner.journal import read_journal
from microtome.planner.replay import replay
from microtome.v1 import generation_pb2 as pb
from microtome.v1 import generation_pb2_grpc as rpc
from tests.support.calls import collect, request, tokens_of, undisturbed
from tests.support.in_process import SECRET, InProcessWorkers, fake_config, in_process


async def eventful_day(path: Path) -> None:
    """Forty calls, some of them cancelled, on two workers of which one is killed."""
    async with in_process(fake_config("fake:step_ms=1", workers__count=2, journal__path=str(path))) as service:

        async def call(n: int) -> None:
            prompt = [n + 1, *range(n)]
            if n % 5:
                responses = await collect(service.stub, request(prompt, max_new_tokens=30, temperature=n % 2, seed=n))
                assert tokens_of(responses) == undisturbed(prompt, 30, n, float(n % 2))
            else:
                doomed = service.stub.Generate(request(prompt, max_new_tokens=2000))
                await doomed.read()
                doomed.cancel()

        calls = [asyncio.create_task(call(n)) for n in range(40)]
        await asyncio.sleep(0.05)
        await service.workers.kill(next(iter(service.workers.processes)))
        await asyncio.gather(*calls)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("journal") / "day.journal"
    asyncio.run(eventful_day(path))
    return path


def run(path: Path, tmp_path: Path, **asked: object) -> tuple[bool, str, str, dict[str, object]]:
    """What the command finds, and what it writes: for people, as remarks, and as JSON."""
    console, remarks = (Console(file=io.StringIO(), width=200) for _ in range(2))
    file = tmp_path / "out.json"
    arguments = {"policy": None, "workers": None, "life": None, **asked}
    agrees = replaying.run(path, json_file=file, console=console, remarks=remarks, **arguments)  # type: ignore[arg-type]
    said, remarked = (one.file.getvalue() for one in (console, remarks))  # type: ignore[attr-defined]
    return agrees, said, remarked, json.loads(file.read_text())


def test_a_day_with_cancels_and_a_killed_worker_replays_without_a_difference(recorded: Path, tmp_path: Path) -> None:
    (life,) = read_journal(recorded.read_bytes()).lives
    kinds = [type(entry.event) for entry in life]
    assert kinds.count(Submit) == 40
    assert kinds.count(WorkerGone) >= 1
    assert kinds.count(WorkerJoined) >= 3  # the one that was killed is replaced
    agrees, said, remarks, data = run(recorded, tmp_path)
    assert agrees
    assert f"{len(life)} events replayed" in said
    assert "no difference" in said
    assert remarks == ""
    assert data["lives"][0]["difference"] is None  # type: ignore[index]


def test_a_flipped_byte_is_named_by_its_record(recorded: Path, tmp_path: Path) -> None:
    data = bytearray(recorded.read_bytes())
    data[len(data) // 2] ^= 0x10
    broken = tmp_path / "broken.journal"
    broken.write_bytes(data)
    agrees, said, remarks, _ = run(broken, tmp_path)
    assert not agrees
    assert "no difference" in said  # in what stands before it
    (life,) = read_journal(bytes(data)).lives
    assert f"record {len(life.bodies) + 1} at byte" in remarks
    assert "its CRC-32 is not the one written with it" in remarks


def test_another_policy_and_more_workers_are_answered_with_figures(recorded: Path, tmp_path: Path) -> None:
    agrees, said, _, data = run(recorded, tmp_path, policy="fair-priority", workers=4)
    assert agrees
    assert "simulated: fair-priority, workers 4" in said
    assert "ttft_p50_ms" in said
    recorded_figures, what_if = data["recorded"], data["what_if"]
    assert isinstance(recorded_figures, dict)
    assert isinstance(what_if, dict)
    assert what_if["output_tokens"] == recorded_figures["output_tokens"] >= 32 * 30
    assert what_if["workers"] == 4
    assert 1 <= data["simulated"]["workers"] <= 2  # type: ignore[index]


async def test_a_driver_that_starts_again_appends_its_life(tmp_path: Path) -> None:
    config = fake_config("fake:step_ms=5", workers__count=1, journal__path=str(tmp_path))
    workers = InProcessWorkers(config)
    broken: list[BaseException] = []
    first = DriverHost(config, SECRET, workers, failed=broken.append)
    await first.start()
    await first.wait_ready()
    await first.leave()
    second = DriverHost(config, SECRET, workers, failed=broken.append)
    await second.start(restarted=True)
    await second.wait_ready()
    await second.stop()
    await workers.end_all()
    assert not broken
    lives = read_journal((tmp_path / "microtome.journal").read_bytes()).lives
    assert len(lives) == 2
    for life in lives:
        assert WorkerJoined in [type(entry.event) for entry in life]
        assert replay(life, life.config).difference is None


async def test_an_event_that_breaks_the_planner_is_the_last_one_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.journal"
    config = fake_config(journal__path=str(path))
    workers, broken = InProcessWorkers(config), asyncio.get_running_loop().create_future()
    host = DriverHost(config, SECRET, workers, failed=lambda error: broken.done() or broken.set_result(error))
    await host.start()
    await host.wait_ready()
    handle = Control.handle

    def break_on_submit(control: Control, event: Event) -> list[Instruction]:
        if isinstance(event, Submit):
            raise ZeroDivisionError("a defect")
        return handle(control, event)

    with monkeypatch.context() as patched:
        patched.setattr(Control, "handle", break_on_submit)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{host.port}") as channel:
            call = rpc.GenerationStub(channel).Generate(request([1, 2]))
            asking = asyncio.ensure_future(call.read())
            assert isinstance(await asyncio.wait_for(broken, 10), ZeroDivisionError)
            (life,) = read_journal(path.read_bytes()).lives  # it is whole though nothing was closed
            *_, last = life
            assert isinstance(last.event, Submit)
            assert last.raised == "ZeroDivisionError: a defect"
            assert replay(life, life.config).raised == "ZeroDivisionError: a defect"
            call.cancel()
            await asyncio.gather(asking, return_exceptions=True)
    await host.stop()
    await workers.end_all()
    assert "the planner raised ZeroDivisionError" in str(replay(life, life.config))


async def test_a_journal_that_cannot_be_written_is_said_at_the_start_but_stops_no_restart(tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("chapter one")
    config = fake_config(journal__path=str(path), workers__count=1)
    workers, broken = InProcessWorkers(config), list[BaseException]()
    host = DriverHost(config, SECRET, workers, failed=broken.append)
    with pytest.raises(BadConfig, match="is a file of something else"):
        await host.start()
    await host.stop()
    again = DriverHost(config, SECRET, workers, failed=broken.append)
    await again.start(restarted=True)
    await again.stop()
    await workers.end_all()
    assert not broken
    assert path.read_text() == "chapter one"


async def test_metrics_say_whether_the_journal_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.journal"
    async with in_process(fake_config(journal__path=str(path), journal__max_bytes=2**20)) as service:
        await collect(service.stub, request([1, 2], max_new_tokens=5))

        async def figures() -> dict[str, float]:
            families = await asyncio.to_thread(lambda: list(service.host.metrics.collect()))
            return {s.name: s.value for family in families for s in family.samples if "journal" in s.name}

        async with asyncio.timeout(10):
            while not (await figures())["microtome_journal_bytes_total"]:  # noqa: ASYNC110  # a thread writes it
                await asyncio.sleep(0.02)
        assert (await figures())["microtome_journal_recording"] == 1
        service.host._journal._left = 10  # type: ignore[union-attr]
        responses = await collect(service.stub, request([1, 2], max_new_tokens=50))
        assert tokens_of(responses) == undisturbed([1, 2], 50)
        assert responses[-1].finish_reason == pb.FINISH_REASON_LENGTH
        async with asyncio.timeout(10):
            while (await figures())["microtome_journal_recording"]:  # noqa: ASYNC110  # and finds out
                await asyncio.sleep(0.02)


def test_a_file_that_is_no_journal_is_said_to_be_none(tmp_path: Path) -> None:
    with (
        pytest.raises(InvalidRequest, match=r"journal '.*nothing.journal' cannot be read: No such file"),
        replaying.opened(tmp_path / "nothing.journal"),
    ):
        pass
    foreign = tmp_path / "a.txt"
    foreign.write_text("hello, hello, hello, hello, hello")
    with pytest.raises(InvalidRequest, match=r"a.txt' cannot be read: it is not a journal"), replaying.opened(foreign):
        pass


def test_a_torn_tail_is_told_and_is_no_fault(recorded: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn.journal"
    torn.write_bytes(recorded.read_bytes()[:-3])
    agrees, said, remarks, data = run(torn, tmp_path)
    assert agrees
    assert "no difference" in said
    assert "bytes at the end are left out: the last record was being written" in remarks
    assert "being written" in str(data["unread"])


def test_a_life_that_is_not_there_is_refused(recorded: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="life 2 is not in 1 to 1"):
        run(recorded, tmp_path, life=2)
