"""``--device auto``: what it takes, what it says, and what the doctor says of a GPU that torch leaves unused.

No GPU is needed: the kernel's folders are made up, and a torch that claims to see one fails as torch does.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from p2p_co2.config import PeerConfig
from p2p_co2.errors import ConfigError
from p2p_co2.system.accelerators import Gpus, Maker, gpus_here
from p2p_co2.tensors.device import device_of, training_device
from peers.doctor.findings import Finding, Grade
from peers.doctor.machine import check_gpus, look_at_machine

CARD = SimpleNamespace(name="NVIDIA Imaginary 24", total_memory=25_386_352_640)


@pytest.fixture(name="cards")
def _cards(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Two cards that torch sees and knows the names of."""
    cards: list[object] = [CARD, CARD]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: CARD)
    return cards


@pytest.fixture(name="no_cards")
def _no_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def kernel_file(root: Path, path: str, text: str = "") -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def card(root: Path, place: str, vendor: str, pci_class: str = "0x030000", memory: int = 0) -> None:
    """A card on the PCI bus as sysfs shows it."""
    folder = f"sys/bus/pci/devices/{place}"
    kernel_file(root, f"{folder}/vendor", f"{vendor}\n")
    kernel_file(root, f"{folder}/class", f"{pci_class}\n")
    if memory:
        kernel_file(root, f"{folder}/mem_info_vram_total", f"{memory}\n")


# ---- which device


def test_auto_is_the_processor_where_torch_sees_no_gpu(no_cards: None) -> None:
    cores = len(os.sched_getaffinity(0))
    found = training_device("auto")
    assert found.name == "cpu"
    assert found.words.startswith(f"cpu ({cores} core")
    assert found.words.endswith(f"; torch {torch.__version__} sees no GPU)")
    assert training_device("cpu").words == f"cpu ({cores} core{'s' if cores > 1 else ''})"
    assert [device_of(number, "auto") for number in range(3)] == ["auto"] * 3


def test_auto_is_the_first_gpu_and_peers_of_one_machine_are_spread_over_all(cards: list[object]) -> None:
    for wanted in ("auto", "cuda", "cuda:0"):
        found = training_device(wanted, is_tried=False)
        assert (found.name, found.words) == ("cuda:0", "cuda:0 (NVIDIA Imaginary 24, 24 GB)")
    assert training_device("cuda:1", is_tried=False).name == "cuda:1"
    assert [device_of(number, "auto") for number in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert [device_of(number, "cuda:1") for number in range(2)] == ["cuda:1", "cuda:1"]
    cards.pop()
    assert [device_of(number, "auto") for number in range(2)] == ["auto", "auto"], "they share it"


def test_a_gpu_that_torch_cannot_compute_on_is_passed_over_by_auto_alone(
    monkeypatch: pytest.MonkeyPatch, cards: list[object]
) -> None:
    def fails(_: object) -> None:
        raise RuntimeError("the driver is too old\nand more of torch's words")

    monkeypatch.setattr(torch.cuda, "get_device_properties", fails)
    found = training_device("auto")
    assert found.name == "cpu"
    assert found.words.endswith("; cuda:0 cannot be used: the driver is too old)")
    with pytest.raises(ConfigError, match=r"--device: cuda:1 cannot be used \(the driver is too old\); give"):
        training_device("cuda:1")


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("abacus", "torch knows no device 'abacus'; give auto, cpu, cuda or cuda:1"),
        ("cuda", "sees no cuda here; give auto or cpu, or see p2p-co2 doctor"),
        ("mps", "sees no mps here"),
        ("", "torch knows no device ''"),
    ],
)
def test_a_device_that_is_not_there_is_refused(no_cards: None, wanted: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"--device: .*{words}"):
        training_device(wanted)


# ---- which GPUs the kernel shows


def test_a_machine_without_gpus(tmp_path: Path) -> None:
    card(tmp_path, "0000:00:02.0", "0x8086")  # Intel's
    card(tmp_path, "0000:00:03.0", "0x10de", "0x020000")  # NVIDIA's network card
    card(tmp_path, "0000:00:04.0", "0x1002", memory=512 << 20)  # the graphics of a processor
    kernel_file(tmp_path, "dev/kfd")
    kernel_file(tmp_path, "dev/nvidiactl")
    assert gpus_here(tmp_path) == []
    assert gpus_here(tmp_path / "nowhere") == []


def test_nvidias_with_and_without_a_driver(tmp_path: Path) -> None:
    card(tmp_path, "0000:01:00.0", "0x10de")
    card(tmp_path, "0000:02:00.0", "0x10de", "0x030200")  # only computes
    (bare,) = gpus_here(tmp_path)
    assert (bare.count, bare.has_driver, bare.words) == (2, False, "2 NVIDIA GPUs")
    kernel_file(tmp_path, "dev/nvidia0")
    assert gpus_here(tmp_path)[0].has_driver
    information = "Model: \t\t NVIDIA GeForce RTX 4090\nIRQ:   \t\t 48\n"
    kernel_file(tmp_path, "proc/driver/nvidia/gpus/0000:01:00.0/information", information)
    assert gpus_here(tmp_path)[0].words == "2 NVIDIA GPUs"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("proc/driver/nvidia/gpus/0000:01:00.0/information", "NVIDIA GeForce RTX 4090"),
        ("dev/nvidia0", "an NVIDIA GPU"),
        ("usr/lib/wsl/lib/libcuda.so.1", "an NVIDIA GPU"),
    ],
)
def test_each_sign_of_one_nvidia_is_enough(tmp_path: Path, path: str, words: str) -> None:
    kernel_file(tmp_path, path, "Model: NVIDIA GeForce RTX 4090\n")
    (found,) = gpus_here(tmp_path)
    assert (found.maker, found.count, found.has_driver, found.words) == (Maker.NVIDIA, 1, True, words)


def test_an_amd_card_with_memory_of_its_own(tmp_path: Path) -> None:
    card(tmp_path, "0000:03:00.0", "0x1002", memory=24 << 30)
    assert gpus_here(tmp_path) == [], "ROCm computes through /dev/kfd"
    kernel_file(tmp_path, "dev/kfd")
    (found,) = gpus_here(tmp_path)
    assert (found.maker, found.has_driver, found.words) == (Maker.AMD, True, "an AMD GPU")


# ---- what the doctor says

GEFORCE = Gpus(Maker.NVIDIA, 1, ("NVIDIA GeForce RTX 4090",), has_driver=True)
BARE = Gpus(Maker.NVIDIA, 1, (), has_driver=False)
RADEON = Gpus(Maker.AMD, 1, (), has_driver=True)


@pytest.mark.parametrize(
    ("there", "version", "built_for", "measured", "advice"),
    [
        ([GEFORCE], "2.13.0+cpu", None, "RTX 4090, not used: torch 2.13.0+cpu is a CPU build",
         "-m pip uninstall -y torch && "),
        ([GEFORCE], "2.13.0+rocm6", Maker.AMD, "built for another maker's", "-m pip install torch==2.13.0"),
        ([RADEON], "2.13.0+cu130", Maker.NVIDIA, "built for another maker's", "one for ROCm"),
        ([BARE], "2.13.0+cu130", Maker.NVIDIA, "its driver is not loaded", "install NVIDIA's driver"),
        ([GEFORCE, RADEON], "2.13.0", Maker.NVIDIA, "torch 2.13.0 cannot use it", "nvidia-smi"),
    ],
)  # fmt: skip
def test_a_gpu_that_is_left_unused_is_told_with_what_mends_it(
    monkeypatch: pytest.MonkeyPatch,
    there: list[Gpus],
    version: str,
    built_for: Maker | None,
    measured: str,
    advice: str,
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    found = check_gpus(there, "auto", "cpu", version, built_for)
    assert found.state is Grade.LIMITED
    assert measured in found.measured
    assert advice in found.advice


def test_a_variable_that_hides_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = check_gpus([GEFORCE], "auto", "cpu", "2.13.0", Maker.NVIDIA)
    assert found.advice == "CUDA_VISIBLE_DEVICES is set and may hide it"


def test_a_gpu_that_is_used_or_was_not_asked_for_is_no_limit() -> None:
    assert check_gpus([GEFORCE], "auto", "cuda:0", "2.13.0", Maker.NVIDIA).state is Grade.OK
    assert check_gpus([], "auto", "cpu", "2.13.0+cpu", None) == Finding("gpu", Grade.OK, "none")
    found = check_gpus([], "auto", "cpu", "2.13.0", Maker.APPLE)
    assert (found.state, found.measured) == (Grade.LIMITED, "Apple's GPU (mps), not used: untested")
    found = check_gpus([GEFORCE], "cpu", "cpu", "2.13.0+cpu", None)
    assert (found.state, found.measured) == (Grade.OK, "NVIDIA GeForce RTX 4090, not asked for")


def test_the_doctor_looks_where_the_kernel_shows_them(tmp_path: Path, no_cards: None) -> None:
    kernel_file(tmp_path / "host", "dev/nvidia0")
    config = PeerConfig(folder=tmp_path / "peer", host="127.0.0.1")
    found = {finding.name: finding for finding in look_at_machine(config, tmp_path / "host")}
    assert found["device"].measured.startswith("cpu (")
    assert found["gpu"].state is Grade.LIMITED
    assert found["gpu"].measured.startswith("an NVIDIA GPU, not used: torch ")
