"""Tensor to bytes and back: how outer gradients are encoded for the wire.

``get_codec(name)`` gives the codec of a run, which ``p2p_co2.codec_specs`` lists; ``Codec`` says what all of
them keep. ``relative_error`` measures what was lost.

| codec | bits per value, scale included | ||x-q||^2/||x||^2, Gaussian |
|---|---|---|
| fp32, bf16, fp16 | 32, 16, 16 | 0, 2.8e-6, 4.3e-8 |
| int8 | 8.25 | 4.2e-5 |
| nf4, int4, fp4, e3m0 | 4.25 | .0092, .0137, .0165, .0370 |
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from p2p_co2.codec_specs import SPECS, codec_names
from p2p_co2.errors import LocalProtocolError
from p2p_co2.tensors.codec.base import Codec, relative_error

__all__ = ["Codec", "get_codec", "relative_error"]


@cache
def get_codec(name: str) -> Codec:
    """The codec called ``name``. Codecs hold no state: everybody shares one.

    Raises ``LocalProtocolError`` for another name; config has refused it by then.
    """
    if name not in SPECS:
        raise LocalProtocolError(f"no codec is called {name!r}: known are {codec_names()}")
    module, _, kind = SPECS[name].made_by.partition(":")
    codec: Codec = getattr(import_module(module), kind)(SPECS[name])
    return codec
