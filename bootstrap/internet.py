"""The internet of a rehearsal: one machine per peer, each behind its own router, all through one middle.

    machine --lan0-- router --wan0------ middle ------wan0-- router --lan0-- machine
                       NAT, if asked      |
                                     TUN device, our forwarder: rate, delay, jitter, loss

Each machine and each router is a network namespace, so the packets are real. Addresses are of 192.0.0.0/24:
reserved for protocol assignments and no host's (RFC 6890), yet taken by libp2p for public ones, without which
it neither relays nor punches holes. No namespace here is connected with the outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bootstrap import forwarder, netns
from bootstrap.forwarder import DEVICE
from bootstrap.local_swarm import Child, LocalSwarm
from p2p_co2.errors import ConfigError, EnvironmentFault
from p2p_co2.planning.profiles import LinkProfile
from p2p_co2.system.process import program

EMULATION = (
    "real packets between network namespaces; rates, delay, jitter, loss by our forwarder on a TUN device"
)
_GATEWAY = "192.0.0.65"
_LAN_GATEWAY = "192.168.1.1"
_LAN_ADDRESS = "192.168.1.2"
_TABLE = "100"
"""The middle's routing table for what comes from the lines: into the forwarder."""
_FAST_BITS_PER_S, _PIECE_BYTES = 50e6, 16_000
"""Of a line whose TCP hands over that many bytes at once. Left alone it takes two or three segments, and each
piece costs the forwarder the same, however large it is."""
_ROUTER_OPTIONS = {"ipv4/ip_forward": "1"} | {
    f"ipv4/conf/{which}/{option}": "0"
    for which in ("all", "default")
    for option in ("rp_filter", "send_redirects")
}


@dataclass(frozen=True)
class Machine:
    """Where a peer runs. ``address``: its own; ``public_address``: the one that others see it under;
    ``port``: the middle's device towards it."""

    name: str
    namespace: str
    router: str
    port: str
    address: str
    public_address: str
    profile: LinkProfile

    def command(self, arguments: list[str]) -> list[str]:
        """The command line that runs ``arguments`` on this machine."""
        return netns.inside(self.namespace, arguments)


class Internet:
    """Use as ``with Internet(...) as internet``, ``add`` the machines, then ``start``.

    ``folder`` gets ``wan.json`` and the forwarder's log. ``congestion``: TCP's congestion control on the
    machines, "" for this machine's own. Leaving the block removes all of it. Entering it raises
    ``ConfigError`` for a congestion control that the kernel lacks.
    """

    def __init__(self, kernel: netns.Kernel, folder: Path, seed: int, congestion: str = "") -> None:
        self._kernel = kernel
        self._folder = folder
        self._seed = seed
        self._congestion = congestion
        self.machines: dict[str, Machine] = {}
        self.forwarded: dict[str, float] = {}
        """What the forwarder says of itself at its end."""
        self._namespaces: list[str] = []
        self._addresses = iter(range(66, 255))
        self._processes = LocalSwarm(folder)
        self._forwarder: Child | None = None

    def __enter__(self) -> Internet:
        netns.sweep()
        try:
            self._middle = self._namespace("middle")
            netns.set_kernel_options(self._middle, _ROUTER_OPTIONS)
            if self._congestion:
                _require_congestion(self._middle, self._congestion)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def add(self, name: str, profile: LinkProfile) -> Machine:
        """A machine with a line of ``profile``. Raises ``EnvironmentFault``."""
        hidden = profile.nat != "open"
        if hidden and not self._kernel.masquerade:
            raise EnvironmentFault("nft cannot make a router here; install nftables, or give --nat open")
        router_address = self._address()
        address = _LAN_ADDRESS if hidden else self._address()
        machine = self.machines[name] = Machine(
            name=name,
            namespace=self._namespace(name),
            router=self._namespace(f"{name}-router"),
            port=f"port{len(self.machines)}",
            address=address,
            public_address=router_address if hidden else address,
            profile=profile,
        )
        self._wire(machine, router_address)
        if hidden:
            netns.masquerade(machine.router, "wan0", symmetric=profile.nat == "symmetric")
        if profile.up_bits_per_s > _FAST_BITS_PER_S:
            with contextlib.suppress(EnvironmentFault):  # kernels before 5.18 lack it
                netns.set_kernel_options(machine.namespace, {"ipv4/tcp_tso_rtt_log": "31"})
                netns.ip(machine.namespace, f"link set lan0 gso_max_size {_PIECE_BYTES}")
        return machine

    def start(self) -> None:
        """Let the packets flow. Raises ``EnvironmentFault``."""
        links = {machine.public_address: machine.profile for machine in self.machines.values()}
        forwarder.write_links(self._folder / "wan.json", links, self._seed)
        arguments = program("bootstrap.forwarder", str(self._folder / "wan.json"), str(os.getpid()))
        command = netns.inside(self._middle, arguments)
        self._forwarder = self._processes.start("forwarder", command)
        self._processes.wait_for_line(self._forwarder, "ready:", netns.COMMAND_S)
        netns.ip(
            self._middle,
            f"link set {DEVICE} up mtu 1500 txqueuelen 2000",
            f"route add default dev {DEVICE} table {_TABLE}",
        )

    def traffic_bytes(self) -> dict[str, tuple[int, int]]:
        """Bytes (up, down) that each machine's line has carried, packet headers included."""
        assert self._forwarder is not None
        try:
            text = Path(f"/proc/{self._forwarder.pid}/net/dev").read_text()
        except OSError as error:
            raise EnvironmentFault(f"the packet forwarder has gone: {error.strerror}") from None
        devices = {}
        for line in text.splitlines()[2:]:
            device, _, figures = line.partition(":")
            words = figures.split()
            devices[device.strip()] = int(words[0]), int(words[8])
        return {name: devices[machine.port] for name, machine in self.machines.items()}

    def close(self) -> None:
        """Remove everything; may be called twice. It takes a second or two and is not to be interrupted."""
        with _deaf():
            self._processes.close()
            if self._forwarder is not None and (said := self._forwarder.last_lines(1)).startswith("{"):
                self.forwarded = json.loads(said)
            while self._namespaces:
                netns.remove(self._namespaces.pop())

    # ---- parts

    def _namespace(self, name: str) -> str:
        full = netns.add(name)
        self._namespaces.append(full)
        netns.set_kernel_options(full, {"ipv6/conf/all/disable_ipv6": "1"})
        netns.ip(full, "link set lo up")
        return full

    def _address(self) -> str:
        return f"192.0.0.{next(self._addresses)}"

    def _wire(self, machine: Machine, router_address: str) -> None:
        """Devices, addresses and routes of one line."""
        router = machine.router
        middle = self._middle
        port = machine.port
        netns.set_kernel_options(router, _ROUTER_OPTIONS)
        # By the route: a namespace may not choose what this machine's administrator has not allowed to all.
        control = f" congctl {self._congestion}" if self._congestion else ""
        netns.ip(
            machine.namespace,
            f"link add lan0 type veth peer name lan0 netns {router}",
            f"addr add {machine.address}/32 dev lan0",
            "link set lan0 up",
            f"route add {_LAN_GATEWAY} dev lan0",
            f"route add default via {_LAN_GATEWAY} dev lan0{control}",
        )
        netns.ip(
            router,
            f"link add wan0 type veth peer name {port} netns {middle}",
            f"addr add {_LAN_GATEWAY}/32 dev lan0",
            "link set lan0 up",
            f"addr add {router_address}/32 dev wan0",
            "link set wan0 up",
            f"route add {machine.address} dev lan0",
            f"route add {_GATEWAY} dev wan0",
            f"route add default via {_GATEWAY} dev wan0",
        )
        lines = [
            f"addr add {_GATEWAY}/32 dev {port}",
            f"link set {port} up",
            f"route add {router_address} dev {port}",
            f"rule add iif {port} lookup {_TABLE}",
        ]
        if machine.public_address != router_address:
            lines.append(f"route add {machine.public_address} via {router_address} dev {port} onlink")
        netns.ip(middle, *lines)


def _require_congestion(namespace: str, name: str) -> None:
    """Try TCP's congestion control ``name``, which the kernel may have to load."""
    route = f"{_LAN_GATEWAY} dev lo"
    try:
        netns.ip(namespace, f"route add {route} congctl {name}", f"route del {route}")
    except EnvironmentFault:
        known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
        problem = f"this kernel has {', '.join(known)} (got {name!r})"
        raise ConfigError.of_option("--congestion", problem) from None


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait, where this is the main thread, which alone hears them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
