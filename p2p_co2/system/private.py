"""What we use of Python's own library that it does not promise to keep. ``tensors.private`` has torch's.

A test in ``tests/test_private.py`` for each says so when a new version has changed it."""

from __future__ import annotations

import threading
from collections.abc import Callable


def call_before_threads_end(call: Callable[[], object]) -> None:
    """Have it called when the program ends, before the threads of executors are ended: ``atexit`` comes after
    that."""
    threading._register_atexit(call)  # type: ignore[attr-defined]
