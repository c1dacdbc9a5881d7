"""A Ray job that brings its own service: up, a thousand prompts, down.

ray job submit --working-dir examples -- python own_service.py --model smollm2-135m
"""

import argparse
import asyncio
import os
import sys

from prompts import answer_all

from microtome.local import configuration, running
from microtome.planner.errors import BatchingError


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    arguments = parser.parse_args()
    try:
        config = configuration(
            {
                "model": arguments.model,
                "service.name": f"job-{os.getpid()}",
                "service.port": 0,  # any free one: other services may be up on this cluster
                "workers.count": arguments.workers,
                "runtime.device": arguments.device,
            }
        )
        with running(config, ray_address="auto") as endpoint:
            failed = asyncio.run(answer_all(endpoint.address, arguments.prompts, arguments.max_new_tokens))
    except BatchingError as error:
        print(error, file=sys.stderr)
        return 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
