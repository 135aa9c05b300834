"""run_recipe: the organiser's recipe, or refused before a line of it has run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from p2p_co2.config import RunConfig
from p2p_co2.errors import ConfigError
from p2p_co2.recipes import load_run_recipe, recipe_digest

TINY: dict[str, str | int | float | bool] = {"layers": 1, "width": 16, "heads": 2, "context": 16}
OWN = """
from pathlib import Path
import torch
from torch import nn

Path(__file__).with_suffix(".ran").touch()

def make(width: int = 3):
    return nn.Linear(width, 1), [torch.ones(2, width)], lambda model, x: model(x).square().mean()
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN, encoding="utf-8")
    return path


def has_run(own: Path) -> bool:
    return own.with_suffix(".ran").exists()


def run_of(name: str, options: dict[str, str | int | float | bool], seed: int = 0) -> RunConfig:
    """A run as its organiser publishes it."""
    return RunConfig(
        recipe=name, recipe_options=options, recipe_digest=recipe_digest(name, options), seed=seed
    )


# ---- by hand


def test_the_organisers_recipe_starts_from_the_runs_seed_and_options() -> None:
    def embedding(seed: int) -> torch.Tensor:
        return load_run_recipe(run_of("byte-gpt", TINY, seed)).model.get_parameter("embedding.weight")

    assert embedding(1).shape == (256, 16)
    assert embedding(1).equal(embedding(1))
    assert not embedding(1).equal(embedding(2))


def test_an_own_recipe_lies_where_the_volunteer_says(own: Path, tmp_path: Path) -> None:
    run = run_of(f"{own}:make", {"width": 5})
    elsewhere = tmp_path / "downloads" / "theirs.py"
    elsewhere.parent.mkdir()
    own.rename(elsewhere)
    assert load_run_recipe(run, f"{elsewhere}:make").model.weight.shape == (1, 5)  # type: ignore[union-attr]


def test_a_peer_may_train_on_a_text_of_its_own(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 100)
    inputs, _ = next(load_run_recipe(run_of("byte-gpt", TINY), data={"text": str(text)}).batches(0, 4))
    assert set(inputs.flatten().tolist()) <= set(b"abcdefgh")


@pytest.mark.parametrize(("recipe", "own"), [("byte-gpt", False), ("own-loop", False), ("a/b.py:make", True)])
def test_a_colon_tells_whose_recipe_it_is(recipe: str, own: bool) -> None:
    assert RunConfig(recipe=recipe).is_own_recipe is own


# ---- refused, and nothing of a stranger's file has run


def test_a_file_that_only_the_run_names_is_not_run(own: Path) -> None:
    with pytest.raises(ConfigError, match=r"get that file from the organiser.*--recipe FILE.py:function"):
        load_run_recipe(run_of(f"{own}:make", {}))
    assert not has_run(own)


@pytest.mark.parametrize("change", ["file", "function", "option"])
def test_another_recipe_than_the_organisers_is_refused_before_it_runs(own: Path, change: str) -> None:
    run = run_of(f"{own}:make", {"width": 5})
    function = "make"
    if change == "file":
        own.write_text(OWN + "\n# one more line\n")
    elif change == "function":
        function = "other"
    else:
        run = run.model_copy(update={"recipe_options": {"width": 6}})
    with pytest.raises(
        ConfigError, match=r"is another than the run's \(digest [0-9a-f]{12} here, [0-9a-f]{12} "
    ):
        load_run_recipe(run, f"{own}:{function}")
    assert not has_run(own)


def test_an_own_file_for_a_built_in_recipe_is_refused_before_it_runs(own: Path) -> None:
    with pytest.raises(ConfigError, match=r"built-in recipe 'byte-gpt'; leave it out"):
        load_run_recipe(run_of("byte-gpt", TINY), f"{own}:make")
    assert not has_run(own)


def test_a_run_without_a_digest_is_refused(own: Path) -> None:
    with pytest.raises(ConfigError, match="none there"):
        load_run_recipe(RunConfig(recipe="byte-gpt", recipe_options=TINY))


def test_data_of_ones_own_must_leave_the_recipe_what_it_is(own: Path) -> None:
    with pytest.raises(ConfigError, match="only built-in recipes let a peer choose"):
        load_run_recipe(run_of(f"{own}:make", {}), f"{own}:make", {"text": "mine.txt"})
    assert not has_run(own)
