"""Tensor to bytes and back: how outer gradients are encoded for the wire.

``get_codec(name)`` gives the codec of a run, which ``p2p_co2.codec_specs`` lists, with the bits that it takes
and the error that it makes; ``Codec`` says what all of them keep.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from p2p_co2.codec_specs import SPECS, codec_names
from p2p_co2.errors import LocalProtocolError
from p2p_co2.tensors.codec.base import Codec

__all__ = ["Codec", "get_codec"]


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
