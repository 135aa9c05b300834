"""A training loop as users write theirs, with much that is odd and allowed at once.

    python tests/own_loop_peer.py TICKET FOLDER SEED [--compiled] [--odd]

The model ties its head to its embedding, is frozen in part, holds one weight transposed and one layer in 16
bits; the loop has a scheduler of its own and counts tokens with a mask. What is agreed is published after the
block. An odd one has set everything that it may set for its whole process and thread.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import socket
import time
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR

import p2p_co2
from p2p_co2.telemetry.events import Event, PeerFinished, RoundCommitted, Warned

WORDS, WIDTH = 17, 8


class Speaker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.module = nn.Linear(WIDTH, WIDTH)  # its author's name for it, not a wrapper's
        self.module.weight.data = self.module.weight.data.t().contiguous().t()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.short = nn.Linear(WIDTH, WIDTH).to(torch.bfloat16)
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.base(self.embed(words))
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        hidden = hidden + self.short(hidden.to(torch.bfloat16)).to(hidden.dtype)
        return cast(Tensor, self.head(self.module(hidden)))


def become_odd() -> None:
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(True)
    torch.set_flush_denormal(True)
    np.seterr(all="raise")
    socket.setdefaulttimeout(0.5)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.umask(0)


def drawn() -> tuple[object, ...]:
    return random.getstate(), np.random.get_state()[1].tolist()


def published_as(agreed: dict[str, Tensor], published: Speaker) -> dict[str, object]:
    """What becomes of a model that was made before the training."""
    start = {name: values.clone() for name, values in published.state_dict().items()}
    found = published.load_state_dict(agreed, strict=False)
    moved = {name for name, values in published.state_dict().items() if not torch.equal(values, start[name])}
    digest = hashlib.sha256(b"".join(agreed[name].numpy().tobytes() for name in sorted(agreed)))
    return {
        "names": sorted(agreed),
        "digest": digest.hexdigest(),
        "still": sorted(set(agreed) - moved),
        "missing": sorted(found.missing_keys),
        "unexpected": found.unexpected_keys,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ticket")
    parser.add_argument("folder", type=Path)
    parser.add_argument("seed", type=int)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--odd", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    plain, published = Speaker(), Speaker()
    if options.odd:
        become_odd()
    model = torch.compile(plain, backend="eager") if options.compiled else plain
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = LinearLR(optimizer, start_factor=0.1, total_iters=50)
    draw, warnings = torch.Generator("cpu").manual_seed(options.seed), list[str]()
    ended = list[PeerFinished]()
    contributors = [0]

    def on_event(event: Event) -> None:
        if isinstance(event, Warned):
            warnings.append(event.text)
        if isinstance(event, PeerFinished):
            ended.append(event)
        if isinstance(event, RoundCommitted):
            contributors.append(event.contributors)

    os.chdir(options.folder.parent)
    folder = Path(options.folder.name)
    config = p2p_co2.PeerConfig(folder=folder, min_peers=3, board=not options.odd, checkpoint_every_s=1.0)
    random.seed(7)
    before = drawn()
    with torch.inference_mode(options.odd):
        joined = p2p_co2.join(options.ticket, model, optimizer, config, on_event)
    if options.odd:
        os.chdir("/")
    with joined as peer, torch.autocast("cpu", dtype=torch.bfloat16, enabled=options.odd):
        while True:
            words = torch.randint(WORDS, (4, 12), generator=draw, device="cpu")
            mask = torch.rand(words.shape, generator=draw, device="cpu", dtype=torch.float32) < 0.9
            losses = nn.functional.cross_entropy(model(words).transpose(1, 2), words, reduction="none")
            loss = (losses * mask).sum() / mask.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            with torch.inference_mode(options.odd):
                going = peer.step(tokens=mask.sum(), loss=loss)
            if not going:
                break
            time.sleep(0.01)  # a stand-in for the work of a larger model
    told = published_as(peer.agreed_parameters(), published) | {
        "warnings": warnings,
        "rounds": min(ended[0].versions),
        "together": max(contributors),
        "nobody drew": drawn() == before,
    }
    print("told:", json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
