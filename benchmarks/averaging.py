"""A round of averaging among four processes on loopback: ours against hivemind's ``DecentralizedAverager``.

32 MB of fp32 per process in 8 tensors, the same codec (fp16; 8 bit) on both sides, both in one run and in
turn. Prints JSON: seconds per round with and without group forming, CPU seconds of the process trees, bytes.

    python benchmarks/averaging.py [--rounds 7] [--codecs fp16 int8] [--skip hivemind libp2p]

What is measured, per round, the slowest process counting:

- ``total_s``: from a common start (a line on every process's standard input, not counted) until the averaged
  values are in the tensors. Ours is ``Peer.step``: snapshot, outer gradient, encode, error report, group,
  reduction, votes, signed decision, outer step, state digest, merge. hivemind's is its ``step``.
- ``reduction_s``: the reduction alone. hivemind's is ``_run_allreduce_inplace_`` (encode, exchange, decode,
  add in place), from the first process's start of it to the last one's end. Ours with the same contents is
  the slowest encode, plus the time from the last offer until all have merged; READY, BEGIN, votes, outer step
  and state digest are inside. ``exchange_s`` is the part of it from the last offer until all hold the signed,
  encoded mean.
- ``cpu_s``: user and system time of the process trees, daemons, DHTs and our seed included, from the start
  to a short pause after the end, so that work left for later is counted. ``averaging_cpu_s`` leaves out what
  hivemind's averager does not do: our outer step, state digest and report of the codec's error.

Laws: the values are checked (hivemind's in each round; ours in the first against the mean computed from all
four inputs, and in all by equal state digests), so that nobody is fast by being wrong. Each side runs in
fresh interpreters with one torch thread. hivemind's group window is the smallest that still forms whole
groups here, and it ends early when the group is full.

Price: the swarms live at once and take turns, and those that wait cost a little CPU: all of them alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from p2p_co2.config import (
    CarrierName,
    ClockConfig,
    CodecConfig,
    CodecName,
    OuterConfig,
    PeerConfig,
    RunConfig,
)
from p2p_co2.discovery import Discovery
from p2p_co2.telemetry import events as ev
from p2p_co2.ticket import Ticket
from p2p_co2.trainer import Peer, connect
from p2p_co2.transport.libp2p_daemon import start_p2p, stop_p2p
from p2p_co2.wire.identity import Identity

PEERS, TENSORS, TENSOR_VALUES = 4, 8, 1_000_000
NOISE = 1e-2
SIDES = ("hivemind", "grpc", "libp2p")
WINDOW_S, REQUEST_TIMEOUT_S = 1.0, 0.5
"""hivemind's ``min_matchmaking_time`` and ``request_timeout``."""
SETTLE_S = 0.3
TOLERANCE = {"fp16": 1e-5, "int8": 5e-4}
"""Root mean square error of a mean of values of size ``NOISE`` (hivemind's 8 bits clip what is beyond three
sigmas, so the largest error says little)."""

Round = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--codecs", nargs="+", choices=("fp16", "int8"), default=["fp16", "int8"])
    parser.add_argument("--skip", nargs="*", choices=SIDES, default=[])
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.worker:
        _work(*options.worker)
        return
    sides = [side for side in SIDES if side not in options.skip]
    measured = {codec: _measure(codec, sides, options) for codec in options.codecs}
    machine = {"platform": platform.platform(), "cpus": os.cpu_count(), "load_1_min": os.getloadavg()[0]}
    job = {"peers": PEERS, "megabytes": TENSORS * TENSOR_VALUES * 4 / 1e6, "rounds": options.rounds}
    print(json.dumps({"at": time.strftime("%F %R"), **machine, **job, **measured}, indent=2))


# ---- the parent: starts the swarms, gives the signal, reads clocks


def _measure(codec: CodecName, sides: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        swarms = [Swarm(side, codec, Path(folder) / side) for side in sides]
        try:
            for swarm in swarms:
                swarm.start()
            for turn in range(options.warm_up + options.rounds):
                for swarm in swarms:
                    swarm.round(turn, keep=turn >= options.warm_up)
        finally:
            for swarm in swarms:
                swarm.stop()
    result: dict[str, Any] = {swarm.side: swarm.summary() for swarm in swarms}
    if "hivemind" in result:
        for side in sides[1:]:
            result[side]["against_hivemind"] = _ratios(result[side], result["hivemind"])
    return result


def _ratios(ours: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, float]:
    """How many times less we take."""
    keys = ("total_s", "reduction_s", "cpu_s_per_gb_moved", "averaging_cpu_s_per_gb_moved")
    return {key: round(theirs[key] / ours[key], 2) for key in keys}


class Swarm:
    """Four workers of one side, and what they did."""

    def __init__(self, side: str, codec: CodecName, folder: Path) -> None:
        self.side, self._codec, self._folder = side, codec, folder
        self._processes: list[subprocess.Popen[str]] = []
        self._tree: dict[int, psutil.Process] = {}
        self._rounds: list[Round] = []
        self._failed = 0

    def start(self) -> None:
        self._folder.mkdir(parents=True)
        if self.side == "hivemind":
            seed = self._spawn("hivemind", self._codec, "0", "-")
            address = self._answer(seed)["address"]
            peers = [self._spawn("hivemind", self._codec, str(index), address) for index in range(1, PEERS)]
        else:
            address = self._answer(self._spawn("seed", self._codec, str(self._folder / "seed")))["address"]
            peers = [
                self._spawn(
                    "peer", self._codec, self.side, str(index), str(self._folder / f"peer{index}"), address
                )
                for index in range(PEERS)
            ]
        for process in peers:
            self._answer(process)
        self._members = self._processes if self.side == "hivemind" else peers

    def round(self, turn: int, keep: bool) -> None:
        """One round of all workers; repeated if the group was not whole."""
        for _ in range(3):
            self._ask(str(turn))
            before_s = self._cpu_s()
            answers = self._ask("go")
            time.sleep(SETTLE_S)
            one = {"cpu_s": self._cpu_s() - before_s, **_row(answers)}
            checks = self._ask("check")
            one["averaging_cpu_s"] = one["cpu_s"] - sum(check["more_cpu_s"] for check in checks)
            if all(answer["group"] == PEERS for answer in answers):
                break
            self._failed += 1
            print(f"{self.side}: groups of {[answer['group'] for answer in answers]}", file=sys.stderr)
        else:
            raise SystemExit(f"{self.side} formed no group of {PEERS} in three attempts")
        if len({check["digest"] for check in checks}) > 1:
            raise SystemExit(f"{self.side}: the peers hold different values")
        if (error := max(check["error"] for check in checks)) > TOLERANCE[self._codec]:
            raise SystemExit(f"{self.side}: the mean is wrong by {error:.1e}")
        print(f"{self._codec} {self.side} {json.dumps(one)}", file=sys.stderr)
        if keep:
            self._rounds.append(one)

    def summary(self) -> dict[str, Any]:
        median = {key: statistics.median(one[key] for one in self._rounds) for key in self._rounds[0]}
        gb_moved = PEERS * median["sent_mb_per_peer"] / 1e3
        gb_of_parameters = PEERS * TENSORS * TENSOR_VALUES * 4 / 1e9
        return {
            **{key: round(value, 3) for key, value in median.items()},
            "total_s_all": [round(one["total_s"], 3) for one in self._rounds],
            "cpu_s_per_gb_of_parameters": round(median["cpu_s"] / gb_of_parameters, 2),
            "cpu_s_per_gb_moved": round(median["cpu_s"] / gb_moved, 2),
            "averaging_cpu_s_per_gb_moved": round(median["averaging_cpu_s"] / gb_moved, 2),
            "groups_that_failed": self._failed,
        }

    def stop(self) -> None:
        """End the workers, and by id whatever they leave behind."""
        self._cpu_s()
        for process in reversed(self._processes):
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        for left in self._tree.values():
            if left.is_running():  # compares start times, so it is not another process of that id
                left.kill()

    def _spawn(self, *arguments: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, __file__, "--worker", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
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
        raise SystemExit(f"a worker ended with {process.wait()}: {process.args}")

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


def _row(answers: Sequence[Round]) -> Round:
    """One round of four processes in one row: the slowest counts."""
    row = {
        "total_s": max(answer["total_s"] for answer in answers),
        "reduction_s": max(answer["ended_at"] for answer in answers),
        "sent_mb_per_peer": statistics.mean(answer["sent_bytes"] for answer in answers) / 1e6,
    }
    if "offered_at" not in answers[0]:
        row["reduction_s"] -= min(answer["began_at"] for answer in answers)
        return row
    row["encode_s"] = max(answer["offered_at"] - answer["began_at"] for answer in answers)
    last_offer_at = max(answer["offered_at"] for answer in answers)
    row["exchange_s"] = max(answer["committed_at"] for answer in answers) - last_offer_at
    row["reduction_s"] += row["encode_s"] - last_offer_at
    return row


# ---- the workers


def _work(role: str, codec: CodecName, *rest: str) -> None:
    {"seed": _seed, "peer": _peer, "hivemind": _hivemind}[role](codec, *rest)


def _say(answer: Mapping[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def _noise(turn: int, index: int) -> torch.Tensor:
    """What process ``index`` learned in round ``turn``: fp32 [TENSORS, TENSOR_VALUES]."""
    generator = torch.Generator().manual_seed(1000 * turn + index)
    return torch.randn(TENSORS, TENSOR_VALUES, generator=generator) * NOISE


def _run_config(codec: CodecName) -> RunConfig:
    """Defaults of the product, but for a training loop that waits for every round."""
    return RunConfig(
        recipe="own-loop",
        fragments=1,
        clock=ClockConfig(mode="steps", inner_steps_per_round=1),
        codec=CodecConfig(name=codec),
        outer=OuterConfig(blocking_rounds=1_000_000),
    )


def _seed(codec: CodecName, folder: str) -> None:
    run, home = _run_config(codec), Path(folder)
    home.mkdir()

    async def serve() -> None:
        identity = Identity.load_or_create(home / "identity")
        p2p = await start_p2p(home / "identity")
        discovery = Discovery(p2p, identity, run.digest(), lambda peer, error: None)
        await discovery.start([])
        await discovery.publish_manifest(run.canonical_bytes(), bytes(32))
        addresses = tuple(str(address) for address in await p2p.get_visible_maddrs())
        _say({"address": str(Ticket(run.digest(), identity.peer_id, addresses))})
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        await discovery.close()
        await stop_p2p(p2p)

    asyncio.run(serve())


def _peer(codec: CodecName, carrier: CarrierName, index: str, folder: str, ticket: str) -> None:
    tensors = [torch.nn.Parameter(torch.zeros(TENSOR_VALUES)) for _ in range(TENSORS)]
    seen: dict[str, ev.Event] = {}

    def on_event(event: ev.Event) -> None:
        seen[event.kind] = event
        if isinstance(event, ev.RoundAborted | ev.Warned | ev.MessageRefused):
            print(event, file=sys.stderr)

    config = PeerConfig(folder=Path(folder), carrier=carrier, min_peers=PEERS, checkpoint_every_s=1e6)
    more_cpu_s = _count_what_hivemind_does_not_do()
    connection = connect(ticket, config, on_event)
    peer = connection.start(torch.nn.ParameterList(tensors), torch.optim.SGD(tensors, lr=0.0))
    network = connection._thread  # the benchmark looks behind the front door for the digest and the bytes
    _say({"ready": True})
    for line in sys.stdin:
        with torch.no_grad():
            for tensor, noise in zip(tensors, _noise(int(line), int(index)), strict=True):
                tensor.sub_(noise)
        seen.clear()
        more_cpu_s[0] = 0.0
        sent_bytes = network.traffic_bytes()[0]
        _say({"prepared": True})
        sys.stdin.readline()
        began_at, entered_at = time.time(), time.perf_counter()
        peer.step(tokens=1, loss=0.0)
        total_s = time.perf_counter() - entered_at
        committed = seen.get("round_committed")
        _say(
            {
                "group": committed.contributors if isinstance(committed, ev.RoundCommitted) else 0,
                "total_s": total_s,
                "began_at": began_at,
                "offered_at": seen["fragment_sent"].at,
                "committed_at": committed.at if committed is not None else 0.0,
                "ended_at": began_at + total_s,
                "sent_bytes": network.traffic_bytes()[0] - sent_bytes,
            }
        )
        sys.stdin.readline()
        error = _first_error(peer, tensors) if int(line) == 0 else 0.0
        _say({"more_cpu_s": more_cpu_s[0], "digest": peer._ledger.agreed()[0].digest.hex(), "error": error})
    peer.leave("the benchmark is over")


def _count_what_hivemind_does_not_do() -> list[float]:
    """CPU seconds in the outer step, the state digest and the codec error report, from now on."""
    from p2p_co2.trainer import fragment_ledger, ledger

    spent_s = [0.0]

    def counted(function: Any) -> Any:
        def call(*arguments: Any, **settings: Any) -> Any:
            began_s = time.thread_time()
            result = function(*arguments, **settings)
            spent_s[0] += time.thread_time() - began_s
            return result

        return call

    fragment_ledger.outer.step = counted(fragment_ledger.outer.step)
    fragment_ledger.error_energy = counted(fragment_ledger.error_energy)
    ledger.state_digest = counted(ledger.state_digest)
    return spent_s


def _first_error(peer: Peer, tensors: Sequence[torch.Tensor]) -> float:
    """How far the first outer step (heavy ball or Nesterov from a zero momentum) is from the true mean's."""
    outer = peer.run.outer
    mean = torch.stack([_noise(0, index) for index in range(PEERS)]).mean(0)
    factor = outer.lr * (1.0 + outer.momentum * outer.nesterov)
    return _rms_error([tensor.detach() for tensor in tensors], mean * -factor)


def _rms_error(values: Sequence[torch.Tensor], wanted: torch.Tensor) -> float:
    return float((torch.stack(list(values)) - wanted).square().mean().sqrt())


def _hivemind(codec: CodecName, index: str, address: str) -> None:
    import hivemind
    from hivemind.averaging import DecentralizedAverager
    from hivemind.compression import Float16Compression, Uniform8BitQuantization

    clock = multiprocessing.Array("d", 3)  # reduction began, ended; bytes encoded for others

    class Averager(DecentralizedAverager):
        async def _run_allreduce_inplace_(self, *arguments: Any, **settings: Any) -> None:
            clock[0] = time.time()
            await super()._run_allreduce_inplace_(*arguments, **settings)
            clock[1] = time.time()

    base = Float16Compression if codec == "fp16" else Uniform8BitQuantization

    class Counting(base):
        def compress(self, *arguments: Any, **settings: Any) -> Any:
            message = super().compress(*arguments, **settings)
            with clock.get_lock():
                clock[2] += len(message.buffer)
            return message

    dht = hivemind.DHT(initial_peers=[] if address == "-" else [address], start=True)
    averager = Averager(
        [torch.zeros(TENSOR_VALUES) for _ in range(TENSORS)], dht, start=True, prefix="benchmark",
        target_group_size=PEERS, compression=Counting(),
        min_matchmaking_time=WINDOW_S, request_timeout=REQUEST_TIMEOUT_S,
    )  # fmt: skip
    _say({"address": str(dht.get_visible_maddrs()[0])})
    for line in sys.stdin:
        turn = int(line)
        with averager.get_tensors() as tensors:
            for tensor, noise in zip(tensors, _noise(turn, int(index)), strict=True):
                tensor.copy_(noise)
        clock[0] = clock[1] = clock[2] = 0.0
        _say({"prepared": True})
        sys.stdin.readline()
        entered_at = time.perf_counter()
        gathered = averager.step(allow_retries=False)
        total_s = time.perf_counter() - entered_at
        sent_bytes = 2 * clock[2]  # the answers, as large as the questions, are encoded where we cannot count
        _say(
            {
                "group": len(gathered or {}),
                "total_s": total_s,
                "began_at": clock[0],
                "ended_at": clock[1],
                "sent_bytes": sent_bytes,
            }
        )
        sys.stdin.readline()
        mean = torch.stack([_noise(turn, peer) for peer in range(PEERS)]).mean(0)
        with averager.get_tensors() as tensors:
            error = _rms_error(tensors, mean)
        _say({"digest": "", "error": error, "more_cpu_s": 0.0})
    averager.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
