"""A gradient as the product of two thin matrices, and the rest of it for the next (PowerSGD, Optimus-CC).

    low = LowRank(16, (64, 160))              # of one sequence: 64 positions of width 160
    payload, rest = low.encode(gradient)      # [sequences, 64, 160] -> uint8 [payload_bytes], what it lost
    payload, rest = low.encode(other + rest)  # lazy error propagation: the next one makes it good
    gradient = low.decode(payload)            # fp32 [sequences, 64, 160]

With z as [tokens, width]: P = orth(z orth(Q)), Q = z^T P, and what is decoded is P Q^T; both travel in bf16.
One step of the power method starts from the last Q, which any gradient may have left. In the papers' symbols
z_k = g_k + e_{k-1} and e_k = z_k - C(z_k): PowerSGD (arXiv 1905.13727), lazy error propagation (2301.09830).

Laws: the decoded and the rest add up to what was encoded. With A_k the inputs of the layer below::

    sum A_k^T C(z_k) = sum A_k^T g_k + sum_{k<K} (A_{k+1} - A_k)^T e_k - A_K^T e_K

A last one that is sent in another codec with the rest added (a flush) leaves that codec's error alone.

Price: 16 r (tokens + width) bits, 2 tokens width / (r (tokens + width)) times fewer than fp32 (int4: 7.5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from p2p_co2.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from p2p_co2.system.memory import Buffer
from p2p_co2.tensors.codec import get_codec


class LowRank:
    """``rank``: columns of P and Q; ``shape``: of what crosses for one sequence, its last number the width;
    ``sequences``: in each microbatch. Raises ``ConfigError`` for a rank that such a matrix cannot have."""

    def __init__(self, rank: int, shape: Sequence[int], sequences: int = 1) -> None:
        self.shape = (sequences, *shape)
        self._rows = math.prod(self.shape[:-1])
        self._width = self.shape[-1]
        most = min(self._rows, self._width)
        if not 1 <= rank <= most:
            size = f"a gradient of [{self._rows}, {self._width}]"
            problem = f"rank {rank} is more than {size} has; use at most rank{most}"
            raise ConfigError("the run", "pipeline.backward_critical", problem)
        self._codec = get_codec("bf16")
        self._numel = rank * (self._rows + self._width)
        generator = torch.Generator(device="cpu").manual_seed(0)
        self._last = torch.randn(self._width, rank, generator=generator, dtype=torch.float32, device="cpu")

    @property
    def payload_bytes(self) -> int:
        """Of one microbatch."""
        return self._codec.payload_bytes(self._numel)

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The payload, uint8 in host memory, and what it does not hold, fp32. ``values``: float [sequences,
        *shape] on any device. Raises ``ValueError`` if one is not finite, ``LocalProtocolError`` for another
        shape."""
        if tuple(values.shape) != self.shape:
            expected = f"{list(self.shape)} crosses here"
            raise LocalProtocolError(f"a stage made a tensor of shape {list(values.shape)}; {expected}")
        flat = values.detach().reshape(self._rows, self._width)
        flat = flat if flat.dtype == torch.float64 else flat.float()
        left = _orthonormal(flat @ _orthonormal(self._last.to(flat)))
        right = flat.T @ left
        factors = torch.cat([left.reshape(-1), right.reshape(-1)])
        payload = self._codec.encode(factors.to(device="cpu", dtype=torch.float32))
        self._last = right
        held = self._product(self._codec.decode(payload)[: self._numel].to(flat))
        return payload, (flat - held).view(self.shape)

    def decode(self, payload: Buffer, device: torch.device | str = "cpu") -> Tensor:
        """fp32 [sequences, *shape]. Raises ``RemoteProtocolError`` for another size or values that are not
        finite."""
        factors = torch.empty(self._numel, dtype=torch.float32, device="cpu")
        self._codec.admit(payload, factors)
        values = self._product(factors.to(device))
        if not bool(torch.isfinite(values).all()):
            raise RemoteProtocolError("not finite", "in the product of a gradient's factors")
        return values.view(self.shape)

    def _product(self, factors: Tensor) -> Tensor:
        rank = self._last.shape[1]
        left = factors[: self._rows * rank]
        right = factors[self._rows * rank :]
        return torch.mm(left.view(-1, rank), right.view(-1, rank).T)


def _orthonormal(columns: Tensor) -> Tensor:
    return torch.linalg.qr(columns).Q  # type: ignore[no-any-return]
