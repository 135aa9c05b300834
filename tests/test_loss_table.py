"""The laboratory: stacked peers are separate peers, fragments cover all parameters, rows have the semantics
they name."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from laboratory import load

from p2p_co2.recipes.corpus import Corpus

lab = load("loss_table")
model = sys.modules["loss_model"]


def _corpus() -> Corpus:
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(97, 105, (5000,), generator=generator, dtype=torch.uint8)
    return Corpus(text[:4000], text[4000:])


def _params(models: int) -> dict[str, torch.Tensor]:
    params: dict[str, torch.Tensor] = model.start_params(3, models)
    generator = torch.Generator().manual_seed(1)
    for tensor in params.values():  # models that differ, and a head that is not zero
        tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.02).requires_grad_(True)
    return params


def test_stacked_gradients_equal_separate_ones() -> None:
    params, windows = _params(4), torch.randint(256, (4, 1, 65))
    stacked = model.gradients(params, windows)
    for peer in range(4):
        alone = {
            name: tensor[peer : peer + 1].detach().requires_grad_(True) for name, tensor in params.items()
        }
        for together, separate in zip(stacked, model.gradients(alone, windows[peer : peer + 1]), strict=True):
            torch.testing.assert_close(together[peer : peer + 1], separate, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["synchronous DiLoCo fp32", "co2 d0"])
def test_without_delay_every_peer_ends_at_the_agreed_parameters(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "HELD_OUT_WINDOWS", 32)
    monkeypatch.setattr(lab, "H", 5)
    line = lab.simulate(_row(name), 2, 0, _corpus())
    assert line["loss_live"] == pytest.approx(line["loss_agreed"], abs=1e-5)


@pytest.mark.parametrize(
    ("name", "expected"), [("co2 d30", [0, 1, 2, 3]), ("co2 d30 first awaited", [1, 1, 2, 3])]
)
def test_co2_at_a_full_round_of_delay_is_one_step_stale(name: str, expected: list[int]) -> None:
    params = model.start_params(0, lab.PEERS)
    names = list(params)
    fragment = lab.FragmentLab(_row(name), names, 0, params)
    drift, versions = torch.full((lab.PEERS, model.PARAMETERS), -0.01), []
    for boundary in range(1, 5):
        model.unflatten_(params, names, model.flatten(params, names) + drift)
        fragment.boundary(boundary * lab.H)
        versions.append(fragment.state.version)
        assert torch.allclose(model.flatten(params, names)[0], fragment.state.params)
    # An awaited first round is applied at once, and the second finds nothing in flight; from then on one per
    # round, each measured from the version before the one that it meets.
    assert versions == expected
    met_its_own = 1 + versions[0]
    assert fragment.gaps[:met_its_own] == [1.0] * met_its_own
    assert fragment.gaps[met_its_own] > 1.0


def test_keep_conserves_every_drift_in_full_precision() -> None:
    row = lab.Row("", "keep", 3, codec="fp32", lr=1.0, momentum=0.0)
    params = model.start_params(0, lab.PEERS)
    names, generator = ["out0", "out1"], torch.Generator().manual_seed(2)
    fragment = lab.FragmentLab(row, names, 0, params)
    start = fragment.state.params.clone()
    total = torch.zeros_like(start)
    for step in range(1, 3 * lab.H + 1):
        drift = 1e-4 * torch.randn(lab.PEERS, len(start), generator=generator)
        model.unflatten_(params, names, model.flatten(params, names) + drift)
        total += drift.mean(0)
        fragment.boundary(step)
    fragment.flush()
    torch.testing.assert_close(fragment.state.params, start + total, rtol=0, atol=1e-5)


def test_table_compares_by_seed_and_finished_rows_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = []
    for seed, (base, keep) in enumerate([(2.0, 2.1), (4.0, 4.4)]):
        for name, loss in [("synchronous DiLoCo fp32", base), ("keep d3", keep)]:
            lines.append(
                json.dumps({"name": name, "seed": seed, "rounds": 30, "loss_agreed": loss, "loss_live": loss})
            )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert lab.read_rows(path, 150) == []
    text = lab.table(lab.read_rows(path, 30))
    assert "| keep d3 | 0.7, 0.5 Nesterov | int4 | 2 | 3.250 | 1.150 | 3.250 | +7.5 % |" in text


def _row(name: str) -> object:
    return next(row for row in lab.ROWS if row.name == name)
