"""The agreed parameters of all stages as those of the whole model, fragment by fragment.

    whole = WholeModel(plan_fragments(model, 4), names)
    for stage, (plan, states) in enumerate(stages):
        whole.put(stage, plan, states)
    states = whole.states()

``names[stage]``: what each trained parameter of a stage is called in the whole model. Stages are cut into
fragments of their own, so a fragment of the whole holds slices of several stages' fragments.

Law: every value of the whole model comes from exactly one stage, in its own place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from p2p_co2.errors import ConfigError, LocalProtocolError
from p2p_co2.tensors.fragments import FragmentPlan, ParameterSlice, large_tensor
from p2p_co2.tensors.names import named_buffers, named_parameters, trained_parameters
from p2p_co2.tensors.outer import AgreedState

Names = Sequence[Mapping[str, str]]
"""Of each stage: its name of a tensor, and the whole model's."""


class WholeModel:
    """``plan``: of the whole model. What is not ``put`` yet holds anything."""

    def __init__(self, plan: FragmentPlan, names: Names) -> None:
        self._names = names
        self._params = [large_tensor(one.numel) for one in plan.fragments]
        self._rooms: dict[str, list[tuple[ParameterSlice, Tensor]]] = {}
        for part, room in _parts(plan, self._params):
            self._rooms.setdefault(part.name, []).append((part, room))
        self._version = -1
        self._missing = plan.numel

    def put(self, stage: int, plan: FragmentPlan, states: Sequence[AgreedState]) -> None:
        """The agreed ``states`` of ``stage``, whose model was cut by ``plan``; once for each stage."""
        for part, values in _parts(plan, [state.params for state in states]):
            for there, room in self._rooms[self._names[stage][part.name]]:
                start = max(part.start, there.start)
                stop = min(part.stop, there.stop)
                if start < stop:
                    at = slice(start - there.start, stop - there.start)
                    room[at] = values[start - part.start : stop - part.start]
                    self._missing -= stop - start
        oldest = min(state.version for state in states)
        self._version = oldest if self._version < 0 else min(self._version, oldest)

    def states(self) -> list[AgreedState]:
        """Of the whole model's fragments, all of the oldest version that any stage's fragment has. To sample
        and evaluate: the outer optimizer's momentum and norms begin anew."""
        if self._missing:
            raise LocalProtocolError(f"{self._missing} values of the whole model were not put")
        still = torch.zeros(1, dtype=torch.float32, device="cpu")
        return [AgreedState(self._version, one, still.expand(one.numel()), 0.0, ()) for one in self._params]


def whole_names(whole: nn.Module, stages: Sequence[nn.Module]) -> list[dict[str, str]]:
    """What ``whole`` calls the trained parameters and the saved buffers of each of ``stages``, whose tensors
    it shares; what it does not hold is left out.

    Raises ``ConfigError`` unless every trained parameter is in ``whole`` and in one stage.
    """
    named = {id(one): name for name, one in _tensors(whole).items()}
    found = [
        {name: named[id(one)] for name, one in _tensors(stage).items() if id(one) in named}
        for stage in stages
    ]
    pairs = zip(found, stages, strict=True)
    trained = [names.get(name, "") for names, stage in pairs for name in trained_parameters(stage)]
    if sorted(trained) != sorted(trained_parameters(whole)):
        problem = "the whole model must be made of the very parameters of its stages, each once"
        raise ConfigError("recipe", "stages", f"{problem}; correct what joins them")
    return found


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**named_parameters(module), **named_buffers(module, persistent=True)}


def _parts(plan: FragmentPlan, flat: Sequence[Tensor]) -> Iterator[tuple[ParameterSlice, Tensor]]:
    """All slices of all fragments, and where their values lie in ``flat``, the fragments' values."""
    for fragment, values in zip(plan.fragments, flat, strict=True):
        yield from ((part, values[at]) for part, at in fragment.parts())
