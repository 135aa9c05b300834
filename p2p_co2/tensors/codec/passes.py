"""One pass over values where torch's operations need many (``passes.c``): fp16, int8, int4, e3m0, sign
and q2, the weighted mean, the outer step.

What a round costs on a CPU is passes over memory. In torch an int8 encode is fifteen of them, a mean of four
slices eighteen. And each of torch's operations takes the interpreter's lock anew, for which it waits while
another thread has it; a call here takes it once.

Law: the same bits as the torch operations that it stands for, in everything that peers agree on or send. The
momentum's energy, a figure for people, is summed in another order. So a peer without a compiler, or with
another processor, agrees with all others: ``kernel`` is None there, and callers go torch's way. A call holds
no interpreter lock, so a training thread goes on meanwhile.

Price: AVX2 and F16C, x86-64 only; what else there is goes torch's way.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from p2p_co2.system.memory import Buffer

FP16, INT8, INT4, E3M0, SIGN, Q2 = range(6)
MOST_SQUARES = 1 << 26
"""Of that many integers of 18 bits the sum of squares fits 64 bits, whatever the vectors."""
_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_ssize_t


class Changed(NamedTuple):
    """What an outer step says of the new momentum and of the change that the parameters lose."""

    energy: float
    """About the sum of the squares of the new momentum: for people, not for the maths."""
    largest_change: float


class _Step(ctypes.Structure):
    """``struct step`` of passes.c."""

    _fields_ = [
        ("beta", ctypes.c_float), ("inverse", ctypes.c_float), ("lr", ctypes.c_float),
        ("nesterov", ctypes.c_int), ("bound", ctypes.c_double), ("energy", ctypes.c_double),
    ]  # fmt: skip


class Passes:
    """Tensors are contiguous, on the CPU and of the size that is said; nothing is checked here."""

    def __init__(self, library: Path) -> None:
        """Raises ``OSError`` if the library does not load, the processor cannot run it, or it is of another
        version. Raises ``AttributeError`` if it is another library."""
        native = ctypes.CDLL(str(library))
        if native.codecs_in_passes() != Q2 + 1:
            raise OSError("this processor has no AVX2 or no F16C, or the library is of another version")
        number = ctypes.c_float
        bits = ctypes.c_int32
        whole = ctypes.c_int
        self.encode = _function(
            native.encode_rows, _SIZE, whole, *[_POINTER] * 5, number, _SIZE, _POINTER, bits
        )
        self.decode = _function(native.decode_blocks, _SIZE, whole, _POINTER, _SIZE, _POINTER, bits)
        self.mean = _function(
            native.mean_of_blocks, _SIZE, whole, _POINTER, _POINTER, _SIZE, _SIZE, _POINTER, bits
        )
        self._largest = _function(native.largest_bits, bits, _POINTER, _SIZE)
        self._squares = _function(native.whole_square_sum, ctypes.c_int64, _POINTER, _SIZE, number)
        self._change = _function(
            native.step_of, bits, _POINTER, _POINTER, _POINTER, _SIZE, _SIZE, _POINTER, _POINTER
        )
        self._take = _function(native.take_change, bits, _POINTER, _POINTER, _SIZE, number, _POINTER)

    # ---- fp32 values, [n]

    def magnitude(self, values: Tensor) -> float:
        """The largest magnitude; inf if any value is not finite, 0 for no values."""
        return _magnitude(self._largest(values.data_ptr(), values.numel()))

    def square_sum(self, values: Tensor, scale: float) -> int:
        """The sum of the squares of ``round(values * scale)``, exact if those are at most 2^18."""
        pieces = torch.split(values, MOST_SQUARES)
        return sum(self._squares(piece.data_ptr(), piece.numel(), scale) for piece in pieces)

    def change_of(
        self, old: Tensor, mean: Tensor, momentum: Tensor, change: Tensor, *, beta: float, inverse: float,
        lr: float, nesterov: bool, bound: float, piece: int,
    ) -> Changed:  # fmt: skip
        """``outer.change_of`` in one call."""
        it = _Step(beta, inverse, lr, nesterov, bound, 0.0)
        largest = self._change(
            ctypes.byref(it), old.data_ptr(), mean.data_ptr(), mean.numel(), piece,
            momentum.data_ptr(), change.data_ptr(),
        )  # fmt: skip
        return Changed(it.energy, _magnitude(largest))

    def take_change_(self, change: Tensor, params: Tensor, scale: float) -> tuple[int, float]:
        """Turn ``change`` into ``params - change``: ``square_sum`` of the change, and the largest new
        magnitude."""
        total = 0
        largest = 0
        sum_here = ctypes.c_int64()
        for start in range(0, change.numel(), MOST_SQUARES):
            here = change[start : start + MOST_SQUARES]
            old = params[start : start + MOST_SQUARES]
            bits = self._take(here.data_ptr(), old.data_ptr(), here.numel(), scale, ctypes.byref(sum_here))
            total = total + sum_here.value
            largest = max(largest, bits)
        return total, _magnitude(largest)


class CodecPasses(NamedTuple):
    """What a codec does in one pass. ``limit_bits``: its largest scale as the bits of an fp32, but for
    int4."""

    kernel: Passes
    codec: int
    limit_bits: int

    def encode(self, given: Sequence[Tensor | None], decay: float, rows: Tensor, blocks: int) -> int:
        """Encode whole ``blocks`` into ``rows``, uint8. ``given``: base, values, residual, wanted and lost,
        as ``Codec.encode`` has them. How many were done: fewer if the next one is not finite."""
        places = (None if one is None else one.data_ptr() for one in given)
        done: int = self.kernel.encode(self.codec, *places, decay, blocks, rows.data_ptr(), self.limit_bits)
        return done

    def decode(self, payload: Buffer | Tensor, values: Tensor, blocks: int) -> int:
        """Decode whole blocks into ``values``, fp32; how many of them hold only finite values."""
        sound: int = self.kernel.decode(
            self.codec, _address(payload), blocks, values.data_ptr(), self.limit_bits
        )
        return sound

    def mean(self, slices: Sequence[Buffer], shares: Sequence[float], blocks: int, rows: Tensor) -> int:
        """Encode the sum of ``shares[i] * slices[i]``, added in this order, into ``rows``. Returns -1, or the
        first slice found that is not finite; ``rows`` is spoilt then."""
        count = len(slices)
        places = (_POINTER * count)(*map(_address, slices))
        factors = (ctypes.c_float * count)(*shares)
        found: int = self.kernel.mean(
            self.codec, places, factors, count, blocks, rows.data_ptr(), self.limit_bits
        )
        return found


def _function(
    function: ctypes._NamedFuncPointer, result: type | None, *arguments: type
) -> ctypes._NamedFuncPointer:
    function.restype = result
    function.argtypes = arguments
    return function


def _magnitude(bits: int) -> float:
    value: float = struct.unpack("=f", struct.pack("=i", bits))[0]
    return value if math.isfinite(value) else math.inf


def _address(data: Buffer | Tensor) -> int:
    """Where bytes lie, also those that may not be written to."""
    if isinstance(data, Tensor):
        return data.data_ptr()
    return int(np.frombuffer(data, np.uint8).ctypes.data) if len(data) else 0


def libraries() -> list[Path]:
    """What installation built, that for all Pythons first: none where there was no compiler."""
    built = [Path(__file__).with_name(f"_native{suffix}") for suffix in reversed(EXTENSION_SUFFIXES)]
    return [library for library in built if library.exists()]


def load() -> Passes | None:
    """The passes of this installation, ``None`` if they were not built or do not fit this machine."""
    for library in libraries():
        try:
            return Passes(library)
        except (OSError, AttributeError):
            continue
    return None


kernel = load()
