"""The kernel of our own decodes to the same bits as torch's operations, whatever the vectors and bytes."""

from __future__ import annotations

import shlex
import subprocess
import sysconfig
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import torch

from p2p_co2.tensors.codec import get_codec, native
from p2p_co2.tensors.codec.fourbit import FourBitCodec
from p2p_co2.tensors.codec.native import Kernel

STREAMED_BLOCKS = 32768  # as in native.c
SCALES = [0.0, 1.0, 2.0**-110, 1e-44, 0.1, 2.0**-24, 2.0**-20, 1e-3, 60000.0, 2.0**100]


def builds_here() -> bool:
    """Whether this Python's C compiler is here and compiles the kernel."""
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
    source = Path(native.__file__).with_name("native.c")
    command = [*compiler, "-std=c11", "-fsyntax-only", str(source)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.fixture
def kernel() -> Kernel:
    if native.kernel is None and not builds_here():
        pytest.skip("no C compiler here, so the installation has no kernel")
    assert native.kernel is not None, "there is a C compiler, but the installation did not build the kernel"
    return native.kernel


@pytest.fixture(params=["int4", "e3m0"])
def codec(request: pytest.FixtureRequest) -> FourBitCodec:
    found = get_codec(request.param)
    assert isinstance(found, FourBitCodec)
    return found


def hostile_rows(codec: FourBitCodec, blocks: int) -> torch.Tensor:
    """Random codes, all 16 of them, under scales of all sizes: uint8 [blocks * block_bytes]."""
    rows = torch.randint(0, 256, (blocks, codec.block_bytes), dtype=torch.uint8)
    scales = torch.tensor([SCALES[block % len(SCALES)] for block in range(blocks)]).view(-1, 1)
    if codec.name == "int4":
        half = scales.clamp(max=8000.0).half()
        scales = torch.cat([half, half * -8.0], dim=1).view(torch.float32)
    rows[:, -4:] = scales.view(torch.uint8)
    codec.check(rows.view(-1))
    return rows.view(-1)


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)


@pytest.mark.parametrize("blocks", [0, 1, 3, 2049, STREAMED_BLOCKS + 1])
def test_every_way_gives_the_bits_of_torch(
    kernel: Kernel, codec: FourBitCodec, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = hostile_rows(codec, blocks)
    with monkeypatch.context() as without:
        without.setattr(native, "kernel", None)
        expected = codec.decode(payload)
    assert expected.isfinite().all()
    for vectors in range(kernel.vectors + 1):
        monkeypatch.setattr(kernel, "vectors", vectors)
        assert torch.equal(bits(codec.decode(payload)), bits(expected)), f"vectors {vectors}"


def test_into_given_memory_at_any_address(kernel: Kernel, codec: FourBitCodec) -> None:
    payload = hostile_rows(codec, STREAMED_BLOCKS + 3)
    expected = codec.decode(payload)
    room = torch.full((expected.numel() + 9,), 7.0)
    for start in (0, 1, 5):  # in fp32: aligned for streaming stores, and not
        codec.decode(payload, room[start : start + expected.numel()])
        assert torch.equal(bits(room[start : start + expected.numel()]), bits(expected))
        assert room[start + expected.numel()] == 7.0
    shifted = torch.empty(payload.numel() + 3, dtype=torch.uint8)[3:].copy_(payload)
    assert torch.equal(bits(codec.decode(shifted)), bits(expected))


def test_a_library_that_does_not_load_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    assert native.load() is None, "there is none"
    (tmp_path / f"_native{EXTENSION_SUFFIXES[0]}").write_bytes(b"of another machine")
    assert native.load() is None
