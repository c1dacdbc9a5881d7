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
import sys
import time
from pathlib import Path

import torch

from bench.peer_engines.agreement import partings
from bench.peer_engines.limits import demand_of_folder
from bench.peer_engines.report import Agreement, as_value, markdown, shares
from bench.peer_engines.roster import DTYPES, HOME_VARIABLE, MODEL, OURS, SETS, chosen, peers_home
from bench.peer_engines.rounds import Bench, Measured, Plan
from bench.peer_engines.workload import WORKS, load

MEASURED = Path(__file__).parent.parent / "docs" / "measured"
TITLE = "Microtome beside other engines, on a CPU"
THREADS = 2
LOOKED_AT = 4  # partings of tokens whose leads are asked for, per peer


def machine() -> dict[str, object]:
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
        "load_before": os.getloadavg()[0],
    }


def compare_tokens(bench: Bench, measured: Measured) -> list[Agreement]:
    """Ours in process with each other engine at float32."""
    ours = measured.of(OURS, "float32")
    if ours is None or not ours.rounds:
        return []
    works = [work for work in WORKS if work in ours.tokens]
    asked = [request for work in works for request in load(work, "round 1, run 0").requests]
    own = [tokens for work in works for tokens in ours.tokens[work]]
    found = []
    for peer in measured.entrants:
        if peer is ours or peer.dtype != "float32" or not peer.rounds:
            continue
        theirs = [tokens for work in works for tokens in peer.tokens[work]]
        if any(len(a) != len(b) for a, b in zip(own, theirs, strict=True)):
            continue  # it tells counts only
        differ = partings(own, theirs)
        contexts = [[*asked[at.request].prompt, *own[at.request][: at.position]] for at in differ[:LOOKED_AT]]
        leads = bench.lead("float32", contexts)
        first = differ[0].position if differ else None
        found.append(Agreement(peer.engine.title, len(own), len(own) - len(differ), first, max(leads, default=None)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="?", default="main", help=f"{', '.join(SETS)}, or names: vllm,openvino")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--works", default=",".join(WORKS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=20, help="no round begins that would end later")
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
    plan = Plan(
        engines=engines,
        dtypes=tuple(asked.dtypes.split(",")),
        works=tuple(asked.works.split(",")),
        rounds=asked.rounds,
        minutes=asked.minutes,
        home=asked.home,
        cores=cores,
        settings=dict(pair.split("=", 1) for pair in asked.set),
        all_new=asked.all_new,
    )
    if not (plan.home / MODEL).is_dir():
        parser.error(f"there is no model at {plan.home / MODEL}: `make bench-peers` installs it, and the peers")
    asked.logs.mkdir(parents=True, exist_ok=True)
    out = asked.out or MEASURED / f"peers-{asked.engines.replace(',', '-')}"
    command, date = f"python -m bench.peers {' '.join(sys.argv[1:])}".strip(), time.strftime("%Y-%m-%d", time.gmtime())
    about = machine()
    with Bench(plan, asked.logs, lambda line: print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)) as bench:
        measured = bench.run()
        agreements = compare_tokens(bench, measured)
    busy = max((cores["before"] for one in measured.entrants for cores in one.cores), default=0.0)
    limits = shares(measured, demand_of_folder(plan.home / MODEL))
    rounds = len(measured.limits)
    facts = [
        f"`{command}`, {date}, {rounds} round{'s' if rounds > 1 else ''}: medians (least–most). SmolLM2-135M-Instruct, "
        f"{THREADS} threads, greedy, exact lengths; the works are in bench/peer_engines/workload.py. Machine: "
        f"{about['cpu']}, {about['cores']} cores, {', '.join(about['features'])}, {about['memory_gib']} GiB, "  # type: ignore[arg-type]
        f"{about['system']}; torch {torch.__version__}; other processes kept at most "
        f"{busy:.2f} cores busy before a turn. A ratio "
        "above 1 means that ours is faster: rates are divided ours ÷ peer, times peer ÷ ours, round by round.",
    ]
    text = markdown(TITLE, facts, measured, limits, agreements)
    print(f"\n{text}")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".md").write_text(text)
    value = as_value(
        {"command": command, "date": date, "machine": about, "torch": torch.__version__}, measured, limits, agreements
    )
    out.with_suffix(".json").write_text(json.dumps(value, indent=1) + "\n")
    print(f"written: {out}.md and .json; the engines' logs are in {asked.logs}")
    return int(any(one.out and one.engine.missing(plan.home) is None for one in measured.entrants))


if __name__ == "__main__":
    sys.exit(main())
