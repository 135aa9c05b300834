"""A model goes out as its own library writes it, and comes back with the same values."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, PromptEncoderConfig, VeraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.distributed import DistributedConfig

from p2p_co2.errors import ConfigError, EnvironmentFault
from p2p_co2.tensors.names import named_parameters, shared_names
from p2p_co2.tensors.pretrained import write_pretrained

WORDS = torch.arange(24).reshape(2, 12) % 17


class Tied(nn.Module):
    """Its head is its embedding; ``base`` is frozen; ``seen`` is a buffer."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(17, 8), nn.Linear(8, 17, bias=False)
        self.head.weight = self.embed.weight
        self.short = nn.Linear(8, 8).to(torch.bfloat16)
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("seen", torch.arange(3))


class SavesItsOwn(nn.Linear):
    """Of a library whose ``save_pretrained`` takes no values, as diffusers' does."""

    def save_pretrained(self, folder: Path, **kwargs: Any) -> None:
        torch.save(self.state_dict(), folder / "own.pt")


def gpt2(**more: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=17, n_positions=16, n_embd=16, n_layer=2, n_head=2, **more)
    ).eval()


def mixtral() -> MixtralForCausalLM:
    """Its library stores experts in another way than it has them."""
    torch.manual_seed(0)
    small = {"vocab_size": 17, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    return MixtralForCausalLM(MixtralConfig(**small, **heads, bos_token_id=0, eos_token_id=0)).eval()


def moved(model: nn.Module) -> dict[str, Tensor]:
    """Trained values that are not the live ones, as a peer gives what is agreed: fp32, tied under each
    name."""
    state = {
        name: one.detach().float() + 0.25
        for name, one in named_parameters(model).items()
        if one.requires_grad
    }
    return state | {name: state[first] for name, first in shared_names(model).items() if first in state}


def loss_of(model: nn.Module) -> float:
    with torch.no_grad():
        return float(model(input_ids=WORDS, labels=WORDS).loss)


def test_any_module_goes_out_in_its_own_names_and_dtypes_with_tied_ones_once(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    state = moved(model)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    write_pretrained(torch.compile(model, backend="eager"), state, tmp_path / "a" / "out")
    path = tmp_path / "a" / "out" / "model.safetensors"
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
        assert set(file.keys()) == set(model.state_dict()) - {"head.weight"}
    load_model(other, path)
    assert torch.equal(other.embed.weight, state["embed.weight"])
    assert other.head.weight is other.embed.weight
    assert torch.equal(other.short.weight, state["short.weight"].to(torch.bfloat16))
    assert torch.equal(other.base.weight, model.base.weight)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert not (path.parent / "config.json").exists()


def test_a_parameter_named_nearly_like_extra_state_goes_out(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    model.my_extra_state = nn.Parameter(torch.ones(3))
    write_pretrained(model, dict(model.named_parameters()), tmp_path / "out")
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {"weight", "bias", "my_extra_state"}


def test_a_dict_of_settings_becomes_the_config(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    model.config = {"model_type": "line", "width": 2}  # type: ignore[assignment]
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "vocab.json").write_text("{}")
    (tmp_path / "note.txt").write_text("by hand")
    write_pretrained(model, {}, tmp_path / "out", beside=[tmp_path / "tokens", tmp_path / "note.txt"])
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == model.config
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "config.json", "model.safetensors", "note.txt", "vocab.json",
    ]  # fmt: skip
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["weight"], model.weight)


def test_settings_that_json_cannot_hold_do_not_end_it(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    model.config = {"act": torch.relu}  # type: ignore[assignment]
    write_pretrained(model, {}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_model_that_is_shared_between_processes_is_written_by_this_one_alone(tmp_path: Path) -> None:
    """Asked to gather, transformers would wait for the others, or raise."""
    model = gpt2()
    state = moved(model)
    model.config.distributed_config = DistributedConfig(fsdp_size=2)
    with pytest.raises(ValueError, match="requires torch"):
        model.save_pretrained(tmp_path / "asked", state_dict=dict(state))
    write_pretrained(model, state, tmp_path / "out")
    assert model.config.distributed_config is not None
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.transformer.wte.weight, state["transformer.wte.weight"])


@pytest.mark.parametrize("make", [gpt2, partial(gpt2, tie_word_embeddings=False), mixtral])
def test_transformers_loads_it_with_the_same_loss(tmp_path: Path, make: Callable[[], Any]) -> None:
    model = make()
    state = moved(model)
    assert ("lm_head.weight" in shared_names(model)) == (make is gpt2)
    lasting = loss_of(model)
    write_pretrained(model, state, tmp_path)
    assert loss_of(model) == lasting
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    model.load_state_dict(state, strict=False)
    assert abs(loss_of(loaded) - loss_of(model)) < 1e-6
    assert abs(loss_of(loaded) - lasting) > 1e-3


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's own
@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True),
        VeraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True),  # its layers share two buffers
    ],
    ids=lambda config: config.peft_type,
)
def test_of_a_peft_model_the_adapters_are_written_with_the_given_values(config: Any, tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = get_peft_model(base, config).eval()
    state = moved(model)
    write_pretrained(model, state, tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors").exists()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = PeftModel.from_pretrained(again, tmp_path / "out")
    before = loss_of(model)
    assert not model.load_state_dict(state, strict=False).unexpected_keys
    assert abs(loss_of(loaded) - loss_of(model)) < 1e-6
    assert abs(loss_of(loaded) - before) > 1e-4


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's own
@pytest.mark.parametrize("config", [PrefixTuningConfig, PromptEncoderConfig])
def test_of_prompts_the_given_values_are_written_not_the_models_own(config: Any, tmp_path: Path) -> None:
    model = get_peft_model(gpt2(), config(task_type="CAUSAL_LM", num_virtual_tokens=2)).eval()
    live = {name: one.detach().clone() for name, one in model.named_parameters()}
    given = {name: one + 0.5 for name, one in live.items() if "prompt_encoder" in name}
    write_pretrained(model, given, tmp_path / "out")
    assert all(torch.equal(one, live[name]) for name, one in model.named_parameters())
    assert not model.load_state_dict(given, strict=False).unexpected_keys
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")["prompt_embeddings"]
    assert torch.equal(written, model.get_prompt_embedding_to_save("default"))


def test_a_library_that_takes_no_values_saves_the_agreed_ones_and_has_its_own_back(tmp_path: Path) -> None:
    model = SavesItsOwn(3, 2)
    state, before = moved(model), model.weight.detach().clone()
    write_pretrained(model, state, tmp_path)
    assert torch.equal(torch.load(tmp_path / "own.pt")["weight"], state["weight"])
    assert torch.equal(model.weight, before)


def test_what_is_not_the_model_s_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=r"weigth.*not in this model"):
        write_pretrained(nn.Linear(2, 1), {"weigth": torch.zeros(1, 2)}, out)
    with pytest.raises(ConfigError, match=r"weight: is \(3,\) in the trained state and \(1, 2\)"):
        write_pretrained(nn.Linear(2, 1), {"weight": torch.zeros(3)}, out)
    with pytest.raises(ConfigError, match="no file and no folder"):
        write_pretrained(nn.Linear(2, 1), {}, out, beside=[tmp_path / "none"])
    assert not out.exists()


class EndsInTheMiddle(nn.Linear):
    """Writes its settings and a part of its tensors, and finds the disk full."""

    def save_pretrained(self, folder: Path, state_dict: dict[str, Tensor]) -> None:
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"torn")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_write_that_ends_in_the_middle_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="No space left"):
        write_pretrained(EndsInTheMiddle(2, 1), {}, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    whole = nn.Linear(2, 1)
    write_pretrained(whole, {}, tmp_path / "out")
    with pytest.raises(EnvironmentFault, match="No space left"):
        write_pretrained(EndsInTheMiddle(2, 1), {}, tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["weight"], whole.weight)


def test_a_save_over_an_earlier_one_leaves_no_tensors_of_it_and_the_users_own_files(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path, max_shard_size="20KB")
    assert list(tmp_path.glob("model-00001-of-*.safetensors"))
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / "model-card.txt").write_text("mine")
    model = gpt2()
    state = moved(model)
    write_pretrained(model, state, tmp_path)
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {
        "README.md",
        "model-card.txt",
        "model.safetensors",
        "config.json",
        "generation_config.json",
    }
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.transformer.wte.weight, state["transformer.wte.weight"])
    assert (tmp_path / "README.md").read_text() == "mine"
