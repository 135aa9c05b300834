"""The GPUs of this machine as the kernel shows them, whether or not torch can use them.

    for gpus in gpus_here():
        gpus.words            # "NVIDIA GeForce RTX 4090", "2 NVIDIA GPUs"
        gpus.has_driver

NVIDIA: /proc/driver/nvidia and /dev/nvidia0 of its driver, the library of WSL 2, and vendor 0x10de on the PCI
bus. The last shows a card without a driver, too. AMD: /dev/kfd, which ROCm computes through, and a card with
memory of its own: the small graphics of most processors is no use for training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

DISPLAY_CLASS = "0x03"
"""PCI's class of a graphics card, and of one that only computes."""
OWN_MEMORY_BYTES = 4e9
"""More than the share of host memory that the graphics of a processor usually takes."""


class Maker(StrEnum):
    """``value``: its number on the PCI bus."""

    NVIDIA = "0x10de"
    AMD = "0x1002"
    APPLE = "0x106b"


@dataclass(frozen=True)
class Gpus:
    """All of one maker. ``names``: as the driver tells them, empty where it does not."""

    maker: Maker
    count: int
    names: tuple[str, ...]
    has_driver: bool

    @property
    def words(self) -> str:
        if len(self.names) == self.count == 1:
            return self.names[0]
        kind = f"{self.maker.name} GPU"
        return f"an {kind}" if self.count == 1 else f"{self.count} {kind}s"


def gpus_here(root: Path = Path("/")) -> list[Gpus]:
    """Those that may train, by maker. ``root``: where proc, dev and sys are."""
    return [*_of_nvidia(root), *_of_amd(root)]


def _of_nvidia(root: Path) -> Iterator[Gpus]:
    names = tuple(_names(root / "proc" / "driver" / "nvidia" / "gpus"))
    nodes = len(list((root / "dev").glob("nvidia[0-9]*")))
    in_wsl = (root / "usr" / "lib" / "wsl" / "lib" / "libcuda.so.1").exists()
    count = max(len(names), nodes, in_wsl, sum(1 for _ in _cards(root, Maker.NVIDIA)))
    if count:
        yield Gpus(Maker.NVIDIA, count, names, has_driver=bool(names or nodes or in_wsl))


def _of_amd(root: Path) -> Iterator[Gpus]:
    memories = [_number(card / "mem_info_vram_total") for card in _cards(root, Maker.AMD)]
    count = sum(memory >= OWN_MEMORY_BYTES for memory in memories)
    if count and (root / "dev" / "kfd").exists():
        yield Gpus(Maker.AMD, count, (), has_driver=True)


def _cards(root: Path, maker: Maker) -> Iterator[Path]:
    for card in (root / "sys" / "bus" / "pci" / "devices").glob("*"):
        if text_of(card / "vendor") == maker and text_of(card / "class").startswith(DISPLAY_CLASS):
            yield card


def _names(folder: Path) -> Iterator[str]:
    for card in sorted(folder.glob("*")):
        for line in text_of(card / "information").splitlines():
            key, _, name = line.partition(":")
            if key == "Model" and name.strip().isprintable():
                yield name.strip()


def text_of(path: Path) -> str:
    with suppress(OSError):  # not there, or not ours to read
        return path.read_text(encoding="utf-8", errors="replace").strip()
    return ""


def _number(path: Path) -> int:
    text = text_of(path)
    return int(text) if text.isdecimal() else 0
