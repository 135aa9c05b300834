"""The processes of ``averaging.py``: a peer of ours, a seed, a peer of hivemind's; one role per process.

    python benchmarks/averaging_workers.py ROLE CODEC VALUES ...

VALUES: of each of the ``TENSORS``.

Each prepares a round at a line with the round's number, begins at the next line, checks at the third, and
answers each with a line of JSON. Clocks are put around methods of both products from here, so neither carries
any for the benchmark's sake.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from json_workers import say

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from p2p_co2.config import (
    CarrierName,
    ClockConfig,
    CodecConfig,
    OuterConfig,
    PeerConfig,
    RunConfig,
)
from p2p_co2.net.discovery import Discovery
from p2p_co2.net.transport.libp2p.daemon import start_p2p, stop_p2p
from p2p_co2.protocol.rounds.exchange import Exchange
from p2p_co2.telemetry import events as ev
from p2p_co2.tensors import outer
from p2p_co2.tensors.fragments import LiveParameters
from p2p_co2.ticket import Ticket
from p2p_co2.trainer import Peer, connect
from p2p_co2.trainer.ledger import fragment_state, worker
from p2p_co2.trainer.ledger.kept import Encoded
from p2p_co2.wire.identity import Identity

PEERS, TENSORS = 4, 8
NOISE = 1e-2
HIVEMIND: dict[str, dict[str, Any]] = {
    "hivemind": {"min_matchmaking_time": 1.0, "request_timeout": 0.5, "target_group_size": PEERS},
    "hivemind-default": {"min_matchmaking_time": 5.0, "request_timeout": 3.0, "target_group_size": None},
}
OURS = ("grpc", "libp2p")
NOT_AVERAGING = ("step", "merge", "merge_", "state_digest")
"""Watched work of ours that hivemind's averager does not do."""


def main() -> None:
    torch.set_num_threads(1)
    role, codec, values, *rest = sys.argv[1:]
    if role == "seed":
        _seed(codec, *rest)
        return
    roles: dict[str, Callable[..., None]] = {"peer": _peer, "hivemind": _hivemind}
    roles[role](int(values), codec, *rest)


def values_of(megabytes: int) -> int:
    """Of each tensor, where all together have so many MB of fp32."""
    return megabytes * 1_000_000 // 4 // TENSORS


def _noise(turn: int, index: int, values: int) -> Iterator[torch.Tensor]:
    """What process ``index`` learned in round ``turn``: ``TENSORS`` times fp32 [values]."""
    generator = torch.Generator().manual_seed(1000 * turn + index)
    return (torch.randn(values, generator=generator).mul_(NOISE) for _ in range(TENSORS))


def _rms_error(tensors: Sequence[torch.Tensor], turn: int, factor: float) -> float:
    """How far ``tensors`` are from ``factor`` times the true mean of a round."""
    peers = [_noise(turn, index, tensors[0].numel()) for index in range(PEERS)]
    squares = 0.0
    for tensor, noises in zip(tensors, zip(*peers, strict=True), strict=True):
        squares += float((tensor - sum(noises) * (factor / PEERS)).square_().mean())
    return float((squares / TENSORS) ** 0.5)


def _run_config(codec: str) -> RunConfig:
    """Defaults of the product, but for a training loop that waits for every round."""
    return RunConfig(
        recipe="own-loop",
        fragments=1,
        clock=ClockConfig(mode="steps", inner_steps_per_round=1),
        codec=CodecConfig(name=codec),
        outer=OuterConfig(blocking_rounds=1_000_000),
    )


def _seed(codec: str, folder: str) -> None:
    serve_run(_run_config(codec), Path(folder))


def serve_run(run: RunConfig, home: Path) -> None:
    """Be a run's seed until standard input ends; says its ticket as ``address``."""
    home.mkdir()

    async def serve() -> None:
        identity = Identity.load_or_create(home / "identity")
        p2p = await start_p2p(home / "identity")
        discovery = Discovery(p2p, identity, run.digest(), lambda peer, error: None)
        await discovery.start([])
        await discovery.publish_manifest(run.canonical_bytes(), bytes(32))
        addresses = tuple(str(address) for address in await p2p.get_visible_maddrs())
        say({"address": str(Ticket(run.digest(), identity.peer_id, addresses))})
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        await discovery.close()
        await stop_p2p(p2p)

    asyncio.run(serve())


class Watch:
    """Clocks around methods of the product: when each last began and ended, and its thread's CPU seconds."""

    def __init__(self) -> None:
        self.began_at: dict[str, float] = {}
        self.ended_at: dict[str, float] = {}
        self.cpu_s: dict[str, float] = {}

    def put_on(self, owner: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def call(*arguments: Any, **settings: Any) -> Any:
            self.began_at[name], began_s = time.monotonic(), time.thread_time()
            result = function(*arguments, **settings)
            self.ended_at[name] = time.monotonic()
            self.cpu_s[name] = self.cpu_s.get(name, 0.0) + time.thread_time() - began_s
            return result

        setattr(owner, name, call)


def _watched() -> Watch:
    watch = Watch()
    watch.put_on(fragment_state.FragmentState, "offer")  # encode
    watch.put_on(Exchange, "start")  # the group is known
    watch.put_on(Encoded, "largest")  # the agreed mean is decoded, before its step is taken
    for owner, name in (
        (outer, "step"), (outer, "merge"), (LiveParameters, "merge_"), (worker, "state_digest"),
    ):  # fmt: skip
        watch.put_on(owner, name)
    return watch


def _peer(values: int, codec: str, carrier: CarrierName, index: str, folder: str, ticket: str) -> None:
    tensors = [torch.nn.Parameter(torch.zeros(values)) for _ in range(TENSORS)]
    committed = [0]

    def on_event(event: ev.Event) -> None:
        if isinstance(event, ev.RoundCommitted):
            committed[0] = event.contributors
        elif isinstance(event, ev.RoundAborted | ev.Warned | ev.MessageRefused):
            print(event, file=sys.stderr)

    config = PeerConfig(folder=Path(folder), carrier=carrier, min_peers=PEERS, checkpoint_every_s=1e6)
    watch = _watched()
    connection = connect(ticket, config, on_event)
    peer: Peer = connection.start(torch.nn.ParameterList(tensors), torch.optim.SGD(tensors, lr=1.0))
    network = connection._thread.view  # behind the front door: the digest and the bytes
    say({"ready": True})
    for line in sys.stdin:
        turn = int(line)
        with torch.no_grad():
            for tensor, noise in zip(tensors, _noise(turn, int(index), values), strict=True):
                tensor.sub_(noise)
        committed[0] = 0
        watch.cpu_s.clear()
        sent_bytes = network.traffic_bytes()[0]
        say({"prepared": True})
        sys.stdin.readline()
        peer.step(tokens=1, loss=0.0)
        digest = peer._ledger.agreed()[0].digest.hex()  # waits for it
        say(
            {
                "group": committed[0],
                "grouped_at": watch.began_at["start"],
                "averaged_at": watch.ended_at["largest"],
                "ended_at": time.monotonic(),
                "encode_s": watch.ended_at["offer"] - watch.began_at["offer"],
                "sent_bytes": network.traffic_bytes()[0] - sent_bytes,
            }
        )
        sys.stdin.readline()
        # The first outer step (heavy ball or Nesterov) from a zero momentum is a multiple of the mean.
        rule = peer.run.outer
        factor = -rule.lr * (1.0 + rule.momentum * rule.nesterov)
        error = 0.0 if turn else _rms_error([tensor.detach() for tensor in tensors], turn, factor)
        more_cpu_s = sum(watch.cpu_s.get(name, 0.0) for name in NOT_AVERAGING)
        say({"more_cpu_s": more_cpu_s, "digest": digest, "error": error})
    peer.stop()
    peer.leave("the benchmark is over")


def _hivemind(values: int, codec: str, side: str, index: str, address: str) -> None:
    import hivemind
    import scipy.optimize  # noqa: F401  (our import of hivemind puts it off; its averager begins with it loaded)
    from hivemind.averaging import DecentralizedAverager
    from hivemind.compression import Float16Compression, Uniform8BitQuantization

    clock = multiprocessing.Array("d", 2)  # reduction began; bytes encoded for others

    class Averager(DecentralizedAverager):  # type: ignore[misc]
        async def _run_allreduce_inplace_(self, *arguments: Any, **settings: Any) -> None:
            clock[0] = time.monotonic()
            await super()._run_allreduce_inplace_(*arguments, **settings)

    base: Any = Float16Compression if codec == "fp16" else Uniform8BitQuantization

    class Counting(base):  # type: ignore[misc]
        def compress(self, *arguments: Any, **settings: Any) -> Any:
            message = super().compress(*arguments, **settings)
            with clock.get_lock():
                clock[1] += len(message.buffer)
            return message

    dht = hivemind.DHT(initial_peers=[] if address == "-" else [address], start=True)
    averager = Averager(
        [torch.zeros(values) for _ in range(TENSORS)], dht, start=True, prefix="benchmark",
        compression=Counting(), **HIVEMIND[side],
    )  # fmt: skip
    say({"address": str(dht.get_visible_maddrs()[0])})
    for line in sys.stdin:
        turn = int(line)
        with averager.get_tensors() as tensors:
            for tensor, noise in zip(tensors, _noise(turn, int(index), values), strict=True):
                tensor.copy_(noise)
        clock[0] = clock[1] = 0.0
        say({"prepared": True})
        sys.stdin.readline()
        gathered = averager.step(allow_retries=False)
        ended_at = time.monotonic()
        times = {"grouped_at": clock[0], "averaged_at": ended_at, "ended_at": ended_at, "encode_s": 0.0}
        # The answers, as large as the questions, are encoded where we cannot count.
        say({"group": len(gathered or {}), **times, "sent_bytes": 2 * clock[1]})
        sys.stdin.readline()
        with averager.get_tensors() as tensors:
            error = _rms_error(tensors, turn, 1.0)
        say({"digest": "", "error": error, "more_cpu_s": 0.0})
    averager.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
