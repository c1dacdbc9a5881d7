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
from collections.abc import Mapping, Sequence
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


def sentences(about: Mapping[str, Any], others_busy: float) -> list[str]:
    """What a reader of the figures has to know."""
    here = about["machine"]
    return [
        f"`{about['command']}`, {about['date']}: medians over rounds (least–most). SmolLM2-135M-Instruct, {THREADS}",
        "threads, greedy, exact lengths; [how it is measured](peers.md).",
        f"Machine: {here['cpu']}, {here['cores']} cores, {', '.join(here['features'])}, {here['memory_gib']} GiB,",
        f"{here['system']}, Python {here['python']};",
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
    parser.add_argument(
        "--minutes",
        type=float,
        default=30,
        help="of the whole; no round begins that would end later, but each dtype's first",
    )
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
        dtypes, works = among(DTYPES, "dtype", asked.dtypes), among(WORKS, "work", asked.works)
    except ValueError as error:
        parser.error(str(error))
    if not (asked.home / MODEL).is_dir():
        parser.error(f"there is no model at {asked.home / MODEL}: `make bench-peers` installs it, and the peers")
    out = asked.out or MEASURED / f"peers-{asked.engines.replace(',', '-')}"
    about = {
        "command": f"python -m bench.peers {' '.join(sys.argv[1:])}".strip(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
    }
    demand = demand_of_folder(asked.home / MODEL)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # engines are ended on the way out
    began_s = time.monotonic()
    parts: list[Part] = []
    for dtype in dtypes:
        plan = Plan(
            engines=engines,
            dtype=dtype,
            works=works,
            rounds=asked.rounds,
            minutes=asked.minutes - (time.monotonic() - began_s) / 60,
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
        text = write(out, about, parts)  # what there is, should the next dtype not come to its end
    print(f"\n{text}\nwritten: {out}.md and .json; the engines' logs are in {asked.logs}")
    out_of_it = [one for part in parts for one in part.measured.entrants if one.out]
    return int(any(one.engine.missing(asked.home) is None for one in out_of_it))


def among(known: tuple[str, ...], what: str, said: str) -> tuple[str, ...]:
    """Names with commas between. Raises ValueError for one that is not known."""
    names = tuple(said.split(","))
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{what} {unknown[0]!r} is none of {', '.join(known)}")
    return names


def write(out: Path, about: Mapping[str, Any], parts: Sequence[Part]) -> str:
    """Both files; returns the Markdown."""
    entrants = [entrant for part in parts for entrant in part.measured.entrants]
    busy = max((cores["before"] for one in entrants for cores in one.cores), default=0.0)
    text = markdown(TITLE, sentences(about, busy), parts)
    out.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{out}.md").write_text(text)
    Path(f"{out}.json").write_text(json.dumps(as_value(about, parts), indent=1) + "\n")
    return text


if __name__ == "__main__":
    sys.exit(main())
