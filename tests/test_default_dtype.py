"""The tests of what computes, once more as under a user's ``torch.set_default_dtype``, and every codec's
bytes under any default. Wrong memory may end the process, so this is another one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from p2p_co2.codec_specs import SPECS
from p2p_co2.tensors.codec import get_codec
from p2p_co2.tensors.codec.base import Codec
from tests.default_dtype import VARIABLE
from tests.test_architecture import ROOT

AVERAGES = ("test_aggregation", "test_fragments", "test_outer", "test_fragment_state")
CODECS: tuple[str, ...] = tuple(SPECS)
SUITES = {
    "float64": AVERAGES,
    "bfloat16": (
        *AVERAGES, "test_codec", "test_checkpoint", "test_trainer", "test_trainer_saver",
    ),
}  # fmt: skip
LEFT_OUT = "bitsandbytes or million or fp4 or nf4 or e3m0 or mantissa"
"""Its own tables follow the default; and what takes long and says no more."""


@pytest.mark.parametrize("dtype", SUITES)
def test_the_suite_under_another_default_dtype(dtype: str) -> None:
    files = [str(ROOT / "tests" / f"{name}.py") for name in SUITES[dtype]]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*command, "-k", f"not ({LEFT_OUT})", *files],
        env={**environment, VARIABLE: dtype, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]


@pytest.fixture
def restored() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)
    torch.set_default_device(None)


def made_anew(codec: Codec) -> Codec:
    """With what it holds computed now."""
    return type(codec)(codec.spec)


def bits(codec: Codec, values: torch.Tensor) -> tuple[bytes, bytes]:
    payload = codec.encode(values)
    return bytes(payload.numpy()), bytes(codec.decode(payload).view(torch.uint8).numpy())


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("restored")
def test_every_codec_gives_the_same_bytes_whatever_the_default_is(name: str, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    values = torch.randn(128 * 33 + 5, generator=draw, dtype=torch.float32, device="cpu")
    expected = bits(get_codec(name), values)
    torch.set_default_dtype(dtype)
    torch.set_default_device("meta")
    assert bits(made_anew(get_codec(name)), values) == expected
