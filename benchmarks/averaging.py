"""A round of averaging among four processes on loopback: ours against hivemind's ``DecentralizedAverager``.

So many MB of fp32 per process (32, 256, 512) in 8 tensors, the same codec (fp16; 8 bit) on both sides, in one
run and in turn.
Prints JSON within ``--bound-s`` (also when cut short): medians over rounds, the slowest process counting.

    python benchmarks/averaging.py [--megabytes 32] [--rounds 5] [--codecs fp16 int8] [--sides hivemind grpc]

Where each figure begins and ends:

- ``total_s``: from the word to go, the same for all four, until every process has the averaged values: ours
  has decoded the agreed mean, hivemind's ``step`` has returned with its tensors averaged.
- ``reduction_s``: from the first process that knows its group (ours: BEGIN is known; hivemind's:
  ``_run_allreduce_inplace_`` is entered) until the same end. Ours holds encoded offers by then, hivemind
  encodes inside; so ``encode_s`` (outer gradient, codec, report of the codec's error) is told beside it, and
  ``reduction_with_encode_s`` is the sum: the figure to compare.
- ``outer_step_s``: what ours does with the average, and hivemind does not: outer step, state digest, merge.
- ``cpu_s``: user and system time of the process trees, daemons, DHTs and our seed included, from the word
  to go to a short pause after the end of everything. ``averaging_cpu_s`` leaves out what hivemind's averager
  does not do: outer step, state digest, merge, and the report of the codec's error where that is not made in
  the same pass as the codes.

hivemind runs twice: ``hivemind-default`` is its constructor as it comes, which is what users get: a window of
``min_matchmaking_time`` 5 s that nothing ends early. ``hivemind`` knows the group's size, so its window ends
when the group is full, and has the smallest window that still forms whole groups here: its best case.

Laws: the values are checked (hivemind's in each round; ours in the first against the mean computed from all
four inputs, and in all by equal state digests), so that nobody is fast by being wrong. Each side runs in
fresh interpreters with one torch thread.

Price: the swarms live at once and take turns, and those that wait cost a little CPU: all of them alike.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from averaging_workers import HIVEMIND, OURS, PEERS, values_of

WORKERS = Path(__file__).with_name("averaging_workers.py")
BARS = {
    "total_s": 3.0,
    "reduction_s": 1.5,
    "reduction_with_encode_s": 1.5,
    "averaging_cpu_s_per_gb_moved": 2.0,
    "cpu_s_per_gb_moved": 2.0,
}
"""How many times less ours should take."""
SETTLE_S = 0.3
STOP_BOUND_S = 20.0
TOLERANCE = {"fp16": 1e-5, "int8": 5e-4}
"""Root mean square error of a mean of values of size ``NOISE`` (hivemind's 8 bits clip what is beyond three
sigmas, so the largest error says little)."""

Round = dict[str, Any]


class CutShort(Exception):
    """Time is up, a person ended the benchmark, or a side is not usable: print what there is."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=32, help="of fp32 per process")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2, help="rounds until memory is where it stays")
    parser.add_argument("--codecs", nargs="+", choices=("fp16", "int8"), default=["fp16", "int8"])
    parser.add_argument("--sides", nargs="+", choices=(*HIVEMIND, *OURS), default=[*HIVEMIND, "grpc"])
    parser.add_argument("--bound-s", type=float, default=290.0, help="of the whole benchmark")
    raise SystemExit(_run(parser.parse_args()))


def _run(options: argparse.Namespace) -> int:
    swarms = {
        codec: [Swarm(side, codec, options.megabytes) for side in options.sides] for codec in options.codecs
    }
    ends_at, trouble = time.monotonic() + options.bound_s - STOP_BOUND_S, ""
    for number in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _cut_short)
    signal.setitimer(signal.ITIMER_REAL, options.bound_s - STOP_BOUND_S)
    for index, codec in enumerate(options.codecs):
        share_s = (ends_at - time.monotonic()) / (len(options.codecs) - index)
        try:
            _measure(swarms[codec], options, time.monotonic() + share_s)
        except CutShort as error:
            trouble = str(error)
            break
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    print(json.dumps(_report(swarms, options, trouble), indent=2))
    return 1 if trouble else 0


def _cut_short(number: int, frame: FrameType | None) -> None:
    raise CutShort("time was up" if number == signal.SIGALRM else "ended by a signal")


def _measure(swarms: Sequence[Swarm], options: argparse.Namespace, ends_at: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            for swarm in swarms:
                swarm.start(Path(folder) / swarm.side)
            for turn in range(options.warm_up + options.rounds):
                for swarm in swarms:
                    swarm.round(turn, keep=turn >= options.warm_up)
                if turn >= options.warm_up and time.monotonic() > ends_at:
                    break
        finally:
            for swarm in swarms:
                swarm.stop()


def _report(
    swarms: Mapping[str, Sequence[Swarm]], options: argparse.Namespace, trouble: str
) -> dict[str, Any]:
    machine = {"platform": platform.platform(), "cpus": os.cpu_count(), "load_1_min": os.getloadavg()[0]}
    job = {"peers": PEERS, "megabytes": options.megabytes, "rounds_asked": options.rounds}
    head = {"at": time.strftime("%F %R"), **machine, **job, "hivemind_settings": HIVEMIND, "trouble": trouble}
    return head | {codec: _table(sides) for codec, sides in swarms.items()}


def _table(swarms: Sequence[Swarm]) -> dict[str, Any]:
    rows = {swarm.side: swarm.summary() for swarm in swarms if swarm.rounds}
    for side in OURS:
        if side in rows:
            rows[side]["times_less_than"] = {
                key: {"bar": bar, **{h: _ratio(rows[h], rows[side], key) for h in HIVEMIND if h in rows}}
                for key, bar in BARS.items()
            }
    return rows


def _ratio(theirs: Mapping[str, float], ours: Mapping[str, float], key: str) -> float:
    return round(theirs[key] / ours[key], 2)


class Swarm:
    """Four workers of one side, and what they did."""

    def __init__(self, side: str, codec: str, megabytes: int) -> None:
        self.side, self._codec, self._megabytes = side, codec, megabytes
        self.rounds: list[Round] = []
        self._processes: list[subprocess.Popen[str]] = []
        self._members: list[subprocess.Popen[str]] = []
        self._tree: dict[int, psutil.Process] = {}
        self._failed = 0

    def start(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        first = ("hivemind", self.side, "0", "-") if self.side in HIVEMIND else ("seed", str(folder / "seed"))
        seed = self._spawn(*first)
        address = self._answer(seed)["address"]
        if self.side in HIVEMIND:
            others = [self._spawn("hivemind", self.side, str(index), address) for index in range(1, PEERS)]
            self._members = [seed, *others]
        else:
            others = self._members = [
                self._spawn("peer", self.side, str(index), str(folder / f"peer{index}"), address)
                for index in range(PEERS)
            ]
        for process in others:
            self._answer(process)

    def round(self, turn: int, keep: bool) -> None:
        """One round of all workers; repeated if the group was not whole."""
        for _ in range(3):
            self._ask(str(turn))
            before_s, told_at = self._cpu_s(), time.monotonic()
            answers = self._ask("go")
            time.sleep(SETTLE_S)
            cpu_s, checks = self._cpu_s() - before_s, self._ask("check")
            error = max(check["error"] for check in checks)
            # hivemind leaves values as they were where a part of its exchange failed, and says nothing.
            if all(answer["group"] == PEERS for answer in answers) and error <= TOLERANCE[self._codec]:
                break
            self._failed += 1
            groups = [answer["group"] for answer in answers]
            print(f"{self.side}: groups of {groups}, wrong by {error:.1e}", file=sys.stderr)
            if self.side in OURS and turn == 0:
                raise CutShort(f"{self.side}: groups of {groups}, the mean is wrong by {error:.1e}")
        else:
            raise CutShort(f"{self.side} averaged nothing among {PEERS} in three attempts")
        if len({check["digest"] for check in checks}) > 1:
            raise CutShort(f"{self.side}: the peers hold different values")
        one = _row(answers, told_at, cpu_s, sum(check["more_cpu_s"] for check in checks))
        print(f"{self._codec} {self.side} {json.dumps(one)}", file=sys.stderr)
        if keep:
            self.rounds.append(one)

    def summary(self) -> dict[str, Any]:
        median = {key: statistics.median(one[key] for one in self.rounds) for key in self.rounds[0]}
        gb_moved = PEERS * median["sent_mb_per_peer"] / 1e3
        gb_of_parameters = PEERS * self._megabytes / 1e3
        return {
            **{key: round(value, 3) for key, value in median.items()},
            "cpu_s_per_gb_of_parameters": round(median["cpu_s"] / gb_of_parameters, 2),
            "cpu_s_per_gb_moved": round(median["cpu_s"] / gb_moved, 2),
            "averaging_cpu_s_per_gb_moved": round(median["averaging_cpu_s"] / gb_moved, 2),
            "total_s_all": [round(one["total_s"], 3) for one in self.rounds],
            "rounds_that_failed": self._failed,
        }

    def stop(self) -> None:
        """End the workers, and by id whatever they leave behind."""
        self._cpu_s()
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        ends_at = time.monotonic() + STOP_BOUND_S / 8
        for process in reversed(self._processes):
            try:
                process.wait(max(0.1, ends_at - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for left in self._tree.values():
            if left.is_running():  # compares start times, so it is not another process of that id
                left.kill()

    def _spawn(self, role: str, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(WORKERS), role, self._codec, str(values_of(self._megabytes)), *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
        )  # fmt: skip
        self._processes.append(process)
        return process

    def _ask(self, line: str) -> list[Round]:
        """Say ``line`` to all members, and collect their answers."""
        for process in self._members:
            assert process.stdin is not None
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
        return [self._answer(process) for process in self._members]

    @staticmethod
    def _answer(process: subprocess.Popen[str]) -> Round:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                answer: Round = json.loads(line)
                return answer
        raise CutShort(f"a worker ended with {process.wait()}: {process.args!r}")

    def _cpu_s(self) -> float:
        total_s = 0.0
        for process in self._processes:
            if process.poll() is not None:
                continue
            root = psutil.Process(process.pid)
            for one in (root, *root.children(recursive=True)):
                self._tree[one.pid] = one
                times = one.cpu_times()
                total_s += times.user + times.system + times.children_user + times.children_system
        return total_s


def _row(answers: Sequence[Round], told_at: float, cpu_s: float, more_cpu_s: float) -> Round:
    """One round of four processes in one row: the slowest counts. Times are of the machine's one clock."""
    averaged_at = max(answer["averaged_at"] for answer in answers)
    reduction_s = averaged_at - min(answer["grouped_at"] for answer in answers)
    encode_s = max(answer["encode_s"] for answer in answers)
    return {
        "total_s": averaged_at - told_at,
        "reduction_s": reduction_s,
        "encode_s": encode_s,
        "reduction_with_encode_s": reduction_s + encode_s,
        "outer_step_s": max(answer["ended_at"] - answer["averaged_at"] for answer in answers),
        "cpu_s": cpu_s,
        "averaging_cpu_s": cpu_s - more_cpu_s,
        "sent_mb_per_peer": statistics.mean(answer["sent_bytes"] for answer in answers) / 1e6,
    }


if __name__ == "__main__":
    main()
