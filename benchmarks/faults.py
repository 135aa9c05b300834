"""What it costs when peers die, come and give badly: real processes, killed and started. Prints JSON.

    python benchmarks/faults.py kills [--peers 5] [--kill-s 120] [--every-s 5] [--carrier auto] [--seed 1]
    python benchmarks/faults.py catchup [--cases one four killed slow committing interrupted]

``kills``: through the console script, a seed and peers that train a tiny paced model (a step rests 100 ms,
so that two cores are not what is measured). First ``--calm-s`` in which a lone newcomer joins. Then every
``--every-s`` a peer is killed (SIGKILL), its libp2p daemon with it, and a newcomer starts at that moment.
Then the run ends by itself. Every second kill hits a peer that just began a round as its coordinator.

- ``throughput``: inner steps per second and peer while others die, over the same undisturbed.
  ``exposed_share``: time inside ``peer.step``, in both phases.
- ``aborted_per_kill``: rounds that ended without a commit from a kill to the next. A peer that goes over to
  the agreed state ends its offer, and that is no round that failed: ``went_over``.
- ``newcomer_alone``, ``newcomers``: seconds from the start of ``p2p-co2 join`` to the first contribution
  that was counted, in the calm and amid the kills, and where they went.

``catchup``: donors train a model of 4 * width * width parameters (keep, int4) and give at most
``CAP_BYTES_PER_S`` each; a newcomer joins when every fragment has had a round, and loads 8 bytes a parameter.

- ``one``, ``four`` donors: four are at least 3 times as fast. ``slow``: one of four gives 30 kB/s and is
  dropped. ``killed``: one of four is killed in the middle.
- ``committing``: four donors commit a fragment every 0.5 s, faster than one loads: the newcomer loads each at
  one version and replays the rounds since. ``interrupted``: the newcomer is killed and started again.

So that one round is enough, the newcomer does not replay what it has only the start of, but in
``committing``."""

from __future__ import annotations

import argparse
import itertools
import math
import random
import re
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from common import Figures, against, bench, command, joined, note, parser_of, run, say

from bootstrap.local_swarm import Child
from p2p_co2.config import OWN_LOOP, ClockConfig, LimitsConfig, RunConfig
from p2p_co2.node.catchup import CatchupController
from p2p_co2.telemetry import events as ev
from tests.campaign import Campaign, choose, paced_run

KILLS_ROUND_S, KILLS_FRAGMENTS, STEP_S = 4.0, 2, 0.1
BAR_THROUGHPUT, BAR_ABORTED, BAR_JOIN_S, BAR_JOIN_ROUNDS = 0.9, 1, 15.0, 3.0
LEFT_ALIVE = 2
"""Training peers that are not killed as long as no newcomer has come up: a small machine starts processes
slowly, and a run whose last peer dies begins anew."""
SETTLE_S, END_BOUND_S = 25.0, 120.0


# ---- kills


def kills(options: argparse.Namespace) -> Figures:
    """A peer is killed every few seconds."""
    with bench(kept=options.out) as swarm:
        return _kills(swarm, options)


def _kills(swarm: Campaign, options: argparse.Namespace) -> Figures:
    random_ = random.Random(options.seed)
    start_s = 10.0 + 4.0 * options.peers
    rounds = math.ceil((start_s + options.calm_s + options.kill_s + SETTLE_S) / KILLS_ROUND_S)
    swarm.start_seed(paced_run(KILLS_ROUND_S, KILLS_FRAGMENTS, STEP_S, rounds))
    carrier = ("--carrier", options.carrier)
    first = [f"peer-{number}" for number in range(options.peers)]
    for name in first:
        swarm.join(name, "--min-peers", str(options.peers), *carrier)
    calm_from = swarm.wait_for_commits(*first, count=2 * KILLS_FRAGMENTS, group=options.peers)
    time.sleep(options.calm_s / 2)
    alone = swarm.join("alone", *carrier)
    time.sleep(options.calm_s / 2)
    kills_from = time.time()
    victims: list[tuple[float, Child]] = []
    newcomers: list[Child] = []
    while time.time() < kills_from + options.kill_s:
        next_at = time.time() + options.every_s
        peers = [child for child in swarm.running() if child.name != "seed"]
        training = [child for child in peers if swarm.reports(child.name, 0.0, next_at)]
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
    swarm.wait(survivors, END_BOUND_S)
    ends = [swarm.events(child.name, ev.PeerFinished)[-1] for child in survivors if not child.running()]
    names = [child.name for child in swarm.children if child.name != "seed"]
    return {
        "kills": len(victims),
        "throughput": _throughput(swarm, names, (calm_from, kills_from), (kills_from, kills_until)),
        **_aborted(swarm, names, victims, kills_until),
        "newcomer_alone": _newcomers(swarm, [alone]), "newcomers": _newcomers(swarm, newcomers),
        "survivors": len(survivors), "hung": [child.name for child in survivors if child.running()],
        "died": [child.name for child in survivors if child.exit_status() not in (0, None)],
        "digests": len({(end.digest, end.versions) for end in ends}),
        "reasons_of_the_end": dict(Counter(end.reason for end in ends)),
    }  # fmt: skip


def _commits(swarm: Campaign, name: str) -> set[tuple[int, int]]:
    return {(event.fragment, event.round) for event in swarm.events(name, ev.RoundCommitted)}


def _throughput(
    swarm: Campaign, names: Sequence[str], calm: tuple[float, float], kills: tuple[float, float]
) -> Figures:
    rates, exposed = [], []
    for times in (calm, kills):
        ends = [(own[0], own[-1]) for name in names if len(own := swarm.reports(name, *times)) > 1]
        rates.append(sum(b.inner_steps - a.inner_steps for a, b in ends) / sum(b.at - a.at for a, b in ends))
        exposed_s = sum(b.exposed_s - a.exposed_s for a, b in ends)
        exposed.append(round(exposed_s / sum(b.wall_s - a.wall_s for a, b in ends), 4))
    return {
        "ratio": against(rates[1] / rates[0], BAR_THROUGHPUT), "calm_steps_per_s": round(rates[0], 3),
        "kills_steps_per_s": round(rates[1], 3), "exposed_share": exposed,
    }  # fmt: skip


def _aborted(
    swarm: Campaign, names: Sequence[str], victims: Sequence[tuple[float, Child]], until: float
) -> Figures:
    ended = [event for name in names for event in swarm.aborts(name)]
    aborts = [event for event in ended if not went_over(event.reason)]
    edges = [at for at, _ in victims] + [until + SETTLE_S]
    per_kill = [
        len({(event.fragment, event.round) for event in aborts if begin <= event.at < end})
        for begin, end in itertools.pairwise(edges)
    ]
    decided = {key for name in names for key in _commits(swarm, name)}
    caught = 0
    for at, victim in victims:
        began = [event for event in swarm.events(victim.name, ev.RoundBegan) if event.at > at - 3.0]
        own = _commits(swarm, victim.name)
        caught += any((event.fragment, event.round) not in own for event in began)
    return {
        "aborted_per_kill": against(max(per_kill), BAR_ABORTED, at_most=True),
        "aborted_per_kill_mean": round(statistics.mean(per_kill), 2), "rounds_decided": len(decided),
        "went_over": len(ended) - len(aborts), "killed_while_coordinating": caught,
        "abort_reasons": dict(Counter(event.reason[:80] for event in aborts).most_common(8)),
    }  # fmt: skip


def went_over(reason: str) -> bool:
    """Whether a peer ended its offer because it went over to the agreed state (``FragmentRounds.set_state``):
    the round itself was made, or will be."""
    return re.fullmatch(r"version \d+ is the agreed state now", reason) is not None


def _newcomers(swarm: Campaign, newcomers: Sequence[Child]) -> Figures:
    """Seconds from each one's start to its first contribution; those that were killed before are left out."""
    took, rounds = list[float](), list[float]()
    for child in newcomers:
        counted = [event for event in swarm.events(child.name, ev.FragmentApplied) if event.contributed]
        if counted:
            took.append(counted[0].at - child.started_at)
            rounds.append((counted[0].at - swarm.events(child.name, ev.PeerStarted)[0].at) / KILLS_ROUND_S)
    if not took:
        return {"contributed": 0}
    return {
        "started": len(newcomers), "contributed": len(took),
        "join_to_contribution_s": {
            "median": round(statistics.median(took), 1), "most": against(max(took), BAR_JOIN_S, at_most=True),
        },
        "rounds_most": against(max(rounds), BAR_JOIN_ROUNDS, at_most=True),
    }  # fmt: skip


# ---- catching up

CAP_BYTES_PER_S, SLOW_BYTES_PER_S = 2e6, 30e3
FRAGMENTS, ROUND_S, FAST_ROUND_S, BOUND_S = 4, 20.0, 2.0, 200.0
VERSIONS_BEFORE = 10
"""In ``committing``, more than what can be replayed."""
CASES: dict[str, Figures] = {
    "one": {"donors": 1},
    "four": {"donors": 4},
    "killed": {"donors": 4, "kill_after_s": 2.5},
    "slow": {"donors": 4, "slow": 1},
    "committing": {"donors": 4, "round_s": FAST_ROUND_S},
    "interrupted": {"donors": 4, "restart_after_s": 3.0},
}


def catchup(options: argparse.Namespace) -> Figures:
    """A newcomer loads the agreed state from donors of several kinds."""
    rows = {case: _catchup_case(case, options.width) for case in options.cases}
    answer: Figures = {"state_bytes": 8 * 4 * options.width**2, "cases": rows}
    if {"one", "four"} <= rows.keys():
        times = rows["four"]["rate_bytes_per_s"] / rows["one"]["rate_bytes_per_s"]
        answer["four_over_one"] = against(times, 3.0)
    return answer


def _catchup_case(case: str, width: int) -> Figures:
    settings = CASES[case]
    count, is_committing = settings["donors"], "round_s" in settings
    clock = ClockConfig(mode="time", round_s=settings.get("round_s", ROUND_S))
    with bench(RunConfig(recipe=OWN_LOOP, fragments=FRAGMENTS, clock=clock)) as swarm:
        shared = (swarm.ticket, swarm.folder, width, count)
        donors = []
        for number in range(count):
            cap = SLOW_BYTES_PER_S if number < settings.get("slow", 0) else CAP_BYTES_PER_S
            told = (f"donor{number}", cap, VERSIONS_BEFORE if is_committing else 1)
            donors.append(swarm.ask(__file__, "donor", *shared, *told))
        for donor in donors:
            donor.answer()
        asked = (*shared, "replay" if is_committing else "states")
        newcomer = swarm.ask(__file__, "newcomer", *asked)
        if wait_s := settings.get("restart_after_s", settings.get("kill_after_s")):
            newcomer.answer()
            time.sleep(wait_s)
            dead = donors[0] if "kill_after_s" in settings else newcomer
            dead.process.kill()
            dead.process.wait()
            if dead is newcomer:
                newcomer = swarm.ask(__file__, "newcomer", *asked)
        row: Figures = {}
        while "rate_bytes_per_s" not in row:
            row = newcomer.answer()
    note(case, row)
    return row


def _model(width: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(int(width), int(width), bias=False) for _ in range(4)))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def _learn(model: torch.nn.Module) -> None:
    """Stands for an inner step: changes every parameter, and takes little of two cores that many share."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.999)
    time.sleep(0.05)


def _donor(ticket: str, folder: str, width: str, count: str, name: str, cap: str, ready_at: str) -> None:
    model, optimizer = _model(width)
    versions, said, over = dict.fromkeys(range(FRAGMENTS), 0), False, threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()

    def hear(event: ev.Event) -> None:
        if isinstance(event, ev.FragmentApplied):
            versions[event.fragment] = event.version

    config = {"min_peers": int(count), "limits": LimitsConfig(upload_bytes_per_s=float(cap))}
    with joined(ticket, Path(folder) / name, model, optimizer, hear, **config) as peer:
        while peer.step(tokens=1, loss=0.0) and not over.is_set():
            _learn(model)
            if not said and min(versions.values()) >= int(ready_at):
                said = True
                say({"ready": name})
        peer.stop()


def _newcomer(ticket: str, folder: str, width: str, count: str, how: str) -> None:
    if how == "states":
        replayable = CatchupController._replayable
        CatchupController._replayable = lambda self, fragment: (  # type: ignore[method-assign]
            replayable(self, fragment) if self._state.agreed[fragment].version else 0
        )
    model, optimizer = _model(width)
    states, replays, refused, contributed_at = list[ev.CaughtUp](), 0, list[str](), list[float]()
    began_at = time.monotonic()

    def hear(event: ev.Event) -> None:
        nonlocal replays
        if isinstance(event, ev.PeerStarted):
            say({"connected": True})
        elif isinstance(event, ev.CaughtUp) and event.how == "state":
            states.append(event)
        elif isinstance(event, ev.CaughtUp):
            replays += 1
        elif isinstance(event, ev.MessageRefused):
            refused.append(event.reason)
        elif isinstance(event, ev.FragmentApplied) and event.contributed:
            contributed_at.append(time.monotonic())

    place = Path(folder) / "newcomer"
    with joined(ticket, place, model, optimizer, hear, min_peers=int(count)) as peer:
        abreast_at = time.monotonic()
        while not contributed_at and time.monotonic() < abreast_at + BOUND_S:
            peer.step(tokens=1, loss=0.0)
            _learn(model)
        peer.stop()
    loading_s = max(one.at for one in states) - min(one.at - one.duration_s for one in states)
    say({
        "rate_bytes_per_s": round(sum(one.bytes for one in states) / loading_s),
        "loading_s": round(loading_s, 2), "loaded_bytes": sum(one.bytes for one in states),
        "donors": [one.donors for one in states], "seconds": [round(one.duration_s, 2) for one in states],
        "refused": refused, "replays": replays, "start_to_abreast_s": round(abreast_at - began_at, 2),
        "abreast_to_contribution_s": round(contributed_at[0] - abreast_at, 2) if contributed_at else None,
    })  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(required=True)
    made = command(
        commands, "kills", kills, peers=(5, "at the start"), calm_s=(40.0, "before the kills"),
        kill_s=(120.0, "of killing"), every_s=(5.0, "between two kills"), seed=(1, "of whom they hit"),
        out=(None, "where journals stay"),
    )  # fmt: skip
    made.add_argument("--carrier", default="auto", choices=("auto", "grpc", "libp2p"))
    made = command(commands, "catchup", catchup, width=(1000, "parameters: 4 * width * width"))
    made.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    run(parser, {"donor": _donor, "newcomer": _newcomer})


if __name__ == "__main__":
    main()
