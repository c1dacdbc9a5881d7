"""Microtome beside other engines: the same model, token ids, lengths and threads, in turns within one run.

`python -m bench.peers main` measures ours, in process and through the whole service, beside vLLM and OpenVINO GenAI;
`rest` the other peers beside ours in process; `all`, or names with commas between, what they say. Each engine has a
process, and each peer an environment of its own under $PEERS_HOME (default: in the user's cache directory), where
`bench/peer_engines/install.sh` put them. The work is in `bench.peer_engines.workload`: greedy, and an output is exactly
as long as asked for; an engine whose lengths differ is refused.

Figures are medians over rounds, with the least and the most; ratios are of the same round. They are printed, and
written to docs/measured as Markdown and JSON. The exit status is 1 when an engine that is installed was not measured.
"""

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.peer_engines.agreement import partings
from bench.peer_engines.limits import demand_of_folder
from bench.peer_engines.report import Agreement, Part, as_value, markdown, part_of
from bench.peer_engines.roster import DTYPES, HOME_VARIABLE, MODEL, OURS, SETS, chosen, peers_home
from bench.peer_engines.rounds import Bench, Measured, Plan, load_of
from bench.peer_engines.workload import WORKS

MEASURED = Path(__file__).parent.parent / "docs" / "measured"
TITLE = "Microtome beside other engines, on a CPU"
THREADS = 2
LOOKED_AT = 4  # partings of tokens whose leads are asked for, per peer


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    features = said.get("flags", "").split()
    memory_kib = int(Path("/proc/meminfo").read_text().split()[1])
    return {
        "cpu": said.get("model name", platform.machine()),
        "features": [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8") if name in features],
        "cores": os.cpu_count(),
        "memory_gib": round(memory_kib / 2**20, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def sentences(command: str, date: str, about: Mapping[str, Any], others_busy: float) -> list[str]:
    """What a reader of the figures has to know."""
    model = f"SmolLM2-135M-Instruct, {THREADS} threads, greedy, exact lengths"
    where = f"{about['cpu']}, {about['cores']} cores, {', '.join(about['features'])}, {about['memory_gib']} GiB"
    return [
        f"`{command}`, {date}: medians over rounds (least–most). {model}; the works are in",
        "`bench/peer_engines/workload.py`.",
        f"Machine: {where}, {about['system']}, Python {about['python']};",
        f"other processes kept at most {others_busy:.2f} cores busy before a turn.",
        "A ratio above 1 means that ours is faster: rates are divided ours ÷ peer, times peer ÷ ours, round by round.",
    ]


def tell(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def compare_tokens(bench: Bench, measured: Measured) -> list[Agreement]:
    """Ours in process with each other engine that tells its tokens."""
    ours = measured.of(OURS)
    if ours is None:
        return []
    works = list(ours.tokens)
    asked = [request for work in works for request in load_of(work, 1, 0).requests]
    own = [tokens for work in works for tokens in ours.tokens[work]]
    found = []
    for peer in measured.entrants:
        if peer is ours or not peer.rounds:
            continue
        theirs = [tokens for work in works for tokens in peer.tokens[work]]
        if any(len(a) != len(b) for a, b in zip(own, theirs, strict=True)):
            continue
        differ = partings(own, theirs)
        contexts = [[*asked[at.request].prompt, *own[at.request][: at.position]] for at in differ[:LOOKED_AT]]
        first = differ[0].position if differ else None
        lead = max(bench.leads(contexts), default=None)
        found.append(Agreement(peer.engine.title, len(own), len(own) - len(differ), first, lead))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="?", default="main", help=f"{', '.join(SETS)}, or names: vllm,openvino")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--works", default=",".join(WORKS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=20, help="of the whole; no round begins that would end later")
    parser.add_argument("--home", type=Path, default=peers_home(), help=f"of the peers; default: ${HOME_VARIABLE}")
    parser.add_argument("--all-new", action="store_true", help="a new process per round, where memory is short")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of ours")
    parser.add_argument(
        "--out", type=Path, help="where to write, without a suffix; default: docs/measured/peers-ENGINES"
    )
    parser.add_argument("--logs", type=Path, default=Path("/tmp/microtome-bench-peers"))
    asked = parser.parse_args()
    cores = tuple(sorted(os.sched_getaffinity(0)))[:THREADS]
    os.sched_setaffinity(0, cores)  # and so for every process that is started
    try:
        engines = chosen(asked.engines)
    except ValueError as error:
        parser.error(str(error))
    if not (asked.home / MODEL).is_dir():
        parser.error(f"there is no model at {asked.home / MODEL}: `make bench-peers` installs it, and the peers")
    out = asked.out or MEASURED / f"peers-{asked.engines.replace(',', '-')}"
    command, date = f"python -m bench.peers {' '.join(sys.argv[1:])}".strip(), time.strftime("%Y-%m-%d", time.gmtime())
    about, demand = machine(), demand_of_folder(asked.home / MODEL)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # engines are ended on the way out
    began_s = time.monotonic()
    dtypes = asked.dtypes.split(",")
    parts: list[Part] = []
    for number, dtype in enumerate(dtypes):
        left = asked.minutes - (time.monotonic() - began_s) / 60
        plan = Plan(
            engines=engines,
            dtype=dtype,
            works=tuple(asked.works.split(",")),
            rounds=asked.rounds,
            minutes=left / (len(dtypes) - number),
            home=asked.home,
            cores=cores,
            settings=dict(pair.split("=", 1) for pair in asked.set),
            all_new=asked.all_new,
        )
        with Bench(plan, asked.logs, tell) as bench:
            measured = bench.run()
            # Narrower arithmetic rounds so much that no two engines stay together for long.
            agreements = compare_tokens(bench, measured) if dtype == "float32" else []
        parts.append(part_of(measured, demand, agreements))
    entrants = [entrant for part in parts for entrant in part.measured.entrants]
    busy = max((cores["before"] for one in entrants for cores in one.cores), default=0.0)
    text = markdown(TITLE, sentences(command, date, about, busy), parts)
    print(f"\n{text}")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".md").write_text(text)
    value = as_value({"command": command, "date": date, "machine": about}, parts)
    out.with_suffix(".json").write_text(json.dumps(value, indent=1) + "\n")
    print(f"written: {out}.md and .json; the engines' logs are in {asked.logs}")
    return int(any(one.out and one.engine.missing(asked.home) is None for one in entrants))


if __name__ == "__main__":
    sys.exit(main())
