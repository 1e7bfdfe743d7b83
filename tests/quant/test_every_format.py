"""Properties of every row of the table of formats, and of `ternary`, which is made up: one file and
one row are all that a new format takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import lowroll
from docs import tables
from lowroll.cli import quantize as command
from lowroll.config import ConfigError, from_mapping
from lowroll.model import hf
from lowroll.quant.formats import get_format
from lowroll.quant.table import FORMATS, OWN, FormatRow, is_dense
from lowroll.runs.export import quantize_folder
from lowroll.trainer.guard import Guard, GuardSettings
from lowroll.weights.publish import digest, publish, rollout_copy
from tests.fixtures.runs import settings, train
from tests.fixtures.sequences import logits
from tests.fixtures.tensors import normal
from tests.fixtures.tiny import hf_folder

MADE_UP = "ternary"
NAMES = (*FORMATS, MADE_UP)


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, MADE_UP, FormatRow("tests.fixtures.ternary:Ternary"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folder(tmp_path_factory.mktemp("formats") / "dense", "qwen3", intermediate_size=64)


@pytest.mark.parametrize("name", NAMES)
def test_the_row_and_the_class_agree(name: str) -> None:
    form = get_format(name)
    assert form.name == name and form.dense == is_dense(name) == (form.dtype is not None)
    assert form.stored_as is None or get_format(form.stored_as).stored_as is None
    q = lowroll.quantize(normal(512, 1024), name)
    assert q.nbytes * 8 / q.dequantize().numel() == pytest.approx(form.bits, rel=5e-3)
    assert set(form.once) | set(form.suffixes) <= set(q.tensors)
    assert set(form.stacked[1:]) <= set(q.tensors)


@pytest.mark.parametrize("name", NAMES)
def test_a_matrix_survives(name: str) -> None:
    """It stays near, gives the same bytes again in its storages, and survives being cut."""
    w, x = normal(256, 128), normal(7, 128, seed=1)
    form, q = get_format(name), lowroll.quantize(w, name)
    assert (q.dequantize() - w).norm() < 0.6 * w.norm()
    assert (q.linear(x) - x @ q.dequantize().t()).norm() < 0.05 * (x @ w.t()).norm()
    before = {key: (t.data_ptr(), t.clone()) for key, t in q.tensors.items()}
    twice = lowroll.quantize(2 * w, name)
    assert torch.equal(q.quantize_(2 * w).linear(x), twice.linear(x))
    q.quantize_(w)
    for key, (place, value) in before.items():
        assert q.tensors[key].data_ptr() == place
        assert torch.equal(q.tensors[key].view(torch.uint8), value.view(torch.uint8)), key
    whole = form.stack(form.cut(q, [128, 128]))
    assert torch.equal(whole.dequantize(), q.dequantize())
    for bad in (torch.zeros(0, 128), torch.ones(3)):
        with pytest.raises(ValueError, match=f"^{name}: "):
            form.quantize(bad)
    with pytest.raises(ValueError, match="cannot (copy|quantize)"):
        q.quantize_(w[:128])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_not_finite_is_refused_by_name(name: str, value: float) -> None:
    w = normal(4, 40)
    w[2, 3] = value
    with pytest.raises(ValueError, match=f"^{name}: the weight holds a non-finite value"):
        lowroll.quantize(w, name)


@pytest.mark.parametrize("name", NAMES)
def test_a_publication_in_place_is_a_fresh_copy(name: str, folder: Path) -> None:
    master = hf.load(folder)
    rollout = rollout_copy(master, name, torch.float32)
    before = digest(rollout)
    with torch.no_grad():
        for _, linear in master.linears():
            assert isinstance(linear.weight, Tensor)
            linear.weight.mul_(1.5)
    publish(master, rollout)
    fresh = rollout_copy(master, name, torch.float32)
    assert digest(rollout) == digest(fresh) != before
    assert torch.equal(logits(rollout), logits(fresh))


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_draws_from_it(name: str, folder: Path) -> None:
    engine = lowroll.Engine(folder, weights=name, cache_tokens=256)
    request = lowroll.Request(prompt_ids=[5, 6, 7], n=2, max_tokens=6, seed=1)
    (group,) = engine.generate([request])
    assert all(rollout.behavior.weights == name for rollout in group.rollouts)
    assert all(-50 < logprob <= 0 for rollout in group.rollouts for logprob in rollout.logprobs)


@pytest.mark.parametrize("name", NAMES)
def test_the_settings_take_it(name: str) -> None:
    cfg = from_mapping({"model": "m", "rollout": {"weights": name}})
    assert (cfg.correction == "none") == is_dense(name)
    assert from_mapping({"model": "m"}, {"rollout.weights": name}).rollout.weights == name
    watch = Guard(GuardSettings(action="fallback", patience=1), name)
    led = [name]
    while led[-1] not in (OWN, ""):
        watch.look({"mismatch/ess": 0.1})
        led.append("" if watch.weights == led[-1] else watch.weights)
    assert len(led) <= 3 and (led[-1] == "") == is_dense(name)


def test_a_name_without_a_row_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"must be one of int8, .*{MADE_UP}, .*got 'quinary'"):
        from_mapping({"model": "m", "rollout": {"weights": "quinary"}})
    with pytest.raises(
        ConfigError, match="must be one of int8, int8_rotated, fp8, bf16, got 'ternary'"
    ):
        from_mapping({"model": "m", "rollout": {"large_batch_weights": MADE_UP}})


def test_the_pages_and_the_help_name_it() -> None:
    assert from_mapping({"model": "m"}, {"rollout.weights": OWN}).rollout.weights == OWN
    for name in NAMES:
        assert f"| `{name}` | {get_format(name).bits:g} bits a weight" in tables.formats()
    shown = command.parser().format_help()
    assert all(name in shown for name in NAMES if not is_dense(name))


def test_a_run_learns_from_it(model: Path, tmp_path: Path) -> None:
    tree = settings(model, tmp_path / "run", rollout={"weights": MADE_UP}, train={"max_steps": 2})
    records = train(tree).records
    assert records[0]["mismatch/kl_k3"] > 0 and records[0]["weights/normalized_quant_error"] > 0


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q8_0", MADE_UP])
def test_no_folder_holds_what_no_tool_knows(name: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{name}: no other tool has a layout"):
        quantize_folder(folder, tmp_path / "out", name)
    assert not (tmp_path / "out").exists()
