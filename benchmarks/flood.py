"""What a flood costs those who train: real processes, windows with and without it, in turn.

Three peers train by paced steps over gRPC. In every other window somebody floods the first of them as fast as
it reads, over four links of one identity, and takes a new identity as soon as the last one is shut out; or
opens links without end and says nothing on them ("links"), or connections on which a TLS handshake comes a
byte at a time ("trickle"). Per window and honest peer: tokens per second and committed rounds per minute, and
the processor time of the one that is flooded. Reported: medians over the windows of each kind, and of the
ratios of neighbouring windows. Prints JSON.

    python benchmarks/flood.py [--pairs 4] [--window-s 14] [--kinds part ping nonsense ready links trickle]

Law: the first window of a pair is the quiet one in every other pair only, so a drift does not count as a
cost. Price: the flood comes from this machine and takes processor time of its own, which is reported; on two
cores it can cost the peers more than what they do about it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from p2p_co2.config import ClockConfig, CodecConfig, PeerConfig, RunConfig
from p2p_co2.errors import P2PCo2Error, PeerLost
from p2p_co2.node.network import Network
from p2p_co2.recipes import recipe_digest
from p2p_co2.telemetry.events import MessageRefused, Progress, RoundCommitted
from p2p_co2.ticket import Ticket
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import PROTOCOL_VERSION
from p2p_co2.wire.messages_pb2 import Envelope, Part, Ping, Ready, RoundKey
from tests.swarms import Swarm

HONEST = ("a", "b", "c")
LINKS = 4
CONNECTIONS, TRICKLE_S = 300, 0.05
"""Held at a time by one that trickles, and between two bytes on each: as slow as nobody's line is."""
HELLO = b"\x16\x03\x01\x3f\xff\x01\x00\x3f\xfb\x03\x03"
"""How a TLS record of 16 KiB begins, with a greeting as long (RFC 8446, 5.1 and 4.1.2)."""
PAUSE_S = 0.02
"""Between two connections or links: what the flood costs is the flooded's, not our own processor time."""
RUN = RunConfig(
    name="flood", recipe="own-loop", recipe_digest=recipe_digest("own-loop", {}), fragments=2,
    clock=ClockConfig(mode="time", round_s=2.0, rounds=100_000), codec=CodecConfig(name="int4"),
)  # fmt: skip
BAR = 0.95
Figures = dict[str, float]


def messages() -> dict[str, bytes]:
    """What a flood consists of."""

    def envelope(**body: object) -> bytes:
        message = Envelope(version=PROTOCOL_VERSION, run=RUN.digest(), **body)  # type: ignore[arg-type]
        return message.SerializeToString()

    key = RoundKey(round=10**6, attempt=bytes(16))
    return {
        "part": envelope(part=Part(key=key, total=1, data=b"x")),
        "large part": envelope(part=Part(key=key, total=1 << 19, data=bytes(1 << 19))),
        "ping": envelope(ping=Ping(nonce=1, sent_at=1.0)),
        "ready": envelope(ready=Ready(round=10**6, state_digest=bytes(32), weight=1.0)),
        "nonsense": b"\xff" * 40,
    }


SOCKETS = ("links", "trickle")
"""Kinds that send no message."""


class Flood:
    """Floods while it is ``on``, in a thread of its own. ``sent``: messages handed to
    gRPC; ``shut_out``: links."""

    def __init__(self, ticket: str, folder: Path, kinds: list[str]) -> None:
        self.on, self.sent, self.shut_out = threading.Event(), 0, 0
        self.opened = self.hung_up = 0
        self._ticket, self._folder, self._kinds = ticket, folder, kinds
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def start(self, victim: PeerId) -> None:
        self._victim = victim
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    async def _run(self) -> None:
        number = 0
        while not self._over.is_set():
            if not self.on.is_set():
                await asyncio.sleep(0.05)
                continue
            number += 1
            kind = self._kinds[number % len(self._kinds)]
            try:
                await self._one_identity(self._folder / str(number), kind)
            except P2PCo2Error as error:
                print(f"identity {number}: {error}", file=sys.stderr)

    async def _one_identity(self, folder: Path, kind: str) -> None:
        config = PeerConfig(folder=folder, carrier="grpc")
        network = await Network.open(Ticket.parse(self._ticket), config, lambda peer, error: None)

        async def ignore(sender: PeerId, data: bytes) -> None:
            return None

        try:
            await network.start_carriers(ignore, lambda peer, error: None)
            record = await network.find_record(self._victim)
            if record is None:
                return
            if kind == "links":
                await self._open_links(network, record)
            elif kind == "trickle":
                await self._trickle(record.grpc_addresses[0])
            else:
                await asyncio.gather(*(self._pour(network, record, messages()[kind]) for _ in range(LINKS)))
        finally:
            await network.close()

    async def _pour(self, network: Network, record: Any, data: bytes) -> None:
        try:
            link = await network.carriers[0].connect(record)
            while self.on.is_set():
                await link.send(data)
                self.sent += 1
            await link.close()
        except PeerLost as error:
            self.shut_out += any(reason in str(error) for reason in ("too many messages", "shut out"))

    async def _open_links(self, network: Network, record: Any) -> None:
        """One after the other, all kept; whoever is refused takes another identity."""
        links = []
        try:
            while self.on.is_set():
                links.append(await network.carriers[0].connect(record))
                self.opened += 1
                await asyncio.sleep(PAUSE_S)
        except PeerLost:
            self.hung_up += 1
        for link in links:
            await link.close()

    async def _trickle(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        held: list[tuple[asyncio.StreamReader, asyncio.StreamWriter, Iterator[int]]] = []
        turns = max(1, round(TRICKLE_S / PAUSE_S))
        try:
            for turn in count():
                if not self.on.is_set():
                    break
                if len(held) < CONNECTIONS:
                    held.append((*await asyncio.open_connection(host, int(port)), chain(HELLO, repeat(0))))
                    self.opened += 1
                is_open = [one for one in held if not one[0].at_eof() and not one[1].transport.is_closing()]
                self.hung_up += len(held) - len(is_open)
                held = is_open
                for _, writer, data in held[turn % turns :: turns]:
                    writer.write(bytes([next(data)]))
                await asyncio.sleep(PAUSE_S)
        except OSError:
            self.hung_up += 1
        for _, writer, _ in held:
            writer.transport.abort()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--window-s", type=float, default=14.0)
    parser.add_argument(
        "--kinds", nargs="+", choices=(*messages(), *SOCKETS), default=[*messages(), *SOCKETS]
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        swarm = Swarm(Path(folder), RUN)
        flood = Flood(swarm.ticket, Path(folder) / "mallory", options.kinds)
        try:
            windows = _windows(swarm, flood, options)
            refused = [event for event in swarm.events("a") if isinstance(event, MessageRefused)]
        finally:
            flood.close()
            swarm.close()
    machine = {"platform": platform.platform(), "cpus": os.cpu_count(), "load_1_min": os.getloadavg()[0]}
    job = {"pairs": options.pairs, "window_s": options.window_s, "kinds": options.kinds, "bar": BAR}
    flooded = {"messages_sent": flood.sent, "links_shut_out": flood.shut_out,
               "opened": flood.opened, "hung_up": flood.hung_up,
               "reasons": sorted({event.reason for event in refused})}  # fmt: skip
    result = {"at": time.strftime("%F %R"), **machine, **job, **_summary(windows), "flood": flooded}
    print(json.dumps(result, indent=2))


def _windows(swarm: Swarm, flood: Flood, options: argparse.Namespace) -> list[tuple[Figures, Figures]]:
    """(quiet, flooded) per pair."""
    for seed, name in enumerate(HONEST):
        swarm.start_peer(name, "--seed", str(seed), "--min-peers", "3", "--carrier", "grpc")
    for name in HONEST:
        swarm.wait_for(name, RoundCommitted, count=6)
    identity = next(event.peer for event in swarm.events("a"))
    flood.start(PeerId(identity))
    pairs = []
    for number in range(options.pairs):
        both: dict[bool, Figures] = {}
        for is_flooded in ((False, True), (True, False))[number % 2]:
            if is_flooded:
                flood.on.set()
            time.sleep(2.0)  # an identity starts, or the last one's messages are read
            both[is_flooded] = _window(swarm, options.window_s)
            flood.on.clear()
            time.sleep(1.0)
        pairs.append((both[False], both[True]))
    return pairs


def _window(swarm: Swarm, seconds: float) -> Figures:
    began_at, used_s = time.time(), _processor_s(swarm.processes["a"].pid)
    here_s = time.process_time()
    time.sleep(seconds)
    ended_at, used_s = time.time(), _processor_s(swarm.processes["a"].pid) - used_s
    here_s = time.process_time() - here_s
    time.sleep(1.5)  # Progress comes every second
    tokens, rounds = [], []
    for name in HONEST:
        events = [event for event in swarm.events(name) if began_at <= event.at <= ended_at]
        progress = [event for event in events if isinstance(event, Progress)]
        first, last = progress[0], progress[-1]
        tokens.append((last.tokens - first.tokens) / (last.at - first.at))
        rounds.append(60 * sum(isinstance(event, RoundCommitted) for event in events) / seconds)
    return {
        "tokens_per_s": statistics.mean(tokens),
        "tokens_per_s_of_the_flooded": tokens[0],
        "rounds_per_min": statistics.mean(rounds),
        "processor_share_of_the_flooded": used_s / seconds,
        "processor_share_of_the_flood": here_s / seconds,
    }


def _processor_s(pid: int) -> float:
    """Processor seconds of a process so far (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _summary(windows: list[tuple[Figures, Figures]]) -> dict[str, Any]:
    quiet, flooded = zip(*windows, strict=True)

    def medians(figures: tuple[Figures, ...]) -> Figures:
        return {key: round(statistics.median(one[key] for one in figures), 4) for key in figures[0]}

    ratios = {
        key: round(statistics.median(beside[key] / alone[key] for alone, beside in windows), 4)
        for key in ("tokens_per_s", "tokens_per_s_of_the_flooded", "rounds_per_min")
    }
    return {"quiet": medians(quiet), "flooded": medians(flooded), "flooded_by_quiet": ratios}


if __name__ == "__main__":
    main()
