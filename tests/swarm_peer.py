"""A test's peer process: a small model in its own training loop, through the library's front door.

    python tests/swarm_peer.py TICKET FOLDER --seed 1 --min-peers 3 [--die-at part] [--resume]
    [--start-over] [--impatient]

``--die-at KIND`` makes the process kill itself with SIGKILL in the moment before it would send its first
message of that kind after ``--die-after`` committed rounds: the way to be dead in a chosen phase of a round,
for real. After four more also before one of a second kind (``waiting,begin``). ``--impatient``: listen to
peers that are listed and gone no longer than to nobody.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from pathlib import Path

import torch
from google.protobuf.message import Message

from p2p_co2.config import PeerConfig
from p2p_co2.node import shell
from p2p_co2.telemetry.events import Event, RoundCommitted
from p2p_co2.telemetry.journal import Journal
from p2p_co2.trainer import arrival, connect
from p2p_co2.wire.envelope import Unsent
from tests.paced_recipe import Descent

WIDTH = 48


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.ReLU(), torch.nn.Linear(4 * WIDTH, WIDTH)
    )


class Doom:
    """Counts commits and kills the process at the chosen message."""

    def __init__(self, kind: str, after: int) -> None:
        self.kinds, self.after, self.commits = kind.split(","), after, 0

    def saw(self, event: Event) -> None:
        self.commits += isinstance(event, RoundCommitted)

    def install(self) -> None:
        written = shell.unsent  # where messages leave by another way this fails: else nobody would die

        def doomed(message: Message, head: bytes) -> Unsent:
            kinds = self.kinds[: 1 + (self.commits - self.after) // 4]
            if self.commits >= self.after and message.__class__.__name__.lower() in kinds:
                os.kill(os.getpid(), signal.SIGKILL)
            return written(message, head)

        shell.unsent = doomed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ticket")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--min-peers", type=int, default=1)
    parser.add_argument("--carrier", default="auto")
    parser.add_argument("--die-at", default="")
    parser.add_argument("--die-after", type=int, default=2)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--start-over", action="store_true")
    parser.add_argument("--no-board", action="store_true")
    parser.add_argument("--impatient", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.impatient:
        arrival.LISTENED_S = arrival.LISTEN_S
    doom = Doom(options.die_at, options.die_after)
    doom.install()
    config = PeerConfig(
        folder=options.folder, min_peers=options.min_peers, carrier=options.carrier,
        board=not options.no_board,
    )  # fmt: skip
    options.folder.mkdir(parents=True, exist_ok=True)
    with Journal(options.folder / "events.jsonl") as journal:

        def on_event(event: Event) -> None:
            doom.saw(event)
            journal.write(event)

        model = make_model()
        optimizer = Descent(model.parameters(), lr=0.01)
        target = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(9))
        data = torch.Generator().manual_seed(options.seed)
        connection = connect(options.ticket, config, on_event)
        print("board:", connection.board or "none", flush=True)
        peer = connection.start(
            model, optimizer, resume=options.resume, start_over=options.start_over,  # type: ignore[arg-type]
        )  # fmt: skip
        signal.signal(signal.SIGINT, lambda *_: peer.stop())
        with peer:
            while True:
                inputs = torch.randn(32, WIDTH, generator=data)
                loss = ((model(inputs) - inputs @ target) ** 2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                time.sleep(0.02)  # a stand-in for the work of a larger model
                if not peer.step(tokens=32, loss=loss):
                    break
    left = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    print("threads left:", left)


if __name__ == "__main__":
    main()
