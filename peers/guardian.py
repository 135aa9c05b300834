"""What a peer does for the stages beside its own: it keeps their agreed state while they have few peers, and
gives it back when they have none.

    with Guardian(Errand(ticket, config, recipe), stage_peer, warn):
        stage_peer.train()

A stage with at least one peer and fewer than the run's ``min_replicas`` has two guardians, in the stages
beside it: all agree on who they are, by a draw over ids. Every tenth round each loads that stage's agreed
state, as any newcomer does, into ``<folder>/guarded/stage-N``, in place of what was there. When the stage
has been empty for a minute, whoever keeps its state joins it, paused, until a peer of that stage trains.

Price: a second process with torch, one at a time, for some seconds every tenth round or as long as the stage
is empty; on the disk one stage's parameters and momentum. What goes wrong is told once, and training goes on.
"""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from p2p_co2.config import PeerConfig
from p2p_co2.errors import P2PCo2Error
from p2p_co2.node.network import RECORD_LIFETIME_S
from p2p_co2.system.machine import available_memory_bytes
from p2p_co2.system.process import StopSignals, end_with_parent, program
from p2p_co2.tensors.checkpoint.folder import has_checkpoint
from p2p_co2.trainer.arrival import CATCH_UP_BOUND_S
from p2p_co2.trainer.network_thread import CLOSE_BOUND_S
from p2p_co2.wire.heartbeat import HEARTBEAT_S

if TYPE_CHECKING:
    from p2p_co2.trainer.stages.peer import StagePeer
    from p2p_co2.wire.identity import PeerId
    from p2p_co2.wire.messages_pb2 import PeerRecord

GUARDIANS = 2
KEPT_EVERY_ROUNDS = 10


class Duty(Enum):
    """What to do for a stage now."""

    NOTHING = "nothing"
    KEEP = "keep"
    GIVE = "give"


def guardians(stage: int, beside: Collection[str]) -> list[str]:
    """Those of the peers ``beside`` a stage who keep its state: everybody draws the same."""
    return sorted(beside, key=lambda peer: hashlib.sha256(f"{peer} {stage}".encode()).digest())[:GUARDIANS]


def tens_of(position: float, rounds: int) -> int:
    """How many times a stage was to be kept before ``position``: not again in the last ten of ``rounds``,
    where the run has an end (0 for none)."""
    came_to = min(int(position), max(0, rounds - KEPT_EVERY_ROUNDS)) if rounds else int(position)
    return came_to // KEPT_EVERY_ROUNDS


def duty(replicas: int, least: int, unheard_s: float, is_guardian: bool, is_due: bool, is_kept: bool) -> Duty:
    """What a peer owes a stage of which ``replicas`` are listed, where the run wants ``least``.
    ``unheard_s``: seconds without a word of any; ``is_due``: a tenth round has begun; ``is_kept``: it has
    that stage's state."""
    if not replicas:
        return Duty.GIVE if is_kept and unheard_s >= RECORD_LIFETIME_S else Duty.NOTHING
    return Duty.KEEP if replicas < least and is_guardian and is_due else Duty.NOTHING


@dataclass(frozen=True)
class Errand:
    """How this peer has joined: ``recipe`` as of ``JoinOptions``."""

    ticket: str
    config: PeerConfig
    recipe: str

    @property
    def kept(self) -> Path:
        """Where the state of ``config.stage`` lies."""
        return self.config.folder / "guarded" / f"stage-{self.config.stage}"

    def forget(self) -> None:
        """Keep nothing: what there is may be of another history."""
        shutil.rmtree(self.kept.parent, ignore_errors=True)

    def of(self, stage: int) -> Errand:
        """For another stage."""
        return Errand(self.ticket, self.config.model_copy(update={"stage": stage}), self.recipe)

    def visitor(self, folder: Path) -> PeerConfig:
        """Of the second process, beside the peer's own: no port or address of that is free for it."""
        other = {"folder": folder, "board": False, "grpc_port": 0, "libp2p_port": 0, "announce_host": ""}
        return self.config.model_copy(update={**other, "min_peers": 1})


class Process:
    """The second process, which does an errand: ``python -m peers.guardian`` with what it needs."""

    def __init__(self, what: Duty, errand: Errand) -> None:
        self.what = what
        self.errand = errand
        self.began_at = time.monotonic()
        self._log = errand.config.folder / "guarded" / "log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        fields = errand.ticket, errand.config.model_dump_json(), errand.recipe, str(os.getpid())
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                program("peers.guardian", what.value, *fields),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0,
            )  # fmt: skip

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.began_at

    def status(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return lines[-1] if lines else f"status {self.status()}"

    def end(self) -> None:
        """Bounded: it is asked to leave, and killed if it does not."""
        self._process.terminate()
        try:
            self._process.wait(CLOSE_BOUND_S / 2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Guardian:
    """A thread beside the training of ``peer``, while it is entered. ``warn``: tells a person; any thread."""

    def __init__(self, errand: Errand, peer: StagePeer, warn: Callable[[str], None]) -> None:
        self._errand = errand
        self._peer = peer
        self._warn = warn
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="guardian", daemon=True)
        self._process: Process | None = None
        stages = peer.peer.run.pipeline.stages
        self._beside = [stage for stage in (peer.stage - 1, peer.stage + 1) if 0 <= stage < stages]
        self._heard_at = dict.fromkeys(self._beside, time.monotonic())
        self._tens = dict.fromkeys(self._beside, 0)
        """Of rounds, for which each was kept, or tried to be."""
        self._told = set[str]()

    def __enter__(self) -> Guardian:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(HEARTBEAT_S):
            try:
                self._look()
            except (OSError, P2PCo2Error) as error:
                self._process = None
                self._tell("no process", f"the state of the stages beside this one is not kept: {error}")
        if self._process is not None:
            self._process.end()

    def _look(self) -> None:
        for stage in self._beside:
            if self._heard(stage):
                self._heard_at[stage] = time.monotonic()
        if self._process is not None:
            self._attend(self._process)
            return
        tens = tens_of(self._peer.peer.position, self._peer.peer.run.clock.rounds)
        for stage in self._beside:
            found = self._duty(stage, is_due=tens > self._tens[stage])
            if found is Duty.KEEP:
                self._tens[stage] = tens
                if not _has_memory():
                    self._tell("no memory", f"stage {stage}'s state is not kept here: too little memory")
                    continue
            if found is Duty.GIVE:
                text = f"nobody holds stage {stage} any more: what is kept here is given to who joins it"
                self._tell(f"given {stage}", text)
            if found is not Duty.NOTHING:
                self._process = Process(found, self._errand.of(stage))
                return

    def _duty(self, stage: int, is_due: bool) -> Duty:
        me = self._peer.peer.peer_id
        beside = {one.peer for side in (stage - 1, stage + 1) for one in self._replicas(side)} | {me}
        is_kept = has_checkpoint(self._errand.of(stage).kept / "checkpoint")
        unheard_s = time.monotonic() - self._heard_at[stage]
        least = self._peer.peer.run.pipeline.min_replicas
        is_guardian = me in guardians(stage, beside)
        return duty(len(self._replicas(stage)), least, unheard_s, is_guardian, is_due, is_kept)

    def _replicas(self, stage: int) -> list[PeerRecord]:
        """Those that are heard, or whose record has not expired: one that is in use is kept for longer."""
        live = self._heard(stage)
        now = time.time()
        return [one for one in self._peer.beside.listed(stage) if one.peer in live or one.expires_at > now]

    def _heard(self, stage: int) -> list[PeerId]:
        return self._peer.beside.live(stage - self._peer.stage)

    def _attend(self, process: Process) -> None:
        """Look after the process that runs."""
        stage = process.errand.config.stage
        is_keeping = process.what is Duty.KEEP
        if (status := process.status()) is None:
            held = self._replicas(stage)
            is_vain = not held or process.age_s > CATCH_UP_BOUND_S
            if is_vain if is_keeping else any(one.tokens_per_s > 0 for one in held):
                process.end()
                self._process = None
            return
        self._process = None
        if not is_keeping:
            self._heard_at[stage] = time.monotonic()  # another try in a minute
        if status and not (is_keeping and not self._heard(stage)):
            said = "kept here for others" if is_keeping else "given to others from here"
            self._tell(process.what.value, f"stage {stage}'s state is not {said}: {process.last_words()}")
        elif is_keeping and not status:
            count = len(self._replicas(stage))
            few = f"{count} peer{'s' * (count != 1)}"
            price = f"a process of {process.last_words()} for {process.age_s:.0f} s every {KEPT_EVERY_ROUNDS}"
            self._tell(f"kept {stage}", f"keeps stage {stage}'s state, since it has {few}: {price} rounds")

    def _tell(self, what: str, text: str) -> None:
        """Once."""
        if what not in self._told:
            self._told.add(what)
            self._warn(text)


def _has_memory() -> bool:
    """Whether a second process as large as this one was at its largest has room."""
    return available_memory_bytes() > 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# ---- the second process


def keep(errand: Errand) -> None:
    """Load the stage's agreed state, and put it in the place of what was kept."""
    from p2p_co2.trainer.gather import fetch

    fresh = errand.kept.with_suffix(".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fetch(errand.ticket, errand.visitor(fresh), errand.recipe)
    shutil.rmtree(errand.kept, ignore_errors=True)
    fresh.rename(errand.kept)


def give(errand: Errand, signals: StopSignals) -> None:
    """Join the stage with what was kept, and rest there until a signal asks to leave."""
    from p2p_co2.recipes import load_measuring_recipe
    from p2p_co2.trainer.connection import connect

    connection = connect(errand.ticket, errand.visitor(errand.kept), lambda event: None)
    try:
        with ExitStack() as leaving:
            peers = connection.visit(load_measuring_recipe(connection.run, errand.recipe))
            for peer in peers:
                leaving.enter_context(peer)
                peer.pause()
            signals.ask = peers[0].stop
            while not signals.asked and all(peer.idle(0.0, between_steps=True) for peer in peers):
                pass
            for peer in peers:
                peer.stop()
    finally:
        connection.close()


def main(what: str, ticket: str, config: str, recipe: str, parent: str) -> int:
    """What ``Process`` starts; its last line is how large it was, or what went wrong."""
    import torch

    def interrupt() -> None:
        raise KeyboardInterrupt

    os.nice(10)
    torch.set_num_threads(1)
    errand = Errand(ticket, PeerConfig.model_validate_json(config), recipe)
    try:
        with StopSignals(interrupt) as signals:
            end_with_parent(int(parent))
            if what == Duty.KEEP.value:
                keep(errand)
            else:
                give(errand, signals)
    except (P2PCo2Error, OSError) as error:
        print(error)
        return 1
    except KeyboardInterrupt:
        return 0
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
