"""What status, metrics and whoever waits are told of a worker that was lost."""

import asyncio

import pytest

from microtome.actors.remains import Loss, Remains
from microtome.planner.errors import WorkerLost
from microtome.planner.types import WorkerId
from microtome.v1 import generation_pb2 as pb
from tests.support.calls import collect, request, status_when, tokens_of, undisturbed
from tests.support.in_process import InProcessWorkers, Service, fake_config, in_process

FIRST = WorkerId("worker-1")


def lost_of(status: pb.StatusResponse) -> list[pb.WorkerStatus]:
    return [worker for worker in status.workers if worker.state == "lost"]


def counted(service: Service, loss: Loss, process: str) -> float | None:
    labels = {"reason": loss.value, "process": process}
    return service.host.metrics.registry.get_sample_value("microtome_workers_lost_total", labels)


async def test_a_death_is_told_by_what_was_found_of_the_process_and_counted() -> None:
    async with in_process(fake_config("fake:step_ms=5")) as service:
        service.workers.found[FIRST] = Remains(lives=False, signal="SIGKILL", step=5, in_step=True)
        running = asyncio.create_task(collect(service.stub, request([1], max_new_tokens=60)))
        await status_when(service.stub, lambda status: status.counters.output_tokens > 3)
        service.workers.say_ended(FIRST)
        status = await status_when(service.stub, lambda status: any("SIGKILL" in w.cause for w in status.workers))
        (lost,) = lost_of(status)
        assert lost.loss == "died"
        assert lost.cause == "its process was killed by SIGKILL in step 5 (noticed: killed by the test)"
        assert await asyncio.to_thread(counted, service, Loss.DIED, "SIGKILL") == 1
        assert tokens_of(await running) == undisturbed([1], 60)


async def test_a_death_of_which_nothing_is_found_is_told_as_it_was_noticed() -> None:
    async with in_process(fake_config("fake:step_ms=5")) as service:
        service.workers.say_ended(FIRST)
        status = await status_when(service.stub, lambda status: bool(lost_of(status)))
        assert [(w.loss, w.cause) for w in lost_of(status)] == [("died", "killed by the test")]
        await status_when(service.stub, lambda _: FIRST in service.workers.ended)
        assert await asyncio.to_thread(counted, service, Loss.DIED, "") == 1


async def test_a_failed_step_stays_the_reason_when_the_process_has_ended_behind_it() -> None:
    config = fake_config("fake:fail_at=3", workers__count=1)
    async with in_process(config) as service:
        service.workers.found[FIRST] = Remains(
            lives=False, exit_code=1, step=3, in_step=True, cause="step 3 failed: step 3 fails as scripted"
        )
        assert tokens_of(await collect(service.stub, request([1], max_new_tokens=4))) == undisturbed([1], 4)
        status = await status_when(service.stub, lambda status: any("exit code" in w.cause for w in status.workers))
        lost = lost_of(status)[0]
        assert lost.loss == "failed a step"
        assert "step 3 failed: step 3 fails as scripted" in lost.cause
        assert "its process ended with exit code 1 in step 3" in lost.cause


async def test_nobody_looks_for_the_remains_of_a_worker_that_was_drained() -> None:
    async with in_process(fake_config("fake", workers__count=2)) as service:
        await service.host.drain(FIRST)
        assert FIRST in service.workers.ended
        status = await service.stub.Status(pb.StatusRequest())
        assert [(w.state, w.loss) for w in status.workers if w.name == FIRST] == [("ended", "")]
        assert service.workers.examined == []


async def test_a_start_whose_process_died_tells_how_to_whoever_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def dies(self: InProcessWorkers, order: object) -> None:
        raise WorkerLost("its process has died")

    async def remains(self: InProcessWorkers, worker: WorkerId) -> Remains:
        return Remains(lives=False, oom_kills=1)

    monkeypatch.setattr(InProcessWorkers, "start", dies)
    monkeypatch.setattr(InProcessWorkers, "remains", remains)
    with pytest.raises(WorkerLost, match=r"^its process ended without a word, as after SIGKILL; out of memory"):
        async with in_process(fake_config("fake")):
            pass
