"""Several inner optimizers as one: ``torch.optim.Muon`` for matrices beside ``AdamW`` for the rest, say.

``Optimizers`` holds the optimizers it was given and no state of its own. Its groups are theirs, in their
order, so a learning rate that is set in a group of the one is set in the other. Its ``state_dict`` numbers
all parameters through, as torch does for one optimizer with so many groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from p2p_co2.errors import ConfigError
from p2p_co2.tensors.names import owned_by
from p2p_co2.tensors.private import add_state_hooks, state_hooks


class _States(MutableMapping[Tensor, Any]):
    """The states of several optimizers, by parameter."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self._parts = parts

    def _of(self, parameter: Tensor) -> Any:
        for part in self._parts:
            if parameter in part.state or any(parameter is one for one in owned_by(part)):
                return part.state
        raise KeyError(parameter)

    def __getitem__(self, parameter: Tensor) -> Any:
        return self._of(parameter)[parameter]

    def __setitem__(self, parameter: Tensor, state: Any) -> None:
        self._of(parameter)[parameter] = state

    def __delitem__(self, parameter: Tensor) -> None:
        del self._of(parameter)[parameter]

    def __iter__(self) -> Iterator[Tensor]:
        for part in self._parts:
            yield from part.state

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._parts)

    def __contains__(self, parameter: object) -> bool:
        return any(parameter in part.state for part in self._parts)


class Optimizers(Optimizer):
    """``parts`` as one ``torch.optim.Optimizer``: ``step`` and ``zero_grad`` are those of all of them, one
    after the other. Raises ``ConfigError`` for what is no optimizer, and for none at all."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        if not parts or not all(hasattr(part, "param_groups") for part in parts):
            kinds = ", ".join(type(part).__name__ for part in parts) or "none"
            problem = f"is a list of {kinds}; give one torch.optim optimizer, or a list of them"
            raise ConfigError("join", "optimizer", problem)
        self.parts = tuple(parts)
        self._check_shared()
        add_state_hooks(self)  # of the state as a whole

    def _check_shared(self) -> None:
        seen = set[int]()
        for part in self.parts:
            own = {id(parameter) for parameter in owned_by(part)}
            if seen & own:
                problem = "two of them train the same parameter; give each parameter to one optimizer"
                raise ConfigError("join", "optimizer", problem)
            seen |= own

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # torch has an attribute
        """The groups of all parts: their own objects, in a new list."""
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.parts[0].state if len(self.parts) == 1 else _States(self.parts)

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Those of the first."""
        return dict(self.parts[0].defaults)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        if closure is not None and len(self.parts) > 1:
            raise ConfigError("step", "closure", "goes to one optimizer, and there are several; leave it out")
        given = [part.step() if closure is None else part.step(closure) for part in self.parts]
        return given[0]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def register_step_pre_hook(self, hook: Any) -> RemovableHandle:
        """Called by the first."""
        return self.parts[0].register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> RemovableHandle:
        """Called by the last."""
        return self.parts[-1].register_step_post_hook(hook)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """To the first."""
        self.parts[0].add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        for before in state_hooks(self, "state_dict_pre"):
            before(self)
        said = self._states_said()
        for after in state_hooks(self, "state_dict_post"):
            said = after(self, said) or said
        return said

    def _states_said(self) -> dict[str, Any]:
        if len(self.parts) == 1:
            return self.parts[0].state_dict()
        states = dict[int, Any]()
        groups = list[dict[str, Any]]()
        first = 0
        for part in self.parts:
            said = part.state_dict()
            states |= {first + number: state for number, state in said["state"].items()}
            for group in said["param_groups"]:
                groups.append({**group, "params": [first + number for number in group["params"]]})
            first += len(owned_by(part))
        return {"state": states, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises ``ValueError`` if it is not of as many groups and parameters."""
        state_dict = dict(state_dict)  # a hook may change it in place, as torch has it
        for before in state_hooks(self, "load_state_dict_pre"):
            state_dict = before(self, state_dict) or state_dict
        self._load_states(state_dict)
        for after in state_hooks(self, "load_state_dict_post"):
            after(self)

    def _load_states(self, state_dict: dict[str, Any]) -> None:
        if len(self.parts) == 1:
            self.parts[0].load_state_dict(state_dict)
            return
        groups = list(state_dict["param_groups"])
        if len(groups) != len(self.param_groups):
            raise ValueError(f"the state has {len(groups)} groups, and here are {len(self.param_groups)}")
        first = 0
        for part in self.parts:
            own = groups[: len(part.param_groups)]
            groups = groups[len(part.param_groups) :]
            stop = first + len(owned_by(part))
            states = {at - first: one for at, one in state_dict["state"].items() if first <= at < stop}
            moved = [{**group, "params": [at - first for at in group["params"]]} for group in own]
            part.load_state_dict({"state": states, "param_groups": moved})
            first = stop

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(type(part).__name__ for part in self.parts)})"


def as_one(made: Any) -> Any:
    """A list of optimizers as one; anything else as it is, for ``check_model`` to look at."""
    return Optimizers(made) if isinstance(made, list | tuple) else made
