"""How fast a newcomer loads the agreed state from several donors, and what bad donors cost it. Prints JSON.

    python benchmarks/catchup.py [--cases one four liar inventor killed slow ...] [--width 1000]

Real processes over real sockets: a seed, donors that train a model of 4 * width * width parameters (keep,
int4) and give at most ``CAP_BYTES_PER_S`` each, and one newcomer that joins when every fragment has had a
round. What it loads is 8 bytes a parameter: parameters and momentum.

- ``one``, ``four``: the rate with one donor and with four. The bar: four are at least 3 times as fast.
- ``liar``: one of four sends wrong bytes in every chunk. The bar: one chunk is thrown away.
- ``inventor``: one of two promises the right state with chunk digests of its own making, and would give the
  chunks that they fit. The bar: it is asked for none.
- ``killed``: one of four is killed (SIGKILL) in the middle: what it had given stays.
- ``slow``: one of four gives 30 kB/s: it is dropped, and its chunks come from the others.
- ``committing``: four donors that commit a fragment every ``0.5`` s, faster than one loads: it loads
  each fragment at one version and replays the rounds since.
- ``interrupted``: the newcomer is killed (SIGKILL) in the middle and started again with its folder. It begins
  anew; the figures are those of its second start.

A newcomer that is few rounds behind replays them instead, which costs far less. So that one round is enough
here, the newcomer does not replay what it has only the start of, but in ``committing``. ``rate`` counts the
states' bytes from the first request to the last chunk, waiting for exports between fragments and the donors'
own rounds included. ``sent_bytes`` is what travelled for it, so chunks that came
twice show there. ``donor_held_bytes_most`` is the most that a donor held for others, states and past means.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from averaging_workers import serve_run
from json_workers import answer_of, say, spawn

from p2p_co2.config import ClockConfig, LimitsConfig, PeerConfig, RunConfig
from p2p_co2.digest import chunk_digests
from p2p_co2.node.catchup import CatchupController
from p2p_co2.protocol.catchup.donor import Donor
from p2p_co2.protocol.catchup.goals import (
    STATE,
    CatchUpEvent,
    DonorRefused,
    Fetched,
)
from p2p_co2.telemetry.events import CaughtUp, Event, FragmentApplied
from p2p_co2.trainer import connect
from p2p_co2.wire.limits import MAX_DATA_BYTES
from p2p_co2.wire.messages_pb2 import Chunk

CAP_BYTES_PER_S = 2e6
SLOW_BYTES_PER_S = 30e3
FRAGMENTS = 4
ROUND_S, FAST_ROUND_S = 20.0, 2.0
VERSIONS_BEFORE = 10
"""In ``committing``, more than what can be replayed."""
BAR_TIMES, BAR_CHUNKS = 3.0, 1
BOUND_S = 200.0
CASES: dict[str, dict[str, Any]] = {
    "one": {"donors": [""]},
    "four": {"donors": ["", "", "", ""]},
    "liar": {"donors": ["lie", "", "", ""]},
    "inventor": {"donors": ["invent", ""]},
    "killed": {"donors": ["", "", "", ""], "kill_after_s": 2.5},
    "slow": {"donors": ["slow", "", "", ""]},
    "committing": {"donors": ["", "", "", ""], "round_s": FAST_ROUND_S},
    "interrupted": {"donors": ["", "", "", ""], "restart_after_s": 3.0},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--width", type=int, default=1000)
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.worker:
        {"seed": _seed, "donor": _donor, "newcomer": _newcomer}[options.worker[0]](*options.worker[1:])
        return
    rows = {case: _measure(case, options.width) for case in options.cases}
    answer: dict[str, Any] = {
        "at": time.strftime("%F %R"),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "state_bytes": 8 * 4 * options.width**2,
        "cap_bytes_per_s": CAP_BYTES_PER_S,
        "cases": rows,
    }
    if {"one", "four"} <= rows.keys():
        times = rows["four"]["rate_bytes_per_s"] / rows["one"]["rate_bytes_per_s"]
        answer["four_over_one"] = {"times": round(times, 2), "bar": BAR_TIMES, "met": times >= BAR_TIMES}
    if "liar" in rows:
        wasted = rows["liar"]["chunks_wrong"]
        answer["liar_chunks"] = {"wrong": wasted, "bar": BAR_CHUNKS, "met": 0 < wasted <= BAR_CHUNKS}
    if "inventor" in rows:
        asked, found = rows["inventor"]["bad_donors_chunks"], rows["inventor"]["refused"]
        answer["inventor_chunks"] = {"given": asked, "bar": 0, "met": asked == 0 and bool(found)}
    print(json.dumps(answer, indent=2))


def _measure(case: str, width: int) -> dict[str, Any]:
    settings = CASES[case]
    donors = settings["donors"]
    with tempfile.TemporaryDirectory(prefix="p2p-co2-catchup-") as folder:
        processes: list[subprocess.Popen[str]] = []
        try:
            processes.append(spawn(__file__, "seed", folder, str(settings.get("round_s", ROUND_S))))
            ticket = answer_of(processes[0])["address"]
            committing = "round_s" in settings
            shared = (ticket, folder, str(width), str(len(donors)))
            versions = str(VERSIONS_BEFORE if committing else 1)
            for index, fault in enumerate(donors):
                processes.append(
                    spawn(__file__, "donor", *shared, f"donor{index}", fault or "honest", versions)
                )
            for process in processes[1:]:
                answer_of(process)
            joins = (__file__, "newcomer", *shared, "replay" if committing else "states")
            newcomer = spawn(*joins)
            processes.append(newcomer)
            if "restart_after_s" in settings:
                answer_of(newcomer)
                time.sleep(settings["restart_after_s"])
                newcomer.kill()
                newcomer.wait()
                newcomer = processes[-1] = spawn(*joins)
            if "kill_after_s" in settings:
                answer_of(newcomer)
                time.sleep(settings["kill_after_s"])
                processes[1].kill()
                processes[1].wait()
            row = _last_answer(newcomer)
            held = [_ask(process) for process in processes[1:-1] if process.poll() is None]
        finally:
            for process in processes:
                _end(process)
    row["donor_held_bytes_most"] = max(answer["held_bytes_most"] for answer in held)
    row["bad_donors_chunks"] = sum(answer["chunks_given"] for answer in held if answer["is_bad"])
    print(case, json.dumps(row), file=sys.stderr)
    return row


def _last_answer(newcomer: subprocess.Popen[str]) -> dict[str, Any]:
    while True:
        answer = answer_of(newcomer)
        if "rate_bytes_per_s" in answer:
            return answer


def _ask(donor: subprocess.Popen[str]) -> dict[str, Any]:
    """End a donor; its last answer says what it held."""
    assert donor.stdin is not None
    donor.stdin.close()
    return answer_of(donor)


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()


# ---- the workers


def _seed(folder: str, round_s: str) -> None:
    clock = ClockConfig(mode="time", round_s=float(round_s))
    serve_run(RunConfig(recipe="own-loop", fragments=FRAGMENTS, clock=clock), Path(folder) / "run-seed")


def _model(width: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(4)))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def _learn(model: torch.nn.Module) -> None:
    """Stands for an inner step: changes every parameter, and takes little of two cores that many share."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.999)
    time.sleep(0.05)


def _donor(ticket: str, folder: str, width: str, donors: str, name: str, fault: str, ready_at: str) -> None:
    model, optimizer = _model(int(width))
    cap = SLOW_BYTES_PER_S if fault == "slow" else CAP_BYTES_PER_S
    config = PeerConfig(
        folder=Path(folder) / name, min_peers=int(donors), limits=LimitsConfig(upload_bytes_per_s=cap)
    )
    given = [0]
    if fault == "lie":
        _lie()
    elif fault == "invent":
        _invent(given)
    versions, most, said, over = dict.fromkeys(range(FRAGMENTS), 0), 0, False, threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()

    def on_event(event: Event) -> None:
        if isinstance(event, FragmentApplied):
            versions[event.fragment] = event.version

    with connect(ticket, config, on_event).start(model, optimizer) as peer:
        while peer.step(tokens=1, loss=0.0) and not over.is_set():
            _learn(model)
            donor = peer._thread.view.node.catchup.donor
            most = max(most, donor.exported_bytes() + donor.history.held_bytes)
            if not said and min(versions.values()) >= int(ready_at):
                said = True
                say({"ready": name})
        peer.stop()
    say({"held_bytes_most": most, "chunks_given": given[0], "is_bad": fault == "invent"})


def _lie() -> None:
    send = Donor._send_chunk

    def wrong(self: Donor, fetch: Any, peer: Any, data: bytes) -> None:
        send(self, fetch, peer, data)
        chunk = self._out.messages[-1][1]
        assert isinstance(chunk, Chunk)
        chunk.data = bytes(len(chunk.data))

    Donor._send_chunk = wrong  # type: ignore[method-assign]


def _invent(given: list[int]) -> None:
    """Other bytes in place of each state, under its name, well signed, and with their own digests."""
    exported, send = Donor.exported, Donor._send_chunk

    def invented(
        self: Donor, fragment: int, version: int, data: Any, digest: bytes, digests: list[bytes], now: float
    ) -> None:
        other = b"\1" * len(data)
        invented_digests = list(chunk_digests(other, self.shape.chunk_bytes))
        exported(self, fragment, version, other, digest, invented_digests, now)

    def counted(self: Donor, fetch: Any, peer: Any, data: Any) -> None:
        given[0] += fetch.what == STATE
        send(self, fetch, peer, data)

    Donor.exported, Donor._send_chunk = invented, counted  # type: ignore[method-assign]


def _newcomer(ticket: str, folder: str, width: str, donors: str, how: str) -> None:
    if how == "states":
        replayable = CatchupController._replayable
        CatchupController._replayable = lambda self, fragment: (  # type: ignore[method-assign]
            replayable(self, fragment) if self._state.agreed[fragment].version else 0
        )
    model, optimizer = _model(int(width))
    fetched: list[tuple[float, Fetched]] = []
    refused: list[DonorRefused] = []
    replays: list[CaughtUp] = []
    contributed_at: list[float] = []
    handle = CatchupController.handle

    def watched(self: CatchupController, event: CatchUpEvent) -> None:
        if isinstance(event, Fetched) and event.goal.what == STATE:
            fetched.append((time.monotonic(), event))
        elif isinstance(event, DonorRefused):
            refused.append(event)
        handle(self, event)

    CatchupController.handle = watched  # type: ignore[method-assign]

    def on_event(event: Event) -> None:
        if isinstance(event, CaughtUp) and event.how == "replay":
            replays.append(event)
        if isinstance(event, FragmentApplied) and event.contributed:
            contributed_at.append(time.monotonic())

    config = PeerConfig(folder=Path(folder) / "newcomer", min_peers=int(donors))
    connection = connect(ticket, config, on_event)
    say({"connected": True})
    began_at = time.monotonic()
    with connection.start(model, optimizer) as peer:
        abreast_at = time.monotonic()
        down_bytes = peer._thread.view.traffic_bytes()[1]
        while not contributed_at and time.monotonic() < abreast_at + BOUND_S:
            peer.step(tokens=1, loss=0.0)
            _learn(model)
        peer.stop()
    first_at = min(at - event.duration_s for at, event in fetched)
    last_at = max(at for at, _ in fetched)
    state_bytes = sum(len(event.data) for _, event in fetched)
    wrong = sum(refusal.reason in ("wrong digest", "wrong size") for refusal in refused)
    row = {
        "rate_bytes_per_s": round(state_bytes / (last_at - first_at)),
        "loading_s": round(last_at - first_at, 2),
        "loads": [
            f"fragment {event.goal.fragment} version {event.version}: {len(event.data) / 1e6:.1f} MB in "
            f"{event.duration_s:.2f} s from {len(event.donors)}"
            for _, event in fetched
        ],
        "chunks": sum(-(-len(event.data) // MAX_DATA_BYTES) for _, event in fetched),
        "chunks_wrong": wrong,
        "refused": [f"{refusal.reason}: {refusal.detail}" for refusal in refused],
        "state_bytes": state_bytes,
        "sent_bytes": down_bytes,
        "replays": len(replays),
        "start_to_abreast_s": round(abreast_at - began_at, 2),
        "abreast_to_contribution_s": round(contributed_at[0] - abreast_at, 2) if contributed_at else None,
    }
    say(row)


if __name__ == "__main__":
    main()
