"""Checkpoints: bytes by hand, the safetensors library as reference, round trips as laws, torn files and
full disks."""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import math
import os
import pickle
import shutil
import struct
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from p2p_co2.config import OuterConfig, RunConfig
from p2p_co2.digest import digest
from p2p_co2.errors import ConfigError, EnvironmentFault, RemoteProtocolError
from p2p_co2.tensors import outer
from p2p_co2.tensors.checkpoint import agreed, parts, tree
from p2p_co2.tensors.checkpoint.folder import Checkpoint, load, load_agreed, save
from p2p_co2.tensors.fragments import plan_fragments
from tests.disks import fill

RUN = RunConfig(name="tested", fragments=2)


def stepped(numel: int, steps: int, seed: int = 0) -> outer.AgreedState:
    generator = torch.Generator().manual_seed(seed)
    state = outer.init(torch.randn(numel, generator=generator))
    for version in range(steps):
        state, _ = outer.step(OuterConfig(), state, torch.randn(numel, generator=generator), version)
    return state


def same(left: outer.AgreedState, right: outer.AgreedState) -> bool:
    return (
        torch.equal(left.params, right.params)
        and torch.equal(left.momentum, right.momentum)
        and left[0:1] + left[3:] == right[0:1] + right[3:]
    )


def module() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3).bfloat16())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.03)


def checkpoint_of(model: nn.Module, optimizer: torch.optim.Optimizer, inner_steps: int) -> Checkpoint:
    plan = plan_fragments(model, RUN.fragments)
    return Checkpoint(
        run_config_json=RUN.canonical_bytes().decode(),
        plan_digest=plan.digest,
        states=tuple(stepped(part.numel, inner_steps % 7, part.index) for part in plan.fragments),
        buffers=dict(model.named_buffers()),
        optimizer=optimizer.state_dict(),
        position=inner_steps / 3,
        inner_steps=inner_steps,
        tokens=inner_steps * 1000,
        residuals={1: torch.full((plan.fragments[1].numel,), 0.1)},
    )


def saved(folder: Path, *inner_steps: int) -> list[Path]:
    model = module()
    optimizer = adamw(model.parameters())
    train(model, optimizer, range(2))
    return [save(folder, checkpoint_of(model, optimizer, steps)) for steps in inner_steps]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- by hand


def test_state_bytes_by_hand() -> None:
    state = outer.AgreedState(3, torch.tensor([1.0, -2.0]), torch.tensor([0.5, 0.0]), 0.25, (1.0, 2.0, 3.0))
    header = b"p2pco2s\x01" + struct.pack("<QQdQdddd", 3, 2, 0.25, 3, 1, 2, 3, 0)
    data = header + struct.pack("<ffff", 1, -2, 0.5, 0)
    assert agreed.state_bytes(state) == data
    assert agreed.state_size_bytes(2) == len(data)
    assert agreed.state_digest(state, len(data)) == digest(digest(data))
    assert agreed.state_digest(state, 80) == digest(digest(data[:80]) + digest(data[80:]))
    assert same(agreed.state_from_bytes(data, 2), state)


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    saved(tmp_path / "deep" / "folder", 10, 20, 30)
    assert names(tmp_path / "deep" / "folder") == [
        "state-000000000020-001",
        "state-000000000030-001",
    ]
    assert load(tmp_path / "deep" / "folder").inner_steps == 30


def test_an_abandoned_future_is_set_aside_until_the_peer_has_come_as_far(tmp_path: Path) -> None:
    saved(tmp_path, 10, 2000, 15)
    assert names(tmp_path) == [
        "state-000000000010-001",
        "state-000000000015-001",
        "state-000000002000-001.set-aside",
    ]
    assert load(tmp_path).inner_steps == 15
    saved(tmp_path, 1999)
    assert "state-000000002000-001.set-aside" in names(tmp_path)
    saved(tmp_path, 2000)
    assert names(tmp_path) == ["state-000000001999-001", "state-000000002000-002"]


def test_one_of_the_same_step_stands_beside_the_earlier_one(tmp_path: Path) -> None:
    saved(tmp_path, 10, 10, 10)
    assert names(tmp_path) == ["state-000000000010-002", "state-000000000010-003"]
    assert load(tmp_path).path.name == "state-000000000010-003"


def test_any_number_of_one_step_may_follow_each_other(tmp_path: Path) -> None:
    (first,) = saved(tmp_path, 10)
    first.rename(tmp_path / "state-000000000010-999")
    saved(tmp_path, 10, 10)
    assert names(tmp_path) == ["state-000000000010-1000", "state-000000000010-1001"]
    assert load(tmp_path).path.name == "state-000000000010-1001"


def test_copies_under_names_of_the_users_own_are_neither_read_nor_removed(tmp_path: Path) -> None:
    (first,) = saved(tmp_path, 10)
    own = ["state-000000000010-001.bak", "state-keep", "state-keep.set-aside"]
    for name in own:
        shutil.copytree(first, tmp_path / name)
    saved(tmp_path, 20, 30)
    assert names(tmp_path) == sorted([*own, "state-000000000020-001", "state-000000000030-001"])
    assert load(tmp_path).inner_steps == 30


# ---- against a reference


def test_the_safetensors_library_reads_our_parts(tmp_path: Path) -> None:
    (path,) = saved(tmp_path, 12)
    theirs = dict[str, torch.Tensor]()
    for part in path.glob("*.safetensors"):
        theirs |= safetensors.torch.load_file(part)
    ours = load(tmp_path)
    assert torch.equal(theirs["0:agreed.0.params"], ours.states[0].params)
    assert torch.equal(theirs["0:buffer.1.running_var"], ours.buffers["1.running_var"])
    assert not any("weight" in name for name in theirs)  # nothing twice, and nothing frozen
    manifest = json.loads((path / parts.MANIFEST).read_text())
    assert manifest["metadata"]["run"] == RUN.canonical_bytes().decode()
    assert load_agreed(path).path == load_agreed(tmp_path).path == path


# ---- laws


@given(
    st.integers(0, 9),
    st.integers(0, 6),
    st.integers(0, 99),
)
def test_state_bytes_there_and_back(numel: int, steps: int, seed: int) -> None:
    state = stepped(numel, steps, seed)
    data = agreed.state_bytes(state)
    back = agreed.state_from_bytes(data, numel)
    assert same(back, state)
    assert agreed.state_bytes(back) == data
    back.params.add_(1.0)  # owns its memory
    pieces = [data[at : at + 24] for at in range(0, len(data), 24)]
    assert agreed.state_digest(state, 24) == digest(b"".join(map(digest, pieces)))
    given = bytearray(data)
    shared = agreed.state_from_bytes(given, numel)  # a download: no second copy of it
    assert same(shared, state)
    shared.params.add_(1.0)
    assert agreed.state_bytes(shared) == given != (data if numel else b"")


@pytest.mark.parametrize("part_bytes", [16, 100, parts.PART_BYTES])
def test_tensors_come_back_out_of_parts_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", part_bytes)
    torch.manual_seed(0)
    tensors = {f"t{i}": torch.randn(3 * i) for i in range(9)}
    tensors |= {"turned": torch.randn(5, 7).t(), "half": torch.randn(9).bfloat16(), "one": torch.tensor(3)}
    tensors |= {"tied": tensors["t3"], "0:7": torch.arange(9)}
    left = tmp_path / parts.TEMPORARY
    left.mkdir()
    (left / "part-00000.safetensors").write_bytes(b"what a killed process left")
    writing = parts.Writing(tmp_path / "folder", {"key": "word"})
    before = {name: values.clone() for name, values in tensors.items()}
    for some in (["t7"], [name for name in tensors if name != "t7"]):
        writing.put({name: tensors[name] for name in some})
        tensors["t7"].zero_()  # training goes on
    writing.put_values("later", torch.arange(50.0))
    writing.finish()
    writing.give_up()  # too late
    read, metadata = parts.read(tmp_path / "folder", lambda name: True)
    assert metadata == {"key": "word"}
    for name, values in (before | {"later": torch.arange(50.0)}).items():
        assert torch.equal(read.pop(name), values), name
    assert not read
    assert names(tmp_path) == ["folder"]


def test_the_swarm_digest_sees_order_and_count() -> None:
    first, second = b"a" * 32, b"b" * 32
    digests = {agreed.swarm_digest(some) for some in ([], [first], [first, second], [second, first])}
    assert len(digests) == 4


def test_training_continues_bit_for_bit(tmp_path: Path) -> None:
    model = module()
    optimizer = adamw(model.parameters())
    train(model, optimizer, range(5))
    written, five_steps_on = checkpoint_of(model, optimizer, 5), copy.deepcopy(model.state_dict())
    save(tmp_path, written)
    train(model, optimizer, range(5, 9))

    read = load(tmp_path)
    resumed = module()
    other = adamw(resumed.parameters())
    other.load_state_dict(dict(read.optimizer))
    resumed.load_state_dict(five_steps_on)
    train(resumed, other, range(5, 9))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, resumed.get_parameter(name)), name
    assert other.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]

    assert all(same(one, two) for one, two in zip(read.states, written.states, strict=True))
    assert torch.equal(read.residuals[1], written.residuals[1])
    assert set(read.buffers) == set(dict(model.named_buffers()))
    for field in ("run_config_json", "plan_digest", "position", "inner_steps", "tokens", "passed_over"):
        assert getattr(read, field) == getattr(written, field)


def test_optimizer_state_keeps_its_types(tmp_path: Path) -> None:
    odd = {
        "state": {0: {"step": 3, "tiny": 5e-324, "inf": math.inf, "on": True, "none": None, "word": "w"}},
        "param_groups": [{"betas": (0.9, 0.999), "empty": [], "nested": [(), {}, [torch.tensor(7)]]}],
        "dtype": torch.bfloat16,
    }
    model = module()
    save(tmp_path, replace(checkpoint_of(model, adamw(model.parameters()), 1), optimizer=odd))
    read = load(tmp_path).optimizer
    assert repr(read) == repr(odd)


class Foo(torch.Tensor):
    """As quantised optimizers have them."""


def a_list_that_holds_itself() -> list[Any]:
    items: list[Any] = []
    items.append(items)
    return items


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (object(), "a object"),
        (len, "a builtin_function_or_method"),
        (b"bytes", "a bytes"),
        (Point(1, 2), "a Point"),
        (np.array([1.0]), "a ndarray"),
        ({3}, "a set"),
        ({(1, 2): 3}, "a key of type tuple"),
        (torch.zeros(2, dtype=torch.complex128), "a tensor of complex128"),
        (torch.eye(2).to_sparse(), "a tensor of layout sparse_coo"),
        (torch.zeros(2, device="meta"), "a tensor without values"),
        (torch.zeros(2).as_subclass(Foo), "a Foo"),
        (a_list_that_holds_itself(), "holds itself"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_only_pickle_could_save_is_left_out_whole_and_named(
    tmp_path: Path, odd: Any, words: str
) -> None:
    state = {
        "state": {0: {"m": torch.ones(2), "odd": odd}, 1: {"m": torch.ones(3)}},
        "param_groups": [{"lr": 0.1, "odd": odd}, {"lr": 0.2}],
        "own": {"deep": [odd]},
    }
    said = tree.say(state)
    assert said.left_out == (
        f"the state of a parameter ({words})",
        f"'odd' of a group ({words})",
        f"'own' ({words})",
    )
    model = module()
    save(tmp_path, replace(checkpoint_of(model, adamw(model.parameters()), 1), optimizer=state))
    read = load(tmp_path).optimizer
    assert repr(read) == repr(
        {"state": {1: {"m": torch.ones(3)}}, "param_groups": [{"lr": 0.1}, {"lr": 0.2}]}
    )


TENSORS = {
    str(dtype).removeprefix("torch."): torch.arange(6).reshape(2, 3).to(dtype)
    for dtype in parts.DTYPES.values()
} | {
    "0-dim": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "turned": torch.randn(5, 7).t(),
    "every-second": torch.arange(9)[::2],
    "expanded": torch.ones(1).expand(4),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "negative": torch.tensor([1 + 2j]).conj().imag,
    "channels-last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "needs-grad": torch.ones(2, requires_grad=True),
    "parameter": nn.Parameter(torch.ones(2)),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_of_any_kind_comes_back_as_it_was(tmp_path: Path, kind: str) -> None:
    values = TENSORS[kind]
    assert parts.trouble_with(values) == ""
    model = module()
    whole = checkpoint_of(model, adamw(model.parameters()), 1)
    save(tmp_path, replace(whole, buffers={kind: values}, optimizer={"a": {"b": values}}))
    read = load(tmp_path)
    for back in (read.buffers[kind], read.optimizer["a"]["b"]):
        assert (back.dtype, back.shape) == (values.dtype, values.shape)
        assert repr(back.tolist()) == repr(values.tolist())


# ---- faults


FILES = [parts.MANIFEST, "part-00000.safetensors"]


@pytest.mark.parametrize("where", [0, 8, 60, 0.5, -1])
@pytest.mark.parametrize("harm", ["cut", "flip", "longer", "gone"])
@pytest.mark.parametrize("name", FILES)
def test_a_torn_one_falls_back_to_the_previous(tmp_path: Path, where: float, harm: str, name: str) -> None:
    newest = saved(tmp_path, 10, 20)[1] / name
    data = bytearray(newest.read_bytes())
    at = int(where * len(data)) if isinstance(where, float) else where % len(data)
    if harm == "cut":
        del data[at:]
    elif harm == "longer":
        data[at:at] = b"0"
    else:
        data[at] ^= 0x11
    newest.write_bytes(data)
    if harm == "gone":
        newest.unlink()
    for read in (load(tmp_path), load_agreed(tmp_path)):
        assert read.inner_steps == 10
        assert len(read.passed_over) == 1
        assert read.passed_over[0].startswith("state-000000000020-001: ")


def test_one_that_cannot_be_read_falls_back_to_the_previous(tmp_path: Path) -> None:
    older, newest = saved(tmp_path, 10, 20)
    (newest / parts.MANIFEST).unlink()
    (newest / parts.MANIFEST).symlink_to("/proc/self/mem")  # what even root cannot read
    read = load(tmp_path)
    assert read.inner_steps == 10
    assert read.passed_over[0].startswith("state-000000000020-001: cannot read")
    shutil.rmtree(older)
    with pytest.raises(EnvironmentFault, match=r"cannot read .*000020"):
        load(tmp_path)


@pytest.mark.parametrize("content", [pickle.dumps([1, 2, 3]), safetensors.torch.save({"a": torch.zeros(3)})])
def test_a_file_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    """Earlier versions wrote one."""
    path = tmp_path / "state-000000000010.safetensors"
    path.write_bytes(content)
    for place in (path, tmp_path):
        with pytest.raises(ConfigError, match=r"no whole .*: not a checkpoint of this version"):
            load_agreed(place)


def forged(folder: Path, rows: dict[str, Any], part: dict[str, torch.Tensor]) -> Path:
    """A checkpoint of one part, all of it with right digests."""
    folder.mkdir()
    data = safetensors.torch.save({name: values.clone() for name, values in part.items()})
    (folder / "part-00000.safetensors").write_bytes(data)
    table = {"metadata": {}, "tensors": rows, "parts": [[len(data), hashlib.sha256(data).hexdigest()]]}
    seal = hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
    (folder / parts.MANIFEST).write_text(json.dumps(table | {"sha256": seal}))
    return folder


X = torch.zeros(4)


@pytest.mark.parametrize(
    ("rows", "part", "words"),
    [
        ({"x": ["float32", [0, 1 << 48, 1 << 48]]}, {}, "impossible shape"),
        ({"x": ["float32", [1 << 48, 1 << 48, 1 << 48, 0]]}, {}, "impossible shape"),
        ({"x": ["float32", [-1]]}, {}, "impossible shape"),
        ({"x": ["float32", [True]]}, {}, "impossible shape"),
        ({"x": ["float32", [1] * 65]}, {}, "impossible shape"),
        ({"x": ["float32", [1 << 30]]}, {"0:x": X}, "larger than its parts"),
        ({"x": ["object", [4]]}, {"0:x": X}, "not readable"),
        ({"x": ["float32", [8]]}, {"0:x": X}, "missing"),
        ({"x": ["float32", [8]]}, {"0:x": X, "0:y": X, "8:x": X}, "not where it should be"),
        ({"x": ["float32", [4]]}, {"0:x": X, "4:x": X}, "not where it should be"),
        ({"x": ["float32", [4]]}, {"-1:x": X}, "not where it should be"),
        ({"x": ["float32", [4]]}, {"x": X}, "not readable"),
        ({"x": ["float32", [0, 3]]}, {}, ""),
        ({"x": ["float32", [2, 2]]}, {"0:x": X, "0:more": X}, ""),
    ],
)
def test_what_a_forger_says_is_believed_only_as_far_as_it_fits(
    tmp_path: Path, rows: dict[str, Any], part: dict[str, torch.Tensor], words: str
) -> None:
    path = forged(tmp_path / "state", rows, part)
    if words:
        with pytest.raises(parts.Damaged, match=words):
            parts.read(path, lambda name: True)
    else:
        assert list(parts.read(path, lambda name: True)[0]["x"].shape) == rows["x"][1]


@pytest.mark.parametrize(
    ("place", "lie"),
    [
        (("metadata", "past"), "[[1]]"),
        (("metadata", "past"), "[" * 100_000),
        (("metadata", "position"), "0x1p99999"),
        (("parts", 0, 0), float("inf")),
    ],
    ids=["shape", "depth", "number", "size"],
)
def test_what_a_forger_sealed_falls_back_to_the_previous(
    tmp_path: Path, place: tuple[str | int, ...], lie: object
) -> None:
    earlier, path = saved(tmp_path, 10, 20)
    table = json.loads((path / parts.MANIFEST).read_text())
    del table["sha256"]
    inner = table
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = lie
    seal = hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
    (path / parts.MANIFEST).write_text(json.dumps(table | {"sha256": seal}))
    assert load(tmp_path).path == earlier


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_not_read_that_would_take_all_memory(tmp_path: Path, name: str) -> None:
    path = forged(tmp_path / "state", {}, {"0:x": X})
    with (path / name).open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(parts.Damaged, match=r"larger than one can be|another size"):
        parts.read(path, lambda name: True)


def test_no_checkpoint_is_the_users_to_solve(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match="no checkpoint there; give a peer's checkpoint folder"):
            load(folder)


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "the disk is full"), (errno.EACCES, "no permission"), (errno.EIO, "Input/output")],
)
def test_a_failing_disk_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    saved(tmp_path, 10)

    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(EnvironmentFault, match=words):
            saved(tmp_path, 20)
    assert names(tmp_path) == ["state-000000000010-001"]
    assert load(tmp_path).inner_steps == 10


def test_a_disk_that_is_full_keeps_what_it_has_and_takes_more_when_there_is_room(small_disk: Path) -> None:
    folder = small_disk / "checkpoint"
    saved(folder, 10)
    fill(small_disk)
    with pytest.raises(EnvironmentFault, match="the disk is full; free some space or give another folder"):
        saved(folder, 20)
    assert names(folder) == ["state-000000000010-001"]
    assert load(folder).inner_steps == 10
    (small_disk / "filling").unlink()
    saved(folder, 20)
    assert (load(folder).inner_steps, load(folder).passed_over) == (20, ())


def test_a_checkpoint_of_another_format_is_refused_in_one_line(tmp_path: Path) -> None:
    (path,) = saved(tmp_path, 2)
    tensors, metadata = parts.read(path, lambda name: True)
    shutil.rmtree(path)
    writing = parts.Writing(path, {**metadata, "format": "p2p-co2 checkpoint 1"})
    writing.put(tensors)
    writing.finish()
    with pytest.raises(ConfigError, match=r"no whole checkpoint there: .* not a checkpoint of this version"):
        load(tmp_path)


# ---- what donors send


def change(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


@pytest.mark.parametrize(
    "lie",
    [
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: b"",
        lambda data: change(data, 7, b"\x02"),
        lambda data: change(data, 8, struct.pack("<Q", 1 << 60)),
        lambda data: change(data, 16, struct.pack("<Q", 1 << 60)),
        lambda data: change(data, 24, struct.pack("<d", math.nan)),
        lambda data: change(data, 24, struct.pack("<d", -1.0)),
        lambda data: change(data, 24, struct.pack("<d", -0.0)),
        lambda data: change(data, 32, struct.pack("<Q", 5)),
        lambda data: change(data, 32, struct.pack("<Q", 1)),
        lambda data: change(data, 40, struct.pack("<d", math.inf)),
        lambda data: change(data, 72, struct.pack("<f", math.nan)),
        lambda data: change(data, len(data) - 4, struct.pack("<f", -math.inf)),
    ],
)
def test_a_lying_donor_is_refused(lie: Callable[[bytes], bytes]) -> None:
    data = agreed.state_bytes(stepped(3, 4))
    with pytest.raises(RemoteProtocolError, match="bad_state"):
        agreed.state_from_bytes(lie(data), 3)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_read(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        agreed.state_from_bytes(data, 4)
