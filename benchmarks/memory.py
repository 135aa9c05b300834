"""Peak memory of a peer beyond training itself, in copies of the parameters in fp32. Prints JSON.

    python benchmarks/memory.py [--width 2000] [--cases int4-keep fp16-co2-ef ...] [--repeats 3] [--out FILE]

The same model and loop run alone, and as two peers that exchange, each in a fresh process whose largest
resident set (VmHWM) the kernel keeps. With a tiny model the same two give what the imports, threads and
sockets cost; what is left, over the model's size in fp32, is the answer:

    copies = ((swarm - alone) of the model - (swarm - alone) of the tiny one) / (4 * parameters)

The bar is 4. The default settings (the first case) run ``--repeats`` times and the median counts, the others
run once. With ``--out`` each run is a line of that file, and what is there already is not run again: all
cases take a quarter of an hour. ``copies`` is the strict reading: the process alone has our allocator's
setting too (``p2p_co2.system.memory``: one arena). ``copies_over_plain`` is against a process that never
heard of us.

``held`` is the table of what is held, by room, in the same unit, at the largest resident set that was seen
when the training thread came by; the rest of the peak is temporary: snapshots, decoded means and merges on
their way between threads, a quarter each (a fragment). The table of all cases goes to standard error as well,
for people. ``caught_up`` counts rounds of a fragment that a peer was not in (it was ready too late, on a busy
machine above all) and got from the other afterwards: the mean that it replays, or, ``states`` of them, the
whole state. A run with many peaks higher: the other holds for a while what it gives, and what it did alone.

Price: VmHWM counts what the allocator keeps as well, so it is an upper bound on what is used. The inner
optimizer is SGD without momentum, so that nothing else has the parameters' size; the gradient's share is in
both runs.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from averaging_workers import serve_run
from json_workers import answer_of, say, spawn

from p2p_co2.config import ClockConfig, CodecConfig, OuterConfig, PeerConfig, RunConfig
from p2p_co2.system.memory import _pool, use_one_arena
from p2p_co2.telemetry import events as ev
from p2p_co2.trainer import Peer, connect
from p2p_co2.trainer.ledger.kept import Compact, Encoded, Gradient, Kept, StepChange

PEERS, LAYERS, ROUNDS, STEPS_PER_ROUND = 2, 4, 4, 8
TINY_WIDTH = 16
STEP_S = 0.02
DEFAULT = "int4-keep"
CASES: dict[str, dict[str, Any]] = {
    f"{codec}-{rule}{'-ef' * feedback}": {
        "codec": {"name": codec, "error_feedback": feedback},
        "outer": {"rule": rule},
    }
    for codec in ("int4", "int8", "fp16")
    for feedback in (False, True)
    for rule in ("keep", "blend", "co2", "eager")
}
BAR_COPIES = 4.0
CASES_BESIDE = 8
"""In one table."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=2000, help="parameters: 4 * width * width")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="keep each run in this file, and go on from it")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.worker:
        roles: dict[str, Callable[..., None]] = {"seed": _seed, "peer": _peer, "alone": _alone}
        roles[options.worker[0]](*options.worker[1:])
        return
    runs = _Runs(options.out)
    alone = {
        (width, own): int(runs.get(f"alone {width} {own}", partial(_run_alone, width, own))["peak_bytes"])
        for width in (options.width, TINY_WIDTH)
        for own in (True, False)
    }
    tiny = runs.get(f"{DEFAULT} {TINY_WIDTH}", partial(_run_swarm, DEFAULT, TINY_WIDTH))
    measured = {}
    for case in options.cases:
        repeats = options.repeats if case == DEFAULT else 1
        run = partial(_run_swarm, case, options.width)
        answers = [runs.get(f"{case} {options.width} {turn}", run) for turn in range(repeats)]
        measured[case] = _row(answers, options.width, int(tiny["peak_bytes"]), alone)
        print(case, json.dumps(measured[case]), file=sys.stderr)
    _print_table(measured)
    machine = {"platform": platform.platform(), "cpus": os.cpu_count()}
    job = {
        "parameters": LAYERS * options.width**2,
        "peers": PEERS,
        "fragments": LAYERS,
        "bar_copies": BAR_COPIES,
    }
    print(json.dumps({"at": time.strftime("%F %R"), **machine, **job, "cases": measured}, indent=2))


class _Runs:
    """What was measured so far, by name; a line each in ``path``, if there is one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self._known: dict[str, dict[str, Any]] = {one.pop("run"): one for one in map(json.loads, lines)}

    def get(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if name not in self._known:
            self._known[name] = measure()
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps({"run": name, **self._known[name]}) + "\n")
        return self._known[name]


def _print_table(measured: Mapping[str, Mapping[str, Any]]) -> None:
    """What is held by room, in copies, a column for each case."""
    for cases in batched(measured, CASES_BESIDE):
        rows = [measured[case] for case in cases]
        table = {room: [row["held"][room] for row in rows] for room in rows[0]["held"]}
        table["temporary"] = [row["copies"] - sum(row["held"].values()) for row in rows]
        table[f"copies (bar {BAR_COPIES:.0f})"] = [row["copies"] for row in rows]
        wide = max(map(len, table)) + 2
        print(" " * wide + "".join(f"{case:>15}" for case in cases), file=sys.stderr)
        for name, values in table.items():
            print(f"{name:{wide}}" + "".join(f"{value:15.2f}" for value in values), file=sys.stderr)


def batched(names: Iterable[str], size: int) -> Iterator[list[str]]:
    """``itertools.batched``, which Python 3.11 does not have."""
    left = iter(names)
    while some := list(islice(left, size)):
        yield some


def _row(
    runs: list[dict[str, Any]], width: int, tiny_bytes: int, alone: Mapping[tuple[int, bool], int]
) -> dict[str, Any]:
    copy_bytes = 4 * LAYERS * width**2
    runs = sorted(runs, key=lambda run: int(run["peak_bytes"]))
    swarm = runs[len(runs) // 2]

    def copies(run: Mapping[str, Any], own: bool) -> float:
        beyond = int(run["peak_bytes"]) - alone[width, own] - (tiny_bytes - alone[TINY_WIDTH, own])
        return round(beyond / copy_bytes, 2)

    return {
        "copies": copies(swarm, own=True),
        "copies_over_plain": copies(swarm, own=False),
        "copies_all": [copies(run, own=True) for run in runs],
        "caught_up_all": [run["caught_up"] for run in runs],
        "states_all": [run["states"] for run in runs],
        "within_bar": copies(swarm, own=True) <= BAR_COPIES,
        "rounds_applied": swarm["applied"],
        "alone_mb": round(alone[width, True] / 1e6),
        "alone_plain_mb": round(alone[width, False] / 1e6),
        "in_swarm_mb": round(swarm["peak_bytes"] / 1e6),
        "fixed_mb": round((tiny_bytes - alone[TINY_WIDTH, True]) / 1e6),
        "held": {room: round(size / copy_bytes, 2) for room, size in swarm["held"].items()},
    }


def _run_alone(width: int, own_allocator: bool) -> dict[str, Any]:
    return answer_of(spawn(__file__, "alone", str(width), str(int(own_allocator))))


def _run_swarm(case: str, width: int) -> dict[str, Any]:
    """The peer with the larger peak, and how often either caught up, and by a whole state."""
    with tempfile.TemporaryDirectory() as folder:
        seed = spawn(__file__, "seed", case, folder)
        ticket = answer_of(seed)["address"]
        peers = [
            spawn(__file__, "peer", case, str(width), f"{folder}/{index}", ticket) for index in range(PEERS)
        ]
        try:
            answers = [answer_of(peer) for peer in peers]
        finally:
            for process in (*peers, seed):
                assert process.stdin is not None
                process.stdin.close()
            for process in (*peers, seed):
                process.wait(30)
    behind = {name: sum(answer[name] for answer in answers) for name in ("caught_up", "states")}
    return {**max(answers, key=lambda answer: int(answer["peak_bytes"])), **behind}


# ---- the workers


def _run_config(case: str) -> RunConfig:
    settings = CASES[case]
    return RunConfig(
        recipe="own-loop",
        fragments=LAYERS,
        clock=ClockConfig(mode="steps", inner_steps_per_round=STEPS_PER_ROUND, rounds=ROUNDS),
        codec=CodecConfig.model_validate(settings["codec"]),
        outer=OuterConfig.model_validate(settings["outer"]),
    )


def _seed(case: str, folder: str) -> None:
    serve_run(_run_config(case), Path(folder) / "seed")


def _model(width: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def _inner_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, width: int) -> float:
    loss: torch.Tensor = (model(torch.randn(4, width)) - 1.0).square().mean()
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    time.sleep(STEP_S)
    return loss.item()


def _alone(width: str, own_allocator: str) -> None:
    if int(own_allocator):
        use_one_arena()
    model, optimizer = _model(int(width))
    for _ in range(STEPS_PER_ROUND):
        _inner_step(model, optimizer, int(width))
    say({"peak_bytes": _status_bytes("VmHWM")})


def _peer(case: str, width: str, folder: str, ticket: str) -> None:
    use_one_arena()
    model, optimizer = _model(int(width))
    counts: Counter[str] = Counter()
    config = PeerConfig(folder=Path(folder), min_peers=PEERS, checkpoint_every_s=1.5)

    def hear(event: ev.Event) -> None:
        counts.update(["state" if isinstance(event, ev.CaughtUp) and event.how == "state" else event.kind])

    peer = connect(ticket, config, hear).start(model, optimizer)
    most_bytes, held = 0, _held(peer)
    with peer:
        while peer.step(tokens=1, loss=_inner_step(model, optimizer, int(width))):
            if (now_bytes := _status_bytes("VmRSS")) > most_bytes:
                most_bytes, held = now_bytes, _held(peer)
    say(
        {
            "peak_bytes": _status_bytes("VmHWM"), "applied": counts["fragment_applied"],
            "caught_up": counts["caught_up"] + counts["state"], "states": counts["state"], "held": held,
        }
    )  # fmt: skip
    sys.stdin.read()


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"this kernel does not tell {field}")


def _held(peer: Peer) -> dict[str, int]:
    """Bytes that are held right now, by room; the network thread goes on meanwhile."""
    fragments, node = peer._ledger.fragments, peer._thread.view.node
    in_flight = [one.open for one in fragments if one.open is not None]
    lanes = node.links._lanes.values()
    offers = [one.offer for one in node.rounds._fragments if one.offer is not None]
    members = [one.member for one in node.rounds._fragments if one.member is not None]
    return {
        "outer: outer_params": sum(_size(one.state.params) for one in fragments),
        "outer: outer_momentum": sum(_size(one.state.momentum) for one in fragments),
        "outer: moved since the last boundary (co2, eager)": sum(
            _size(kept) for one in fragments for kept in one.departure.offset
        ),
        "outer: offer in the newest mean (eager)": sum(
            _size(one.departure.stale[0]) for one in fragments if one.departure.stale is not None
        ),
        "codec: residual": sum(_size(one.residual) for one in fragments),
        "trainer: gradient in flight, or what the codec lost of it": sum(
            _size(one.gradient) for one in in_flight
        ),
        "rounds: payloads": sum(len(offer.payload) for offer in offers),
        "rounds: means": sum(len(member.exchange.mean) for member in members),
        "catchup: past means": node.catchup.donor.history.held_bytes,
        "catchup: states being given": sum(
            len(one.data) for one in list(node.catchup.donor.exports.values())
        ),
        "node: queued messages": sum(lane.bulk_bytes for lane in lanes),
        "memory: pages kept for the next round": _pool.held_bytes - _pool._used_bytes,
        "allocator: free in its arenas": _free_in_arenas_bytes(),
    }


class _Arenas(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
            "keepcost",
        )
    ]  # fmt: skip


def _free_in_arenas_bytes() -> int:
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = _Arenas
    return int(ask().fordblks)


def _size(kept: Kept | torch.Tensor | None) -> int:
    """Of what is held here alone; a payload that an offer reads is the round's."""
    match kept:
        case torch.Tensor():
            return kept.numel() * kept.element_size()
        case Compact():
            return kept._rows.numel()
        case Encoded():
            return len(kept._payload)
        case Gradient():
            return _size(kept._lost)
        case StepChange():
            return _size(kept._mean)
        case None:
            return 0


if __name__ == "__main__":
    main()
