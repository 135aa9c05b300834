"""The names that peers know parameters by: the author's own, whatever this machine wrapped round the
model."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from p2p_co2.tensors.fragments.names import (
    named_buffers,
    named_modules,
    named_parameters,
    shared_names,
)
from p2p_co2.tensors.fragments.plan import plan_fragments


class Gpt(nn.Module):
    """Blocks in a list, a tied head, a buffer, and a module that its author called ``module``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(4))
        self.module = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(self.module(hidden)))


def whole(model: Gpt) -> nn.Module:
    return torch.compile(model, backend="eager")


def parallel(model: Gpt) -> nn.Module:
    return nn.DataParallel(model)


def compiled_in_parallel(model: Gpt) -> nn.Module:
    return nn.DataParallel(torch.compile(model, backend="eager"))


def by_block(model: Gpt) -> nn.Module:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="eager")
    return model


def some_blocks(model: Gpt) -> nn.Module:
    model.blocks[1] = checkpoint_wrapper(torch.compile(model.blocks[1], backend="eager"))
    return model


def bare(model: Gpt) -> nn.Module:
    return model


WRAPPERS = [whole, parallel, compiled_in_parallel, by_block, some_blocks]


@pytest.mark.parametrize("wrap", [bare, *WRAPPERS])
def test_a_wrapped_model_has_the_names_of_the_model(wrap: Callable[[Gpt], nn.Module]) -> None:
    model = Gpt()
    names, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    modules = dict(model.named_modules())
    wrapped = wrap(model)
    assert list(named_parameters(wrapped)) == list(names)
    assert all(named_parameters(wrapped)[name] is parameter for name, parameter in names.items())
    assert list(named_buffers(wrapped)) == list(buffers)
    assert dict(named_modules(wrapped)) == modules
    assert "module.weight" in names  # the author's own


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_a_wrapped_model_is_cut_as_the_model_is(wrap: Callable[[Gpt], nn.Module], count: int) -> None:
    plan = plan_fragments(Gpt(), count)
    assert plan_fragments(wrap(Gpt()), count) == plan


@pytest.mark.parametrize("wrap", [bare, *WRAPPERS])
def test_names_and_further_names_are_those_of_the_models_state(wrap: Callable[[Gpt], nn.Module]) -> None:
    """A tied weight has two, and so has all of a module that stands in two places."""
    model = Gpt()
    model.again = model.blocks[2]
    state = dict(model.state_dict())
    wrapped = wrap(model)
    further = shared_names(wrapped)
    assert further["head.weight"] == "embed.weight"
    assert len(further) == 1 + len(model.blocks[2].state_dict())
    assert {*named_parameters(wrapped), *further, *named_buffers(wrapped)} == set(state)
    assert all(state[name].data_ptr() == state[first].data_ptr() for name, first in further.items())
