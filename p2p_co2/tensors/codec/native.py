"""A kernel of our own: four-bit codes to fp32 on a CPU, in one pass (``native.c``; ``passes`` has others).

torch has no operation that looks codes up in a table that is not linear and scales them in one go, and each
further pass costs as much as writing the result. So ``native.c`` is compiled when the package is installed;
where there is no C compiler, installation goes on without it and codecs use torch's operations: slower (to
decode, e3m0 by five times, int4 hardly), with the same bits.

Law: a value is ``levels[code] * (scale * unit) + zero`` in fp32, whichever way it is computed. A call holds
no interpreter lock, so a training thread goes on meanwhile.

Price: a file per platform instead of one for all.
"""

from __future__ import annotations

import ctypes
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from torch import Tensor


class Kernel:
    """``native.c``, loaded. ``vectors`` is the widest kind that this processor has: 2, 1 or 0."""

    def __init__(self, library: Path) -> None:
        """Raises ``OSError`` if the library does not load, ``AttributeError`` if it is another one."""
        native = ctypes.CDLL(str(library))
        self._decode = native.decode_fourbit
        self._decode.restype = None
        pointer, number = ctypes.c_void_p, ctypes.c_float
        self._decode.argtypes = [
            pointer, ctypes.c_ssize_t, ctypes.c_int, number, pointer, number, pointer, ctypes.c_int,
        ]  # fmt: skip
        self.vectors = int(native.widest_vectors())

    def decode(
        self, rows: Tensor, half: bool, unit: float, levels: Tensor, zero: float, values: Tensor, vectors: int
    ) -> None:
        """Decode ``rows`` (uint8 [b, 68]: codes, then a scale) into ``values`` (fp32 [b * 128]).

        Scales are fp16 if ``half``, else fp32; ``levels`` fp32 [16] are in units of ``scale * unit``;
        ``zero`` is added to each product: 0.0 leaves no negative zeros, -0.0 changes nothing. All on the CPU
        and contiguous. ``vectors`` at most ``self.vectors``.
        """
        self._decode(
            rows.data_ptr(), len(rows), half, unit, levels.data_ptr(), zero, values.data_ptr(), vectors
        )


def load() -> Kernel | None:
    """The kernel of this installation, ``None`` if it was not built or does not fit this machine."""
    for library in libraries():
        try:
            return Kernel(library)
        except (OSError, AttributeError):
            continue
    return None


def libraries() -> list[Path]:
    """What installation built: none where there was no compiler."""
    built = [Path(__file__).with_name(f"_native{suffix}") for suffix in EXTENSION_SUFFIXES]
    return [library for library in built if library.exists()]


kernel = load()
