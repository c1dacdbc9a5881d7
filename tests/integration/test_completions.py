"""Several completions of one prompt on a real service: a worker dies, then the driver, and no completion differs."""

import os
import signal

import ray

import microtome
from microtome.actors.requests import seed_of
from tests.support.calls import undisturbed
from tests.support.on_ray import up

PROMPT, SEED, TOKENS = [5, 6, 7], 11, 250


async def test_completions_outlive_a_worker_and_the_driver_and_where_knows_them(service_name: str) -> None:
    endpoint = up(service_name, "fake:step_ms=10", workers__count=2)
    came: dict[int, list[int]] = {index: [] for index in range(4)}
    driver_pid = ray.get(ray.get_actor(service_name, namespace=service_name).pid.remote())
    killed: list[str] = []
    patient = microtome.Retry(attempts=60, resume_attempts=60, most_s=1.0)  # a busy machine restarts a driver slowly
    async with microtome.AsyncClient(endpoint.address, retry=patient) as client:
        generation = client.generate(token_ids=PROMPT, n=4, max_new_tokens=TOKENS, temperature=1.0, seed=SEED)
        async for update in generation:
            assert update.offset == len(came[update.index])
            came[update.index] += update.token_ids
            if not killed and min(map(len, came.values())) >= 10:
                places = await client.where(generation.generation_id)
                assert [place.state for place in places] == ["running"] * 4
                home = next(w for w in (await client.status()).workers if w.name == places[0].worker)
                os.kill(home.pid, signal.SIGKILL)
                killed.append("worker")
            elif killed == ["worker"] and min(map(len, came.values())) >= 60:
                places = await client.where(generation.generation_id)
                assert all(place.moved for place in places)
                assert all(place.output_tokens >= 60 for place in places)
                os.kill(driver_pid, signal.SIGKILL)
                killed.append("driver")
        assert killed == ["worker", "driver"], "the generation was over too soon"
        for index, tokens in came.items():
            assert tokens == undisturbed(PROMPT, TOKENS, seed_of(SEED, index), 1.0)
        assert [(c.index, list(c.token_ids)) for c in generation.completions] == sorted(came.items())
        assert {c.usage.output_tokens for c in generation.completions} == {TOKENS}
