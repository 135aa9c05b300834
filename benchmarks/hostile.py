"""What hostile peers cost the others: liars in a laboratory, liars and floods as real processes.

    python benchmarks/hostile.py laboratory [--swarms 4:1 8:3] [--attacks flip replay ...] [--rules scored]
    python benchmarks/hostile.py lies [--cases owner boast ...] [--rounds 30] [--steps 40]
    python benchmarks/hostile.py flood [--pairs 4] [--window-s 14] [--kinds part ping ...]

``laboratory``: the swarms of ``loss.py``, codec "q2". "8:3" are eight peers, of which three lie. Liars know
what the honest learned, claim a million times their work, and average as they like: they count their own
slices alone, and as few of the others' as nobody refuses. In the attacks that begin with "owner" they send
honest slices and lie about means. Members look at means, remember and divide by the product's own code. A
mean that most refuse is made again by the rule. Reported: held-out loss over that of the honest alone, who
are as many as the rest; the round in which most first doubt the middle liar, by slices or means; how often
an honest one's slices count nothing. "": nobody lies, over rule "centred".

``lies``: each case is a line of ``CASES``: who is there, and what the last of them do. Liars run the product
with one function changed. Rounds are by inner steps, so a loss depends on the machine only where a peer is
late. Reported: held-out loss over that of the same honest peers alone, less 1; rounds that came to nothing;
who was refused or found to lie. One run of one seed says little of a per cent.

``flood``: three peers train by paced steps over gRPC. In every other window somebody floods the first of
them as fast as it reads, over four links of one identity, and takes a new identity as soon as the last is
shut out. Reported: medians over the windows of each kind, and of the ratios of neighbours. The flood
takes processor time of this machine, which is told."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from common import Bench, Figures, against, bench, command, joined, medians, note, parser_of, run
from loss import SHORT, TEXT, VOCAB, Liars, fitted, held_out_loss, train
from torch import Tensor

from p2p_co2.config import ClockConfig, PeerConfig, RunConfig
from p2p_co2.errors import P2PCo2Error, PeerLost
from p2p_co2.node.network import Network
from p2p_co2.protocol.rounds.events import Likeness
from p2p_co2.protocol.rounds.exchange import BAD, may_be_true
from p2p_co2.protocol.rounds.repute import Repute
from p2p_co2.recipes import load_recipe, recipe_digest
from p2p_co2.rule_specs import AGGREGATION_RULES
from p2p_co2.system.memory import Buffer
from p2p_co2.telemetry.events import MessageRefused, RoundAborted, RoundCommitted, Warned
from p2p_co2.tensors.aggregation import Mean, compare, get_rule, reduce_slices
from p2p_co2.tensors.aggregation import Part as Slice
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
LIED = "asked last, and averages"
"""In the warning of a peer that an owner lied."""


class Case(NamedTuple):
    """The last ``liars`` of ``peers`` lie. ``mean``, ``change``: what a liar multiplies the means that it
    makes, and what it learned, with. ``claim``: how many times its work it claims. ``ghost``: it comes
    after the first exchange, says that it trains, and makes no step."""

    peers: int
    liars: int = 0
    mean: float = 1.0
    change: float = 1.0
    claim: float = 1.0
    ghost: bool = False


CASES = {
    "owner": Case(4, 1, mean=-1.0),
    "boast": Case(4, 1, change=-1.0, claim=1e6),
    "boast of three": Case(8, 3, change=-1.0, claim=1e6),
    "ghosts": Case(6, 3, ghost=True),
}


def scaled(codec: Codec, mean: Buffer, times: float) -> memoryview:
    """An encoded mean, multiplied."""
    values = torch.empty(len(mean) // codec.block_bytes * codec.block_values)
    codec.admit(mean, values)
    return memoryview(codec.encode(values * times).numpy())


# ---- laboratory


def _direction(honest: Tensor) -> Tensor:
    return honest.mean(0) / honest.mean(0).norm().clamp_min(1e-12)


def _min_max(honest: Tensor) -> Tensor:
    """As far against their mean as two of them lie apart (Shejwalkar and Houmansadr 2021, "Min-Max")."""
    mean, away, far = honest.mean(0), _direction(honest), torch.cdist(honest, honest).max()
    least, most = 0.0, float(10 * far)
    for _ in range(20):
        middle = (least + most) / 2
        is_near = (honest - mean + middle * away).norm(dim=1).max() <= far
        least, most = (middle, most) if is_near else (least, middle)
    return mean - least * away


def _noise(like: Tensor) -> Tensor:
    return torch.randn_like(like) * like.square().mean().sqrt()


def _drifted(mean: Tensor) -> Tensor:
    """Away in a direction that stays, as far as members hardly notice."""
    away = torch.randn(len(mean), generator=torch.Generator().manual_seed(0))
    return mean + 0.6 * mean.norm() * away / away.norm()


ATTACKS: Mapping[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "flip": lambda honest, own, first, last: -own,
    "ten times": lambda honest, own, first, last: 10 * own,
    "noise": lambda honest, own, first, last: _noise(own),
    "constant": lambda honest, own, first, last: torch.full_like(own, float(own.abs().mean())),
    "zeros": lambda honest, own, first, last: torch.zeros_like(own),
    "minus mean": lambda honest, own, first, last: -honest.mean(0),
    "replay": lambda honest, own, first, last: first,
    "copycat": lambda honest, own, first, last: last,
    "alie": lambda honest, own, first, last: honest.mean(0) - honest.std(0),
    "min-max": lambda honest, own, first, last: _min_max(honest),
    "sleeper": lambda honest, own, first, last: -own,
    "pulse": lambda honest, own, first, last: -2 * own.norm() * _direction(honest),
    "poison": lambda honest, own, first, last: own,
}
"""What a liar sends, of what the honest and itself learned in this exchange, and the honest mean of the first
one and of the last. A sleeper begins after ``SLEEPS``, "pulse" lies every third time; who poisons learned
from text in another alphabet."""
MEANS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "owner flip": torch.neg, "owner ten times": lambda mean: 10 * mean, "owner noise": _noise,
    "owner zeros": torch.zeros_like, "owner drift": _drifted,
}  # fmt: skip
SLEEPS = 50
"""Exchanges of each fragment."""
FRAGMENTS = len(SHORT.names())


class LyingPeers(Liars):
    """The last ``liars`` of ``peers``. ``doubted_at``: by liar, the round in which most of the
    honest first doubt it; ``zeros``: of the honest by the honest, how many counted nothing, of how many."""

    def __init__(self, peers: int, liars: int, attack: str) -> None:
        super().__init__()
        everybody = [PeerId(str(number)) for number in range(peers)]
        self.honest, self.names, self.claim = everybody[: peers - liars], everybody[peers - liars :], 1e6
        self.doubted_at, self.zeros, self.exchange = dict[str, int](), [0, 0], -1
        self._attack = attack
        self._reputes = {peer: Repute() for peer in self.honest}
        self._first, self._last = dict[str, Tensor](), dict[str, Tensor]()
        self._random = random.Random(0)

    @property
    def _lies(self) -> bool:
        is_awake = self._attack != "sleeper" or self.exchange >= SLEEPS * FRAGMENTS
        return is_awake and (self._attack != "pulse" or self.exchange % 3 == 0)

    def read(self, rows: Tensor) -> Tensor:
        if self._attack == "poison":
            rows[len(self.honest) :] = VOCAB - 1 - rows[len(self.honest) :]
        return rows

    def send(self, payloads: dict[PeerId, memoryview], codec: Codec, fragment: str) -> None:
        self.exchange += 1
        learned = {peer: _values(codec, payload) for peer, payload in payloads.items()}
        honest = torch.stack([learned[peer] for peer in self.honest])
        first = self._first.setdefault(fragment, honest.mean(0))
        for peer in self.names if self._lies else ():
            if self._attack == "absent":
                del payloads[peer]
            elif self._attack in ATTACKS:
                lie = ATTACKS[self._attack](honest, learned[peer], first, self._last.get(fragment, first))
                payloads[peer] = memoryview(codec.encode(lie.contiguous()).numpy())
        self._last[fragment] = honest.mean(0)

    def owners(self, payloads: Iterable[PeerId]) -> list[PeerId]:
        """Whoever coordinates divides among those that it does not doubt. A liar has to leave out who is
        found to lie."""
        doubts = [sum(self._reputes[one].is_doubted(peer) for one in self.honest) for peer in self.names]
        most = len(self.honest) // 2
        asked = [peer for peer, times in zip(self.names, doubts, strict=True) if times <= most]
        mine = self._reputes.get(self._random.choice([*self.honest, *asked]))
        barred = mine.is_doubted if mine else self._reputes[self.honest[0]].has_lied
        return [peer for peer in payloads if not barred(peer)]

    def mean(self, owner: PeerId, name: str, slices: Sequence[Slice], codec: Codec) -> Mean:
        if owner in self.honest or not self._lies:
            mean = super().mean(owner, name, slices, codec)
            standing = {PeerId(peer): one for (peer, _, _), one in zip(slices, mean.standing, strict=False)}
            if owner in self.honest:
                self._reputes[owner].scored(standing)
                self._count(standing)
        else:
            mean = self._lie(slices, codec)
        refused = 0
        for (peer, weight, payload), counted in zip(slices, mean.weights, strict=True):
            if peer in self.honest and peer != owner:
                likeness = Likeness(*compare(codec, payload, mean.encoded))
                is_true = may_be_true(likeness, 0.0)
                self._reputes[PeerId(peer)].looked_at(owner, likeness if is_true else BAD)
                refused += not is_true and 4 * counted >= weight
        if 2 * refused <= len(slices) - 1:
            return mean
        for repute in self._reputes.values():
            repute.lied(owner)
        return reduce_slices(get_rule(name), codec, slices)

    def _lie(self, slices: Sequence[Slice], codec: Codec) -> Mean:
        if (change := MEANS.get(self._attack)) is not None:
            mean = reduce_slices(get_rule("mean"), codec, slices)
            lie = change(_values(codec, mean.encoded)).contiguous()
            return mean._replace(encoded=memoryview(codec.encode(lie).numpy()))
        left_out = set(self.honest[: len(slices) // 2])
        told = [(peer, math.ulp(0.0) if peer in left_out else w, data) for peer, w, data in slices]
        return reduce_slices(get_rule("mean"), codec, told)

    def _count(self, standing: Mapping[PeerId, float]) -> None:
        for peer in standing.keys() - self.names:
            self.zeros[0] += standing[peer] == 0
            self.zeros[1] += 1
        for peer in self.names:
            times = sum(repute.is_doubted(peer) for repute in self._reputes.values())
            if 2 * times > len(self.honest):
                self.doubted_at.setdefault(peer, self.exchange // FRAGMENTS + 1)


def _values(codec: Codec, payload: Buffer) -> Tensor:
    return codec.decode(torch.frombuffer(bytearray(payload), dtype=torch.uint8))


def laboratory(options: argparse.Namespace) -> Figures:
    """Liars in the laboratory of ``loss.py``."""
    answer = Figures()
    torch.set_num_threads(1)
    for swarm, seed in product(options.swarms, options.seeds):
        peers, liars = map(int, swarm.split(":"))
        shaped = replace(fitted(replace(SHORT, peers=peers, codec="q2")), cap=options.cap)
        shaped = replace(shaped, slow=options.slow, shards=options.shards)

        honest = "absent" if any(options.attacks) else ""
        alone = 0.0
        for attack, rule in ((honest, "centred"), *product(options.attacks, options.rules)):
            lying = LyingPeers(peers, liars if attack else 0, attack)
            made = train(replace(shaped, aggregation=rule), options.rounds, seed, lying)[1]
            loss = held_out_loss(TEXT, made)
            if not alone:
                alone = loss
                continue
            told = answer[f"{swarm} {rule} {attack or 'nobody lies'}, seed {seed}"] = {
                "loss": round(loss, 4), "over_alone": round(loss / alone - 1, 4),
                "doubted_at": statistics.median_high(lying.doubted_at.values()) if lying.doubted_at else None,
                "liars_doubted": len(lying.doubted_at),
                "honest_at_zero": round(lying.zeros[0] / max(1, lying.zeros[1]), 4),
            }  # fmt: skip
            note(swarm, rule, attack, told)
    return answer


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
FLOOD_KINDS = ("part", "large part", "ping", "ready", "nonsense")
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
            data = messages(RUN.digest())[kind]
            await asyncio.gather(*(self._pour(network, record, data) for _ in range(LINKS)))
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
                  "reasons": reasons},
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
        commands, "laboratory", laboratory, rounds=(30, "of 30 inner steps"), cap=(2.0, "of weights"),
        slow=(0, "peers that make a tenth of the steps"), shards=(False, "each learns a piece of the text"),
    )  # fmt: skip
    made.add_argument("--swarms", nargs="+", default=["4:1", "8:2", "8:3"], help="peers:liars")
    made.add_argument("--attacks", nargs="+", choices=("", *ATTACKS, *MEANS), default=[*ATTACKS, *MEANS])
    made.add_argument("--rules", nargs="+", choices=tuple(AGGREGATION_RULES), default=["scored"])
    made.add_argument("--seeds", type=int, nargs="+", default=[0], help="which ones")
    made = command(
        commands, "lies", lies, rounds=(30, "of --steps"), steps=(40, "inner steps of a round"),
    )  # fmt: skip
    made.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    made = command(commands, "flood", flood, pairs=(4, "of windows"), window_s=(14.0, "of each"))
    made.add_argument("--kinds", nargs="+", choices=FLOOD_KINDS, default=list(FLOOD_KINDS))
    run(parser, {"peer": _peer})


if __name__ == "__main__":
    main()
