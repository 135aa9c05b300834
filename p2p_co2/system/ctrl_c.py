"""What a Ctrl-C means to a command that says nothing else of it: one word, and the end.

Programs call ``answer`` before they import what takes time. Amid an import the process ends at once, by the
signal, which a shell shows as status 130. Some modules swallow a ``KeyboardInterrupt`` there, or report it as
a failure of their own. At any other time it raises ``KeyboardInterrupt``, so that what is open is closed.

A command that has more to do sets ``process.StopSignals`` in its place. A program that handles the signal
itself keeps its handler. Of a Ctrl-C in the interpreter's own start, some 30 ms, Python may print where it
was.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # ``signal`` without the enums, which are slow to make
import os
from types import FrameType

_IMPORTING = "<frozen importlib._bootstrap>"


def is_importing(frame: FrameType | None) -> bool:
    """Whether ``frame`` is below an import."""
    while frame is not None and frame.f_code.co_filename != _IMPORTING:
        frame = frame.f_back
    return frame is not None


def _stop(number: int, frame: FrameType | None) -> None:
    os.write(2, b"stopped\n")
    if is_importing(frame):
        _signal.signal(number, _signal.SIG_DFL)
        os.kill(os.getpid(), number)
    raise KeyboardInterrupt


def answer() -> None:
    """From now on; called by programs, never by what a library imports."""
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        try:  # noqa: SIM105 (contextlib is slow to import)
            _signal.signal(_signal.SIGINT, _stop)
        except ValueError:
            pass  # imported by a thread: its program has long begun
