"""A test's peer in a program that has set everything that it may set for its whole process and thread.

    python -O -W error tests/odd_peer.py TICKET FOLDER odd|plain

Both kinds train the same model, on other data, to the run's end. The odd one's model and data name their own
dtype and device, as its author has to; nothing of p2p-co2's is told of any setting.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np
import torch

from p2p_co2 import PeerConfig, connect
from p2p_co2.telemetry.journal import Journal

PLAIN = {"dtype": torch.float32, "device": "cpu"}


def become_odd() -> None:
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(True)
    torch.set_flush_denormal(True)
    np.seterr(all="raise")
    socket.setdefaulttimeout(0.5)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.umask(0)


def main() -> None:
    ticket, folder, kind = sys.argv[1:]
    is_odd = kind == "odd"
    torch.set_num_threads(1)
    if is_odd:
        become_odd()
    draw = torch.Generator(device="cpu").manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(48, 96, **PLAIN), torch.nn.ReLU(), torch.nn.Linear(96, 48, **PLAIN)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw, **PLAIN))
    target = torch.randn(48, 48, generator=draw, **PLAIN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    os.chdir(Path(folder).parent)
    journal = Journal(Path(folder) / "events.jsonl")
    config = PeerConfig(folder=Path(Path(folder).name), min_peers=2, board=False, checkpoint_every_s=1.0)
    random.seed(7)
    drawn = random.getstate(), np.random.get_state()[1].tolist()
    with torch.inference_mode() if is_odd else contextlib.nullcontext():
        peer = connect(ticket, config, journal.write).start(model, optimizer)
    if is_odd:
        os.chdir("/")
    with peer, torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_odd):
        going = True
        while going:
            inputs = torch.randn(32, 48, generator=draw, **PLAIN)
            loss = ((model(inputs) - inputs @ target) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.02)
            with torch.inference_mode(is_odd):
                going = peer.step(tokens=32, loss=loss)
    journal.close()
    is_as_it_was = (random.getstate(), np.random.get_state()[1].tolist()) == drawn
    print("nobody drew:", is_as_it_was)


if __name__ == "__main__":
    main()
