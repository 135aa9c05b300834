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
    "module:name". ``keeps_residual``: it loses so much that error feedback has something to carry on."""

    name: str
    block_bytes: int
    made_by: str
    block_values: int = 128
    keeps_residual: bool = True

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
        CodecSpec("fp32", 512, f"{_HOME}.plain:PlainCodec", keeps_residual=False),
        CodecSpec("fp16", 256, f"{_HOME}.plain:PlainCodec"),
        CodecSpec("bf16", 256, f"{_HOME}.plain:PlainCodec"),
        CodecSpec("int8", 132, f"{_HOME}.bitsandbytes_blocks:Int8"),
        CodecSpec("fp4", 68, f"{_HOME}.bitsandbytes_blocks:BitsAndBytesFourBit"),
        CodecSpec("nf4", 68, f"{_HOME}.bitsandbytes_blocks:BitsAndBytesFourBit"),
        CodecSpec("int4", 68, f"{_HOME}.fourbit:Int4"),
        CodecSpec("e3m0", 68, f"{_HOME}.fourbit:E3M0"),
    )
}


def codec_names() -> str:
    """All of them for a person: "fp32, fp16, ... or e3m0"."""
    *names, last = SPECS
    return f"{', '.join(names)} or {last}"
