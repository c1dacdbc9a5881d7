"""A Ray job that uses a service which is up on its cluster: found by name, a thousand prompts, left as it was.

ray job submit --working-dir examples -- python existing_service.py --service microtome
"""

import argparse
import asyncio
import sys

from prompts import answer_all

from microtome.actors.cluster import address_of
from microtome.planner.errors import BatchingError


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--service", default="microtome")
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    arguments = parser.parse_args()
    try:
        address = address_of(arguments.service, ray_address="auto")
    except BatchingError as error:
        print(error, file=sys.stderr)
        return 1
    return 1 if asyncio.run(answer_all(address, arguments.prompts, arguments.max_new_tokens)) else 0


if __name__ == "__main__":
    sys.exit(main())
