"""Real swarms: the console script's programs as separate processes on this machine, over real sockets. Those
that are hurt are in ``test_faults``, late joiners among them."""

from __future__ import annotations

import base64
import json
import os
import signal
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from bootstrap.local_swarm import Child, LocalSwarm, environment
from p2p_co2.config import ClockConfig, RunConfig, write_toml
from p2p_co2.node.credit import credit_files, last_counted, read_credit
from p2p_co2.recipes import recipe_digest
from p2p_co2.system.process import program
from p2p_co2.telemetry.events import (
    LinkLost,
    LinkOpened,
    PeerFinished,
    PeerLeft,
    PeerStarted,
    Progress,
    RoundCommitted,
    Warned,
)
from p2p_co2.telemetry.journal import read_events
from p2p_co2.ticket import Ticket
from p2p_co2.wire.messages_pb2 import Decision, Outcome
from tests import campaign
from tests.campaign import Campaign

pytestmark = pytest.mark.swarm

TINY: dict[str, str | int | float | bool] = {"layers": 1, "width": 32, "heads": 2, "context": 32, "batch": 4}
START_S = 180.0
"""Bound on a process's start: importing torch, several processes at a time, on few cores that may stand still
for seconds. Nothing here is about speed."""
LEAVE_S = 60.0
TWO_OVER_LIBP2P = ("--min-peers", "2", "--carrier", "libp2p")
OWN_RECIPE = """
import torch
from torch import nn
from p2p_co2.recipes import Recipe

def make():
    def batches(seed, batch):
        generator = torch.Generator().manual_seed(seed)
        while True:
            x = torch.randn(batch, 8, generator=generator)
            yield x, x.roll(1, 1)
    def loss(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])
    return Recipe(nn.Linear(8, 8), batches, loss)
"""


@contextmanager
def opened(folder: Path) -> Iterator[Campaign]:
    """A swarm of which nothing is left when the block ends."""
    folder.mkdir(exist_ok=True)
    with Campaign(folder, grace_s=LEAVE_S) as swarm:
        yield swarm
        below = [process for child in swarm.running() for process in psutil.Process(child.pid).children(True)]
    assert not [process for process in below if process.is_running()]
    assert not [child for child in swarm.children if psutil.pid_exists(child.pid)]


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Campaign]:
    with opened(tmp_path) as swarm:
        yield swarm


def run_of(rounds: int, recipe: str = "byte-gpt") -> RunConfig:
    options = TINY if recipe == "byte-gpt" else {}
    return RunConfig(
        name="test",
        recipe=recipe,
        recipe_options=options,
        recipe_digest=recipe_digest(recipe, options),
        fragments=2,
        clock=ClockConfig(mode="time", round_s=1.0, rounds=rounds),
    )


def test_two_peers_agree_over_each_carrier(tmp_path: Path) -> None:
    """Two swarms side by side, one on each carrier."""
    with ExitStack() as both:
        swarms = {carrier: both.enter_context(opened(tmp_path / carrier)) for carrier in ("grpc", "libp2p")}
        for carrier, swarm in swarms.items():
            swarm.start_seed(run_of(rounds=6))
            for name in ("one", "two"):
                swarm.join(name, "--min-peers", "2", "--carrier", carrier, recipe="")
        for carrier, swarm in swarms.items():
            peers = swarm.children[1:]
            assert swarm.wait(peers, START_S), swarm.tails()
            assert [peer.exit_status() for peer in peers] == [0, 0], [peer.last_lines() for peer in peers]
            ends = [swarm.events(name, PeerFinished)[-1] for name in ("one", "two")]
            assert len({end.digest for end in ends}) == 1, ends
            assert ends[0].digest
            assert min(ends[0].versions) >= 2
            for name in ("one", "two"):
                assert {event.carrier for event in swarm.events(name, LinkOpened)} == {carrier}
            losses = [event.loss for event in swarm.events("one", Progress) if event.loss == event.loss]
            assert losses[-1] < losses[0]
            assert max(event.contributors for event in swarm.events("one", RoundCommitted)) == 2
            assert list((swarm.folder / "one" / "checkpoint").glob("state-*/manifest.json"))
            credits_are_what_certificates_say(swarm.folder / "one", swarm.folder / "two")


def credits_are_what_certificates_say(*folders: Path) -> None:
    """What each peer says it gave is what the commits that any of them keeps come to."""
    records = [read_credit(*credit_files(folder)) for folder in folders]
    blocks = records[0][0].blocks
    by_peer = dict[str, float]()
    for certificate in {line.outcome: line.certificate for _, lines in records for line in lines}.values():
        decision = Decision.FromString(zlib.decompress(base64.b64decode(certificate)))
        outcome = Outcome.FromString(decision.outcome)
        for part in outcome.parts:
            share = (part.stop_block - part.start_block) / sum(blocks)
            for one in part.contributors:
                by_peer[one.peer] = by_peer.get(one.peer, 0.0) + one.weight * share
    assert len(by_peer) == len(folders)
    for head, lines in records:
        assert lines[-1].tokens_so_far == pytest.approx(by_peer[head.peer])
        assert lines[-1].tokens_so_far > 0


def test_a_daemon_dies_a_peer_leaves_at_ctrl_c_and_comes_back_and_two_ctrl_cs_end_at_once(
    swarm: Campaign,
) -> None:
    swarm.start_seed(campaign.paced_run(1.0, step_s=0.05))
    one, two = (swarm.join(name, *TWO_OVER_LIBP2P) for name in ("one", "two"))
    swarm.wait_until("a round of both", lambda: contributors(swarm, "one") == 2)
    outlive_a_killed_daemon(swarm, one)
    leave_and_resume(swarm, two)
    end_at_once(swarm, one)


def outlive_a_killed_daemon(swarm: Campaign, peer: Child) -> None:
    daemon, *others = psutil.Process(peer.pid).children(recursive=True)
    assert (daemon.name(), others) == ("p2pd", [])
    killed_at = time.time()
    daemon.kill()
    since = killed_at + 1.0
    swarm.wait_until("a round of both", lambda: contributors(swarm, "one", since) == 2)
    swarm.wait_until("a round of both", lambda: contributors(swarm, "two", since) == 2)
    assert [event for event in swarm.events("one", LinkLost) if event.at >= killed_at]
    assert [event for event in swarm.events("two", LinkOpened) if event.at >= killed_at]
    swarm.wait_until(
        "its word", lambda: any("was started again" in event.text for event in swarm.events("one", Warned))
    )


def leave_and_resume(swarm: Campaign, two: Child) -> None:
    gone = len(swarm.events("one", PeerLeft))
    # What a terminal does: all of the foreground group gets it, and the libp2p daemon if it is in there.
    os.killpg(two.pid, signal.SIGINT)
    assert swarm.wait([two], LEAVE_S), two.last_lines()
    assert two.exit_status() == 0, two.last_lines()
    left = swarm.events("two", PeerFinished)[-1]
    assert left.digest
    steps = swarm.events("two", Progress)[-1].inner_steps
    swarm.wait_until("the goodbye", lambda: len(swarm.events("one", PeerLeft)) > gone)
    again = swarm.join("two", "--resume", *TWO_OVER_LIBP2P)
    swarm.wait_until("a second start", lambda: swarm.events("two", Progress)[-1].inner_steps > steps)
    begins = swarm.events("two", PeerStarted)[-1]
    assert begins.inner_steps >= steps
    told = f"checkpoint: step {begins.inner_steps}, round {begins.position:.2f}"
    counted = last_counted(swarm.folder / "two")
    assert f"resumed from {begins.resumed_from.removesuffix('checkpoint')}{told}" in again.last_lines(100)
    swarm.wait_until("a round of both", lambda: contributors(swarm, "two", since=left.at) == 2)
    assert counted is not None
    rounds = counted.rounds_so_far
    swarm.wait_until("more", lambda: (last_counted(swarm.folder / "two") or counted).rounds_so_far > rounds)
    assert again.running()


def end_at_once(swarm: Campaign, peer: Child) -> None:
    below = psutil.Process(peer.pid).children(recursive=True)
    assert below, "the libp2p daemon is a child"
    peer.asked_to_end = True
    os.kill(peer.pid, signal.SIGSTOP)  # so that both arrive before it can leave by the first
    os.kill(peer.pid, signal.SIGINT)
    os.kill(peer.pid, signal.SIGTERM)
    os.kill(peer.pid, signal.SIGCONT)
    assert swarm.wait([peer], LEAVE_S)
    assert peer.exit_status() in {0, 130}
    assert not [
        process for process in below if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]


def test_seeds_die_and_come_back_or_are_replaced_by_peers_and_who_cannot_join_is_told(
    swarm: Campaign, tmp_path: Path
) -> None:
    here, other = tmp_path / "recipe.py", tmp_path / "other.py"
    here.write_text(OWN_RECIPE)
    other.write_text(OWN_RECIPE + "# a change, were it only a comment\n")
    run, own = run_of(0, f"{here}:make"), f"{here}:make"
    first = swarm.start_seed(run)
    ticket = Ticket.parse(swarm.ticket)
    refused = {
        "another than the run's": swarm.join("changed", recipe=f"{other}:make"),
        "--recipe": swarm.join("unnamed", recipe=""),
    }
    place = ["--host", "127.0.0.1", "--folder", str(swarm.folder / "seed2")]
    second = swarm.start("seed2", program("bootstrap", "seed", "--also", swarm.ticket, *place), environment())
    ticket_of_both = swarm.wait_for_line(second, "ticket:", START_S)
    assert Ticket.parse(ticket_of_both).run_key == ticket.run_key
    assert len(peers_in(ticket_of_both)) == 2
    assert_refused(swarm, refused)

    swarm.kill(first)
    stranded = swarm.join("stranded", recipe=own)  # its ticket names the dead one alone
    stranded.asked_to_end = True
    swarm.ticket = ticket_of_both
    right = swarm.join("one", recipe=own)
    swarm.wait_until("a step", lambda: any(each.inner_steps for each in swarm.events("one", Progress)))
    assert swarm.wait([stranded], START_S)
    assert stranded.exit_status() == 1
    assert "no seed can be reached" in stranded.last_lines()
    assert "Traceback" not in stranded.last_lines(100)

    swarm.ticket = str(ticket)  # which says where it was
    back = swarm.start_seed(run)
    again = Ticket.parse(swarm.wait_for_line(back, "ticket:", START_S))
    assert (again.run, again.run_key) == (ticket.run, ticket.run_key)
    swarm.interrupt(back)
    assert swarm.wait([back], LEAVE_S)
    assert back.exit_status() == 0
    swarm.ticket = ticket_of_both
    come_in_by_a_peers_ticket(swarm, second, own)
    assert right.running()


def come_in_by_a_peers_ticket(swarm: Campaign, seed: Child, recipe: str) -> None:
    """With the last seed gone: a later ticket names peers, and those keep the run's settings."""
    swarm.join("two", recipe=recipe)
    ticket = swarm.folder / "one" / "ticket"

    seeds = peers_in(swarm.ticket)
    swarm.wait_until(
        "both are named", lambda: ticket.exists() and len(peers_in(ticket.read_text()) - seeds) == 2
    )
    swarm.kill(seed)
    swarm.ticket = ticket.read_text().strip()
    swarm.join("three", recipe=recipe)
    swarm.wait_until("a round", lambda: contributors(swarm, "three") > 1)


def peers_in(ticket: str) -> set[str]:
    return {place.rpartition("/")[2] for place in Ticket.parse(ticket).seeds}


def assert_refused(swarm: Campaign, refused: dict[str, Child]) -> None:
    """Each of them in one line that says why, by the words in it."""
    for peer in refused.values():
        peer.asked_to_end = True
    for words, peer in refused.items():
        assert swarm.wait([peer], START_S)
        assert peer.exit_status() == 2, peer.last_lines()
        said = peer.last_lines(100)
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        assert words in errors[0]
        assert "Traceback" not in said


def test_a_demo_and_a_rehearsal_end_with_a_summary_and_nothing_running(tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(write_toml(run_of(0).model_copy(update={"clock": ClockConfig(round_s=2.0)})))
    commands = {
        "demo": ["demo", "--round-s", "2"],
        "rehearsal": ["rehearse", str(run_file), "--profile", "dsl"],
    }
    with LocalSwarm(tmp_path) as parent:
        for kind, words in commands.items():
            given = [*words, "--peers", "2", "--seconds", "10", "--folder", str(tmp_path / kind)]
            parent.start(f"{kind}-command", program("bootstrap", *given), environment())
        assert parent.wait(parent.children, 2 * START_S), [one.last_lines() for one in parent.children]
        for child in parent.children:
            assert child.exit_status() == 0, child.last_lines(40)
    demo, rehearsal = (json.loads((tmp_path / kind / "summary.json").read_text()) for kind in commands)
    for summary in (demo, rehearsal):
        assert summary["digests_equal"] is True
        assert not [pid for pid in summary["processes"].values() if psutil.pid_exists(pid)]
    assert demo["loss"]["end"] < demo["loss"]["start"]
    assert 1_000_000 <= demo["parameters"] <= 2_000_000
    for name in ("events.jsonl", "loss.png", "report.html"):
        assert (tmp_path / "demo" / name).exists()
    (kept,) = (tmp_path / "demo").rglob("state-*")
    assert kept.parent == tmp_path / "demo" / "checkpoint"
    assert "carriers slowed down on loopback" in rehearsal["emulation"]
    assert rehearsal["lines"]["peer-1"]["name"] == "dsl"
    assert rehearsal["rounds"]["duration_s"]["mean"] > 0.16, "four ways of 40 ms at least"


def test_ctrl_c_ends_a_demo_with_all_its_processes(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with LocalSwarm(tmp_path) as parent:
        options = ["--peers", "2", "--seconds", "60", "--folder", str(folder)]
        demo = parent.start("demo", program("bootstrap", "demo", *options), environment())
        journal = folder / "peers" / "peer-1" / "events.jsonl"
        ends_at = time.monotonic() + 2 * START_S
        while not (journal.exists() and _training(journal)):
            assert demo.running(), demo.last_lines()
            assert time.monotonic() < ends_at, demo.last_lines()
            time.sleep(0.1)
        below = psutil.Process(demo.pid).children(recursive=True)
        assert len(below) >= 3
        parent.interrupt(demo)
        assert parent.wait([demo], LEAVE_S), demo.last_lines()
        assert demo.exit_status() == 130
        assert demo.last_lines(1) == "stopped; no process is left"
        assert not [process for process in below if process.is_running()]


def contributors(swarm: Campaign, name: str, since: float = 0.0) -> int:
    """Most contributors of a round that a peer saw committed after ``since``."""
    commits = [event for event in swarm.events(name, RoundCommitted) if event.at > since]
    return max((event.contributors for event in commits), default=0)


def _training(journal: Path) -> bool:
    return any([isinstance(event, Progress) for event in read_events(journal)])
