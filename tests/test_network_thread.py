"""The network's thread without a network: what the training thread says reaches observers in its order, and
a caller's callback that fails is not lost on the loop."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from p2p_co2.config import PeerConfig
from p2p_co2.node.reporting import ReportService
from p2p_co2.telemetry import events as ev
from p2p_co2.ticket import Ticket
from p2p_co2.trainer.network_thread import NetworkThread
from tests.round_network import make_identity

ME = make_identity(0)
BOUND_S = 60.0


@contextlib.contextmanager
def running(folder: Path, told: list[ev.Event], trouble: Exception | None = None) -> Iterator[NetworkThread]:
    """A thread whose loop runs; ``trouble`` is what the caller's callback raises."""

    def on_event(event: ev.Event) -> None:
        told.append(event)
        if trouble is not None:
            raise trouble

    seed = f"/ip4/127.0.0.1/tcp/1/p2p/{ME.peer_id}"
    thread = NetworkThread(Ticket(bytes(32), ME.peer_id, (seed,)), PeerConfig(folder=folder), on_event)
    thread._network = SimpleNamespace(identity=ME)  # type: ignore[assignment]
    thread._thread.start()
    try:
        yield thread
    finally:
        thread._loop.call_soon_threadsafe(thread._loop.stop)
        thread._thread.join(BOUND_S)
        thread._loop.close()


def until_the_loop_is_through(thread: NetworkThread) -> None:
    """All that was asked of the loop so far, and what that asked of it, is done."""
    for _ in range(4):
        done = threading.Event()
        thread._loop.call_soon_threadsafe(done.set)
        assert done.wait(BOUND_S)


def test_observers_hear_of_the_end_after_all_that_was_told_before_it(tmp_path: Path) -> None:
    with running(tmp_path, []) as thread:
        heard: list[ev.Event] = []
        reporting = ReportService.__new__(ReportService)
        reporting._loop, reporting._responder = thread._loop, SimpleNamespace(see=heard.append)  # type: ignore[assignment]
        thread._reporting = reporting
        node = SimpleNamespace(say_goodbye=lambda reason: None, stop=lambda: None)
        thread._view = SimpleNamespace(node=node)  # type: ignore[assignment]
        hold = threading.Event()
        thread._loop.call_soon_threadsafe(hold.wait)  # a busy loop: both are waiting when it goes on
        thread.report(ev.Warned, {"text": "the last step"})
        thread.goodbye("the run is over", {"digest": "", "versions": (), "carriers": {}})
        hold.set()
        until_the_loop_is_through(thread)
        assert [type(event) for event in heard] == [ev.Warned, ev.PeerFinished]


def test_a_callback_that_fails_ends_the_training_and_not_only_a_line_of_a_log(tmp_path: Path) -> None:
    trouble, told = ValueError("the caller's disk is full"), list[ev.Event]()
    with running(tmp_path, told, trouble) as thread:
        thread._loop.call_soon_threadsafe(thread._loop.set_exception_handler, lambda loop, context: None)
        thread.on_event(ev.Warned(at=time.time(), peer=ME.peer_id, text="something"))
        until_the_loop_is_through(thread)
        assert len(told) == 1
        with pytest.raises(ValueError, match="disk is full"):
            thread.check()
