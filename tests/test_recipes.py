"""Recipes: the byte GPT, the corpora, and the user's own file."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_co2.errors import ConfigError
from p2p_co2.recipes import BYTE_GPT, Recipe, load_recipe, recipe_digest
from p2p_co2.recipes import corpus as corpora
from p2p_co2.recipes.byte_gpt import ByteGPT, Shape, next_token_loss
from p2p_co2.recipes.recipe import first_tensor_numel, warm_up

TINY: dict[str, str | int | float | bool] = {"layers": 2, "width": 32, "heads": 2, "context": 32, "batch": 4}

OWN = """
import torch
from torch import nn

def make(width: int = 3):
    batches = [torch.ones(2, width), torch.zeros(2, width)]
    return nn.Linear(width, 1), batches, lambda model, x: model(x).square().mean()

def wrong():
    return 7

def frozen():
    return nn.Linear(1, 1).requires_grad_(False), [], lambda model, x: x

def spent():
    return nn.Linear(1, 1), iter([torch.ones(1, 1)]), lambda model, x: model(x).sum()

not_a_function = 3
"""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200, encoding="utf-8")
    return path


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN, encoding="utf-8")
    return path


# By hand


def test_default_shape_has_between_one_and_two_million_parameters_and_starts_near_a_uniform_guess() -> None:
    model = ByteGPT(Shape())
    assert 1e6 < sum(parameter.numel() for parameter in model.parameters()) < 2e6
    tokens = torch.randint(256, (2, 64))
    assert model(tokens).shape == (2, 64, 256)
    loss = next_token_loss(model, (tokens, tokens.roll(-1, 1)))
    assert loss.item() == pytest.approx(math.log(256), abs=0.2)


def test_learning_rate_warms_up_on_the_swarms_clock() -> None:
    assert [warm_up(position, 2.0) for position in (0.0, 1.0, 2.0, 50.0)] == pytest.approx(
        [0.1, 0.55, 1.0, 1.0]
    )
    assert warm_up(0.0, 0.0) == 1.0


def test_tokens_are_those_of_the_first_tensor() -> None:
    assert first_tensor_numel({"x": [torch.ones(3, 4), torch.ones(9)]}) == 12
    assert first_tensor_numel("nothing") == 1


def test_windows_are_the_text_shifted_by_one(text: Path) -> None:
    recipe = load_recipe(BYTE_GPT, TINY | {"text": str(text)}, seed=0)
    inputs, targets = next(recipe.batches(1, 3))
    assert inputs.shape == targets.shape == (3, 32)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert bytes(inputs[0].tolist()) in text.read_bytes()
    assert recipe.tokens((inputs, targets)) == 96
    assert recipe.default_batch == 4


def test_token_file_in_sixteen_bits_and_its_recipe(tmp_path: Path) -> None:
    path = tmp_path / "ids.bin"
    path.write_bytes(torch.arange(2000).remainder(900).to(torch.uint16).numpy().tobytes())
    recipe = load_recipe(BYTE_GPT, TINY | {"tokens": str(path), "vocab_size": 900}, seed=0)
    inputs, targets = next(recipe.batches(0, 2))
    assert torch.equal((inputs + 1).remainder(900), targets)
    assert recipe.generate is None
    assert recipe.loss(recipe.model, (inputs, targets)).item() == pytest.approx(math.log(900), abs=0.2)


# Against a reference


def test_model_is_causal() -> None:
    model = load_recipe(BYTE_GPT, TINY, seed=0).model
    for parameter in model.parameters():  # the residual projections start at zero and would hide a leak
        torch.nn.init.normal_(parameter, std=0.2)
    first = torch.randint(256, (1, 32))
    second = first.clone()
    second[0, 20] = (second[0, 20] + 1) % 256
    same = torch.isclose(model(first), model(second), atol=1e-5).all(-1)[0]
    assert same[:20].all()
    assert not same[20:].any()


def test_loss_falls_in_thirty_steps() -> None:
    recipe = load_recipe(BYTE_GPT, TINY | {"learning_rate": 1e-2}, seed=0)
    assert recipe.held_out is not None
    before = recipe.held_out(recipe.model)
    optimizer = recipe.optimizer(recipe.model.parameters())
    for batch in islice(recipe.batches(0, 8), 30):
        optimizer.zero_grad()
        recipe.loss(recipe.model, batch).backward()
        optimizer.step()
    assert recipe.held_out(recipe.model) < before - 1.5
    assert recipe.held_out(recipe.model) == recipe.held_out(recipe.model)


# Laws


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), drawn=st.integers(0, 5))
def test_every_peer_starts_with_the_same_bits_and_torch_keeps_its_random_state(seed: int, drawn: int) -> None:
    first = load_recipe(BYTE_GPT, TINY, seed).model.state_dict()
    torch.rand(drawn)
    state = torch.get_rng_state()
    second = load_recipe(BYTE_GPT, TINY, seed).model.state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = load_recipe(BYTE_GPT, TINY, seed + 1).model.state_dict()
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])


def test_peers_draw_different_windows_and_the_same_seed_the_same(text: Path) -> None:
    recipe = load_recipe(BYTE_GPT, TINY | {"text": str(text)}, seed=0)
    assert torch.equal(next(recipe.batches(1, 4))[0], next(recipe.batches(1, 4))[0])
    assert not torch.equal(next(recipe.batches(1, 4))[0], next(recipe.batches(2, 4))[0])


def test_embedded_corpus_is_the_same_each_time_and_holds_out_whole_documents() -> None:
    corpus, again = corpora.embedded_corpus(), corpora.embedded_corpus()
    assert torch.equal(corpus.train, again.train)
    assert torch.equal(corpus.held_out, again.held_out)
    assert 5_000_000 < len(corpus.train) + len(corpus.held_out) <= corpora.CAP_BYTES
    assert 0.02 < len(corpus.held_out) / len(corpus.train) < 0.08
    assert bytes(corpus.held_out[:2000].tolist()) not in bytes(corpus.train.tolist())


def test_folder_holds_out_whole_files(tmp_path: Path) -> None:
    for index in range(60):
        (tmp_path / f"{index}.md").write_text(f"file {index:02d} ", encoding="utf-8")
    corpus = corpora.text_corpus(tmp_path)
    train, held_out = (set(bytes(part.tolist()).decode().split("file ")[1:]) for part in corpus)
    assert held_out
    assert not train & held_out
    assert len(train | held_out) == 60


def test_one_file_holds_out_its_tail(text: Path) -> None:
    corpus = corpora.text_corpus(text)
    assert bytes(torch.cat(list(corpus)).tolist()) == text.read_bytes()
    assert len(corpus.held_out) == len(text.read_bytes()) // 20


def test_digest_covers_what_must_agree_and_no_more(own: Path, tmp_path: Path) -> None:
    plain = recipe_digest(BYTE_GPT, {})
    assert len(plain) == 64
    assert plain == recipe_digest(BYTE_GPT, {"layers": Shape().layers, "text": "mine.txt", "batch": 2})
    assert plain != recipe_digest(BYTE_GPT, {"layers": 5})
    elsewhere = tmp_path / "elsewhere.py"
    elsewhere.write_text(OWN, encoding="utf-8")
    mine = recipe_digest(f"{own}:make", {"width": 4})
    assert mine == recipe_digest(f"{elsewhere}:make", {"width": 4})
    assert mine != recipe_digest(f"{own}:make", {"width": 5})
    assert mine != recipe_digest(f"{own}:wrong", {"width": 4})
    elsewhere.write_text(OWN + "\n", encoding="utf-8")
    assert mine != recipe_digest(f"{elsewhere}:make", {"width": 4})


def test_users_own_recipe(own: Path) -> None:
    recipe = load_recipe(f"{own}:make", {"width": 4}, seed=3)
    assert isinstance(recipe, Recipe)
    sums = [float(batch.sum()) for batch in islice(recipe.batches(0, 1), 5)]
    assert sums == [8.0, 0.0, 8.0, 0.0, 8.0]
    batch = next(recipe.batches(0, 1))
    assert recipe.tokens(batch) == 8
    recipe.loss(recipe.model, batch).backward()
    assert isinstance(recipe.optimizer(recipe.model.parameters()), torch.optim.AdamW)
    assert not (own.parent / "__pycache__").exists()
    again = load_recipe(f"{own}:make", {"width": 4}, seed=3)
    for first, second in zip(recipe.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(first, second)


def test_sampling_keeps_the_prompt_and_repeats_with_its_seed() -> None:
    recipe = load_recipe(BYTE_GPT, TINY, seed=0)
    assert recipe.generate is not None
    sample = recipe.generate(recipe.model, "def ", 40, 7)
    assert sample.startswith("def ")
    assert sample == recipe.generate(recipe.model, "def ", 40, 7)
    assert recipe.generate(recipe.model, "", 3, 7) != ""


# Faults


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 3}, "unknown option; byte-gpt knows batch, context, heads, layers"),
        ({"layers": 0}, "whole number of at least 1"),
        ({"layers": True}, "whole number"),
        ({"learning_rate": -1.0}, "positive number"),
        ({"heads": 3}, "multiple of 2"),
        ({"text": 3}, "must be a path"),
        ({"text": "a", "tokens": "b"}, "either text or tokens"),
        ({"vocab_size": 300}, "goes with the option tokens"),
        ({"vocab_size": 70000, "tokens": "b"}, "at most 65536"),
        ({"text": "no/such/file"}, "cannot read no/such/file"),
        ({"tokens": "no/such/file"}, "cannot read no/such/file"),
    ],
)
def test_bad_option_is_refused_with_what_would_be_right(
    options: dict[str, str | int | float | bool], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(BYTE_GPT, options, seed=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\xff\xfe\x00x" * 99, "not UTF-8"),
        (b"short", "only 5 tokens"),
        (b"x" * 60, "context 64"),
    ],
)
def test_bad_text_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_recipe(BYTE_GPT, {"text": str(path)}, seed=0)


def test_folder_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no \.txt"):
        load_recipe(BYTE_GPT, {"text": str(tmp_path)}, seed=0)


@pytest.mark.parametrize(
    ("content", "vocab_size", "message"),
    [
        (b"\x00\x01" * 50 + b"\x07", 300, "positive multiple of 2"),
        (b"", 10, "positive multiple of 1"),
        (b"\x01\x09" * 50, 9, "token id 9, so vocab_size must be at least 10"),
        (b"\x00\x04" * 50, 1000, "token id 1024"),
    ],
)
def test_bad_token_file_is_refused(content: bytes, vocab_size: int, message: str, tmp_path: Path) -> None:
    path = tmp_path / "ids"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_recipe(BYTE_GPT, {"tokens": str(path), "vocab_size": vocab_size}, seed=0)


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("none_such", {}, "has no function 'none_such'"),
        ("not_a_function", {}, "has no function"),
        ("wrong", {}, "must return a Recipe, or .* got int"),
        ("frozen", {}, "nothing to train"),
        ("make", {"depth": 3}, "do not fit make.*unexpected keyword argument 'depth'"),
    ],
)
def test_bad_user_recipe_is_refused(
    own: Path, function: str, options: dict[str, str | int | float | bool], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(f"{own}:{function}", options, seed=0)


def test_user_batches_that_run_out_say_so(own: Path) -> None:
    batches = load_recipe(f"{own}:spent", {}, seed=0).batches(0, 1)
    next(batches)
    with pytest.raises(ConfigError, match="run out"):
        next(batches)


def test_bad_names_and_files_are_refused(tmp_path: Path) -> None:
    for name in ("bit-gpt", "file.py", "file.txt:make", "file.py:not a name"):
        for use in (lambda name: load_recipe(name, {}, 0), lambda name: recipe_digest(name, {})):
            with pytest.raises(ConfigError, match="no such recipe; write"):
                use(name)
    with pytest.raises(ConfigError, match="no such file"):
        recipe_digest(f"{tmp_path}/absent.py:make", {})
    broken = tmp_path / "broken.py"
    broken.write_text("def make(:\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="not valid Python"):
        load_recipe(f"{broken}:make", {}, 0)
    broken.write_text("import no_such_module_at_all\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot import what it needs"):
        load_recipe(f"{broken}:make", {}, 0)
