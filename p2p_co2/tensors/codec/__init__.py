"""Tensor to bytes and back: how outer gradients are encoded for the wire.

``get_codec(name)`` gives the codec of a run; ``Codec`` says what all of them keep (see ``base``).
``encode_with_residual`` adds error feedback, ``relative_error`` measures what was lost.

| codec | bits per value, scale included | ||x-q||^2/||x||^2, Gaussian |
|---|---|---|
| fp32, bf16, fp16 | 32, 16, 16 | 0, 2.8e-6, 4.3e-8 |
| int8 | 8.25 | 4.2e-5 |
| nf4, int4, fp4, e3m0 | 4.25 | .0092, .0137, .0165, .0370 |
"""

from __future__ import annotations

import torch

from p2p_co2.config import CodecName
from p2p_co2.errors import LocalProtocolError
from p2p_co2.tensors.codec.base import Codec
from p2p_co2.tensors.codec.bitsandbytes_blocks import BitsAndBytesFourBit, Int8
from p2p_co2.tensors.codec.feedback import encode_with_residual, relative_error
from p2p_co2.tensors.codec.fourbit import E3M0
from p2p_co2.tensors.codec.int4 import Int4
from p2p_co2.tensors.codec.plain import PlainCodec

__all__ = ["Codec", "encode_with_residual", "get_codec", "relative_error"]


_CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        PlainCodec("fp32", torch.float32),
        PlainCodec("fp16", torch.float16),
        PlainCodec("bf16", torch.bfloat16),
        Int8(),
        BitsAndBytesFourBit("fp4"),
        BitsAndBytesFourBit("nf4"),
        Int4(),
        E3M0(),
    )
}


def get_codec(name: CodecName) -> Codec:
    """The codec called ``name``. Codecs hold no state: everybody shares one.

    Raises ``LocalProtocolError`` for another name; config has refused it by then.
    """
    if name not in _CODECS:
        raise LocalProtocolError(f"no codec is called {name!r}: known are {', '.join(_CODECS)}")
    return _CODECS[name]
