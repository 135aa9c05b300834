"""What hostile peers cost the others: liars and floods, as real processes.

    python benchmarks/hostile.py lies [--cases owner boast ...] [--rounds 30] [--steps 40]
    python benchmarks/hostile.py flood [--pairs 4] [--window-s 14] [--kinds part ping ...]

``lies``: each case is a line of ``CASES``: who is there, and what the last of them do. Liars run the product
with one function changed. Rounds are by inner steps, so a loss depends on the machine only where a peer is
late. Reported: held-out loss over that of the same honest peers alone, less 1; rounds that came to nothing;
who was refused or found to lie. One run of one seed says little of a per cent.

``flood``: three peers train by paced steps over gRPC. In every other window somebody floods the first of
them as fast as it reads, over four links of one identity, and takes a new identity as soon as the last is
shut out; or opens links without end ("links"), or connections on which a TLS handshake comes a byte at a
time ("trickle"). Reported: medians over the windows of each kind, and of the ratios of neighbours. The flood
takes processor time of this machine, which is told."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from common import Bench, Figures, against, bench, command, joined, medians, note, parser_of, run

from p2p_co2.config import ClockConfig, PeerConfig, RunConfig
from p2p_co2.errors import P2PCo2Error, PeerLost
from p2p_co2.node.network import Network
from p2p_co2.protocol.rounds.attempt import Attempt
from p2p_co2.protocol.rounds.exchange import PartState
from p2p_co2.recipes import load_recipe, recipe_digest
from p2p_co2.system.memory import Buffer
from p2p_co2.telemetry.events import MessageRefused, RoundAborted, RoundCommitted, Warned
from p2p_co2.tensors.aggregation import Mean
from p2p_co2.tensors.codec import Codec
from p2p_co2.ticket import Ticket
from p2p_co2.trained import Trained
from p2p_co2.trainer.ledger import worker
from p2p_co2.trainer.ledger.fragment_state import FragmentState
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import PROTOCOL_VERSION
from p2p_co2.wire.messages_pb2 import Envelope, Part, Ping, Ready, RoundKey
from tests.campaign import paced_run

END_BOUND_S = 3600.0
LIED = "averages no more"
"""In the warning of a peer that an owner lied."""


class Case(NamedTuple):
    """The last ``liars`` of ``peers`` lie. ``mean``, ``change``: what a liar multiplies the means that it
    makes, and what it learned, with. ``claim``: how many times its work it claims. ``two_faced``: it sends
    each peer another mean, and signs them all. ``ghost``: it comes after the first exchange, says that it
    trains, and makes no step."""

    peers: int
    liars: int = 0
    mean: float = 1.0
    change: float = 1.0
    claim: float = 1.0
    two_faced: bool = False
    ghost: bool = False


CASES = {
    "owner": Case(4, 1, mean=-1.0),
    "owner ten times": Case(4, 1, mean=-10.0),
    "owner too long": Case(4, 1, mean=10.0),
    "owner with two faces": Case(4, 1, two_faced=True),
    "boast": Case(4, 1, change=-1.0, claim=1e6),
    "boast of three": Case(8, 3, change=-1.0, claim=1e6),
    "ghosts": Case(6, 3, ghost=True),
}


def scaled(codec: Codec, mean: Buffer, times: float) -> memoryview:
    """An encoded mean, multiplied."""
    values = torch.empty(len(mean) // codec.block_bytes * codec.block_values)
    codec.admit(mean, values)
    return memoryview(codec.encode(values * times).numpy())


# ---- processes


def _swarm_of(case: Case, options: argparse.Namespace) -> Figures:
    """The built-in recipe, and what the first peer saw."""
    clock = ClockConfig(mode="steps", inner_steps_per_round=options.steps, rounds=options.rounds)
    digest = recipe_digest("byte-gpt", {})
    names = [f"peer{number}" for number in range(case.peers)]
    honest = names[: len(names) - case.liars]
    with bench(RunConfig(name="hostile", recipe="byte-gpt", recipe_digest=digest, clock=clock)) as swarm:
        for number, name in enumerate(names):
            liar = case if name not in honest else Case(0)
            least = case.peers - case.liars * case.ghost
            if liar.ghost:
                swarm.wait_for(names[0], RoundCommitted)
            swarm.work(
                name, __file__, "peer", swarm.ticket, swarm.folder / name, least, number, json.dumps(liar)
            )
        if not swarm.wait([child for child in swarm.children if child.name in honest], END_BOUND_S):
            return {"failed": swarm.tails()}
        loss = Trained.load(swarm.folder / names[0] / "checkpoint").held_out_loss()
        events = swarm.all_events(names[0])
    named = Counter(event.other[-6:] for event in events if isinstance(event, MessageRefused))
    named.update(
        event.text.split()[1][-6:] for event in events if isinstance(event, Warned) and LIED in event.text
    )
    kinds = Counter(type(event) for event in events)
    return {
        "loss": round(loss, 4), "means": kinds[RoundCommitted], "rounds lost": kinds[RoundAborted],
        "named": dict(named),
    }  # fmt: skip


def lie_to_each() -> None:
    """Have this process send each peer another mean, well signed."""
    hold, send = PartState.hold, PartState.send
    held: dict[int, tuple[Any, ...]] = {}

    def hold_and_know(self: PartState, *told: Any) -> None:
        hold(self, *told)
        held[id(self)] = told

    def send_others(self: PartState, attempt: Attempt, swarm: Any, outlet: Any, to: Any = ()) -> None:
        for number, peer in enumerate(to or [peer for peer in attempt.shares if peer != outlet.me]):
            other = PartState(self.owner, self.generation, memoryview(bytearray(self.place)), 0.0)
            other.place[-1] ^= number
            hold(other, *held[id(self)][:4])
            send(other, attempt, swarm, outlet, [peer])

    PartState.hold, PartState.send = hold_and_know, send_others  # type: ignore[method-assign]


def lie(mean: float, change: float) -> None:
    """Have this process lie about means and about what it learned."""
    reduce, offer = worker.reduce_slices, FragmentState.offer

    def false_mean(rule: Any, codec: Codec, slices: Any) -> Mean:
        true = reduce(rule, codec, slices)
        return Mean(scaled(codec, true.encoded, mean), true.weights)

    def false_offer(self: FragmentState, snapshot: torch.Tensor, *told: Any) -> Any:
        start = self.state.params
        return offer(self, start + change * (snapshot - start), *told)

    worker.reduce_slices = false_mean  # type: ignore[attr-defined]
    FragmentState.offer = false_offer  # type: ignore[method-assign]


def _peer(ticket: str, place: str, peers: str, number: str, told: str) -> None:
    """One peer: the recipe's loop through the library's front door."""
    mine = Case(*json.loads(told))
    if mine.two_faced:
        lie_to_each()
    if (mine.mean, mine.change) != (1.0, 1.0):
        lie(mine.mean, mine.change)
    recipe = load_recipe("byte-gpt", {}, seed=0)
    model, optimizer = recipe.model, recipe.optimizer(recipe.model.parameters())
    config = {"min_peers": int(peers), "carrier": "grpc"}
    with joined(ticket, Path(place), model, optimizer, None, recipe.learning_rate, **config) as peer:
        while mine.ghost:
            time.sleep(1.0)
        for batch in recipe.batches(1000 + int(number), recipe.default_batch):
            loss = recipe.loss(model, batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if not peer.step(tokens=int(recipe.tokens(batch) * mine.claim), loss=loss.detach()):
                break


def lies(options: argparse.Namespace) -> Figures:
    """Peers that lie about means, about what they learned, and about how much."""
    answer, clean = Figures(), dict[int, float]()
    for name in options.cases:
        case = CASES[name]
        if (honest := case.peers - case.liars) not in clean:
            clean[honest] = _swarm_of(Case(honest), options)["loss"]
        answer[name] = _swarm_of(case, options)
        answer[name]["over_clean"] = round(answer[name]["loss"] / clean[honest] - 1, 4)
        note(name, answer[name])
    return answer


# ---- floods

HONEST, LINKS, SETTLE_S = ("a", "b", "c"), 4, 2.0
CONNECTIONS, TRICKLE_S = 300, 0.05
"""Held at a time by one that trickles, and between two bytes on each: as slow as nobody's line is."""
HELLO = b"\x16\x03\x01\x3f\xff\x01\x00\x3f\xfb\x03\x03"
"""How a TLS record of 16 KiB begins, with a greeting as long (RFC 8446, 5.1 and 4.1.2)."""
PAUSE_S = 0.02
"""Between two connections or links: what the flood costs is the flooded's, not our own processor time."""
FLOOD_KINDS = ("part", "large part", "ping", "ready", "nonsense", "links", "trickle")
"""The last two send no message."""
RUN = paced_run(round_s=2.0, step_s=0.05, width=256)
"""Three peers that train at rest."""


def messages(run_digest: bytes) -> dict[str, bytes]:
    """What a flood consists of."""

    def envelope(**body: object) -> bytes:
        message = Envelope(version=PROTOCOL_VERSION, run=run_digest, **body)  # type: ignore[arg-type]
        return message.SerializeToString()

    key = RoundKey(round=10**6, attempt=bytes(16))
    return {
        "part": envelope(part=Part(key=key, total=1, data=b"x")),
        "large part": envelope(part=Part(key=key, total=1 << 19, data=bytes(1 << 19))),
        "ping": envelope(ping=Ping(nonce=1, sent_at=1.0)),
        "ready": envelope(ready=Ready(round=10**6, state_digest=bytes(32), weight=1.0)),
        "nonsense": b"\xff" * 40,
    }


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
                note(f"identity {number}: {error}")

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
                await asyncio.gather(
                    *(self._pour(network, record, messages(RUN.digest())[kind]) for _ in range(LINKS))
                )
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


def flood(options: argparse.Namespace) -> Figures:
    """Somebody floods one of three peers, in every other window."""
    with bench(RUN) as swarm:
        mallory = Flood(swarm.ticket, swarm.folder / "mallory", options.kinds)
        for name in HONEST:
            swarm.join(name, "--min-peers", str(len(HONEST)), "--carrier", "grpc", "--no-board")
        swarm.wait_for_commits(*HONEST, count=6)
        mallory.start(PeerId(swarm.all_events("a")[0].peer))
        try:
            pairs = [
                _pair(swarm, mallory, options.window_s, number % 2 == 1) for number in range(options.pairs)
            ]
        finally:
            mallory.close()
        reasons = sorted({event.reason for event in swarm.events("a", MessageRefused)})
    quiet, flooded = zip(*pairs, strict=True)
    ratios = {
        key: statistics.median(beside[key] / alone[key] for alone, beside in pairs)
        for key in ("tokens_per_s", "tokens_per_s_of_the_flooded", "rounds_per_min")
    }
    return {
        "tokens_flooded_by_quiet": against(ratios.pop("tokens_per_s"), 0.95), "flooded_by_quiet": ratios,
        "quiet": medians(quiet), "flooded": medians(flooded),
        "flood": {"messages_sent": mallory.sent, "links_shut_out": mallory.shut_out,
                  "opened": mallory.opened, "hung_up": mallory.hung_up, "reasons": reasons},
    }  # fmt: skip


def _pair(swarm: Bench, mallory: Flood, seconds: float, flooded_first: bool) -> tuple[Figures, Figures]:
    """(quiet, flooded)"""
    both: dict[bool, Figures] = {}
    for is_flooded in (flooded_first, not flooded_first):
        if is_flooded:
            mallory.on.set()
        time.sleep(SETTLE_S)  # an identity starts, or the last one's messages are read
        both[is_flooded] = _window(swarm, seconds)
        mallory.on.clear()
        time.sleep(SETTLE_S / 2)
    return both[False], both[True]


def _window(swarm: Bench, seconds: float) -> Figures:
    flooded = psutil.Process(next(child.pid for child in swarm.children if child.name == "a"))
    began_at, used_s, here_s = time.time(), sum(flooded.cpu_times()[:2]), time.process_time()
    time.sleep(seconds)
    used_s, here_s = sum(flooded.cpu_times()[:2]) - used_s, time.process_time() - here_s
    ended_at = time.time()
    time.sleep(1.5)  # Progress comes every second
    tokens, rounds = [], []
    for name in HONEST:
        tokens.append(swarm.tokens_per_s(name, began_at, ended_at))
        committed = [one for one in swarm.events(name, RoundCommitted, began_at) if one.at <= ended_at]
        rounds.append(60 * len(committed) / seconds)
    return {
        "tokens_per_s": statistics.mean(tokens), "tokens_per_s_of_the_flooded": tokens[0],
        "rounds_per_min": statistics.mean(rounds), "processor_share_of_the_flooded": used_s / seconds,
        "processor_share_of_the_flood": here_s / seconds,
    }  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(required=True)
    made = command(
        commands, "lies", lies, rounds=(30, "of --steps"), steps=(40, "inner steps of a round"),
    )  # fmt: skip
    made.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    made = command(commands, "flood", flood, pairs=(4, "of windows"), window_s=(14.0, "of each"))
    made.add_argument("--kinds", nargs="+", choices=FLOOD_KINDS, default=list(FLOOD_KINDS))
    run(parser, {"peer": _peer})


if __name__ == "__main__":
    main()
