"""What every codec is: fp32 values to bytes and back, block after block.

Laws: the payload is whole blocks of ``block_values`` values, each block self-contained (its codes, then its
scale if it has one, all little-endian). So a slice at block boundaries is contiguous bytes and decodes alone
to the same values as within the whole. A decoded value is a table's entry times the scale in fp32, which
rounds once and alike on every IEEE machine. Encoding of finite values never gives NaN or Inf. Codecs hold no
state: one serves all threads. All tensors are in host memory.

Price: a payload is padded to whole blocks, and a scale costs a quarter of a bit per value (a sixteenth in
blocks of 512). Blocks whose
largest magnitude is below ``SMALLEST`` are sent as zeros, so that nothing is ever subnormal, which some
processors round differently.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from p2p_co2.codec_specs import CodecSpec
from p2p_co2.errors import LocalProtocolError, RemoteProtocolError
from p2p_co2.system.memory import Buffer
from p2p_co2.tensors.codec import passes
from p2p_co2.tensors.codec.passes import CodecPasses

SCALE_BYTES = 4
SMALLEST = 2.0**-110
"""Blocks with a smaller absolute maximum are zero on the wire."""
LARGEST = torch.finfo(torch.float32).max
PIECE_VALUES = 1 << 18
"""Values worked on at once, a whole number of any codec's blocks: 1 MiB of scratch per step, which stays in
the cache and hides what a torch call costs."""
NOT_FINITE = "values to encode are not finite: training has diverged; lower the learning rates"


def pieces(numel: int) -> Iterator[slice]:
    """The pieces of ``numel`` values that are worked on one after the other: each is encoded and decoded
    alone to the same bits."""
    return (slice(start, min(start + PIECE_VALUES, numel)) for start in range(0, numel, PIECE_VALUES))


class Codec(ABC):
    """Lossy or plain encoding of flat fp32 tensors, as its ``spec`` says: ``block_values`` values become
    ``block_bytes`` bytes. A new one overrides ``_encode_blocks``, ``_decode_blocks`` and ``_finite``."""

    in_passes: int | None = None
    """What ``passes`` calls this codec, if it has it."""
    has_zero = True
    """Whether 0 is sent as 0. Where it is not, the last block's padding repeats its values."""
    scale_limit_bits = 0

    def __init__(self, spec: CodecSpec) -> None:
        self.name = spec.name
        self.spec = spec
        self.block_values = spec.block_values
        self.block_bytes = spec.block_bytes
        self.chunk_blocks = PIECE_VALUES // spec.block_values
        """Blocks worked on at once."""

    def blocks(self, numel: int) -> int:
        """Blocks that hold ``numel`` values."""
        return -(-numel // self.block_values)

    def payload_bytes(self, numel: int) -> int:
        """Bytes of the payload of ``numel`` values."""
        return self.blocks(numel) * self.block_bytes

    def encode(
        self, values: Tensor, out: Tensor | None = None, *, base: Tensor | None = None,
        residual: Tensor | None = None, decay: float = 1.0, wanted: Tensor | None = None,
        lost: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Encode ``values``, or ``base - values + residual * decay``, into uint8 [blocks(n) * block_bytes].

        All are fp32 [n]; the last two may be left out, the residual needs a base. ``out`` takes the payload
        if given (same shape and dtype, contiguous), ``wanted`` what is encoded, ``lost`` what of that is
        not decoded again. Raises ``ValueError`` if a value is NaN or Inf (training has diverged),
        ``LocalProtocolError`` for another dtype or shape.
        """
        if (values.dtype, values.dim(), values.device.type) != (torch.float32, 1, "cpu"):
            what = f"{values.dtype} {tuple(values.shape)} on {values.device}"
            raise LocalProtocolError(f"encode takes a flat fp32 tensor in host memory, not {what}")
        values = values.detach().contiguous()
        numel = values.numel()
        if out is None:
            out = torch.empty(self.payload_bytes(numel), dtype=torch.uint8, device="cpu")
        must_fit(out, torch.uint8, self.payload_bytes(numel))
        given = (base, values, residual, wanted, lost)
        done = 0
        if (kernel := self._kernel(*(one for one in given if one is not None))) is not None:
            done = numel // self.block_values
            if kernel.encode(given, decay, out, done) < done:
                raise ValueError(NOT_FINITE)
        if (start := done * self.block_values) < numel:
            left = [None if one is None else one[start:] for one in given]
            self._encode_left(left, decay, out[done * self.block_bytes :])
        return out

    def _encode_left(self, given: Sequence[Tensor | None], decay: float, out: Tensor) -> None:
        """What no pass does, in torch's operations. ``given``: base, values, residual, wanted and lost."""
        base, values, residual, wanted, lost = given
        assert values is not None
        if base is not None:
            values = torch.sub(base, values, out=wanted)
            if residual is not None:
                values.add_(residual * decay)
        width = self.block_values
        rows = out.view(-1, self.block_bytes)
        whole = len(values) // width
        blocks = values[: whole * width].view(-1, width)
        for start, stop in self._chunks(whole):
            self._encode_blocks(blocks[start:stop], rows[start:stop])
        if left := len(values) - whole * width:
            last = torch.zeros(1, width, dtype=torch.float32, device="cpu")
            last[0, :left] = values[-left:]
            if not self.has_zero:
                last = last[:, :left].repeat(1, -(-width // left))[:, :width].contiguous()
            self._encode_blocks(last, rows[-1:])
        if lost is not None:
            torch.sub(values, self.decode(out)[: len(values)], out=lost)

    def decode(self, payload: Tensor, out: Tensor | None = None) -> Tensor:
        """Decode ``payload`` (uint8 [k * block_bytes]) into fp32 [k * block_values].

        ``out`` takes the values if given. What a peer sent is for ``admit``. Raises ``LocalProtocolError`` if
        it is not whole blocks.
        """
        rows = self._rows(payload)
        if out is None:
            out = torch.empty(len(rows) * self.block_values, dtype=torch.float32, device="cpu")
        must_fit(out, torch.float32, len(rows) * self.block_values)
        if (kernel := self._kernel(rows)) is not None:
            kernel.decode(rows, out, len(rows))
            return out
        blocks = out.view(-1, self.block_values)
        for start, stop in self._chunks(len(rows)):
            self._decode_blocks(rows[start:stop], blocks[start:stop])
        return out

    def admit(self, payload: Buffer, values: Tensor) -> None:
        """Decode what a peer sent into ``values`` (fp32 [n]): exactly its blocks, of finite values only.

        Raises ``RemoteProtocolError`` with reason "wrong size", or "not finite": a value or a scale that is
        NaN or Inf, a scale below 0, or one by which a value would overflow. ``values`` are spoilt then.
        """
        view = memoryview(payload).cast("B")
        blocks = self.blocks(len(values))
        if len(view) != blocks * self.block_bytes:
            size = f"{len(view)} bytes for {blocks} {self.name} blocks of {self.block_bytes} bytes"
            raise RemoteProtocolError("wrong size", size)
        if blocks and not self._take(view, values, blocks):
            raise RemoteProtocolError("not finite", f"in {blocks} {self.name} blocks")

    def _take(self, view: memoryview, values: Tensor, blocks: int) -> bool:
        """Decode all ``blocks``; whether they hold finite values only."""
        whole, left = divmod(len(values), self.block_values)
        if (kernel := self._kernel(values)) is not None:
            sound = kernel.decode(view, values, whole)
            if left:
                last = torch.empty(self.block_values, dtype=torch.float32, device="cpu")
                sound += kernel.decode(view[whole * self.block_bytes :], last, 1)
                values[-left:] = last[:left]
            return sound == blocks
        # torch has no read-only tensors and warns about read-only memory.
        payload = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)
        rows = self._rows(payload)
        if not all(self._finite(rows[start:stop]) for start, stop in self._chunks(blocks)):
            return False
        values.copy_(self.decode(payload)[: len(values)])
        return True

    def mean(
        self, slices: Sequence[Buffer], shares: Sequence[float], blocks: int, rows: Tensor
    ) -> int | None:
        """Encode the sum of ``shares[i] * slices[i]``, added in this order, in one pass; None, and nothing
        done, where there is none for this codec. Returns the first slice found that is not finite, or -1."""
        kernel = self._kernel()
        return None if kernel is None else kernel.mean(slices, shares, blocks, rows)

    def _kernel(self, *tensors: Tensor) -> CodecPasses | None:
        """What does these in one pass, if anything."""
        fits = all(tensor.is_contiguous() for tensor in tensors)
        if passes.kernel is None or self.in_passes is None or not fits:
            return None
        return CodecPasses(passes.kernel, self.in_passes, self.scale_limit_bits)

    @abstractmethod
    def _encode_blocks(self, values: Tensor, rows: Tensor) -> None:
        """Encode fp32 [b, block_values] into uint8 [b, block_bytes]; raises ``ValueError`` if not finite."""

    @abstractmethod
    def _decode_blocks(self, rows: Tensor, values: Tensor) -> None:
        """Decode uint8 [b, block_bytes] into fp32 [b, block_values]."""

    @abstractmethod
    def _finite(self, rows: Tensor) -> bool:
        """Whether uint8 [b, block_bytes] decodes to finite values only."""

    def _chunks(self, blocks: int) -> Iterator[tuple[int, int]]:
        for start in range(0, blocks, self.chunk_blocks):
            yield start, min(start + self.chunk_blocks, blocks)

    def _rows(self, payload: Tensor) -> Tensor:
        if payload.dtype != torch.uint8 or payload.dim() != 1:
            raise LocalProtocolError(
                f"a payload is a flat uint8 tensor, not {payload.dtype} {tuple(payload.shape)}"
            )
        if payload.numel() % self.block_bytes:
            raise LocalProtocolError(f"{payload.numel()} bytes are not whole {self.name} blocks")
        payload = payload.contiguous()
        if payload.storage_offset() % SCALE_BYTES:
            payload = payload.clone()  # a view as another dtype must start at a multiple of its size
        return payload.view(-1, self.block_bytes)


class ScaledCodec(Codec):
    """A codec whose blocks are ``code_bits`` per value and then a scale in fp32.

    ``largest_code`` is the largest magnitude in the decoding table. A scale may be at most ``LARGEST /
    largest_code``, so that every decoded value is finite.
    """

    code_bits: int
    largest_code: float

    def __init__(self, spec: CodecSpec) -> None:
        super().__init__(spec)
        assert self.block_bytes == SCALE_BYTES + self.block_values * self.code_bits // 8
        limit = torch.tensor(LARGEST / self.largest_code, dtype=torch.float64, device="cpu").float()
        if limit.double() * self.largest_code > LARGEST:
            limit = torch.nextafter(limit, torch.zeros((), dtype=torch.float32, device="cpu"))
        self.scale_limit = limit.item()
        self.scale_limit_bits = int(limit.view(torch.int32))

    def _finite(self, rows: Tensor) -> bool:
        # As integers, non-negative finite floats keep their order, and everything else is outside of it.
        least, most = torch.aminmax(self.scales(rows).view(torch.int32))
        return int(least) >= 0 and int(most) <= self.scale_limit_bits

    def _codes(self, rows: Tensor) -> Tensor:
        """The codes of uint8 [b, block_bytes], a view of it."""
        return rows[:, :-SCALE_BYTES]

    def scales(self, rows: Tensor) -> Tensor:
        """The scales of uint8 [b, block_bytes] as fp32 [b, 1]."""
        return rows[:, -SCALE_BYTES:].contiguous().view(torch.float32)

    def _write_scales(self, rows: Tensor, scale: Tensor) -> None:
        """Write fp32 [b, 1] as the last bytes of each row."""
        rows[:, -SCALE_BYTES:].copy_(scale.view(torch.uint8))


def absmax(values: Tensor, scratch: Tensor | None = None) -> Tensor:
    """The largest magnitude of each row of fp32 [b, n] as fp32 [b, 1].

    ``scratch`` (same shape) is overwritten. Raises ``ValueError`` if a value is NaN or Inf: the maximum
    carries both.
    """
    most = torch.abs(values, out=scratch).amax(dim=1, keepdim=True)
    if not bool(torch.isfinite(most).all()):
        raise ValueError(NOT_FINITE)
    return most


def must_fit(out: Tensor, dtype: torch.dtype, numel: int) -> None:
    """Raise ``LocalProtocolError`` unless ``out`` is contiguous, of this dtype, and [numel], in host
    memory."""
    if (out.dtype, out.shape, out.device.type, out.is_contiguous()) != (dtype, (numel,), "cpu", True):
        what = f"{out.dtype} {tuple(out.shape)} on {out.device}"
        raise LocalProtocolError(f"out must be contiguous {dtype} [{numel}] in host memory, not {what}")
