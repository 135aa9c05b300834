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
from collections.abc import Callable, Container, Iterator, Sequence
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
from p2p_co2.protocol.heartbeat import HEARTBEAT_S

WORD = 8
_WORDS, _CONTENT = 0, 1
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
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=_AS_LONG_AS_IT_LIVES)
        self._sent: tuple[dist.Work | None, Tensor] | None = None
        """A word on its way needs its memory."""
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
        self._send(to, torch.tensor([len(data)]), _CONTENT)
        self._send(to, data, _CONTENT)

    def hear(self, of: int) -> str:
        size = torch.zeros(1, dtype=torch.int64)
        self._receive(of, size, _CONTENT)
        data = torch.zeros(int(size), dtype=torch.uint8)
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
            self._sent = dist.isend(word, to, group=self._group, tag=_WORDS), word

    def next_word(self, of: int) -> list[float]:
        """Its kind, then its numbers. Raises what the other ended the group with."""
        word = torch.zeros(WORD, dtype=torch.float64)
        self._receive(of, word, _WORDS)
        numbers: list[float] = word.tolist()
        if numbers[0] == (Call.FAILED if self.leads else Command.FAIL):
            error = error_of(self.hear(of))
            self.is_broken = True
            if self.leads:
                self.fail(error, {of})
            raise error
        return numbers

    # ---- the end

    def fail(self, error: BaseException, but: Container[int] = ()) -> None:
        """End the group: whoever listens now, or within a second, raises ``error`` too."""
        self.is_broken = True
        text, kind = text_of(error, self.rank), Command.FAIL if self.leads else Call.FAILED

        def tell(rank: int) -> None:
            with suppress(EnvironmentFault):  # it is gone, too
                self.word(rank, kind)
                self.say(rank, text)

        _at_once(tell, [rank for rank in self.others if rank not in but], HEARTBEAT_S)

    def gone(self) -> P2PCo2Error | None:
        """After an error of another library: the one of ours that it stands for, if another rank is gone or
        has ended the group; None if all others live."""
        found: dict[int, P2PCo2Error] = {}

        def listen(rank: int) -> None:
            try:
                self.next_word(rank)
            except P2PCo2Error as error:
                found.setdefault(rank, error)

        if not self.is_broken:
            _at_once(listen, self.others, HEARTBEAT_S if self.leads else 3 * HEARTBEAT_S)
        return next(iter(found.values()), None)

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
            dist.send(values, to, group=self._group, tag=tag)

    def _receive(self, of: int, into: Tensor, tag: int) -> None:
        with self._lost(of):
            dist.recv(into, of, group=self._group, tag=tag)

    @contextmanager
    def _lost(self, other: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            fault = EnvironmentFault(
                f"rank {other} of the {self.size} ranks that are this peer has ended; {_CURE}"
            )
            if not self.is_broken:
                self.fail(fault, {other})
            raise fault from error


def _at_once(work: Callable[[int], None], ranks: Sequence[int], bound_s: float) -> None:
    """``work`` for each, as far as it comes in time. A wait of gloo's own that runs out would close the
    connections to all ranks, so threads wait, and are left behind."""
    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in ranks]
    ends_at = time.monotonic() + bound_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, ends_at - time.monotonic()))


def _word(kind: Command | Call, numbers: Sequence[float]) -> Tensor:
    values = [float(kind), *numbers, *(0.0,) * WORD][:WORD]
    return torch.tensor(values, dtype=torch.float64)


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
