"""The processes of one ``torchrun`` group, which are one peer together, and what they say to each other.

Rank 0 leads: it alone has a folder, sockets and a board. Each call that all ranks make (``step``, ``save``,
``leave``) begins with a word of each rank, which rank 0 gathers. Then rank 0 gives commands, which the others
carry out, until one says that the call is over.

    ranks = Ranks.of_this_process()                  # None outside a group
    words = ranks.gather({"call": "step"})           # rank 0 has them all, by rank
    with ranks.commanding():                         # rank 0
        ranks.tell("load_", 3)
        ranks.spread(values)
    command = ranks.hear()                           # the others; then ``spread`` into memory of theirs

All of it are collectives of ``torch.distributed``. Words are JSON as bytes, so nothing is unpickled. They
go through host memory, in a gloo group of their own, which waits as long as its processes live.

Law: a rank that ends by an error closes the group. What rank 0 ends with in a call, every rank raises; of any
other end the rest hear by an ``EnvironmentFault``. Price: a step takes one gathering and one broadcast.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from p2p_co2 import errors
from p2p_co2.errors import ConfigError, EnvironmentFault, P2PCo2Error, RunOver
from p2p_co2.system.process import say
from p2p_co2.wire.heartbeat import SILENCE_FLOOR_S

_AT_ONCE_BYTES = 256
"""Of a word in one collective. What is longer says its length there, and comes in a second one."""
_AS_LONG_AS_THEY_LIVE = timedelta(days=365)
"""A peer may rest for a night, and rank 0 wait for others for longer."""
_CURE = (
    "see the ranks' own output for why, then start all ranks again (torchrun does with --max-restarts): the "
    "peer goes on from its last checkpoint"
)


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
        self._group: dist.ProcessGroup | None = None
        try:
            # Whether all came is bounded by torch's own time, unlike what is waited for afterwards. The first
            # group stays: to end it while another rank still connects fails there.
            dist.new_group(backend="gloo")
            self._group = dist.new_group(backend="gloo", timeout=_AS_LONG_AS_THEY_LIVE)
        except RuntimeError as error:
            problem = "not all ranks of this peer came to join: one has ended, or is held up"
            raise EnvironmentFault(f"{problem}; {_CURE}") from error
        finally:
            tell.cancel()

    @classmethod
    def of_this_process(cls) -> Ranks | None:
        """The group that ``torch.distributed`` was initialised for, None if there is none. Every rank asks at
        the same time."""
        return cls() if dist.is_available() and dist.is_initialized() else None

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def is_broken(self) -> bool:
        """Whether the group has ended by an error, here or on another rank."""
        return self._group is None

    # ---- words

    def gather(self, word: object) -> list[Any]:
        """What every rank says, by rank; on rank 0 alone. A word is anything of JSON but a number."""
        text = json.dumps(word).encode()
        mine = _head(text)
        heads = [torch.empty_like(mine) for _ in range(self.size)]
        with self._connected() as group:
            dist.gather(mine, heads if self.leads else None, 0, group=group)
            if not self.leads:
                if len(text) > _AT_ONCE_BYTES:
                    dist.send(_bytes_of(text), 0, group=group)
                return []
            words = [word, *(json.loads(head.numpy().tobytes()) for head in heads[1:])]
            for rank, said in enumerate(words):
                if isinstance(said, int):
                    dist.recv(more := _room(said), rank, group=group)
                    words[rank] = json.loads(more.numpy().tobytes())
        return words

    def tell(self, *command: object) -> None:
        """Rank 0, to all others, which ``hear``."""
        text = json.dumps(command).encode()
        self.spread(_head(text))
        if len(text) > _AT_ONCE_BYTES:
            self.spread(_bytes_of(text))

    def hear(self) -> list[Any]:
        """The next command of rank 0. Raises what rank 0 has ended with."""
        said = json.loads(self.spread(_room(_AT_ONCE_BYTES)).numpy().tobytes())
        if isinstance(said, int):
            said = json.loads(self.spread(_room(said)).numpy().tobytes())
        if said[0] == "fail":
            raise error_of(said[1])
        return list(said)

    # ---- values

    def spread(self, values: Tensor) -> Tensor:
        """Rank 0's ``values`` (contiguous, any dtype) into those of all others, on the device where they
        lie."""
        if values.numel():
            with self._connected() as group:
                is_here = values.device.type == "cpu"  # else the program's own group reaches them
                dist.broadcast(values.view(-1).view(torch.uint8), 0, group=group if is_here else None)
        return values

    # ---- the end

    @contextmanager
    def together(self) -> Iterator[None]:
        """Part of a call of all ranks: an error in it ends the group."""
        if self.is_broken:
            raise EnvironmentFault(f"the ranks of this peer are not together any more; {_CURE}")
        try:
            yield
        except BaseException:
            self.close()
            raise

    @contextmanager
    def commanding(self) -> Iterator[None]:
        """As ``together``, on rank 0 while the others ``hear``: what it raises on purpose they raise, too."""
        with self.together():
            try:
                yield
            except P2PCo2Error as error:
                with suppress(P2PCo2Error, RuntimeError):  # another rank is gone, too
                    self.tell("fail", text_of(error))
                raise

    def end_by(self, error: BaseException | None) -> None:
        """This rank's loop has ended, perhaps by an ``error``: the group ends with it."""
        if error is not None and not self.is_broken:
            self.close()
            if isinstance(error, RuntimeError):
                here = f"this is rank {self.rank} of {self.size} that are one peer"
                error.add_note(f"{here}; if another has ended, {_CURE}")

    def close(self) -> None:
        """All that wait for this rank hear that it is gone. May be called twice."""
        group = self._group
        self._group = None
        if group is not None:
            with suppress(RuntimeError, ValueError):  # the program has ended them all
                dist.destroy_process_group(group)

    @contextmanager
    def _connected(self) -> Iterator[dist.ProcessGroup]:
        if self._group is None:
            raise EnvironmentFault(f"the ranks of this peer are not together any more; {_CURE}")
        try:
            yield self._group
        except RuntimeError as error:
            text = f"another of the {self.size} ranks that are this peer has ended; {_CURE}"
            # Frames of torch's would keep the connections, and others waiting for this rank.
            raise EnvironmentFault(text) from error.with_traceback(None)


def _head(text: bytes) -> Tensor:
    head = text if len(text) <= _AT_ONCE_BYTES else b"%d" % len(text)
    return _bytes_of(head.ljust(_AT_ONCE_BYTES))


def _bytes_of(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _room(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu")


def text_of(error: P2PCo2Error) -> list[Any]:
    """An error for another process, as JSON has it; ``error_of`` makes it again."""
    match error:
        case ConfigError():
            return ["ConfigError", error.where, error.key, error.problem]
        case RunOver():
            return ["RunOver", error.rounds]
    return [type(error).__name__, str(error)]


def error_of(said: list[Any]) -> P2PCo2Error:
    kind: type[P2PCo2Error] = getattr(errors, said[0])
    return kind(*said[1:])
