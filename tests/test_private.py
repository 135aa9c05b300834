"""What other libraries do not promise to keep is as we use it: one test for each such thing."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD

from p2p_co2.recipes.optimizers import Optimizers
from p2p_co2.system.private import call_before_threads_end
from p2p_co2.tensors import private


@pytest.fixture(name="sharded")
def _sharded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[nn.Module]:
    """A layer in the one shard of a group of one."""
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        yield fully_shard(nn.Linear(4, 2))
    finally:
        dist.destroy_process_group()


def test_a_call_can_be_put_before_the_end_of_the_threads() -> None:
    """That it comes in time is seen where a program leaves its swarm at its end."""
    assert hasattr(threading, "_register_atexit")
    call_before_threads_end(lambda: None)


def test_a_cut_parameter_is_known_by_its_class(sharded: nn.Module) -> None:
    assert all(map(private.is_dtensor, sharded.parameters()))
    assert not private.is_dtensor(torch.zeros(1))


def test_a_sharded_module_is_of_the_authors_class_and_shards_itself_again(sharded: nn.Module) -> None:
    assert type(sharded) is not nn.Linear
    assert private.class_of(sharded) is private.class_of(nn.Linear(1, 1)) is nn.Linear
    sharded(torch.zeros(1, 4))
    private.reshard(sharded)
    assert all(map(private.is_dtensor, sharded.parameters()))
    private.reshard(nn.Linear(1, 1))  # nothing to do


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of compile itself
def test_wrappers_are_known_by_where_they_keep_the_module() -> None:
    layer = nn.Linear(2, 2)
    for wrapped in (torch.compile(layer), checkpoint_wrapper(layer), nn.DataParallel(layer)):
        assert isinstance(wrapped, nn.Module)
        assert private.inner_module(wrapped) is layer
        assert not private.is_fully_sharded(wrapped)
    assert private.inner_module(layer) is None
    older = nn.Module()
    older.add_module(private.FULLY_SHARDED, layer)
    assert private.inner_module(older) is layer
    assert private.is_fully_sharded(older)


def test_a_modules_own_tensors_and_children_come_under_all_their_names() -> None:
    module = nn.Module()
    module.one = module.other = nn.Linear(1, 1)
    module.register_buffer("saved", torch.zeros(1))
    module.register_buffer("left_out", torch.zeros(1), persistent=False)
    module.register_parameter("none", None)
    assert private.own_modules(module).keys() == {"one", "other"}
    assert private.own_tensors(module).keys() == {"saved", "left_out"}
    assert private.names_not_saved(module) == {"left_out"}


def test_batch_norms_are_known_and_those_without_statistics_are_none() -> None:
    assert private.is_batch_norm(nn.BatchNorm2d(1))
    assert not private.is_batch_norm(nn.BatchNorm1d(1, track_running_stats=False))
    assert not private.is_batch_norm(nn.LayerNorm(1))


def test_torchs_own_methods_find_where_hooks_on_a_state_go() -> None:
    parts = Optimizers([SGD([nn.Parameter(torch.zeros(1))], lr=1.0)])
    called = list[str]()
    parts.register_state_dict_pre_hook(lambda one: called.append("before"))
    parts.register_state_dict_post_hook(lambda one, said: called.append("after"))
    parts.register_load_state_dict_pre_hook(lambda one, said: called.append("before load"))
    parts.register_load_state_dict_post_hook(lambda one: called.append("after load"))
    parts.load_state_dict(parts.state_dict())
    assert called == ["before", "after", "before load", "after load"]


def test_lightnings_fetcher_is_where_it_was() -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    trainer = lightning.Trainer(logger=False, accelerator="cpu")
    assert private.fetcher_of(trainer) is None  # until it fits
