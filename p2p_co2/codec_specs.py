"""The codecs that a run may name, known without torch: config, planner, command line and memory rules read
this; ``tensors.codec`` makes them.

To add a codec, write its class in a file of its own (``tensors.codec.base.Codec``) and one line in ``SPECS``.
"""

from __future__ import annotations

from dataclasses import dataclass

COARSE_BITS = 9
"""Codecs with fewer bits per value lose so much that live parameters under "keep" and "blend" shall not hold
it."""


@dataclass(frozen=True)
class CodecSpec:
    """``name`` in run files; ``block_values`` values become ``block_bytes`` bytes; ``made_by``, the class, as
    "module:name". ``error``: ||x - q||^2 / ||x||^2 of Gaussian values. ``needs_feedback``: it loses so much
    that error feedback is on where a run leaves that out."""

    name: str
    block_bytes: int
    made_by: str
    error: float
    block_values: int = 128
    needs_feedback: bool = False

    @property
    def bits(self) -> float:
        """Per value on the wire, scales included."""
        return 8 * self.block_bytes / self.block_values

    def payload_bytes(self, values: int) -> int:
        """Bytes of so many values, padded to whole blocks."""
        return -(-values // self.block_values) * self.block_bytes


_HOME = "p2p_co2.tensors.codec"
SPECS = {
    spec.name: spec
    for spec in (
        CodecSpec("fp32", 512, f"{_HOME}.plain:PlainCodec", 0.0),
        CodecSpec("fp16", 256, f"{_HOME}.plain:PlainCodec", 4.3e-8),
        CodecSpec("bf16", 256, f"{_HOME}.plain:PlainCodec", 2.8e-6),
        CodecSpec("int8", 132, f"{_HOME}.bitsandbytes_blocks:Int8", 4.2e-5),
        CodecSpec("fp4", 68, f"{_HOME}.bitsandbytes_blocks:BitsAndBytesFourBit", 0.0165),
        CodecSpec("nf4", 68, f"{_HOME}.bitsandbytes_blocks:BitsAndBytesFourBit", 0.0092),
        CodecSpec("int4", 68, f"{_HOME}.fourbit:Int4", 0.0137),
        CodecSpec("e3m0", 68, f"{_HOME}.fourbit:E3M0", 0.0370),
        CodecSpec("q2", 132, f"{_HOME}.bitplanes:TwoBits", 0.117, 512, needs_feedback=True),
        CodecSpec("sign", 68, f"{_HOME}.bitplanes:Sign", 0.363, 512, needs_feedback=True),
    )
}


def codec_names() -> str:
    """All of them for a person: "fp32, fp16, ... or e3m0"."""
    *names, last = SPECS
    return f"{', '.join(names)} or {last}"
