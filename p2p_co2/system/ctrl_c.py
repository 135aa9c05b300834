"""A Ctrl-C while the program is still importing itself: one word and the end, no traceback.

The command line imports this before what takes time, and calls ``hand_over`` when it has all that it needs;
commands say themselves what a Ctrl-C means to them from then on. No import sees a ``KeyboardInterrupt``,
which some swallow and others report as a failure of their own. The process ends by the signal, which a shell
shows as status 130. A program that handles the signal itself, or has an excepthook of its own, keeps both.
Of a Ctrl-C in the interpreter's own start, some 30 ms, Python may print where it was."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # ``signal`` without the enums, which are slow to make
import os
import sys
from types import FrameType, TracebackType


def hand_over() -> None:
    """The imports are through: from now on a Ctrl-C raises ``KeyboardInterrupt`` again."""
    if _signal.getsignal(_signal.SIGINT) is _end_at_once:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)


def take_back() -> None:
    """More slow imports are ahead and there is nothing to give back yet: a Ctrl-C ends the process at once,
    until ``hand_over``."""
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _end_at_once)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    os.write(2, b"stopped\n")
    os.kill(os.getpid(), _signal.SIGINT)


def _end_quietly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("stopped", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


if sys.excepthook is sys.__excepthook__:
    sys.excepthook = _end_quietly
if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    try:  # noqa: SIM105 (contextlib is slow to import)
        _signal.signal(_signal.SIGINT, _end_at_once)
    except ValueError:
        pass  # imported by a thread: its program has long begun
