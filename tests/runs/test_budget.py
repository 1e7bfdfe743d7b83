"""Runs whose `rollout.weights` is a budget: identities, resumption, what the folder holds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import lowroll
from lowroll.cli import serve
from lowroll.cli.main import main
from lowroll.config import from_mapping
from lowroll.metrics.record import read
from lowroll.model import hf
from lowroll.model.headers import low_bit_format
from lowroll.model.tokenizer import load_tokenizer
from lowroll.quant import mixed
from lowroll.quant.format_budget import Budget
from lowroll.quant.formats import get_format
from lowroll.quant.mixed import Mixed
from lowroll.quant.table import EIGHT_BITS
from lowroll.runs import chosen_formats, preflight, sft
from lowroll.runs.assembly.trainer import guard as build_guard
from lowroll.runs.chosen_formats import FILE
from lowroll.runs.diagnose import diagnose
from lowroll.runs.evaluate import evaluate
from lowroll.runs.export import export_run, quantize_folder
from lowroll.runs.folder import RunFolder
from lowroll.runs.roles import limits
from lowroll.transport.rollout_log import read_rollouts
from lowroll.weights.publish import digest, quantize_base
from tests.fixtures.runs import ALWAYS, copy_stopped_after, fingerprint, settings, train
from tests.fixtures.tiny import hf_folder

WIDE = {"max_kl": 1e9}
SOME = {"max_bits": 6.0, "formats": ["nvfp4", "int8", "dense"]}
QUICK = {"train": {"max_steps": 2}, "correction": "tis"}


def tree(model: Path, out: Path, weights: object, **changes: Any) -> dict[str, Any]:
    made = settings(model, out, **QUICK)
    made["train"] = {**made["train"], **changes}
    made["rollout"] = {**made["rollout"], "weights": weights}
    return made


def kept(folder: Path) -> dict[str, Any]:
    return json.loads((folder / FILE).read_text())


@pytest.mark.parametrize(
    ("weights", "plain", "lora"),
    [
        (WIDE, "nvfp4", False),
        ({"max_kl": 0}, "dense", True),
        ({"max_kl": 1e9, "formats": ["int4", "dense"]}, "int4", True),
    ],
)
def test_a_budget_without_a_choice_is_the_plain_format(
    model: Path, tmp_path: Path, weights: object, plain: str, lora: bool
) -> None:
    mine = train(tree(model, tmp_path / "a", weights, lora=lora)).folder
    theirs = train(tree(model, tmp_path / "b", plain, lora=lora)).folder
    assert set(kept(mine)["weights"]) == {plain}
    assert fingerprint(mine) == fingerprint(theirs)


@pytest.mark.parametrize(
    "changes", [{}, {"lora": True}, {"forward": "aligned"}], ids=["all", "lora", "aligned"]
)
def test_a_resumed_run_has_the_same_formats_and_bits(
    model: Path, tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tree(model, tmp_path / "whole", SOME, **changes) | {"correction": "auto"}
    whole = train(asked).folder
    assert len(kept(whole)["weights"]) > 1
    assert 4.5 < kept(whole)["bits"] <= 6
    cut = tmp_path / "cut"
    copy_stopped_after(whole, 1, cut)
    monkeypatch.setattr(
        "lowroll.runs.format_search.search", lambda *_: pytest.fail("searched again")
    )
    again = train(asked | {"output_dir": str(cut)}, resume=True).folder
    assert fingerprint(again) == fingerprint(whole)
    tags = {s.rollout.behavior.weights for s in read_rollouts(_first(whole)).samples}
    assert tags == {mixed.read(kept(whole)["weights"], torch.float32)}
    assert "max_bits=6" in (whole / "config.yaml").read_text()


def _first(folder: Path) -> Path:
    return min((folder / "rollouts").iterdir())


def test_the_search_repeats_itself(model: Path, tmp_path: Path) -> None:
    texts = []
    for name in "ab":
        folder = train(tree(model, tmp_path / name, SOME)).folder
        texts.append((folder / FILE).read_text())
    assert texts[0] == texts[1]


def test_a_file_that_is_missing_or_anothers_is_refused(model: Path, tmp_path: Path) -> None:
    folder = train(tree(model, tmp_path / "run", SOME)).folder
    (folder / FILE).rename(folder / "away")
    with pytest.raises(ValueError, match=rf"{FILE}: missing"):
        train(tree(model, folder, SOME), resume=True)
    shutil.copy(folder / "away", folder / FILE)
    text = (folder / FILE).read_text()
    (folder / FILE).write_text(text.replace('"budget": "max_bits=6', '"budget": "max_bits=9'))
    with pytest.raises(ValueError, match=r"rollout\.weights: max_bits=6.* is of max_bits=9"):
        train(tree(model, folder, SOME), resume=True)
    (folder / FILE).write_text(text.replace('"int8"', '"int7"'))
    with pytest.raises(ValueError, match=rf"{FILE}: weights: .*'int7' is none of"):
        train(tree(model, folder, SOME), resume=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / FILE).write_text("[]")
    with pytest.raises(ValueError, match="no budget and no weights in it"):
        train(tree(model, tmp_path / "other", SOME))
    assert (tmp_path / "other" / FILE).read_text() == "[]"


def test_a_budget_that_cannot_be_kept_says_what_was_measured(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"max_bits=4 cannot be kept: .*4\.5 bits, .*KL"):
        train(tree(model, tmp_path / "a", {"max_bits": 4}))
    with pytest.raises(ValueError, match=r"cannot be kept: within it no choice"):
        train(tree(model, tmp_path / "b", {"max_kl": 1e-12, "max_bits": 8}))
    assert not (tmp_path / "a" / FILE).exists()


def test_a_low_bit_folder_is_refused(model: Path, tmp_path: Path) -> None:
    low = tmp_path / "low"
    quantize_folder(model, low, "int8")
    with pytest.raises(ValueError, match=r"holds int8 weights, and a budget needs the dense"):
        train(tree(low, tmp_path / "run", WIDE))


# -- what comes after a run, and beside it -----------------------------------------------------------


@pytest.mark.parametrize("lora", [False, True])
def test_what_a_run_has_drawn_from_is_exported_bit_for_bit(
    model: Path, tmp_path: Path, lora: bool
) -> None:
    folder = train(tree(model, tmp_path / "run", SOME, lora=lora)).folder
    name = mixed.read(kept(folder)["weights"], torch.float32)
    done = export_run(folder, tmp_path / "out", "rollout")
    assert done.format == name
    base = tmp_path / "out" / ("base" if lora else "")
    assert hf.load(base).weight_format == name
    if not lora:
        learner = hf.load(export_run(folder, tmp_path / "merged", "merged").folder)
        assert digest(hf.load(base)) == digest(quantize_base(learner, name))
    if lora:
        export_run(folder, tmp_path / "adapter", "adapter")
        assert hf.load(tmp_path / "adapter").weight_format == name


def test_a_run_is_diagnosed_in_its_formats(model: Path, tmp_path: Path) -> None:
    asked = tree(model, tmp_path / "run", SOME)
    folder = train(asked).folder
    found = diagnose(from_mapping(asked), folder, num_prompts=2, n=2)
    assert found.format == mixed.read(kept(folder)["weights"], torch.float32)
    assert diagnose(from_mapping(asked), None, num_prompts=2, n=2).format == found.format


def test_an_evaluation_takes_a_budget(model: Path, tmp_path: Path) -> None:
    cfg = from_mapping(tree(model, tmp_path / "run", SOME) | {"eval": {"num_examples": 2}})
    rows = evaluate(cfg, ["dense", "max_kl=1000000", "max_bits=6"])
    assert [row["weights"] for row in rows][:2] == ["fp32", "nvfp4"]
    assert rows[2]["weights"].startswith("mixed-")
    assert evaluate(cfg)[1]["weights"].startswith("mixed-")


def test_a_budget_is_quantized_into_a_folder(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 20)
    for i, options in enumerate(([], ["--calibration", str(text)])):
        out = tmp_path / f"out{i}"
        arguments = ["quantize", str(model), str(out), "--format", "max_bits=6", "--device", "cpu"]
        assert main([*arguments, *options]) == 0
        assert "bits a weight, " in capsys.readouterr().err
        form = get_format(str(hf.load(out).weight_format))
        assert isinstance(form, Mixed) and form.bits <= 6
    assert main([*arguments, "--awq", "--calibration", str(text)]) != 0
    assert "--awq: it rescales for one format" in capsys.readouterr().err


def test_a_server_and_a_terminal_take_a_budget(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = serve.parser().parse_args([str(model), "--weights", "max_bits=6"])
    engine = serve.make_engine(arguments, model, load_tokenizer(model))
    assert engine.stats().weights.startswith("mixed-") and engine.stats().weight_bits <= 6
    told = ["generate", "--model", str(model), "--weights", "max_kl=9", "--prompt", "a"]
    assert main([*told, "--max-tokens", "2", "--device", "cpu"]) == 0
    assert "nvfp4 100%" in capsys.readouterr().err
    assert main(["serve", str(model), "--weights", "max_bit=6"]) != 0
    assert "--weights: 'max_bit=6': a budget is max_kl=0.02" in capsys.readouterr().err


def test_what_takes_no_budget_says_so(model: Path, tmp_path: Path) -> None:
    cfg = from_mapping(tree(model, tmp_path / "run", SOME))
    with pytest.raises(ValueError, match=r"rollout\.weights: max_bits=6.*: with roles|for one"):
        limits.refuse(cfg)
    found = preflight.look_at_run(cfg)
    assert any("searched for when the run starts" in note for note in found.notes)
    assert not found.problems
    lora = from_mapping(tree(model, tmp_path / "run", SOME, lora=True))
    with pytest.raises(ValueError, match="lowroll sft searches for no formats"):
        sft.plain(lora)
    assert sft.plain(cfg).rollout.weights == "int8"


@pytest.mark.parametrize("lora", [False, True])
def test_a_guard_leaves_a_mixture_for_eight_bits_or_the_dense_base(
    model: Path, tmp_path: Path, lora: bool
) -> None:
    asked = tree(model, tmp_path / "whole", SOME, lora=lora, max_steps=4)
    asked |= {"guard": {**ALWAYS, "action": "fallback"}}
    whole = train(asked).folder
    files = sorted((whole / "rollouts").iterdir())
    tags = [read_rollouts(path).samples[0].rollout.behavior.weights for path in files]
    name = mixed.read(kept(whole)["weights"], torch.float32)
    assert tags == [name, name, *[("fp32" if lora else EIGHT_BITS)] * 2]
    cut = tmp_path / "cut"
    copy_stopped_after(whole, 2, cut)
    again = train(asked | {"output_dir": str(cut)}, resume=True).folder
    assert fingerprint(again) == fingerprint(whole)


def test_the_formats_are_chosen_again_when_the_kl_leaves_the_budget(
    model: Path, tmp_path: Path
) -> None:
    """Each choice is of the weights as they are by then; a run that goes on before or after one makes
    the same, and what comes after the run knows it."""
    asked = tree(model, tmp_path / "whole", SOME, max_steps=5, learning_rate=0.1)
    del asked["env"]
    (tmp_path / "rows.jsonl").write_text('{"prompt": "ab"}\n{"prompt": "cde"}\n')
    (tmp_path / "rewards.py").write_text("def odd(text):\n    return sum(map(ord, text)) % 7 / 7\n")
    asked |= {"data": str(tmp_path / "rows.jsonl")}
    asked |= {"reward_funcs": [f"{tmp_path}/rewards.py:odd"]}
    asked |= {"guard": {"kl_above": 1e-12, "patience": 2, "ess_below": None}}
    whole = train(asked).folder
    first, *again = [kept(whole), *kept(whole)["again"]]
    assert [one["step"] for one in again] == [2, 4]
    names = [mixed.read(one["weights"], torch.float32) for one in (first, *again)]
    assert names[0] != names[1] and all(one["bits"] <= 6 for one in again)
    files = sorted((whole / "rollouts").iterdir())
    tags = [read_rollouts(path).samples[0].rollout.behavior.weights for path in files]
    assert tags == [names[0], names[0], names[1], names[1], names[2]]
    last = 1 + (names[2] != names[1])
    assert [record.get("guard/choices", 0) for record in read(whole)] == [0, 0, 1, 1, last]
    assert export_run(whole, tmp_path / "last", "rollout").format == names[2]
    assert export_run(whole, tmp_path / "early", "rollout", step=2).format == names[1]
    for stopped in (1, 3):
        cut = tmp_path / f"cut{stopped}"
        copy_stopped_after(whole, stopped, cut)
        resumed = train(asked | {"output_dir": str(cut)}, resume=True).folder
        assert fingerprint(resumed) == fingerprint(whole)
        assert kept(resumed) == kept(whole)


@pytest.mark.parametrize("changes", [{"lora": True}, {"forward": "aligned"}, {}], ids=str)
def test_a_learner_with_the_same_codes_has_no_other_choice(
    model: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    asked = tree(model, tmp_path / "run", SOME, max_steps=3, **changes)
    asked |= {"guard": {"kl_above": 1e-12, "patience": 1}, "correction": "auto"}
    asked["rollout"]["exact"] = not changes
    assert "again" not in kept(train(asked).folder)


def test_a_budget_of_kl_is_the_guards_bound(model: Path, tmp_path: Path) -> None:
    """Twice what is allowed is an alarm; a choice that changes nothing is not made at every alarm."""
    cfg = from_mapping(tree(model, tmp_path / "run", "int8"))
    watch = build_guard(cfg, "max_kl=0.01")
    assert watch is not None and watch.settings.kl_above == 0.02
    wide = build_guard(cfg, "max_kl=1")
    assert wide is not None and wide.settings.kl_above == 2
    own = from_mapping(tree(model, tmp_path / "run", "int8") | {"guard": {"kl_above": 0.5}})
    chosen = build_guard(own, "max_kl=0.01")
    assert chosen is not None and chosen.settings.kl_above == 0.5
    plain = build_guard(cfg)
    assert plain is not None and not plain.has_budget
    loud = {"mismatch/kl_k3": 0.03, "mismatch/ess": 0.9, "mismatch/weight_max": 2.0}
    searched = []
    for step in range(1, 40):
        watch.look(loud)
        if watch.wants_choice:
            searched.append(step)
            watch.chosen("int8", {})
    assert searched == [3, 9, 21]


def test_a_budget_that_is_lost_leaves_the_formats(model: Path, tmp_path: Path) -> None:
    """What nothing keeps any more is said, and the run goes on."""
    asked = tree(model, tmp_path / "run", {"max_kl": 1.0, "max_bits": 4.6}, max_steps=2)
    asked |= {"guard": {"kl_above": 1e-12, "patience": 1}}
    with patch(
        "lowroll.runs.format_search.parse", side_effect=[Budget(1.0, 4.6)] + [Budget(0, 4.6)] * 2
    ):
        folder = train(asked).folder
    assert "again" not in kept(folder)
    assert (
        "guard: step 1: the formats stay: rollout.weights: max_kl=0,max_bits=4.6 cannot be"
        in "".join(path.read_text() for path in (folder / "logs").iterdir())
    )


# -- what a folder stores ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def careful(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of several formats, rounded with compensation."""
    out = tmp_path_factory.mktemp("stored") / "mixed"
    options = ["--format", "max_bits=6", "--rounding", "gptq", "--device", "cpu"]
    assert main(["quantize", str(model), str(out), *options]) == 0
    return out


def test_an_adapter_learns_on_the_codes_that_a_folder_stores(careful: Path, tmp_path: Path) -> None:
    asked = tree(careful, tmp_path / "whole", "stored", lora=True) | {"dtype": "bfloat16"}
    whole = train(asked).folder
    own = str(low_bit_format(careful, torch.bfloat16))
    assert own.startswith("mixed-")
    assert read_rollouts(_first(whole)).samples[0].rollout.behavior.weights == own
    held = hf.load(careful, dtype=torch.bfloat16)
    base = hf.load(export_run(whole, tmp_path / "out", "rollout").folder / "base")
    for (name, ours), (_, theirs) in zip(base.linears(), held.linears(), strict=True):
        for key, tensor in theirs.weight.tensors.items():
            assert torch.equal(ours.weight.tensors[key], tensor), name
    cut = tmp_path / "cut"
    copy_stopped_after(whole, 1, cut)
    again = train(asked | {"output_dir": str(cut)}, resume=True).folder
    assert fingerprint(again) == fingerprint(whole)
    found = diagnose(from_mapping(asked), whole, num_prompts=2, n=2)
    assert found.format == own


@pytest.mark.parametrize("lora", [False, True])
def test_stored_is_the_format_by_its_name(model: Path, tmp_path: Path, lora: bool) -> None:
    low = quantize_folder(model, tmp_path / "low", "nvfp4").folder
    runs = [
        train(tree(low, tmp_path / name, name, lora=lora)).folder for name in ("stored", "nvfp4")
    ]
    assert fingerprint(runs[0]) == fingerprint(runs[1])
    cfg = from_mapping(tree(low, tmp_path / "look", "stored", lora=lora))
    assert not preflight.look_at_run(cfg).problems
    rows = evaluate(from_mapping(cfg.tree() | {"eval": {"num_examples": 2}}))
    assert [row["weights"] for row in rows][:2] == ["fp32", "nvfp4"]


def test_what_stores_nothing_or_cannot_be_searched_is_refused(model: Path, tmp_path: Path) -> None:
    dense = tree(model, tmp_path / "run", "stored")
    with pytest.raises(ValueError, match=r"rollout\.weights: stored, and .* holds dense weights"):
        train(dense)
    (problem,) = preflight.look_at_run(from_mapping(dense)).problems
    assert "holds dense weights; write dense, a format or a budget" in problem
    with pytest.raises(ValueError, match="for one process"):
        limits.refuse(from_mapping(dense))
    low = quantize_folder(model, tmp_path / "low", "int8").folder
    (problem,) = preflight.look_at_run(from_mapping(tree(low, tmp_path / "run", WIDE))).problems
    assert "holds int8 weights, and a budget needs the dense model; write stored" in problem
    experts = hf_folder(tmp_path / "moe", "qwen3-moe")
    cfg = from_mapping(tree(experts, tmp_path / "run", WIDE))
    assert any("has experts" in line for line in preflight.look_at_run(cfg).problems)
    with pytest.raises(ValueError, match=r"large_batch_weights: null"):
        from_mapping({"model": "m", "rollout": {"weights": "stored", "large_batch_weights": "fp8"}})


def test_an_edited_file_is_refused(model: Path, tmp_path: Path) -> None:
    """Layers of another model, and formats that the run did not draw from."""
    whole_run = train(tree(model, tmp_path / "whole", SOME, max_steps=3)).folder
    folder = tmp_path / "run"
    copy_stopped_after(whole_run, 2, folder)
    file = folder / FILE
    whole = json.loads(file.read_text())
    (first, second), layers = list(whole["weights"])[:2], whole["weights"]
    swapped = {**layers, first: layers[second], second: layers[first]}
    more = {**layers, first: {**layers[first], "blocks.9.qkv": 8}}
    for weights, words in (
        (swapped, r"rollout\.weights: the run drew from mixed-.* was changed"),
        (more, rf"{FILE}: weights: blocks\.9\.qkv has no weights in .*, and 8 here"),
    ):
        file.write_text(json.dumps({**whole, "weights": weights}))
        with pytest.raises(ValueError, match=words):
            train(tree(model, folder, SOME, max_steps=3), resume=True)
    file.write_text(json.dumps({**whole, "again": [1, {"a": 2}, {"step": "3"}]}))
    asked = tree(model, folder, SOME, max_steps=3) | {
        "guard": {"kl_above": 1e-12, "patience": 1, "ess_below": None}
    }
    train(asked, resume=True)
    assert [one["step"] for one in kept(folder)["again"]] == [3]


def test_a_file_of_an_earlier_run_goes(model: Path, tmp_path: Path) -> None:
    folder = train(tree(model, tmp_path / "run", SOME)).folder
    lowroll.run(from_mapping(tree(model, folder, "int8")), overwrite=True)
    assert not (folder / FILE).exists()


def test_nothing_to_measure_on_is_no_choice(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = train(tree(model, tmp_path / "run", SOME)).folder
    home = RunFolder(from_mapping(tree(model, folder, SOME)), "grpo")
    assert chosen_formats.again(home, "max_bits=6", hf.load(model), [], 7) is None
    assert "guard: step 7: no response to measure on; the formats stay" in caplog.text
    watch = build_guard(from_mapping(tree(model, folder, "int8")), "max_kl=0.01")
    assert watch is not None
    watch.wants_choice = True
    watch.without_choice()
    assert (watch.choices, watch.wants_choice, watch.wait) == (0, False, 1)


def test_a_final_model_is_evaluated_where_the_run_began_with_codes(
    careful: Path, tmp_path: Path
) -> None:
    asked = tree(careful, tmp_path / "run", "stored") | {"eval": {"num_examples": 2}}
    folder = train(asked).folder
    rows = evaluate(from_mapping(asked | {"model": str(folder / "final")}))
    assert {row["weights"] for row in rows} == {"fp32"}


def test_codes_are_not_scaled(careful: Path, tmp_path: Path) -> None:
    asked = tree(careful, tmp_path / "run", "stored", lora=True, uaq_scale=1.5)
    with pytest.raises(
        ValueError, match=r"train\.uaq_scale: .* holds int8_rotated and nvfp4 .* weights"
    ):
        train(asked)
    assert any("train.uaq_scale" in p for p in preflight.look_at_run(from_mapping(asked)).problems)
