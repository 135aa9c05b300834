"""Whether what this peer holds of a fragment is whole.

A step works in the memory of the state before it, piece by piece, and what a peer keeps beside the state
changes with it. Where one fails in its middle (memory has ended; a bug) there is neither the old state nor
the new one: the fragment is torn.

Law: from then on it is not saved, not given to anybody, nothing is measured from it and no round follows it:
whoever asks hears why. What others took before that is whole. The peer ends, and goes on from its last
checkpoint, which stays as it was. Price: its own work since then. Going on with the others' state in its
place would take memory for a whole one where there was none for a piece, and who is alone has nobody to ask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from p2p_co2.errors import EnvironmentFault, LocalProtocolError


class Wholeness:
    """Of one fragment; used by the worker thread."""

    def __init__(self) -> None:
        self._torn: EnvironmentFault | LocalProtocolError | None = None

    def check(self) -> None:
        """Raises ``EnvironmentFault`` if a change failed for want of memory, ``LocalProtocolError`` if it
        failed otherwise."""
        if self._torn is not None:
            raise type(self._torn)(*self._torn.args) from self._torn.__cause__

    @contextmanager
    def changing(self, what: str) -> Iterator[None]:
        """Whoever leaves this block before its end leaves the fragment torn. Raises as ``check``, also in
        place of what failed, which is the cause."""
        self.check()
        try:
            yield
        except BaseException as error:
            kind = EnvironmentFault if _is_of_memory(error) else LocalProtocolError
            free = ", with more memory free" if kind is EnvironmentFault else ""
            self._torn = kind(
                f"{what} failed in its middle ({type(error).__name__}: {error}): the agreed state in memory "
                "is not whole, and is neither saved nor given to others; the last checkpoint is as it was: "
                f"join again with --resume{free}"
            )
            raise self._torn from error


def _is_of_memory(error: BaseException) -> bool:
    """torch has no error of its own for memory that ended on the host."""
    return isinstance(error, MemoryError) or "allocate memory" in str(error)
