"""What it costs the others when peers die: a swarm in which a random peer is killed every few seconds. Prints
JSON.

    python benchmarks/faults.py [--peers 5] [--kill-s 120] [--every-s 5] [--carrier auto] [--seed 1]

Through the console script on loopback: a seed and peers that train a tiny paced model (a step rests 100 ms,
so that the two cores of a small machine are not what is measured). First ``--calm-s`` in which a single
newcomer joins; then every ``--every-s`` one peer is killed with SIGKILL, its libp2p daemon with it, and a
newcomer with a new identity is started at the same moment; then the run ends by itself, and all who are left
must hold one digest. Every second kill is aimed: it hits the peer that just began a round as its coordinator.
The others hit anybody, newcomers that are still starting as well.

- ``throughput``: inner steps per second and peer while others die, over the same undisturbed: of all peers,
  for as long as each lived. Bar 0.9. ``exposed_share``: time inside ``peer.step`` of wall time, in both
  phases: what the swarm itself took from training; the rest of a loss is processor time: a process that
  starts takes seconds of it, which elsewhere would be another machine's.
- ``aborted_per_kill``: distinct rounds (fragment, number) that anybody saw aborted after a kill and before
  the next: most and mean. Bar: most 1. A peer that goes over to the agreed state ends its offer, and that is
  no round that failed: ``went_over`` counts those. ``killed_while_coordinating``: kills that left a begun
  round undecided at its coordinator.
- ``without_a_commit``: the longest time in which any fragment had no commit, in the calm and amid the kills,
  in seconds and in rounds (a fragment has one in each ``round_s``). No bar.
- ``newcomer_alone``: seconds from the start of ``p2p-co2 join`` in the calm to its first contribution that
  was counted, and where they went. Bars: 15 s, 3 rounds. ``newcomers``: the same of those that were started
  one upon the other in the killing, with too few cores for all: no bar.
- ``hung``, ``died``: survivors that did not end within a bound, or with an error. Bar: none.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bootstrap.local_swarm import Child
from p2p_co2.telemetry.events import (
    CaughtUp,
    FragmentApplied,
    FragmentSent,
    PeerFinished,
    PeerJoined,
    PeerStarted,
    Progress,
    RoundBegan,
    RoundCommitted,
)
from tests.campaign import Campaign, choose, paced_run

ROUND_S, FRAGMENTS, STEP_S = 4.0, 2, 0.1
BAR_THROUGHPUT, BAR_ABORTED, BAR_JOIN_S, BAR_JOIN_ROUNDS = 0.9, 1, 15.0, 3.0
LEFT_ALIVE = 2
"""Training peers that are not killed as long as no newcomer has come up: a small machine starts processes
slowly, and a run whose last peer dies begins anew."""
SETTLE_S, END_BOUND_S = 25.0, 120.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=int, default=5)
    parser.add_argument("--calm-s", type=float, default=40.0)
    parser.add_argument("--kill-s", type=float, default=120.0)
    parser.add_argument("--every-s", type=float, default=5.0)
    parser.add_argument("--carrier", default="auto", choices=("auto", "grpc", "libp2p"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="where journals stay")
    options = parser.parse_args()
    folder = options.out or Path(tempfile.mkdtemp(prefix="p2p-co2-faults-"))
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no process outlives us
    with Campaign(folder) as swarm:
        answer = _run(swarm, options)
    machine = {"at": time.strftime("%F %R"), "platform": platform.platform(), "cpus": os.cpu_count()}
    print(json.dumps({**machine, **answer}, indent=2))


def _run(swarm: Campaign, options: argparse.Namespace) -> dict[str, Any]:
    random_ = random.Random(options.seed)
    start_s = 10.0 + 4.0 * options.peers
    rounds = math.ceil((start_s + options.calm_s + options.kill_s + SETTLE_S) / ROUND_S)
    swarm.start_seed(paced_run(ROUND_S, FRAGMENTS, STEP_S, rounds))
    carrier = ("--carrier", options.carrier)
    first = [f"peer-{number}" for number in range(options.peers)]
    for name in first:
        swarm.join(name, "--min-peers", str(options.peers), *carrier)
    calm_from = swarm.wait_for_commits(*first, count=2 * FRAGMENTS, group=options.peers)
    time.sleep(options.calm_s / 2)
    alone = swarm.join("alone", *carrier)
    time.sleep(options.calm_s / 2)
    kills_from = time.time()
    victims: list[tuple[float, Child]] = []
    newcomers: list[Child] = []
    while time.time() < kills_from + options.kill_s:
        next_at = time.time() + options.every_s
        peers = [child for child in swarm.running() if child.name != "seed"]
        training = [child for child in peers if _trains(swarm, child)]
        if len(training) <= LEFT_ALIVE:
            peers = [child for child in peers if child not in training] or peers
        aimed = len(victims) % 2 == 1 and len(training) > LEFT_ALIVE
        victim = (swarm.wait_for_coordinator(peers, options.every_s) if aimed else None) or choose(
            random_, peers
        )
        swarm.kill(victim)
        victims.append((time.time(), victim))
        newcomers.append(swarm.join(f"newcomer-{len(newcomers)}", *carrier))
        time.sleep(max(0.0, next_at - time.time()))
    kills_until = time.time()
    survivors = [child for child in swarm.running() if child.name != "seed"]
    hung = not swarm.wait(survivors, END_BOUND_S)
    ends = [swarm.events(child.name, PeerFinished)[-1] for child in survivors if not child.running()]
    names = [child.name for child in swarm.children if child.name != "seed"]
    return {
        "peers": options.peers,
        "carrier": options.carrier,
        "kills": len(victims),
        "rounds_committed": len({key for name in names for key in _commits(swarm, name)}),
        "throughput": _throughput(swarm, names, (calm_from, kills_from), (kills_from, kills_until)),
        **_aborted(swarm, names, victims, kills_until),
        "without_a_commit": _without_a_commit(swarm, names, (calm_from, kills_from, kills_until)),
        "newcomer_alone": _newcomers(swarm, [alone]),
        "newcomers": _newcomers(swarm, newcomers),
        "survivors": len(survivors),
        "hung": [child.name for child in survivors if child.running()] if hung else [],
        "died": [child.name for child in survivors if child.exit_status() not in (0, None)],
        "digests": len({(end.digest, end.versions) for end in ends}),
        "reasons_of_the_end": dict(Counter(end.reason for end in ends)),
    }


def _trains(swarm: Campaign, child: Child) -> bool:
    return any(event.phase == "training" for event in swarm.events(child.name, Progress))


def _commits(swarm: Campaign, name: str) -> set[tuple[int, int]]:
    return {(event.fragment, event.round) for event in swarm.events(name, RoundCommitted)}


def _throughput(
    swarm: Campaign, names: Sequence[str], calm: tuple[float, float], kills: tuple[float, float]
) -> dict[str, Any]:
    rates, exposed = [], []
    for since, until in (calm, kills):
        done = [swarm.steps(name, since, until) for name in names]
        rates.append(sum(steps for steps, _ in done) / sum(seconds for _, seconds in done))
        exposed.append(_exposed_share(swarm, names, since, until))
    ratio = rates[1] / rates[0]
    return {
        "ratio": round(ratio, 3),
        "bar": BAR_THROUGHPUT,
        "met": ratio >= BAR_THROUGHPUT,
        "calm_steps_per_s": round(rates[0], 3),
        "kills_steps_per_s": round(rates[1], 3),
        "exposed_share": [round(share, 4) for share in exposed],
    }


def _exposed_share(swarm: Campaign, names: Sequence[str], since: float, until: float) -> float:
    exposed_s = wall_s = 0.0
    for name in names:
        reports = [
            event
            for event in swarm.events(name, Progress, since)
            if event.at <= until and event.phase == "training" and event.wall_s > 0
        ]
        if len(reports) > 1:
            exposed_s += reports[-1].exposed_s - reports[0].exposed_s
            wall_s += reports[-1].wall_s - reports[0].wall_s
    return exposed_s / wall_s if wall_s else 0.0


def _aborted(
    swarm: Campaign, names: Sequence[str], victims: Sequence[tuple[float, Child]], until: float
) -> dict[str, Any]:
    ended = [event for name in names for event in swarm.aborts(name)]
    aborts = [event for event in ended if not went_over(event.reason)]
    edges = [at for at, _ in victims] + [until + SETTLE_S]
    per_kill = [
        len({(event.fragment, event.round) for event in aborts if begin <= event.at < end})
        for begin, end in itertools.pairwise(edges)
    ]
    decided = {key: True for name in names for key in _commits(swarm, name)}
    caught = 0
    for at, victim in victims:
        began = [event for event in swarm.events(victim.name, RoundBegan) if event.at > at - 3.0]
        own = _commits(swarm, victim.name)
        caught += any((event.fragment, event.round) not in own for event in began)
    return {
        "aborted_per_kill": {
            "most": max(per_kill),
            "mean": round(statistics.mean(per_kill), 2),
            "bar": BAR_ABORTED,
            "met": max(per_kill) <= BAR_ABORTED,
            "rounds_decided": len(decided),
        },
        "went_over": len(ended) - len(aborts),
        "killed_while_coordinating": caught,
        "abort_reasons": dict(Counter(event.reason[:80] for event in aborts).most_common(8)),
    }


def went_over(reason: str) -> bool:
    """Whether a peer ended its offer because it went over to the agreed state (``FragmentRounds.set_state``):
    the round itself was made, or will be."""
    return re.fullmatch(r"version \d+ is the agreed state now", reason) is not None


def _without_a_commit(
    swarm: Campaign, names: Sequence[str], edges: tuple[float, float, float]
) -> dict[str, Any]:
    made_at: dict[tuple[int, int], float] = {}
    for name in names:
        for event in swarm.events(name, RoundCommitted):
            key = event.fragment, event.round
            made_at[key] = min(event.at, made_at.get(key, event.at))
    answer: dict[str, Any] = {"round_s": ROUND_S}
    for phase, (since, until) in zip(("calm", "kills"), itertools.pairwise(edges), strict=True):
        longest_s, fragment = longest_gap(made_at, FRAGMENTS, since, until)
        rounds = round(longest_s / ROUND_S, 2)
        answer[phase] = {"longest_s": round(longest_s, 1), "in_rounds": rounds, "fragment": fragment}
    return answer


def longest_gap(
    made_at: Mapping[tuple[int, int], float], fragments: int, since: float, until: float
) -> tuple[float, int]:
    """The longest time between two commits of one fragment, of which part lies between ``since`` and
    ``until``, and that fragment. ``made_at``: of (fragment, round), when the first peer had it. What came
    before the first commit, or would come after the last one, counts from ``since`` and up to ``until``."""
    longest = (0.0, 0)
    for fragment in range(fragments):
        times = sorted(at for (of, _), at in made_at.items() if of == fragment)
        before = [at for at in times if at <= since] or [since]
        after = [at for at in times if at >= until] or [until]
        around = [before[-1], *(at for at in times if since < at < until), after[0]]
        gap = max(later - at for at, later in itertools.pairwise(around))
        longest = max(longest, (gap, fragment))
    return longest


def _newcomers(swarm: Campaign, newcomers: Sequence[Child]) -> dict[str, Any]:
    rows = [row for child in newcomers if (row := _first_contribution(swarm, child)) is not None]
    parts = ("imports_and_dht_s", "first_peer_s", "caught_up_s", "first_send_s", "counted_s")
    if not rows:
        return {"contributed": 0}
    return {
        "started": len(newcomers),
        "contributed": len(rows),
        "join_to_contribution_s": {
            "median": round(statistics.median(row["all_s"] for row in rows), 1),
            "most": round(max(row["all_s"] for row in rows), 1),
            "bar": BAR_JOIN_S,
            "met": max(row["all_s"] for row in rows) <= BAR_JOIN_S,
        },
        "rounds": {
            "median": round(statistics.median(row["rounds"] for row in rows), 2),
            "most": round(max(row["rounds"] for row in rows), 2),
            "bar": BAR_JOIN_ROUNDS,
            "met": max(row["rounds"] for row in rows) <= BAR_JOIN_ROUNDS,
        },
        "where_the_median_went": {
            part: round(statistics.median(row[part] for row in rows), 2) for part in parts
        },
    }


def _first_contribution(swarm: Campaign, child: Child) -> dict[str, float] | None:
    """Seconds of a newcomer's road, part by part; None for one that was killed on it."""

    def first(events: Sequence[Any], after: float) -> float:
        return next((event.at for event in events if event.at >= after), after)

    name, began_at = child.name, child.started_at
    started = swarm.events(name, PeerStarted)
    counted = [event for event in swarm.events(name, FragmentApplied) if event.contributed]
    if not started or not counted:
        return None
    up_at, counted_at = started[0].at, counted[0].at
    heard_at = first(swarm.events(name, PeerJoined), up_at)
    training = [event for event in swarm.events(name, Progress) if event.phase == "training"]
    caught_up = [event.at for event in swarm.events(name, CaughtUp)]
    trains_at = first(training, heard_at)
    ready_at = max([trains_at, *(at for at in caught_up if at <= counted_at)])
    ready_at = min(ready_at, counted_at)
    sent = [event for event in swarm.events(name, FragmentSent) if event.at <= counted_at]
    sent_at = sent[-1].at if sent else counted_at
    return {
        "all_s": counted_at - began_at,
        "rounds": (counted_at - up_at) / ROUND_S,
        "imports_and_dht_s": up_at - began_at,
        "first_peer_s": heard_at - up_at,
        "caught_up_s": trains_at - heard_at,
        "first_send_s": max(0.0, sent_at - trains_at),
        "counted_s": counted_at - sent_at,
    }


if __name__ == "__main__":
    main()
