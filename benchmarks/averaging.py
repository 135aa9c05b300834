"""Averaging alone, and the codecs alone.

    python benchmarks/averaging.py round [--megabytes 32] [--rounds 5] [--codecs fp16 int8]
    python benchmarks/averaging.py codecs [--mb 32 256] [--repeats 9]

``round``: a round among four processes on loopback, ours against hivemind's ``DecentralizedAverager``. So
many MB of fp32 per process in 8 tensors, the same codec on both sides, in turn: medians
over rounds, the slowest process counting.

- ``total_s``: from the word to go until every process has the averaged values: ours has decoded the agreed
  mean, hivemind's ``step`` has returned.
- ``reduction_s``: from the first process that knows its group until the same end. Ours holds encoded offers
  by then, hivemind encodes inside: ``reduction_with_encode_s`` is the figure to compare.
- ``cpu_s``: user and system time of the process trees, daemons and DHTs included. ``averaging_cpu_s`` leaves
  out ours that hivemind's averager does not do: outer step, digest of the state, merge.

``hivemind-default`` is its constructor as it comes, whose window of 5 s nothing ends early. ``hivemind``
knows the group's size and has the smallest window that forms whole groups here: its best case. Values are
checked: hivemind's in each round, ours in the first against the true mean and in all by equal digests.

``codecs``: MB/s of fp32 of every codec on one thread, beside bitsandbytes' own functions. Repeats of all are
interleaved; the verdict takes medians of the ratios of processor time within a repeat.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"  # bitsandbytes' CPU kernels ask OpenMP, before torch is told

import psutil
import torch
from common import Bench, Clocks, Figures, Worker, bench, command, joined, medians, note, parser_of, run, say
from rivals import HIVEMIND, PEERS

from p2p_co2.codec_specs import SPECS
from p2p_co2.config import OWN_LOOP, ClockConfig, CodecConfig, OuterConfig, RunConfig
from p2p_co2.protocol.rounds.exchange import Exchange
from p2p_co2.telemetry import events as ev
from p2p_co2.tensors import outer
from p2p_co2.tensors.codec import get_codec
from p2p_co2.tensors.fragments import LiveParameters
from p2p_co2.tensors.outer_rules import Keep
from p2p_co2.trainer.ledger import fragment_state, worker
from p2p_co2.trainer.ledger.kept import Encoded

TENSORS, NOISE = 8, 1e-2
OURS = ("grpc", "libp2p")
BARS = {
    "total_s": 3.0, "reduction_s": 1.5, "reduction_with_encode_s": 1.5, "averaging_cpu_s_per_gb_moved": 2.0,
    "cpu_s_per_gb_moved": 2.0,
}  # fmt: skip
"""How many times less ours should take."""
SETTLE_S = 0.3
TOLERANCE = {"fp16": 1e-5, "int8": 5e-4}
"""Root mean square error of a mean of values of size ``NOISE``."""
NOT_AVERAGING = ("step", "merge", "merge_", "state_chunk_digests")
"""Watched work of ours that hivemind's averager does not do."""


class Unusable(Exception):
    """A side that averages wrongly, or not at all."""


def averaging(options: argparse.Namespace) -> Figures:
    """A round of averaging, ours against hivemind's."""
    answer = Figures(trouble="")
    for codec in options.codecs:
        sides = {side: Side(side, codec, options.megabytes) for side in options.sides}
        try:
            _measure(list(sides.values()), options)
        except Unusable as error:
            answer["trouble"] = str(error)
        answer[codec] = _table(sides)
    return answer


def _measure(sides: Sequence[Side], options: argparse.Namespace) -> None:
    """The sides live at once and take turns; those that wait cost a little CPU, all alike."""
    with ExitStack() as stack:
        for side in sides:
            side.start(stack)
        for turn in range(options.warm_up + options.rounds):
            for side in sides:
                side.round(turn, keep=turn >= options.warm_up)


def _table(sides: Mapping[str, Side]) -> Figures:
    rows = {name: side.summary() for name, side in sides.items() if side.rounds}
    for name in set(OURS) & rows.keys():
        rows[name]["times_less_than"] = {
            key: {"bar": bar, **{h: round(rows[h][key] / rows[name][key], 2) for h in HIVEMIND if h in rows}}
            for key, bar in BARS.items()
        }
    return rows


class Side:
    """Four workers of one side, and what they did."""

    def __init__(self, name: str, codec: str, megabytes: int) -> None:
        self.name, self._codec, self._megabytes = name, codec, megabytes
        self.rounds: list[dict[str, float]] = []
        self._workers: list[Worker] = []
        self._seeds: list[int] = []
        self._failed = 0

    def start(self, stack: ExitStack) -> None:
        values = self._megabytes * 1_000_000 // 4 // TENSORS
        if self.name in HIVEMIND:
            script, role, address = str(Path(__file__).with_name("rivals.py")), "averager", "-"
        else:
            script, role = __file__, "peer"
            swarm: Bench = stack.enter_context(bench())
            self._seeds.append(swarm.start_seed(_run_config(self._codec)).pid)
            address = f"{swarm.ticket},{swarm.folder}"
        for index in range(PEERS):
            member = Worker(script, role, self._codec, values, self.name, index, address)
            self._workers.append(stack.enter_context(member))
            if index == 0 and self.name in HIVEMIND:
                address = member.answer()["address"]
        for member in self._workers[self.name in HIVEMIND :]:
            member.answer()

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
            note(self.name, [answer["group"] for answer in answers], f"wrong by {error:.1e}")
            if self.name in OURS and turn == 0:  # a second attempt would start from another state
                raise Unusable(f"{self.name}: the first round was not whole, or wrong by {error:.1e}")
        else:
            raise Unusable(f"{self.name} averaged nothing among {PEERS} in three attempts")
        if len({check["digest"] for check in checks}) > 1:
            raise Unusable(f"{self.name}: the peers hold different values")
        one = _row(answers, told_at, cpu_s, sum(check["more_cpu_s"] for check in checks))
        note(self._codec, self.name, one)
        if keep:
            self.rounds.append(one)

    def summary(self) -> Figures:
        median = medians(self.rounds)
        gb_moved = PEERS * median["sent_mb_per_peer"] / 1e3
        return {
            **median,
            "cpu_s_per_gb_moved": round(median["cpu_s"] / gb_moved, 2),
            "averaging_cpu_s_per_gb_moved": round(median["averaging_cpu_s"] / gb_moved, 2),
            "total_s_all": [round(one["total_s"], 3) for one in self.rounds],
            "rounds_that_failed": self._failed,
        }

    def _ask(self, line: str) -> list[Figures]:
        for member in self._workers:
            member.tell(line)
        return [member.answer() for member in self._workers]

    def _cpu_s(self) -> float:
        total_s = 0.0
        for pid in (*self._seeds, *(member.process.pid for member in self._workers)):
            root = psutil.Process(pid)
            for one in (root, *root.children(recursive=True)):
                times = one.cpu_times()
                total_s += times.user + times.system + times.children_user + times.children_system
        return total_s


def _row(answers: Sequence[Figures], told_at: float, cpu_s: float, more_cpu_s: float) -> dict[str, float]:
    """One round of four processes in one row: the slowest counts. Times are of the machine's one clock."""
    averaged_at = max(answer["averaged_at"] for answer in answers)
    reduction_s = averaged_at - min(answer["grouped_at"] for answer in answers)
    encode_s = max(answer["encode_s"] for answer in answers)
    return {
        "total_s": averaged_at - told_at, "reduction_s": reduction_s, "encode_s": encode_s,
        "reduction_with_encode_s": reduction_s + encode_s,
        "outer_step_s": max(answer["ended_at"] - answer["averaged_at"] for answer in answers),
        "cpu_s": cpu_s, "averaging_cpu_s": cpu_s - more_cpu_s,
        "sent_mb_per_peer": statistics.mean(answer["sent_bytes"] for answer in answers) / 1e6,
    }  # fmt: skip


# ---- our workers


def noise_of(turn: int, index: int, values: int) -> Iterator[torch.Tensor]:
    """What process ``index`` learned in round ``turn``: ``TENSORS`` times fp32 [values]."""
    generator = torch.Generator().manual_seed(1000 * turn + index)
    return (torch.randn(values, generator=generator).mul_(NOISE) for _ in range(TENSORS))


def rms_error(tensors: Sequence[torch.Tensor], turn: int, factor: float) -> float:
    """How far ``tensors`` are from ``factor`` times the true mean of a round."""
    peers = [noise_of(turn, index, tensors[0].numel()) for index in range(PEERS)]
    squares = 0.0
    for tensor, noises in zip(tensors, zip(*peers, strict=True), strict=True):
        squares += float((tensor - sum(noises) * (factor / PEERS)).square_().mean())
    return float((squares / TENSORS) ** 0.5)


def _run_config(codec: str) -> RunConfig:
    """Defaults of the product, but for a training loop that waits for every round."""
    return RunConfig(
        recipe=OWN_LOOP, fragments=1, clock=ClockConfig(mode="steps", inner_steps_per_round=1),
        codec=CodecConfig(name=codec), outer=OuterConfig(blocking_rounds=1_000_000),
    )  # fmt: skip


def _peer(codec: str, values: str, carrier: str, index: str, place: str) -> None:
    clocks = Clocks(
        (fragment_state.FragmentState, "offer"),  # encodes
        (Exchange, "start"),  # the group is known
        (Encoded, "largest"),  # the agreed mean is decoded, before its step is taken
        (outer, "step"), (Keep, "merge"), (LiveParameters, "merge_"), (worker, "state_chunk_digests"),
    )  # fmt: skip
    tensors = [torch.nn.Parameter(torch.zeros(int(values))) for _ in range(TENSORS)]
    model, optimizer = torch.nn.ParameterList(tensors), torch.optim.SGD(tensors, lr=1.0)
    counted, sent = [0], [0]

    def hear(event: ev.Event) -> None:
        if isinstance(event, ev.RoundCommitted):
            counted[0] = event.contributors
        elif isinstance(event, ev.RoundAborted | ev.Warned | ev.MessageRefused):
            note(str(event))

    ticket, folder = place.split(",", 1)
    config = {"carrier": carrier, "min_peers": PEERS}
    with joined(ticket, Path(folder) / f"peer{index}", model, optimizer, hear, **config) as peer:
        view = peer._part.view  # behind the front door: the bytes, and the digest
        say({"ready": True})
        for line in sys.stdin:
            turn = int(line)
            with torch.no_grad():
                for tensor, noise in zip(tensors, noise_of(turn, int(index), int(values)), strict=True):
                    tensor.sub_(noise)
            counted[0], sent[0] = 0, view.traffic_bytes()[0]
            clocks.clear()
            say({"prepared": True})
            sys.stdin.readline()
            peer.step(tokens=1, loss=0.0)
            digest = peer._ledger.agreed()[0].digest.hex()  # waits for it
            say({
                "group": counted[0], "grouped_at": clocks["start"].began_at,
                "averaged_at": clocks["largest"].ended_at, "ended_at": time.monotonic(),
                "encode_s": clocks["offer"].took_s, "sent_bytes": view.traffic_bytes()[0] - sent[0],
            })  # fmt: skip
            sys.stdin.readline()
            # The first outer step (heavy ball or Nesterov) from a zero momentum is a multiple of the mean.
            rule = peer.run.outer
            factor = -rule.lr * (1.0 + rule.momentum * rule.nesterov)
            error = 0.0 if turn else rms_error([tensor.detach() for tensor in tensors], turn, factor)
            more_cpu_s = sum(clocks[name].cpu_s for name in NOT_AVERAGING)
            say({"more_cpu_s": more_cpu_s, "digest": digest, "error": error})
        peer.stop()
        peer.leave("the benchmark is over")


# ---- codecs

OURS_OF_4_BITS = ("int4", "e3m0")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _NEVER = -1, -3, 2**31 - 1


def codecs(options: argparse.Namespace) -> Figures:
    """Every codec on one thread, beside bitsandbytes."""
    # Freed memory stays with the process: the kernel's zeroing of fresh pages hits one and spares the next.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _NEVER)
    ctypes.CDLL(None).mallopt(_M_TRIM_THRESHOLD, _NEVER)
    names = tuple(SPECS) if options.only == "all" else OURS_OF_4_BITS
    answer: Figures = {
        "torch": torch.__version__, "processor": platform.machine(),
        "relative_error": {name: _error(name) for name in names},
    }  # fmt: skip
    for input_mb in options.mb:
        values = _gaussians(input_mb * 250_000)
        calls = _contestants(values, names)
        taken_s: dict[str, list[float]] = {what: [] for what in calls}
        for _ in range(options.repeats):
            for what, call in calls.items():
                before_s = time.process_time()
                result = call()
                taken_s[what].append(time.process_time() - before_s)
                del result
        mb = values.numel() * 4 / 1e6
        speeds = {what: round(mb / max(1e-9, median(each)), 1) for what, each in taken_s.items()}
        answer[f"{input_mb} MB"] = {"mb_per_cpu_s": speeds, "verdict": _verdict(taken_s)}
    return answer


def _contestants(values: torch.Tensor, names: Sequence[str]) -> dict[str, Callable[[], object]]:
    """What is timed, by "who operation"."""
    from bitsandbytes import functional

    calls: dict[str, Callable[[], object]] = {}
    for name in names:
        codec = get_codec(name)
        payload = codec.encode(values)
        calls[f"{name} encode"] = partial(codec.encode, values)
        calls[f"{name} decode"] = partial(codec.decode, payload)
    for kind in ("fp4", "nf4"):
        encode = partial(functional.quantize_4bit, values, blocksize=128, quant_type=kind)
        calls[f"bitsandbytes-{kind} encode"] = encode
        calls[f"bitsandbytes-{kind} decode"] = partial(functional.dequantize_4bit, *encode())
    return calls


def _verdict(taken_s: Mapping[str, list[float]]) -> Figures:
    """Ours of 4 bits against the faster of the library's two."""

    def times(name: str, operation: str) -> float:
        theirs = min((taken_s[f"bitsandbytes-{kind} {operation}"] for kind in ("fp4", "nf4")), key=median)
        pairs = zip(theirs, taken_s[f"{name} {operation}"], strict=True)
        return round(median(their / max(1e-9, our) for their, our in pairs), 2)

    return {
        name: {f"{what}_times_bitsandbytes": times(name, what) for what in ("encode", "decode")}
        for name in OURS_OF_4_BITS
    }


def _gaussians(numel: int) -> torch.Tensor:
    return torch.randn(numel // 512 * 512, generator=torch.Generator().manual_seed(0))


def _error(name: str) -> float:
    values, codec = _gaussians(1 << 20), get_codec(name)
    lost = values - codec.decode(codec.encode(values))
    return float(f"{lost.square().sum() / values.square().sum():.3g}")


def main() -> None:
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(required=True)
    made = command(
        commands, "round", averaging, megabytes=(32, "of fp32 per process"), rounds=(5, "measured"),
        warm_up=(2, "rounds until memory is where it stays"),
        sides=([*HIVEMIND, "grpc"], f"{', '.join((*HIVEMIND, *OURS))}"),
    )  # fmt: skip
    made.add_argument("--codecs", nargs="+", choices=tuple(TOLERANCE), default=list(TOLERANCE))
    made = command(commands, "codecs", codecs, mb=([32], "of fp32 to encode"), repeats=(9, "interleaved"))
    made.add_argument("--only", choices=("all", "4bit"), default="all")
    run(parser, {"peer": _peer})


if __name__ == "__main__":
    main()
