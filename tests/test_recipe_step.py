"""What a recipe's settings do: accumulation, clipping, autocast, a peer's own data, helper modules, a
tokenizer."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from p2p_co2.config import RunConfig
from p2p_co2.errors import ConfigError
from p2p_co2.recipes import InnerStep, Recipe, load_recipe, load_run_recipe, recipe_digest
from p2p_co2.trained import Origin, Trained

LINE = """
import torch
from torch import nn
from p2p_co2.recipes import Recipe

def make({arguments}):
    return Recipe(nn.Linear(2, 1), lambda seed, batch: iter([]), lambda model, x: model(x).sum() {settings})
"""


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).float().square().mean()
    return loss


def made(**settings: Any) -> tuple[InnerStep, nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    recipe = Recipe(model, lambda seed, batch: iter([]), squares, tokens=len, **settings)
    return InnerStep(recipe, model, torch.optim.SGD(model.parameters(), lr=0.1)), model


def weights(model: nn.Module) -> Tensor:
    return torch.cat([one.detach().flatten() for one in model.parameters()])


# The inner step


def test_accumulated_micro_steps_are_one_step_on_all_of_them() -> None:
    data = torch.randn(12, 4)
    accumulated, one = made(accumulate=3)
    whole, other = made()
    taken = accumulated.take(iter(data.split(4)))
    once = whole.take(iter([data]))
    assert taken is not None
    assert once is not None
    assert (taken.tokens, once.tokens) == (12, 12)
    assert float(taken.loss) == pytest.approx(float(once.loss))
    torch.testing.assert_close(weights(one), weights(other))


def test_batches_that_run_out_in_the_middle_of_a_step_end_it_untaken() -> None:
    step, model = made(accumulate=3)
    before = weights(model)
    assert step.take(iter(torch.randn(2, 5, 4))) is None
    assert torch.equal(weights(model), before)


def test_a_recipes_list_of_optimizers_steps_as_one() -> None:
    def several(parameters: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
        weight, bias = parameters
        return [torch.optim.Muon([weight], lr=0.1), torch.optim.AdamW([bias], lr=0.1)]

    model = nn.Linear(4, 2)
    before = [one.detach().clone() for one in model.parameters()]
    recipe = Recipe(model, lambda seed, batch: iter([]), squares, tokens=len, optimizer=several)
    optimizer = recipe.optimizer(model.parameters())
    assert len(optimizer.param_groups) == 2
    InnerStep(recipe, model, optimizer).take(iter([torch.randn(3, 4)]))
    assert not any(torch.equal(now, was) for now, was in zip(model.parameters(), before, strict=True))


def test_gradients_are_clipped_once_all_are_summed() -> None:
    data = 100 * torch.randn(2, 8, 4)
    step, model = made(accumulate=2, max_grad_norm=1.0)
    before = weights(model)
    assert step.take(iter(data)) is not None
    moved = (weights(model) - before).norm() / 0.1
    assert moved.item() == pytest.approx(1.0, rel=1e-4)


def test_autocast_computes_in_sixteen_bits_and_leaves_the_parameters() -> None:
    seen = list[torch.dtype]()

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        output = model(batch)
        seen.append(output.dtype)
        mean: Tensor = output.float().square().mean()
        return mean

    model = nn.Linear(4, 2)
    recipe = Recipe(model, lambda seed, batch: iter([]), loss, autocast="bf16")
    step = InnerStep(recipe, model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert step.take(iter([torch.randn(3, 4)])) is not None
    assert seen == [torch.bfloat16]
    assert model.weight.dtype == torch.float32


def test_a_step_that_overflows_in_fp16_is_skipped_and_counts_nothing() -> None:
    step, model = made(autocast="fp16", max_grad_norm=1e9)
    before = weights(model)
    skipped = step.take(iter([torch.full((3, 4), math.inf)]))
    assert skipped is not None
    assert skipped.tokens == 0
    assert math.isnan(skipped.loss)
    assert torch.equal(weights(model), before)
    taken = step.take(iter([torch.randn(3, 4)]))
    assert taken is not None
    assert taken.tokens == 3
    reference, other = made()
    step, model = made(autocast="fp16")
    data = torch.randn(3, 4)
    step.take(iter([data]))
    reference.take(iter([data]))
    torch.testing.assert_close(weights(model), weights(other), atol=2e-3, rtol=1e-2)


@pytest.mark.parametrize(
    ("settings", "stages", "message"),
    [
        ("accumulate=0", 1, "accumulate: must be a whole number of batches of at least 1, got 0"),
        ("accumulate=True", 1, "accumulate: must be a whole number"),
        ("max_grad_norm=-1.0", 1, "max_grad_norm: must be a number above 0"),
        ("autocast='fp8'", 1, 'autocast: must be "bf16", "fp16" or None'),
        ("accumulate=2", 3, "accumulate: does not apply in a run with stages; set pipeline.microbatches"),
        ("autocast='bf16'", 3, "autocast: does not apply in a run with stages; use torch.autocast inside"),
    ],
)
def test_settings_that_mean_nothing_are_refused(
    tmp_path: Path, settings: str, stages: int, message: str
) -> None:
    text = (Path(__file__).parent.parent / "examples" / "staged_recipe.py").read_text()
    file = tmp_path / "staged.py"
    assert text.count("return Recipe(") == 1
    file.write_text(text.replace("return Recipe(", f"return Recipe({settings}, "))
    with pytest.raises(ConfigError, match=message):
        load_recipe(f"{file}:make", {}, 0, stages=stages)


# A peer's own data


def run_of(file: Path) -> RunConfig:
    name = f"{file}:make"
    return RunConfig(recipe=name, recipe_digest=recipe_digest(name, {}), fragments=2)


def test_a_peers_data_reaches_the_recipe_and_is_no_part_of_the_digest(tmp_path: Path) -> None:
    file = tmp_path / "r.py"
    file.write_text(LINE.format(arguments="data='none'", settings=", tokenizer=data"))
    run = run_of(file)
    assert load_run_recipe(run, f"{file}:make").tokenizer == "none"
    assert load_run_recipe(run, f"{file}:make", {"data": "/my/files"}).tokenizer == "/my/files"


def test_data_that_nobody_takes_or_that_is_missing_is_said_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "r.py"
    file.write_text(LINE.format(arguments="", settings=""))
    with pytest.raises(ConfigError, match=r"--data: make\(\) of .*r\.py takes no data; leave it out"):
        load_run_recipe(run_of(file), f"{file}:make", {"data": "/my/files"})
    file.write_text(LINE.format(arguments="data", settings=""))
    with pytest.raises(ConfigError, match=r"--data: make\(\) of .* needs a data path: join with --data PATH"):
        load_run_recipe(run_of(file), f"{file}:make")
    built_in = RunConfig(recipe="byte-gpt", recipe_digest=recipe_digest("byte-gpt", {}))
    with pytest.raises(ConfigError, match=r"--data: is for a run with its own recipe.*use --text"):
        load_run_recipe(built_in, data={"data": "/my/files"})


# Helper modules

MAIN = """
from layers import width
from parts.model import build
import torch

def make():
    import late
    return build(width), [torch.ones(1, width)], lambda model, x: model(x).sum() * late.factor
"""


@pytest.fixture
def helped(tmp_path: Path) -> Path:
    """A recipe with a module, a package, and one that is imported late, each by another way."""
    folder = tmp_path / "here"
    (folder / "parts").mkdir(parents=True)
    (folder / "main.py").write_text(MAIN)
    (folder / "layers.py").write_text("width = 3\n")
    (folder / "late.py").write_text("factor = 2.0\n")
    (folder / "unused.py").write_text("raise SystemExit('nobody imports this')\n")
    (folder / "parts" / "__init__.py").write_text("")
    (folder / "parts" / "model.py").write_text("from .deep import linear as build\n")
    (folder / "parts" / "deep.py").write_text(
        "from torch import nn\nfrom layers import width\n\n"
        "def linear(n):\n    assert n == width\n    return nn.Linear(n, 1)\n"
    )
    return folder / "main.py"


def test_helpers_are_imported_from_the_recipes_folder_and_of_two_recipes_each_has_its_own(
    helped: Path, tmp_path: Path
) -> None:
    recipe = load_recipe(f"{helped}:make", {}, 0)
    assert next(recipe.batches(0, 1)).shape == (1, 3)
    assert not list(helped.parent.rglob("__pycache__"))
    other = tmp_path / "there"
    helped.parent.rename(other)
    (other / "layers.py").write_text("width = 5\n")
    assert next(load_recipe(f"{other / 'main.py'}:make", {}, 0).batches(0, 1)).shape == (1, 5)
    assert str(other) not in sys.path


@pytest.mark.parametrize(
    "file", ["layers.py", "late.py", "parts/__init__.py", "parts/model.py", "parts/deep.py"]
)
def test_a_changed_helper_is_another_recipe_and_is_refused_before_it_runs(helped: Path, file: str) -> None:
    run, name = run_of(helped), f"{helped}:make"
    assert load_run_recipe(run, name).default_batch == 8
    helper = helped.parent / file
    helper.write_text(helper.read_text() + "\nraise SystemExit('it ran')\n")
    with pytest.raises(ConfigError, match="is another than the run's"):
        load_run_recipe(run, name)


@pytest.mark.parametrize("file", ["main.py", "layers.py"])
def test_what_changes_after_it_was_compared_does_not_run(
    helped: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(helped)

    def then_changed(*given: Any) -> str:
        digest = recipe_digest(*given)
        (helped.parent / file).write_text("raise SystemExit('it ran')\n")
        return digest

    monkeypatch.setattr("p2p_co2.recipes.recipe.recipe_digest", then_changed)
    assert next(load_run_recipe(run, f"{helped}:make").batches(0, 1)).shape == (1, 3)


def test_the_digest_is_of_the_places_below_the_folder_and_of_nothing_else(
    helped: Path, tmp_path: Path
) -> None:
    before = recipe_digest(f"{helped}:make", {})
    (helped.parent / "unused.py").write_text("another")
    helped.parent.rename(tmp_path / "moved")
    moved = tmp_path / "moved" / "main.py"
    assert recipe_digest(f"{moved}:make", {}) == before
    (moved.parent / "layers.py").rename(moved.parent / "other.py")
    assert recipe_digest(f"{moved}:make", {}) != before


def test_a_recipe_without_helpers_keeps_the_digest_of_versions_before(tmp_path: Path) -> None:
    file = tmp_path / "r.py"
    file.write_text("import torch\nimport p2p_co2\ndef make(): pass\n")
    (tmp_path / "p2p_co2").mkdir()
    (tmp_path / "p2p_co2" / "__init__.py").write_text("")
    digest = "1a9fd3027025cd13"
    assert recipe_digest(f"{file}:make", {"a": 1}).startswith(digest)


def test_links_and_names_of_pythons_own_modules_are_refused(helped: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.py"
    elsewhere.write_text("width = 3\n")
    (helped.parent / "layers.py").unlink()
    (helped.parent / "layers.py").symlink_to(elsewhere)
    with pytest.raises(ConfigError, match=r"layers\.py: is a symlink, or leads out"):
        recipe_digest(f"{helped}:make", {})
    (helped.parent / "layers.py").unlink()
    (helped.parent / "layers.py").write_text("width = 3\nimport calendar\n")
    (helped.parent / "calendar.py").write_text("")
    with pytest.raises(ConfigError, match=r"has the name of Python's own module 'calendar'; rename it"):
        recipe_digest(f"{helped}:make", {})


def test_a_helper_named_like_a_loaded_module_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "r.py"
    file.write_text("import pytest\n" + LINE.format(arguments="", settings=""))
    (tmp_path / "pytest.py").write_text("")
    with pytest.raises(ConfigError, match=r"helper pytest\.py has the name of a module that is loaded"):
        load_recipe(f"{file}:make", {}, 0)


def test_the_recipe_of_the_documents_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent / "docs" / "how-to" / "own-recipe.md").read_text()
    (tmp_path / "recipe.py").write_text(page.split("```python\n")[1].split("```")[0])
    recipe = load_recipe(f"{tmp_path / 'recipe.py'}:make", {"width": 8}, 0, data={"data": "mine"})
    optimizer = recipe.optimizer(recipe.model.parameters())
    taken = InnerStep(recipe, recipe.model, optimizer).take(iter(recipe.batches(1, 5)))
    assert taken is not None
    assert taken.tokens == 5


# A tokenizer


def test_text_comes_by_the_models_own_generate_and_the_recipes_tokenizer(tmp_path: Path) -> None:
    words = {word: number for number, word in enumerate(["a", "b", "c", "[UNK]"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(tmp_path / "t")
    model = GPT2LMHeadModel(GPT2Config(vocab_size=4, n_positions=8, n_embd=8, n_layer=1, n_head=1)).eval()

    def batches(seed: int, batch: int) -> Iterator[Tensor]:
        yield torch.zeros(1, 1)

    origin = Origin(run=RunConfig(), round=0.0, inner_steps=0)
    trained = Trained(Recipe(model, batches, squares, tokenizer=tmp_path / "t"), origin, tmp_path)
    text = trained.sample("a b", 100, seed=0)
    assert text.startswith("a b")
    assert len(text.split()) <= 8
    assert trained.sample("a b", 100, seed=0) == text
    assert {trained.sample("a b", 100, seed) for seed in islice(range(9), 1, None)} != {text}
