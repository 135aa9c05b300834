"""The front door believes nothing: a model and an optimizer either train two peers to equal parameters, or
are refused with the parameter's name and the cure before the network is used."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from p2p_co2.config import PeerConfig
from p2p_co2.errors import ConfigError
from p2p_co2.trainer import Connection, connect, join
from p2p_co2.trainer.network_thread import NetworkThread
from tests.paced_recipe import Descent
from tests.peer_bench import STEPS, Lone, impatient, meet

__all__ = ["impatient"]
Made = tuple[Any, Any]
"""A model and its optimizer."""
UNUSED = cast(NetworkThread, SimpleNamespace(warn=print))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))


# ---- taken: two peers that start alike and train apart end alike


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight


class Shared(nn.Module):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"embed": nn.Embedding(9, 4), "out": nn.Linear(4, 4)})
        self.decoder = nn.ModuleDict({"embed": self.encoder["embed"], "out": nn.Linear(4, 4)})


class Scales(nn.Module):
    """A parameter without dimensions, one without elements, one without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.nothing = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.empty(0, 3))
        self.inner, self.module = nn.Linear(3, 3), nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.ones(5, dtype=torch.int8), requires_grad=False)
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))


def of_dtype(dtype: torch.dtype) -> Callable[[], nn.Module]:
    return lambda: plain().to(dtype)


def mixed() -> nn.Module:
    model = plain()
    model[0].to(torch.bfloat16)
    return model


def partly_frozen() -> nn.Module:
    model = plain()
    model[0].requires_grad_(False)
    return model


def transposed() -> nn.Module:
    model = plain()
    model[0].weight.data = model[0].weight.data.t().contiguous().t()
    return model


def one_buffer() -> nn.Module:
    """All parameters as views of one tensor, as flattened recurrent layers have them."""
    model = plain()
    flat, at = torch.empty(sum(p.numel() for p in model.parameters())), 0
    for parameter in model.parameters():
        view = flat[at : at + parameter.numel()].view(parameter.shape)
        at += parameter.numel()
        parameter.data = view.copy_(parameter.data)
    return model


def compiled() -> nn.Module:
    return cast(nn.Module, torch.compile(plain(), backend="eager"))


def compiled_in_part() -> nn.Module:
    model = plain()
    model[2] = checkpoint_wrapper(torch.compile(model[2], backend="eager"))
    return model


def weight_normed() -> nn.Module:
    model = plain()
    nn.utils.parametrizations.weight_norm(model[0])
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "tied": Tied,
    "a shared module": Shared,
    "odd sizes, and a layer called module": Scales,
    "bfloat16": of_dtype(torch.bfloat16),
    "float16": of_dtype(torch.float16),
    "float64": of_dtype(torch.float64),
    "mixed dtypes": mixed,
    "partly frozen": partly_frozen,
    "not contiguous": transposed,
    "views of one buffer": one_buffer,
    "channels last": lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
    "recurrent": lambda: nn.LSTM(3, 5, 2),
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
    "weight norm": weight_normed,
    "compiled": compiled,
    "compiled and checkpointed in part": compiled_in_part,
    "DataParallel": lambda: nn.DataParallel(plain()),
    "TorchScript": lambda: torch.jit.script(plain()),
}


def by_groups(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [one], "lr": 0.01} for one in model.parameters()], lr=0.1)


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "SGD": sgd,
    "SGD with momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "AdamW by groups": by_groups,
    "a rate that is a tensor": lambda model: torch.optim.Adam(
        model.parameters(), lr=torch.tensor(0.01), capturable=False, foreach=False
    ),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
    "one of the user's own": lambda model: Descent(model.parameters()),
}
CASES = [(name, "SGD") for name in MODELS] + [("plain", name) for name in OPTIMIZERS if name != "SGD"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize(("model", "optimizer"), CASES)
def test_two_peers_with_it_train_to_equal_parameters(
    tmp_path: Path, impatient: None, model: str, optimizer: str
) -> None:
    peers = []
    for name in ("a", "b"):
        torch.manual_seed(0)
        made = MODELS[model]()
        peers.append(Lone(tmp_path / name, made, OPTIMIZERS[optimizer](made), name))
    start = peers[0].live()
    for step in range(3 * STEPS + 1):
        for peer in peers:
            peer.train() if step < 2 * STEPS else peer.tell()
        meet(*peers)
    for peer in peers:
        peer.peer.leave()
    agreed = [peer.peer.agreed_parameters() for peer in peers]
    for name, values in agreed[0].items():
        assert torch.equal(values, agreed[1][name]), name
    for ours, theirs, begun, parameter in zip(
        peers[0].live(), peers[1].live(), start, peers[0].model.parameters(), strict=True
    ):
        assert torch.equal(ours.float(), theirs.float())
        if parameter.requires_grad and parameter.numel():
            assert not torch.equal(ours, begun)


# ---- refused


def meta() -> Made:
    with torch.device("meta"):
        model = plain()
    return model, sgd(model)


def frozen_meta() -> Made:
    model = plain()
    model[0].to("meta").requires_grad_(False)
    return model, sgd(model[2])


def meta_buffer() -> Made:
    model = plain()
    model[2].register_buffer("mask", torch.ones(2, device="meta"))
    return model, sgd(model)


def lazy() -> Made:
    return nn.Sequential(nn.LazyLinear(3)), sgd(plain())


def changed(change: Callable[[nn.Sequential], None], early: bool = True) -> Callable[[], Made]:
    """The plain model after a change, before or after its optimizer is made."""

    def made() -> Made:
        model = plain()
        if early:
            change(model)
        optimizer = sgd(model)
        if not early:
            change(model)
        return model, optimizer

    return made


def retype(dtype: torch.dtype) -> Callable[[nn.Sequential], None]:
    def change(model: nn.Sequential) -> None:
        model[0].weight = nn.Parameter(model[0].weight.detach().to(dtype))

    return change


def tie_by_data(model: nn.Sequential) -> None:
    model.append(nn.Linear(8, 6))
    model[3].weight.data = model[0].weight.data


def overlap(model: nn.Sequential) -> None:
    values = torch.zeros(100)
    model[0].weight, model[2].weight = (
        nn.Parameter(values[:48].view(6, 8)),
        nn.Parameter(values[40:64].view(4, 6)),
    )


def expand(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.zeros(1, 8).expand(6, 8))


def self_overlap(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.zeros(13).as_strided((6, 8), (1, 1)))


def sparse(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.eye(6, 8).to_sparse())


def not_finite(value: float) -> Callable[[nn.Sequential], None]:
    def change(model: nn.Sequential) -> None:
        model[2].weight.data[1, 2] = value

    return change


def replace(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.ones(6, 8))


def in_inference_mode() -> Made:
    with torch.inference_mode():
        model = plain()
    return model, sgd(model)


def copied() -> Made:
    model = plain()
    return copy.deepcopy(model), sgd(model)


def of_half() -> Made:
    model = plain()
    return model, sgd(model[0])


def of_more() -> Made:
    model = plain()
    return model, torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3, 7))], lr=0.1)


class Scaled(torch.Tensor):
    """A tensor with a meaning of its own, as quantisers make."""


def special() -> Made:
    model = plain()
    model[0].weight = nn.Parameter(torch.ones(6, 8).as_subclass(Scaled))
    return model, sgd(model)


def rated(rate: Any) -> Callable[[], Made]:
    def made() -> Made:
        model = plain()
        optimizer = sgd(model)
        optimizer.param_groups[0]["lr"] = rate
        return model, optimizer

    return made


REFUSED: dict[str, tuple[Callable[[], Made], str]] = {
    "no model": (lambda: (None, sgd(plain())), r"join: model: is None; give the torch.nn.Module"),
    "no optimizer": (lambda: (plain(), None), r"join: optimizer: is None; give the model first"),
    "swapped": (lambda: (sgd(plain()), plain()), "join: model: is of type SGD"),
    "two models": (lambda: (plain(), plain()), "join: optimizer: is of type Sequential"),
    "parameters": (lambda: (list(plain().parameters()), sgd(plain())), "join: model: is of type list"),
    "a scheduler": (
        lambda: (plain(), torch.optim.lr_scheduler.ConstantLR(sgd(plain()))),
        "join: optimizer: is of type ConstantLR",
    ),
    "all frozen": (changed(lambda model: model.requires_grad_(False) and None), "no parameter to train"),
    "nothing in it": (lambda: (nn.Tanh(), sgd(plain())), "no parameter to train"),
    "meta": (meta, r"0.weight: has no values yet .*to_empty"),
    "frozen on meta": (frozen_meta, r"0.weight: has no values yet"),
    "a meta buffer": (meta_buffer, r"2.mask: has no values yet"),
    "lazy": (lazy, r"0.weight: has no values yet .*make one forward pass"),
    "complex": (changed(retype(torch.complex64)), r"0.weight: is a Tensor of complex64, strided; only plain"),
    "float8": (changed(retype(torch.float8_e4m3fn)), r"0.weight: is a Tensor of float8_e4m3fn"),
    "sparse": (changed(sparse), r"0.weight: is a Tensor of float32, sparse_coo; .*to_dense"),
    "tied by data": (changed(tie_by_data), r"shares memory with (0|3).weight.*make them one parameter"),
    "overlapping": (changed(overlap), r"2.weight: shares memory with 0.weight"),
    "expanded": (changed(expand), r"0.weight: .*memory of their own"),
    "strided over itself": (changed(self_overlap), r"0.weight: .*memory of their own"),
    "a special tensor": (special, r"0.weight: is a Scaled of float32"),
    "made in inference mode": (in_inference_mode, r"0.weight: is a Tensor of float32, strided; .*leaves"),
    "NaN": (changed(not_finite(float("nan"))), r"2.weight: has values that are not finite"),
    "Inf": (changed(not_finite(float("-inf"))), r"2.weight: has values that are not finite"),
    "an optimizer of another copy": (copied, r"holds none of the model's parameters \(0.weight"),
    "replaced after the optimizer": (changed(replace, early=False), r"0.weight: is trained by no group"),
    "an optimizer of half": (of_half, r"2.weight: is trained by no group of the optimizer.*requires_grad_"),
    "an optimizer of more": (of_more, r"trains a parameter of shape \(3, 7\) that is not the model's"),
    "a rate of 0": (rated(0.0), r"optimizer: param_groups\[0\]: has the learning rate 0.0; give it the rate"),
    "a rate that is NaN": (rated(float("nan")), r"param_groups\[0\]: has the learning rate nan"),
    "a negative rate": (rated(-0.1), r"param_groups\[0\]: has the learning rate -0.1"),
    "a tensor rate of 0": (rated(torch.tensor(0.0)), r"param_groups\[0\]: has the learning rate"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_exchanged_is_refused_by_name_before_the_network_is_used(case: str) -> None:
    make, words = REFUSED[case]
    model, optimizer = make()
    with pytest.raises(ConfigError, match=words):
        join("no ticket, and so a TicketError if it were looked at", model, optimizer)
    unused = Connection(UNUSED, PeerConfig())
    with pytest.raises(ConfigError, match=words):
        unused.start(model, optimizer)


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded() -> Made:
    from torch.distributed.fsdp import fully_shard

    model = plain()
    optimizer = sgd(model)
    fully_shard(model)
    return model, optimizer


def sharded_by_a_wrapper() -> Made:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = nn.Sequential(FullyShardedDataParallel(plain(), device_id=torch.device("cpu")))
    return model, sgd(model)


def parallel() -> Made:
    model = nn.Sequential(nn.parallel.DistributedDataParallel(plain()))
    return model, sgd(model)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (sharded, r"0.weight: is a DTensor of float32, strided; .*shard nothing"),
        (sharded_by_a_wrapper, "model: 0: is wrapped by .*: one peer per process"),
        (parallel, r"model: 0: is wrapped by .*: one peer per process"),
    ],
)
def test_what_other_processes_share_is_refused(make: Callable[[], Made], words: str) -> None:
    model, optimizer = make()
    with pytest.raises(ConfigError, match=words):
        join("no ticket", model, optimizer)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((None, PeerConfig(), print), "ticket: is of type NoneType; give the word"),
        ((Path("ticket"), PeerConfig(), print), "ticket: is of type PosixPath"),
        (("ticket", None, print), r"config: is of type NoneType; give PeerConfig\(folder"),
        (("ticket", "runs/me", print), "config: is of type str"),
        (("ticket", {"folder": "me"}, print), "config: is of type dict"),
        (("ticket", PeerConfig(), None), "on_event: is of type NoneType; give a function"),
    ],
)
def test_other_arguments_are_refused_by_name(arguments: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        connect(*arguments)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (0.5, r"learning_rate: is 0.5; give a function"),
        (lambda position: None, "gives None at position 0"),
        (lambda position: float("nan"), "gives nan at position 0"),
        (lambda position: -1.0, "gives -1.0 at position 0; it must give a factor of 0 or more"),
    ],
)
def test_a_schedule_is_tried_once_at_the_start(schedule: Any, words: str) -> None:
    model = plain()
    unused = Connection(UNUSED, PeerConfig())
    with pytest.raises(ConfigError, match=words):
        unused.start(model, sgd(model), schedule)
