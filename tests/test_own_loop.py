"""Training loops as users write theirs, in processes of their own: what is allowed works, all at once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from p2p_co2.config import OWN_LOOP, ClockConfig, RunConfig
from p2p_co2.telemetry.events import RoundCommitted
from p2p_co2.tensors.checkpoint.folder import load
from tests.swarms import ENVIRONMENT, ROOT, Swarm, swarm

pytestmark = pytest.mark.swarm
KINDS: list[tuple[str, list[str], list[str]]] = [
    ("plain", [], ["1"]),
    ("compiled", [], ["2", "--compiled"]),
    ("odd", ["-O", "-W", "error"], ["3", "--odd"]),
]
"""(name, flags of the interpreter, options of ``own_loop_peer``)"""


def told(running: Swarm, name: str) -> dict[str, Any]:
    found = re.search(r"^told: (.*)$", running.log(name), re.MULTILINE)
    assert found, running.log(name)[-3000:]
    return dict(json.loads(found[1]))


def test_whatever_a_program_is_and_has_set_it_publishes_the_same_model_as_the_others(tmp_path: Path) -> None:
    clock = ClockConfig(mode="time", round_s=1.0, rounds=6)
    with swarm(tmp_path, RunConfig(name="own", recipe=OWN_LOOP, fragments=3, clock=clock)) as running:
        for name, flags, words in KINDS:
            script = [sys.executable, *flags, str(ROOT / "tests" / "own_loop_peer.py")]
            running.start(name, [*script, running.ticket, str(tmp_path / name), *words])
        names = [name for name, _, _ in KINDS]
        running.wait(*names)
        ours, *others = (told(running, name) for name in names)
        assert not any("Traceback" in running.log(name) for name in names)
    for one in (ours, *others):
        assert (one["digest"], one["names"]) == (ours["digest"], ours["names"])
        assert (one["still"], one["warnings"], one["nobody drew"]) == ([], [], True)
        assert one["rounds"] > 1
        assert one["together"] == 3
    assert {"embed.weight", "head.weight", "module.weight", "blocks.0.bias"} <= set(ours["names"])
    assert (ours["missing"], ours["unexpected"]) == (["base.bias", "base.weight"], [])
    plans = {load(tmp_path / name / "checkpoint").plan_digest for name in names}  # the folder joined with
    assert len(plans) == 1
    assert (tmp_path / "odd" / "identity").stat().st_mode & 0o777 == 0o600


USERS_LOOP = """
import random, sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import p2p_co2
import peers  # this user's own
from p2p_co2.telemetry.events import CheckpointSaved, RoundCommitted
from p2p_co2.telemetry.journal import Journal

ticket, folder, seed, rounds = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
torch.manual_seed(0)
random.seed(seed)
begun = random.getstate()
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5000)
torch.manual_seed(seed)
inputs = torch.randn(2048, 16)
data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True), inputs[:, :1] > -1)
loader = DataLoader(data, batch_size=64, shuffle=True, num_workers=2, worker_init_fn=peers.greet)

folder.mkdir(exist_ok=True)
journal = Journal(folder / "events.jsonl")
commits, saved = [], []

def on_event(event):
    journal.write(event)
    commits.extend([1] * isinstance(event, RoundCommitted))
    saved.extend([1] * isinstance(event, CheckpointSaved))

config = p2p_co2.PeerConfig(folder=folder, checkpoint_every_s=1.0)
connection = p2p_co2.connect(ticket, config, on_event)
resume = (folder / "checkpoint").exists()
peer = connection.start(model, optimizer, resume=resume)
print("board", peer.board, flush=True)
print("resumed at step", peer.inner_steps, flush=True)
with peer:
    going = True
    while going:
        for batch, targets, mask in loader:
            loss = ((model(batch) - targets) ** 2 * mask).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            going = peer.step(tokens=mask.sum(), loss=loss)
            if not going or (len(commits) >= rounds and saved and Path(folder / "enough").exists()):
                going = False
                break
torch.save(model.state_dict(), folder / "published.pt")
print("published", random.getstate() == begun, flush=True)
"""
"""Ends when it has taken part in so many rounds and was told that this is enough."""
TAKEN = "def greet(worker):\n    pass\n"
RUN = RunConfig(name="own-loop", recipe="own-loop", fragments=2, clock=ClockConfig(mode="time", round_s=1.0))


def begin(running: Swarm, name: str, folder: Path, script: Path, *words: str) -> None:
    """The user's program, from the user's folder, which is on the module path, too."""
    with (running.folder / f"{name}.log").open("wb") as log:
        running.processes[name] = subprocess.Popen(
            [sys.executable, script.name, running.ticket, str(folder), *words],
            stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=script.parent,
            env=ENVIRONMENT | {"PYTHONPATH": f"{script.parent}{os.pathsep}{ROOT}"},
        )  # fmt: skip


def test_an_own_loop_as_users_write_it(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    script = home / "train.py"
    script.write_text(USERS_LOOP)
    (home / "peers.py").write_text(TAKEN)
    for name in ("monitoring.py", "bootstrap.py", "tests.py"):
        (home / name).write_text("raise SystemExit('this is the user\\'s own')\n")
    with swarm(tmp_path, RUN) as running:
        folders = {name: tmp_path / name for name in ("a", "b")}
        for seed, (name, folder) in enumerate(folders.items()):
            begin(running, name, folder, script, str(seed), "4")
        address = running.said("a", r"board (http\S+)")[1]
        with urllib.request.urlopen(address, timeout=120) as page:
            assert page.status == 200, "our board, not the user's module"
        for name, folder in folders.items():
            running.wait_for(name, RoundCommitted, 4)
            (folder / "enough").touch()
        running.wait("a", "b")
        for name, folder in folders.items():
            assert "published True" in running.log(name), running.log(name)
            assert "Traceback" not in running.log(name), running.log(name)
            assert (folder / "published.pt").exists()
        begin(running, "again", folders["a"], script, "0", "1")
        assert int(running.said("again", r"resumed at step (\d+)")[1]) > 0
        running.wait("again")
        assert "published True" in running.log("again"), running.log("again")
