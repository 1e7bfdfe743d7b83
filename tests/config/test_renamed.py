"""Old names of the configuration work for one version, and say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lowroll.config import ConfigError, RunConfig, as_config, from_mapping, load
from lowroll.config.build import known_keys
from lowroll.config.document import parse
from lowroll.config.renamed import GONE, RENAMED, carry_over, renamed_tree
from lowroll.config.surogate.read import load_surogate

OLD, NEW = "rollout.bulk", "rollout.large_batch_weights"
NOTE = f"its name is {NEW} now; the old one works in this version, and not in the next"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_the_table_leads_from_unknown_keys_to_known_ones() -> None:
    known = known_keys(RunConfig)
    assert RENAMED[OLD] == NEW
    for old, new in RENAMED.items():
        assert old not in known and new in known


def test_a_file_with_an_old_name(tmp_path: Path) -> None:
    path = written(tmp_path, "model: m\nrollout:\n  weights: nvfp4\n  bulk: fp8\n")
    cfg = load(path)
    assert cfg.rollout.large_batch_weights == "fp8" and cfg.rollout.weights == "nvfp4"
    assert f"{path}:4: {OLD}: {NOTE}" in cfg.notes
    again = load(written(tmp_path, cfg.dump()))
    assert again.dump() == cfg.dump() and NOTE not in "".join(again.notes)


def test_a_wrong_value_is_blamed_where_it_was_written(tmp_path: Path) -> None:
    path = written(tmp_path, "model: m\nrollout: {bulk: int3}\n")
    with pytest.raises(ConfigError) as error:
        load(path)
    assert str(error.value).startswith(f"{path}:2: {OLD}: must be one of int8, int8_rotated, ")


@pytest.mark.parametrize("overrides", [{OLD: "fp8"}, [f"{OLD}=fp8"], {"rollout": {"bulk": "fp8"}}])
def test_an_override_with_an_old_name(overrides: Any) -> None:
    for tree in ({"model": "m"}, {"model": "m", "rollout": {"large_batch_weights": "int8"}}):
        cfg = from_mapping(tree, overrides)
        assert cfg.rollout.large_batch_weights == "fp8"
        assert sum(NOTE in note for note in cfg.notes) == 1
    assert from_mapping({"model": "m", "rollout": {"bulk": "int8"}}, {NEW: "fp8"}).rollout == (
        from_mapping({"model": "m", "rollout": {"large_batch_weights": "fp8"}}).rollout
    )


def test_a_tree_in_python_with_an_old_name() -> None:
    cfg = as_config({"model": "m", "rollout": {"bulk": None}})
    assert cfg.rollout.large_batch_weights is None and f"config: {OLD}: {NOTE}" in cfg.notes


def test_old_and_new_together_name_both(tmp_path: Path) -> None:
    path = written(tmp_path, "model: m\nrollout: {large_batch_weights: fp8, bulk: fp8}\n")
    words = f"{OLD}: is the old name of {NEW}, which is given too; give one of them"
    with pytest.raises(ConfigError) as error:
        load(path)
    assert str(error.value) == f"{path}:2: {words}"
    for overrides in ([f"{OLD}=fp8", f"{NEW}=fp8"], [f"{NEW}=fp8", f"{OLD}=fp8"]):
        with pytest.raises(ConfigError) as error:
            from_mapping({"model": "m"}, overrides)
        assert str(error.value) == f"override {words}"


def test_a_key_that_is_gone_is_dropped_with_a_note(tmp_path: Path) -> None:
    assert not GONE.keys() & known_keys(RunConfig)
    path = written(tmp_path, "model: m\nrollout:\n  parts: 3\n  weights: fp8\n")
    cfg = load(path)
    assert cfg.rollout.weights == "fp8"
    assert any(note.startswith(f"{path}:3: rollout.parts: the key is gone") for note in cfg.notes)
    assert "gone" not in "".join(load(written(tmp_path, cfg.dump())).notes)
    assert "parts" not in renamed_tree({"rollout": {"parts": None}})["rollout"]


def test_a_key_that_became_a_constant_is_refused_with_another_value(tmp_path: Path) -> None:
    """The folder of an earlier run says the constant; a value that would be ignored is an error."""
    for key, gone in GONE.items():
        if gone.value is not None:
            cfg = from_mapping({"model": "m"}, {key: gone.value})
            assert cfg.dump() == from_mapping({"model": "m"}).dump()
            assert f"override {key}: the key is gone, and ignored: {gone.instead}" in cfg.notes
            with pytest.raises(ConfigError, match=f"^override {key}: the key is gone, and only"):
                from_mapping({"model": "m"}, {key: 7})
    path = written(tmp_path, "model: m\nguard:\n  factor: 0.3\n")
    with pytest.raises(
        ConfigError, match="run.yaml:3: guard.factor: the key is gone, and only 0.5"
    ):
        load(path)


def test_what_lies_beneath_a_renamed_section_moves_with_its_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(RENAMED, "watch", "guard")
    cfg = from_mapping({"model": "m"}, ["watch.patience=7"])
    assert cfg.guard is not None and cfg.guard.patience == 7
    assert any(note.startswith("override watch.patience: its name is guard.") for note in cfg.notes)
    document = parse("model: m\nwatch:\n  patience: 7\n", "run.yaml")
    assert carry_over(document) == [f"run.yaml:2: watch: {NOTE.replace(NEW, 'guard')}"]
    assert document.value == {"model": "m", "guard": {"patience": 7}}
    assert document.marks["guard", "patience"].where == "run.yaml:3"


def test_surogates_files_have_no_old_names(tmp_path: Path) -> None:
    train, orch = tmp_path / "train.yaml", tmp_path / "orch.yaml"
    train.write_text("model: m\n")
    orch.write_text("env: [{id: reverse-text}]\nrollouts_per_example: 8\n")
    cfg = load_surogate(train, None, orch, [f"{OLD}=fp8"])
    assert cfg.rollout.large_batch_weights == "fp8" and f"override {OLD}: {NOTE}" in cfg.notes
    orch.write_text(orch.read_text() + "rollout: {bulk: fp8}\n")
    with pytest.raises(ConfigError, match="orch.yaml:3: rollout: unknown key"):
        load_surogate(train, None, orch)


def test_settings_of_an_earlier_version_are_those_of_now() -> None:
    now = yaml.safe_load(from_mapping({"model": "m", "rollout": {"bulk": "fp8"}}).dump())
    before = {**now, "rollout": {**now["rollout"]}}
    before["rollout"]["bulk"] = before["rollout"].pop("large_batch_weights")
    assert renamed_tree(before) == now and "bulk" in before["rollout"]
