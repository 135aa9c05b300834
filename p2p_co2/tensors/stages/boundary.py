"""One crossing between two stages: a float tensor to a codec's bytes and back.

    boundary = Boundary("int8", (64, 160))     # of one sequence: 64 positions of width 160
    payload = boundary.encode(hidden)          # hidden [sequences, 64, 160] -> uint8 [payload_bytes]
    hidden = boundary.decode(payload)          # fp32 [sequences, 64, 160]

Law (straight-through): what a stage computes on is the decoded value, when it computes it again too. The
sender never decodes. Bytes of a peer are checked for size and finite values before they become a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from p2p_co2.errors import LocalProtocolError
from p2p_co2.system.memory import Buffer
from p2p_co2.tensors.codec import get_codec


class Boundary:
    """``codec``: its name; ``shape``: of what crosses for one sequence; ``sequences``: in each microbatch."""

    def __init__(self, codec: str, shape: Sequence[int], sequences: int = 1) -> None:
        self.codec, self.shape = get_codec(codec), (sequences, *shape)
        self.numel = math.prod(self.shape)

    @property
    def payload_bytes(self) -> int:
        """Of one microbatch."""
        return self.codec.payload_bytes(self.numel)

    def encode(self, values: Tensor) -> Tensor:
        """``values``: float [sequences, *shape] on any device. Raises ``ValueError`` if one is not finite,
        ``LocalProtocolError`` for another shape."""
        if tuple(values.shape) != self.shape:
            expected = f"{list(self.shape)} crosses here"
            raise LocalProtocolError(f"a stage made a tensor of shape {list(values.shape)}; {expected}")
        flat = values.detach().reshape(-1).to(device="cpu", dtype=torch.float32)
        return self.codec.encode(flat)

    def decode(self, payload: Buffer, device: torch.device | str = "cpu") -> Tensor:
        """fp32 [sequences, *shape]. Raises ``RemoteProtocolError`` for another size or values that are not
        finite."""
        values = torch.empty(self.numel, dtype=torch.float32, device="cpu")
        self.codec.admit(payload, values)
        return values.view(self.shape).to(device)
