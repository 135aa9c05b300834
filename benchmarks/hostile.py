"""What lying peers cost the others: in a laboratory, and as real processes.

Each case is a line of ``CASES``: who is there, how fast, and what the last of them do. The laboratory is that
of ``defence_tax``: rounds in which everybody is, with the product's weights, rule, codec, outer step, and its
law about means that do not hold what was sent. A round that too few sign is not made; its work waits for the
next one. In processes the liars run the product with one function changed.

    python benchmarks/hostile.py [--cases owner boast ...] [--rounds 30] [--seeds 1] [--processes]

Reported for each case: held-out loss over that of the same honest peers alone, less 1; rounds of a fragment
that came to nothing; of a hundred liars' parts how many were refused, and the honest parts that were; the
share of the first peer's work that counts, of what the weight cap allows. JSON.

Price: the laboratory knows no late or lost message. A process is one run of one seed, and says little of a
per cent.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from defence_tax import Averaged, Together, by_speed, play
from loss_model import FRAGMENTS, Windows, flatten, held_out_loss, unflatten_

from p2p_co2.config import ClockConfig, PeerConfig, RunConfig
from p2p_co2.protocol.rounds import Likeness
from p2p_co2.protocol.rounds.attempt import Attempt, Share, capped, is_quorum
from p2p_co2.protocol.rounds.exchange import Findings, PartState, has_a_say, may_be_true
from p2p_co2.recipes import load_recipe, recipe_digest
from p2p_co2.recipes.corpus import embedded_corpus
from p2p_co2.system.memory import Buffer
from p2p_co2.telemetry.events import MessageRefused, RoundAborted, RoundCommitted, Warned
from p2p_co2.telemetry.journal import Journal
from p2p_co2.tensors import outer
from p2p_co2.tensors.aggregation import Mean, compare, get_rule, reduce_slices
from p2p_co2.tensors.codec import Codec
from p2p_co2.trained import Trained
from p2p_co2.trainer import connect
from p2p_co2.trainer.ledger import worker
from p2p_co2.trainer.ledger.fragment_state import FragmentState
from p2p_co2.wire.identity import PeerId
from tests.swarms import ROOT, Swarm

Figures = dict[str, Any]
END_BOUND_S = 3600.0
LIED = "averages no more"
"""In the warning of a peer that an owner lied."""


class Case(NamedTuple):
    """``every``: inner steps of the fastest peer for one of each; the last ``liars`` of them lie. ``mean``,
    ``change``: what a liar multiplies the means that it makes, and what it learned, with; ``claim``: how
    many times its work it claims; ``owned``: how many equal shares it averages, as its line claims;
    ``two_faced``: whether it sends each peer another mean, and signs them all; ``narrow``: whether, in its
    turns to coordinate, it takes in a bare majority (what the others learned is lost here); ``ghost``:
    whether it comes after the first exchange, says that it trains, and makes no step (processes alone)."""

    every: tuple[int, ...]
    liars: int = 0
    mean: float = 1.0
    change: float = 1.0
    claim: float = 1.0
    owned: int = 1
    two_faced: bool = False
    narrow: bool = False
    ghost: bool = False


CASES = {
    "owner": Case((1,) * 4, 1, mean=-1.0),
    "owner of a claimed line": Case((1,) * 8, 1, mean=-1.0, owned=2),
    "owner ten times": Case((1,) * 4, 1, mean=-10.0),
    "owner too long": Case((1,) * 4, 1, mean=10.0),
    "owner with two faces": Case((1,) * 4, 1, two_faced=True),
    "boast": Case((1,) * 4, 1, change=-1.0, claim=1e6),
    "boast of three": Case((1,) * 8, 3, change=-1.0, claim=1e6),
    "narrow groups": Case((1,) * 8, 1, change=-1.0, claim=1e6, narrow=True),
    "ghosts": Case((1,) * 6, 3, ghost=True),
    "fast": Case((1, 8, 8, 8, 8)),
    "uneven": Case((1, 1, 8, 8)),
    "equal": Case((1,) * 8),
}


# ---- the laboratory


class Attacked(Averaged):
    """One fragment of a swarm in which the last peers lie. ``liars``: owners that were found out."""

    def __init__(self, run: RunConfig, names: Sequence[str], groups: Sequence[Together], case: Case) -> None:
        super().__init__(run, names, groups[0].params)
        self._case, self.counts = case, Counter[str]()
        self.peers = [PeerId(f"{peer:02}") for peer in range(len(case.every))]
        self.caught: set[PeerId] = set()

    @cached_property
    def _lying(self) -> set[PeerId]:
        return set(self.peers[len(self.peers) - self._case.liars :])

    def _owners(self, round_: int) -> list[PeerId]:
        """Of as many parts as there are peers."""
        trusted = [peer for peer in self.peers if peer not in self.caught]
        claimed = [peer for peer in trusted if peer in self._lying for _ in range(self._case.owned)]
        honest = [peer for peer in trusted if peer not in self._lying]
        left = len(self.peers) - len(claimed)
        return [*(honest[(round_ + part) % len(honest)] for part in range(left)), *claimed]

    def _members(self, round_: int) -> list[PeerId]:
        """All peers; of a narrow group the liars and as many others, another time others, as they need."""
        count = len(self.peers)
        if not self._case.narrow or round_ % count:
            return self.peers
        honest = [peer for peer in self.peers if peer not in self._lying]
        first, needed = round_ // count, count // 2 + 1 - len(self._lying)
        return sorted([*self._lying, *(honest[(first + more) % len(honest)] for more in range(needed))])

    def average(self, groups: Sequence[Together], tokens: Sequence[float]) -> None:
        case, codec, round_ = self._case, self._codec, self.state.version + 1
        done, members = dict(zip(self.peers, tokens, strict=True)), self._members(round_)
        shares = {
            peer: Share(done[peer] * (case.claim if peer in self._lying else 1.0), 0) for peer in members
        }
        weights = capped(shares, self._run.weight_cap)
        offers: dict[PeerId, memoryview] = {}
        for group in groups:
            for index, live in zip(group.peers, flatten(group.params, self._names), strict=True):
                peer = self.peers[index]
                gradient = (self.state.params - live) * (case.change if peer in self._lying else 1.0)
                if peer in shares:
                    offers[peer] = memoryview(codec.encode(gradient).numpy())
        owners, size = self._owners(round_), len(offers[members[-1]])
        part_bytes = -(-size // codec.block_bytes // len(owners)) * codec.block_bytes
        means, found = bytearray(), {peer: dict[int, tuple[PeerId, bool]]() for peer in members}
        for part, start in enumerate(range(0, size, part_bytes)):
            owner = owners[part]
            slices = [(peer, weights[peer], one[start : start + part_bytes]) for peer, one in offers.items()]
            mean = reduce_slices(get_rule("centred"), codec, slices)
            encoded = scaled(codec, mean.encoded, case.mean) if owner in self._lying else mean.encoded
            means += encoded
            for (peer, asked, data), counted in zip(slices, mean.weights, strict=True):
                if peer == owner:
                    found[peer][part] = owner, True
                elif 4 * counted >= asked and has_a_say(peer, shares):
                    found[peer][part] = owner, may_be_true(Likeness(*compare(codec, data, encoded)))
                if peer == self.peers[0]:
                    self.counts["counted"] += round(1e6 * counted / asked)
                    self.counts["asked"] += 10**6
        if self._is_signed(found, owners):
            mean_values = codec.decode(torch.frombuffer(means, dtype=torch.uint8))
            mean_values = mean_values[: self.state.params.numel()]
            self.state, _ = outer.step(self._run.outer, self.state, mean_values, self.state.version)
            for group in groups:
                unflatten_(group.params, self._names, self.state.params.expand(len(group.peers), -1))

    def _is_signed(self, found: dict[PeerId, dict[int, tuple[PeerId, bool]]], owners: list[PeerId]) -> bool:
        """Whether a quorum signs; who lied to more than half of the others averages no more."""
        refused = {
            peer: Findings(looked).refused for peer, looked in found.items() if peer not in self._lying
        }
        accused = Counter(owner for parts in refused.values() for owner in {owners[part] for part in parts})
        for peer, looked in found.items():
            for part, (owner, _) in looked.items():
                if peer not in self._lying and owner != peer:
                    who = "liars'" if owner in self._lying and self._case.mean != 1.0 else "honest"
                    self.counts[f"{who} parts"] += 1
                    self.counts[f"{who} parts refused"] += part in refused[peer]
        self.caught |= {owner for owner, times in accused.items() if 2 * times > len(found) - 1}
        signers = [peer for peer in found if not refused.get(peer)]
        proved = self._lying.intersection(owners) if self._case.two_faced else set[PeerId]()
        self.caught |= proved
        is_signed = not proved and is_quorum(signers, len(self.peers), self.peers[-1])  # a liar coordinates
        self.counts["rounds lost"] += not is_signed
        return is_signed


def scaled(codec: Codec, mean: Buffer, times: float) -> memoryview:
    """An encoded mean, multiplied."""
    values = torch.empty(len(mean) // codec.block_bytes * codec.block_values)
    codec.admit(mean, values)
    return memoryview(codec.encode(values * times).numpy())


def train(case: Case, rounds: int, steps: int, seed: int) -> tuple[float, Counter[str]]:
    """Held-out loss of the agreed parameters, and what was counted on the way."""
    torch.set_num_threads(1)
    run, corpus = RunConfig(), embedded_corpus()
    groups = by_speed(seed, case.every)
    names = [[name for name, _, _ in fragment] for fragment in FRAGMENTS]
    fragments = [Attacked(run, some, groups, case) for some in names]
    for fragment in fragments[1:]:
        fragment.caught = fragments[0].caught  # a peer remembers for all fragments
    play(groups, fragments, Windows(corpus, seed, rounds * steps, 8), rounds, steps)  # the same without liars
    return held_out_loss(groups[0].params, corpus), sum((one.counts for one in fragments), Counter())


def in_laboratory(case: Case, options: argparse.Namespace) -> Figures:
    over, total = [], Counter[str]()
    for seed in range(options.seeds):
        loss, counts = train(case, options.rounds, options.steps, seed)
        total += counts
        honest = Case(case.every[: len(case.every) - case.liars])
        clean = train(honest, options.rounds, options.steps, seed)[0] if case.liars else loss
        over.append((loss, clean))
    return {
        "loss": [round(loss, 4) for loss, _ in over],
        "over_clean": round(statistics.median(loss / clean - 1 for loss, clean in over), 4),
        "first_peer_counted": round(total.pop("counted") / total.pop("asked"), 4),
        **total,
    }


# ---- processes


def in_processes(case: Case, options: argparse.Namespace) -> Figures:
    """The built-in recipe by inner steps: a loss depends on the machine only where a peer is late."""
    run = RunConfig(
        name="hostile",
        recipe="byte-gpt",
        recipe_digest=recipe_digest("byte-gpt", {}),
        clock=ClockConfig(mode="steps", inner_steps_per_round=options.steps, rounds=options.rounds),
    )
    names = [f"peer{number}" for number in range(len(case.every))]
    with tempfile.TemporaryDirectory() as folder:
        swarm = Swarm(Path(folder), run)
        try:
            for number, name in enumerate(names):
                liar = case if number >= len(names) - case.liars else Case(())
                script, place = str(ROOT / "benchmarks" / "hostile.py"), str(Path(folder) / name)
                least = len(names) - case.liars * case.ghost
                told = [swarm.ticket, place, str(least), str(number), json.dumps(liar)]
                if liar.ghost:
                    swarm.wait_for(names[0], RoundCommitted)
                swarm.start(name, [sys.executable, script, "--worker", *told])
            swarm.wait(*names[: len(names) - case.liars], bound_s=END_BOUND_S)
            loss = Trained.load(Path(folder) / names[0] / "checkpoint").held_out_loss()
            events = swarm.events(names[0])
        finally:
            swarm.close()
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


def work(ticket: str, place: str, peers: str, number: str, lies: str) -> None:
    """One peer: the recipe's loop through the library's front door."""
    torch.set_num_threads(1)
    mine = Case(*json.loads(lies))
    if mine.two_faced:
        lie_to_each()
    if (mine.mean, mine.change) != (1.0, 1.0):
        lie(mine.mean, mine.change)
    recipe, folder = load_recipe("byte-gpt", {}, seed=0), Path(place)
    model, optimizer = recipe.model, recipe.optimizer(recipe.model.parameters())
    config = PeerConfig(
        folder=folder, min_peers=int(peers), carrier="grpc", checkpoint_every_s=1e6, board=False
    )
    folder.mkdir(parents=True, exist_ok=True)
    with Journal(folder / "events.jsonl") as journal:
        peer = connect(ticket, config, journal.write).start(
            model, optimizer, learning_rate=recipe.learning_rate
        )
        signal.signal(signal.SIGINT, lambda *_: peer.stop())
        with peer:
            while mine.ghost:
                time.sleep(1.0)
            for batch in recipe.batches(1000 + int(number), recipe.default_batch):
                loss = recipe.loss(model, batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if not peer.step(tokens=int(recipe.tokens(batch) * mine.claim), loss=loss.detach()):
                    break


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=40, help="inner steps in a round, a multiple of 8")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--processes", action="store_true", help="as real processes, not in the laboratory")
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(*options.worker)
        return
    play = in_processes if options.processes else in_laboratory
    cases = {}
    for name in options.cases if options.processes else [n for n in options.cases if not CASES[n].ghost]:
        cases[name] = play(CASES[name], options)
        print(name, json.dumps(cases[name]), file=sys.stderr)
    job = {key: getattr(options, key) for key in ("rounds", "steps", "seeds", "processes")}
    machine = {"cpus": os.cpu_count(), "load_1_min": os.getloadavg()[0]}
    print(json.dumps({"at": time.strftime("%F %R"), **machine, **job, **cases}, indent=2))


if __name__ == "__main__":
    main()
