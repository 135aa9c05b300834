"""A test's peer that forks a child, as a user's program may: the child tries what it may not do, and outlives
its parent.

    python tests/forking_peer.py TICKET FOLDER GRPC_PORT LIBP2P_PORT BOARD_PORT

It leaves on SIGINT. The child sleeps on; the line ``child PID`` on stdout names it. Another child ends at
once, the way that a program ends.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from p2p_co2 import Peer, PeerConfig, join
from p2p_co2.errors import ConfigError
from tests.swarm_peer import make_model


def as_child(peer: Peer) -> None:
    """What is the parent's says so, and is not left, closed or written to from here."""
    for work in (lambda: peer.step(tokens=1, loss=1.0), peer.save, peer.agreed_parameters):
        try:
            work()
        except ConfigError as error:
            print(f"refused: {error}", flush=True)
    peer.leave()


def main() -> None:
    ticket, folder, *ports = sys.argv[1:]
    grpc_port, libp2p_port, board_port = map(int, ports)
    torch.set_num_threads(1)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = PeerConfig(
        folder=Path(folder), grpc_port=grpc_port, libp2p_port=libp2p_port, board_port=board_port
    )
    with join(ticket, model, optimizer, config) as peer:
        signal.signal(signal.SIGINT, lambda *_: peer.stop())
        if os.fork() == 0:
            as_child(peer)
            print(f"child {os.getpid()}", flush=True)
            time.sleep(600)
            os._exit(0)
        ending = os.fork()
        if ending == 0:
            sys.exit(7)  # by way of the block's end and the interpreter's
        print(f"ended {os.waitstatus_to_exitcode(os.waitpid(ending, 0)[1])}", flush=True)
        while peer.step(tokens=32, loss=1.0):
            time.sleep(0.02)
    print("left", flush=True)


if __name__ == "__main__":
    main()
