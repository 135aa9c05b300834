"""One crossing between two stages: a float tensor to a codec's bytes and back.

    boundary = Boundary("int8", (64, 160))     # of one sequence: 64 positions of width 160
    payload = boundary.encode(hidden)          # hidden [sequences, 64, 160] -> uint8 [payload_bytes]
    hidden = boundary.decode(payload)          # fp32 [sequences, 64, 160]

Law (straight-through): what a stage computes on is the decoded value, when it computes it again too. The
sender never decodes. Bytes of a peer are checked for size and finite values before they become a tensor.
``UsualSizes`` scales down values that are far larger than their sender's usual ones.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from statistics import median

import torch
from torch import Tensor

from p2p_co2.errors import LocalProtocolError, RemoteProtocolError
from p2p_co2.system.memory import Buffer
from p2p_co2.tensors.codec import get_codec

MOST_TIMES = 100.0
"""A root mean square is at most so many times the median of its sender's last ``RECENT``."""
MOST = 1e6
"""And at most so large at all: beyond that squares and products overflow."""
RECENT = 64
"""Payloads of a sender whose sizes are remembered."""
MAX_SENDERS = 128
SEVERAL = 4
"""Of a sender's last ``RECENT`` so many larger ones are scaled down, and each further one is refused. An
honest RMSNorm makes one of some 150 times now and then, where a token's activations are nearly nothing."""


class Boundary:
    """``codec``: its name; ``shape``: of what crosses for one sequence; ``sequences``: in each microbatch."""

    def __init__(self, codec: str, shape: Sequence[int], sequences: int = 1) -> None:
        self.codec = get_codec(codec)
        self.shape = (sequences, *shape)
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


class UsualSizes:
    """How large the values are that each sender sends. A payload far larger than its last ones would be all
    of an inner step's gradient."""

    def __init__(self) -> None:
        self._recent: OrderedDict[Hashable, deque[float]] = OrderedDict()

    def admit(self, sender: Hashable, values: Tensor) -> Tensor:
        """``values``, finite and of any shape, or scaled down to ``MOST_TIMES`` the usual. Raises
        ``RemoteProtocolError`` for one larger than ``MOST``, and for more than ``SEVERAL``. Each size counts
        as it came, so that one that stays is the usual one in a while."""
        size = float(torch.linalg.vector_norm(values)) / math.sqrt(max(1, values.numel()))
        recent = self._recent.setdefault(sender, deque(maxlen=RECENT))
        self._recent.move_to_end(sender)
        if len(self._recent) > MAX_SENDERS:
            self._recent.popitem(last=False)
        usual = median(recent) if recent else 0.0
        limit = MOST_TIMES * usual or MOST
        are_several = sum(one > limit for one in recent) >= SEVERAL
        if size <= MOST:
            recent.append(size)
        if not size <= MOST or (size > limit and are_several):
            raise RemoteProtocolError("too large", f"root mean square {size:.3g}, {usual:.3g} as a rule")
        return values * (limit / size) if size > limit else values
