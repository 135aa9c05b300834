"""The processes of one ``torchrun`` group, which are one peer together, and what they say to each other.

Rank 0 leads: it alone has a folder, sockets and a board. The others follow: each call that all ranks make
(``step``, ``save``, ``leave``) begins with a word from each follower to rank 0, and ends with a word of rank
0's; between the two a follower carries out rank 0's commands.

    ranks = Ranks.of_this_process()                  # None outside a group
    if ranks.leads: ranks.tell(Command.LOAD, 3)      # to all; then ranks.send(to, values)
    else:           command, numbers = ranks.command()

Words are eight float64 numbers, which hold counts up to 2**53. Texts and tensors go beside them, under a tag
of their own. All goes over gloo and host memory, point to point between rank 0 and a follower, in a process
group of its own: so whoever waits hears at once when the process at the other end is gone.

Law: whoever raises in the midst of a call ends the group (``is_broken``), and every rank that is left raises
the same error. Price: a step takes one exchange of words; a follower waits for rank 0 as long as it lives.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from p2p_co2.errors import (
    ConfigError,
    EnvironmentFault,
    LocalProtocolError,
    P2PCo2Error,
    RunOver,
    TicketError,
    TransportError,
)
from p2p_co2.system.process import say
from p2p_co2.wire.heartbeat import HEARTBEAT_S, SILENCE_FLOOR_S

WORD = 8
_WORDS, _CONTENT, _NOTHING = 0, 1, 2
"""Tags."""
_AS_LONG_AS_IT_LIVES = timedelta(days=365)
_CURE = (
    "see that rank's own output for why, then start all ranks again (torchrun does with --max-restarts): the "
    "peer goes on from its last checkpoint"
)


class Call(IntEnum):
    """What all ranks call at the same time. A rank that ends with an error says ``FAILED``."""

    JOIN = 0
    STEP = 1
    SAVE = 2
    AGREED = 3
    PUT_BACK = 4
    TURN = 5
    STATE = 6
    LEAVE = 7
    FAILED = 8


CALLED = {
    Call.JOIN: "join", Call.STEP: "step", Call.SAVE: "save", Call.AGREED: "agreed", Call.LEAVE: "leave",
    Call.PUT_BACK: "the end of agreed", Call.TURN: "has_turn", Call.STATE: "state_dict",
}  # fmt: skip
"""In words."""


class Command(IntEnum):
    """What rank 0 asks of the others within a call; ``GO`` ends it, ``FAIL`` ends the group."""

    GO = 0
    FAIL = 1
    BEGIN = 2
    SNAPSHOT = 3
    MERGE = 4
    LOAD = 5
    SET_ASIDE = 6
    PUT_BACK = 7
    FORGET = 8
    LIST_STATE = 9
    READ_STATE = 10
    LOAD_STATE = 11
    BUFFERS = 12
    FROZEN = 13
    COMPARE = 14
    FIGURES = 15


class Ranks:
    """This process among the ``size`` of its group: number ``rank``."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        here = f"rank {self.rank} of {self.size} has come to join, and waits for the others"
        words = f"warning: {here}: all ranks of a torchrun group call join, not rank 0 alone"
        tell = threading.Timer(SILENCE_FLOOR_S, say, (words,))
        tell.daemon = True
        tell.start()
        try:  # bounded by torch's own time, unlike what is waited for afterwards
            self._group = dist.new_group(backend="gloo")
        except RuntimeError as error:
            problem = "not all ranks of this peer came to join: one has ended, or is held up"
            raise EnvironmentFault(f"{problem}; {_CURE}") from error
        finally:
            tell.cancel()
        self._kept: list[object] = []
        """What is on its way needs its memory: a follower's last word; at the end what may never arrive."""
        self.is_broken = False
        """Whether the group has ended by an error."""

    @classmethod
    def of_this_process(cls) -> Ranks | None:
        """The group that ``torch.distributed`` was initialised for, None if there is none. Every rank asks at
        the same time."""
        return cls() if dist.is_available() and dist.is_initialized() else None

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def others(self) -> range:
        """Those that this one speaks to."""
        return range(1, self.size) if self.leads else range(1)

    # ---- content

    def send(self, to: int, values: Tensor) -> None:
        """Any dtype; received as the same number of bytes."""
        self._send(to, _bytes_of(values.contiguous()), _CONTENT)

    def receive(self, of: int, into: Tensor) -> None:
        """``into`` is contiguous and in host memory."""
        self._receive(of, _bytes_of(into), _CONTENT)

    def say(self, to: int, text: str) -> None:
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        self._send(to, torch.tensor([len(data)], dtype=torch.int64, device="cpu"), _CONTENT)
        self._send(to, data, _CONTENT)

    def hear(self, of: int) -> str:
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._receive(of, size, _CONTENT)
        data = torch.zeros(int(size), dtype=torch.uint8, device="cpu")
        self._receive(of, data, _CONTENT)
        return data.numpy().tobytes().decode()

    # ---- words

    def tell(self, command: Command, *numbers: float) -> None:
        """Rank 0, to all others."""
        for rank in self.others:
            self.word(rank, command, *numbers)

    def word(self, to: int, kind: Command | Call, *numbers: float) -> None:
        """A follower's does not wait until it is heard: rank 0 may have another word for it."""
        word = _word(kind, numbers)
        if self.leads:
            self._send(to, word, _WORDS)
            return
        with self._lost(to):
            self._kept = [dist.isend(word, to, group=self._group, tag=_WORDS), word]

    def next_word(self, of: int) -> list[float]:
        """Its kind, then its numbers. Raises what the other ended the group with."""
        word = torch.zeros(WORD, dtype=torch.float64, device="cpu")
        self._receive(of, word, _WORDS)
        numbers: list[float] = word.tolist()
        self._raise_if_failed(of, numbers)
        return numbers

    def _raise_if_failed(self, of: int, word: list[float]) -> None:
        if word[0] == (Call.FAILED if self.leads else Command.FAIL):
            data = torch.zeros(int(word[1]), dtype=torch.uint8, device="cpu")
            self._receive(of, data, _CONTENT)
            self.is_broken = not self.leads  # which tells the others
            raise error_of(data.numpy().tobytes().decode())

    # ---- the end

    def fail(self, error: BaseException) -> None:
        """End the group: whoever listens now, or within a second, raises ``error`` too."""
        self.is_broken = True
        kind = Command.FAIL if self.leads else Call.FAILED
        data = torch.frombuffer(bytearray(text_of(error, self.rank).encode()), dtype=torch.uint8)
        pieces = ((_word(kind, (len(data),)), _WORDS), (data, _CONTENT))
        works = list[dist.Work | None]()
        for rank in self.others:
            with suppress(RuntimeError):  # it is gone, too
                works += [dist.isend(piece, rank, group=self._group, tag=tag) for piece, tag in pieces]
        self._kept += [*works, data, *(piece for piece, _ in pieces)]
        ends_at = time.monotonic() + HEARTBEAT_S
        for work in works:
            with suppress(RuntimeError):  # once time is up gloo closes all connections, and they hear of that
                left_s = max(0.001, ends_at - time.monotonic())
                if work is not None:
                    work.wait(timedelta(seconds=left_s))

    def gone(self) -> P2PCo2Error | None:
        """After an error of another library: the one of ours that it stands for, if another rank is gone or
        has ended the group; None if all others live for a second.

        Gloo has no look at a connection that does not close all when time is up; but to ask for one more
        piece raises if the other end is gone, and what comes can be seen in its memory."""
        if self.is_broken:
            return None
        words = {rank: torch.full((WORD,), -1.0, dtype=torch.float64, device="cpu") for rank in self.others}
        ends_at = time.monotonic() + (1 if self.leads else 3) * HEARTBEAT_S
        try:
            for rank in self.others:
                self._listen(rank, words[rank], _WORDS)
            while time.monotonic() < ends_at:
                for rank in self.others:
                    self._raise_if_failed(rank, words[rank].tolist())
                    self._listen(rank, torch.zeros(1, dtype=torch.float32, device="cpu"), _NOTHING)
                time.sleep(HEARTBEAT_S / 20)
        except P2PCo2Error as error:
            return error
        return None

    def _listen(self, of: int, into: Tensor, tag: int) -> None:
        with self._lost(of):
            self._kept += [dist.irecv(into, of, group=self._group, tag=tag), into]

    @contextmanager
    def together(self) -> Iterator[None]:
        """A call of all ranks: what one raises in it, all do."""
        if self.is_broken:
            raise EnvironmentFault(f"the ranks of this peer are not together any more; {_CURE}")
        try:
            yield
        except BaseException as error:
            if not self.is_broken:
                self.fail(error)
            raise

    # ---- one piece

    def _send(self, to: int, values: Tensor, tag: int) -> None:
        with self._lost(to):
            _finish(dist.isend(values, to, group=self._group, tag=tag))

    def _receive(self, of: int, into: Tensor, tag: int) -> None:
        with self._lost(of):
            _finish(dist.irecv(into, of, group=self._group, tag=tag))

    @contextmanager
    def _lost(self, other: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            text = f"rank {other} of the {self.size} ranks that are this peer has ended; {_CURE}"
            raise EnvironmentFault(text) from error


def _finish(work: dist.Work | None) -> None:
    if work is not None:
        work.wait(_AS_LONG_AS_IT_LIVES)


def _word(kind: Command | Call, numbers: Sequence[float]) -> Tensor:
    values = [float(kind), *numbers, *(0.0,) * WORD][:WORD]
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _bytes_of(values: Tensor) -> Tensor:
    return values.view(-1).view(torch.uint8)


_KINDS = {one.__name__: one for one in (EnvironmentFault, TicketError, TransportError, LocalProtocolError)}


def text_of(error: BaseException, rank: int) -> str:
    """An error for another process; ``error_of`` makes it again."""
    if isinstance(error, ConfigError):
        return json.dumps(["ConfigError", error.where, error.key, error.problem])
    if isinstance(error, RunOver):
        return json.dumps(["RunOver", error.rounds])
    if type(error).__name__ in _KINDS:
        return json.dumps([type(error).__name__, str(error)])
    text = f"rank {rank} of this peer ended with {type(error).__name__}: {error}; {_CURE}"
    return json.dumps(["EnvironmentFault", text])


def error_of(text: str) -> P2PCo2Error:
    kind, *values = json.loads(text)
    match kind:
        case "ConfigError":
            return ConfigError(*map(str, values))
        case "RunOver":
            return RunOver(int(values[0]))
    return _KINDS.get(kind, EnvironmentFault)(*map(str, values))
