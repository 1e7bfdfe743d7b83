"""Resuming: what may change is shown to change nothing, and everything else is refused by name."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lowroll.checkpoint.atomic_folders import encode_manifest
from lowroll.checkpoint.store import Store
from lowroll.config import RunConfig, from_mapping
from lowroll.engine import cache_size as engine_module
from lowroll.engine.native import NativeEngine
from lowroll.metrics import trackers
from lowroll.metrics.record import read, reproducible
from lowroll.model import hf
from lowroll.runs import hub, identity
from lowroll.runs.memory import fit
from lowroll.runs.memory import plan as memory_plan
from lowroll.runs.session import RunResult
from tests.fixtures.roles import DEADLINE_S, forked, write
from tests.fixtures.runs import copy_stopped_after, settings, train
from tests.fixtures.tiny import hf_model

STEPS = 4
# prompts of several pages with a common head, so that pages are found again; three groups of which
# two fit at a time
TASK = {
    "id": "reverse-text",
    "args": {
        "system": "write it backwards",
        "template": "{text}",
        "max_words": 1,
        "min_len": 3,
        "max_len": 12,
    },
}
OTHER = {
    "id": "arithmetic",
    "args": {"system": "write it backwards", "min_steps": 1, "max_steps": 1},
}


def tree(model: Path, out: Path, **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "env": [TASK],
        "batch_size": 12,
        "eval": {"interval": 2, "num_examples": 3},
        "ckpt": {"interval": 1},
        "rollout": {"page_size": 4, "max_batch": 8, "cache_tokens": 512},
        "train": {"max_steps": STEPS, "lr_scheduler_type": "constant", "minibatches": 1},
    }
    for key, value in changes.items():
        base[key] = {**base.get(key, {}), **value} if isinstance(value, dict) else value
    return settings(model, out, **base)


def learnt(folder: Path, steps: int = STEPS) -> dict[str, str]:
    """Digests of what the first steps computed: tensors, rollouts, and the records but for `eval/*`
    and `guard/*`."""
    last = Store(folder / "checkpoints").load(steps)
    files = {path.name: path for path in last.path.glob("*.safetensors")}
    files |= {
        path.name: path
        for path in (folder / "rollouts").iterdir()
        if path.stem <= f"step_{steps:06d}"
    }
    records = [
        {
            key: value
            for key, value in reproducible(record).items()
            if not key.startswith(("eval/", "guard/"))
        }
        for record in read(folder)[:steps]
    ]
    assert len(files) >= 2 + steps
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()} | {
        "records": json.dumps(records, sort_keys=True),
        "orchestrator": json.dumps(last.state["orchestrator"]),
    }


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tree(model, tmp_path_factory.mktemp("whole") / "run")).folder


def go_on(model: Path, whole: Path, out: Path, step: int = 2, **changes: Any) -> RunResult:
    copy_stopped_after(whole, step, out)
    return train(tree(model, out, **changes), resume=True)


# every key that may change, at other values
CHANGES: dict[str, list[dict[str, Any]]] = {
    "output_dir": [{}],
    "ckpt": [
        {"ckpt": {"interval": STEPS, "keep_last": 1}},
        {"ckpt": {"interval": 1, "keep_interval": 3}},
    ],
    "score.workers": [{"score": {"workers": 3}}],
    "score.max_error_rate": [
        {"score": {"max_error_rate": 0.5}},
        {"score": {"max_error_rate": 0.0}},
    ],
    "eval": [
        {"eval": {"interval": None}},
        {
            "eval": {
                "interval": 1,
                "num_examples": 7,
                "rollouts_per_example": 2,
                "temperature": 0.7,
                "top_p": 0.9,
                "env": [TASK, OTHER],
            }
        },
    ],
    "guard": [{"guard": None}, {"guard": {"action": "fallback", "patience": 1, "kl_growth": None}}],
    "force": [{"force": True}],
    "dapo.no_signal": [{"dapo": {"no_signal": "go_on"}}],
    "rollout.release_cache": [{"rollout": {"release_cache": True}}],
    "rollout.vllm": [{"rollout": {"vllm": {"folder": "weights"}}}],
    "client": [{"client": {"timeout": 5.0}}],
    "serve": [{"serve": {"port": 1}}],
    "rollout_transport": [{"rollout_transport": {"type": "zmq"}}],
    "weight_broadcast": [{"weight_broadcast": {"timeout": 5.0}}],
    "ray": [{"ray": {"address": "auto"}}],
    "launcher": [{"launcher": "local"}],
    "logging_steps": [{"logging_steps": 2}],
    "track": [{"track": ["tensorboard"]}],
    "track_project": [{"track_project": "mine"}],
    "push_to_hub": [{"push_to_hub": "me/mine"}],
    "rollout.cuda_graphs": [{"rollout": {"cuda_graphs": False}}],
    "train.gpus": [],  # for processes: tests/runs/test_ranks.py
    "train.sharding": [{"train": {"sharding": "none"}}],
    "train.max_steps": [{"train": {"max_steps": STEPS + 2}}],
}


def test_every_key_is_tried() -> None:
    assert CHANGES.keys() == {*identity.MAY_CHANGE, "train.max_steps"} >= ELSEWHERE
    assert all(len(CHANGES[key]) == 1 for key in ELSEWHERE)


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tracker and no hub, which no test has."""
    monkeypatch.setattr(trackers, "check", lambda names: None)
    monkeypatch.setattr(hub, "check", lambda name: None)
    monkeypatch.setattr(hub, "push", lambda *given: "the hub")


# what one process on a CPU does not come to, or only tells somebody: all of it in one run
ELSEWHERE = {
    "force",
    "dapo.no_signal",
    "rollout.vllm",
    "client",
    "serve",
    "rollout_transport",
    "weight_broadcast",
    "ray",
    "logging_steps",
    "track",
    "track_project",
    "push_to_hub",
    "rollout.cuda_graphs",
    "train.sharding",
}


def merged(changes: Iterable[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in (item for change in changes for item in change.items()):
        found[key] = found.get(key, {}) | value if isinstance(value, dict) else value
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("nobody")
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(merged(CHANGES[key][0] for key in sorted(ELSEWHERE)), id="elsewhere"),
        *(
            pytest.param(change, id=f"{key}-{i}")
            for key in CHANGES
            if key not in {*ELSEWHERE, "launcher"}
            for i, change in enumerate(CHANGES[key])
        ),
    ],
)
def test_what_may_change_changes_nothing(
    changes: dict[str, Any], model: Path, whole: Path, tmp_path: Path
) -> None:
    assert learnt(go_on(model, whole, tmp_path / "cut", **changes).folder) == learnt(whole)


@pytest.mark.slow
def test_a_launcher_changes_nothing(model: Path, whole: Path, tmp_path: Path) -> None:
    copy_stopped_after(whole, 2, tmp_path / "cut")
    asked = tree(model, tmp_path / "cut", **CHANGES["launcher"][0])
    words = ("grpo", str(write(asked, tmp_path / "run.yaml")), "launcher=local", "--resume")
    with forked(tmp_path / "log", *words) as launcher:
        assert launcher.wait(timeout=DEADLINE_S) == 0, (tmp_path / "log").read_text()
    assert learnt(tmp_path / "cut") == learnt(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rollout": {"max_batch": 4}}, r"rollout\.max_batch was 8 and is 4"),
        ({"rollout": {"cache_tokens": 1024}}, r"rollout\.cache_tokens was 512 and is 1024"),
        ({"rollout": {"cache_tokens": None}}, r"rollout\.cache_tokens was 512 and is None"),
        ({"score": {"time_limit": 3.0}}, r"score\.time_limit was 10\.0 and is 3\.0"),
        ({"score": {"memory_limit_mb": 999}}, r"score\.memory_limit_mb was 2048 and is 999"),
        ({"train": {"max_steps": 1, "warmup_steps": 0}}, r"train\.warmup_steps was 2 and is 0"),
        ({"train": {"max_steps": 2}}, "train.max_steps: 2, and the run has made 3 steps"),
    ],
)
def test_what_would_change_the_run_is_refused(
    changes: dict[str, Any], told: str, model: Path, whole: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=told):
        go_on(model, whole, tmp_path / "cut", 3, **changes)


@pytest.mark.slow
@pytest.mark.parametrize(("key", "value"), [("max_batch", 3), ("cache_tokens", 64)])
def test_they_do_change_the_rollouts(
    key: str, value: int, model: Path, whole: Path, tmp_path: Path
) -> None:
    """Why they are refused: other rows run together, and their sums round otherwise."""
    other = train(
        tree(
            model, tmp_path / "run", rollout={key: value}, train={"max_steps": 1, "warmup_steps": 1}
        )
    )
    assert learnt(other.folder, 1).keys() == learnt(whole, 1).keys() and learnt(
        other.folder, 1
    ) != learnt(whole, 1)


def before_engines(folder: Path) -> None:
    """Write a run's settings as a lowroll wrote them that had one engine."""
    for path in (*folder.glob("checkpoints/step_*/MANIFEST.json"), folder / "config.yaml"):
        text = path.read_text()
        saved = path.name == "MANIFEST.json"
        meta = json.loads(text)["meta"] if saved else {"config": text}
        config = yaml.safe_load(meta["config"])
        del config["rollout"]["engine"], config["rollout"]["vllm"]
        for key in ("advantage_function", "buffer", "asynchrony", "client", "serve", "launcher"):
            del config[key]
        meta["config"] = yaml.safe_dump(config)
        if saved:
            path.write_bytes(encode_manifest(json.loads(text)["files"], meta))
        else:
            path.write_text(text.splitlines()[0] + "\n" + meta["config"])


@pytest.mark.slow
@pytest.mark.parametrize("kept", [2, 0])
def test_a_run_from_before_there_were_engines_goes_on(
    kept: int, model: Path, whole: Path, tmp_path: Path
) -> None:
    copy_stopped_after(whole, 2, tmp_path / "old")
    for step in range(kept + 1, STEPS):  # died before its first checkpoint, when none is kept
        shutil.rmtree(tmp_path / f"old/checkpoints/step_{step:06d}", ignore_errors=True)
    before_engines(tmp_path / "old")
    assert learnt(train(tree(model, tmp_path / "old"), resume=True).folder) == learnt(whole)


def test_another_engine_than_that_of_before_is_refused(model: Path, tmp_path: Path) -> None:
    cfg = from_mapping(
        tree(model, tmp_path, rollout={"engine": "vllm", "weights": "dense", "cache_tokens": None})
    )
    saved = yaml.safe_load(cfg.dump())
    del saved["rollout"]["engine"]
    told = "configuration is not that of the checkpoint: rollout.engine was 'native' and is 'vllm'"
    with pytest.raises(ValueError, match=told):
        identity.refuse_other_settings(saved, cfg)


# -- the size of the cache -------------------------------------------------------------------------


@pytest.mark.slow
def test_a_resumed_run_has_the_cache_that_it_began_with(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default follows the free memory; the number that came of it belongs to the checkpoint."""
    free, made = [10**9], []

    def watched(engine: NativeEngine, *args: Any, **options: Any) -> None:
        build(engine, *args, **options)
        made.append(engine.stats().cache_tokens)

    planned: list[memory_plan.MemoryPlan] = []
    check = fit.check

    def checked(*args: Any) -> memory_plan.MemoryPlan:
        planned.append(check(*args))
        return planned[-1]

    monkeypatch.setattr(fit, "check", checked)
    build = NativeEngine.__init__
    monkeypatch.setattr(NativeEngine, "__init__", watched)
    monkeypatch.setattr(engine_module, "free_memory", lambda device: free[0])
    each, plans = 2 * 2 * 1 * 16 * 4, []
    monkeypatch.setattr(memory_plan, "free_memory", lambda device: plans[-1])
    for expected in (None, 96):  # what the run can use, and what the plan leaves of the memory
        free[0] = memory = 10**9
        if expected is not None:
            held = planned[-1].peak - planned[-1].cache_tokens * each
            memory = -int(-(held + expected * each) // (1 - memory_plan.MARGIN))
        plans.append(memory)
        name = f"run{memory}"
        run = tree(model, tmp_path / name, rollout={"cache_tokens": None})
        folder = train(run).folder
        assert expected in (None, made[-1]) and (expected == 96 or 96 < made[-1] < 1024)
        for now in (10**10, made[-1] * each):
            free[0] = now
            copy_stopped_after(folder, 2, tmp_path / f"cut{now}")
            again = train({**run, "output_dir": str(tmp_path / f"cut{now}")}, resume=True)
            assert made[-1] == made[-2] and learnt(again.folder) == learnt(folder)
            shutil.rmtree(tmp_path / f"cut{now}")
        free[0] -= 1
        copy_stopped_after(folder, 2, tmp_path / f"less{memory}")
        with pytest.raises(
            ValueError,
            match=r"^resume: a run keeps the KV cache that it began with: rollout\."
            r"cache_tokens: a KV cache of \d+ tokens takes .* GB, and .* are free$",
        ):
            train({**run, "output_dir": str(tmp_path / f"less{memory}")}, resume=True)


@pytest.mark.slow
def test_the_default_cache_is_as_good_as_one_without_end(model: Path, tmp_path: Path) -> None:
    """Same rows together, same pages found again: the same bits."""
    folders = [
        train(
            tree(
                model,
                tmp_path / str(size),
                rollout={"cache_tokens": size},
                train={"max_steps": 2},
                stages=[{"step": 2, "max_tokens": 9, "batch_size": 24}],
            )
        ).folder
        for size in (None, 1 << 16)
    ]
    assert learnt(folders[0], 2) == learnt(folders[1], 2)
    sizes = [Store(folder / "checkpoints").load().meta["cache_tokens"] for folder in folders]
    assert sizes[0] < 2048 and sizes[1] == 1 << 16
    assert (
        f"a KV cache of {sizes[0]:,} tokens"
        in json.loads((folders[0] / "about.json").read_text())["rollout"]
    )


# -- what is read beside the settings --------------------------------------------------------------


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "rope_theta": (
        lambda m: edit(m / "config.json", lambda c: c | {"rope_theta": 5e5}),
        r"model: config\.json: rope_theta was 10000\.0 and is 500000\.0",
    ),
    "norm_eps": (
        lambda m: edit(m / "config.json", lambda c: c | {"rms_norm_eps": 1e-3}),
        r"model: config\.json: norm_eps was 1e-06 and is 0\.001",
    ),
    "eos": (
        lambda m: edit(m / "config.json", lambda c: c | {"eos_token_id": 7}),
        r"model: config\.json: eos_ids was \(\d+,\) and is \(7,\)",
    ),
    "eos of generation_config.json": (
        lambda m: (m / "generation_config.json").write_text('{"eos_token_id": 7}'),
        r"model: config\.json: eos_ids was \(\d+,\) and is \(\d+, 7\)",
    ),
    "tokenizer's eos": (
        lambda m: edit(m / "tokenizer_config.json", lambda c: c | {"eos_token": "a"}),
        r"model: tokenizer_config\.json was sha256:\w{12}\.\.\. and is sha256:\w{12}\.\.\.",
    ),
    "tokenizer": (
        lambda m: edit(m / "tokenizer.json", lambda c: c | {"normalizer": {"type": "Lowercase"}}),
        r"model: tokenizer\.json was sha256:\w{12}\.\.\. and is",
    ),
    "chat template": (
        lambda m: (m / "chat_template.jinja").write_text(
            "x" + (m / "chat_template.jinja").read_text()
        ),
        r"model: chat_template\.jinja was sha256:\w{12}\.\.\. and is",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", FILES)
def test_another_model_folder_is_refused_by_what_is_other(
    what: str, model: Path, whole: Path, tmp_path: Path
) -> None:
    change, told = FILES[what]
    other = shutil.copytree(model, tmp_path / "model")
    copy_stopped_after(whole, 2, tmp_path / "cut")
    shutil.move(model, tmp_path / "kept")
    try:
        shutil.copytree(other, model)
        change(model)
        with pytest.raises(
            ValueError, match=f"^resume: the run does not read what it began with: {told}"
        ):
            train(tree(model, tmp_path / "cut"), resume=True)
    finally:
        shutil.rmtree(model)
        shutil.move(tmp_path / "kept", model)


@pytest.mark.slow
def test_what_nobody_reads_may_be_other(model: Path, whole: Path, tmp_path: Path) -> None:
    """A note in config.json, generation settings: the run goes on as the same."""
    kept = (model / "config.json").read_text()
    try:
        edit(
            model / "config.json",
            lambda c: c | {"transformers_version": "9", "max_window_layers": 3},
        )
        (model / "generation_config.json").write_text('{"temperature": 0.1}')
        assert learnt(go_on(model, whole, tmp_path / "cut").folder) == learnt(whole)
    finally:
        (model / "config.json").write_text(kept)
        (model / "generation_config.json").unlink()


@pytest.mark.slow
def test_the_weights_of_the_model_are_refused_as_before(
    model: Path, whole: Path, tmp_path: Path
) -> None:
    other = hf.load(model)
    with torch.no_grad():
        other.norm.weight.mul_(2)
    shutil.move(model, tmp_path / "kept")
    try:
        hf.save(other, model, tokenizer_from=tmp_path / "kept")
        with pytest.raises(
            ValueError, match="^model: the weights of .* are not those that the run began with"
        ):
            go_on(model, whole, tmp_path / "cut")
    finally:
        shutil.rmtree(model)
        shutil.move(tmp_path / "kept", model)


ENV = """
from lowroll.envs.reverse_text import ReverseText

class Mine(ReverseText):
    def __init__(self, *, words, **options):
        super().__init__(template="{text}", max_words=1, min_len=3, max_len=5, **options)
"""


@pytest.mark.slow
def test_data_code_and_other_models_are_part_of_a_run(model: Path, tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(ENV)
    (tmp_path / "words.txt").write_text("one\n")
    for name in ("teacher", "critic"):
        shutil.copytree(model, tmp_path / name)
    env = [
        {
            "id": f"{tmp_path}/env.py:Mine",
            "name": "mine",
            "args": {"words": str(tmp_path / "words.txt")},
        }
    ]
    aipo = {"correction": "aipo", "loss": {"aipo": {"teacher_tau": 0.5}}, "env": env}
    learner = {"max_steps": 2, "teacher": str(tmp_path / "teacher")}
    runs = {
        "teacher": tree(model, tmp_path / "aipo", **aipo, train=learner),
        "critic": tree(
            model,
            tmp_path / "ppo",
            algorithm="ppo",
            critic={"model": str(tmp_path / "critic")},
            train={"max_steps": 2},
        ),
    }
    for run in runs.values():
        train(run)
        train(run, resume=True)

    def refused(name: str, told: str) -> None:
        with pytest.raises(
            ValueError, match=f"^resume: the run does not read what it began with: {told}"
        ):
            train(runs[name], resume=True)

    (tmp_path / "env.py").write_text(ENV + "    # the same\n")
    refused("teacher", r"env mine: its code was sha256:\w{12}\.\.\. and is sha256:\w{12}\.\.\.$")
    (tmp_path / "env.py").write_text(ENV)
    (tmp_path / "words.txt").write_text("two\n")
    refused("teacher", r"env mine: words was sha256:\w{12}\.\.\. and is sha256:\w{12}\.\.\.$")
    (tmp_path / "words.txt").write_text("one\n")
    for name, key in (("teacher", r"train\.teacher"), ("critic", r"critic\.model")):
        edit(tmp_path / name / "config.json", lambda c: c | {"rope_theta": 5e5})
        refused(name, rf"{key}: config\.json: rope_theta was 10000\.0 and is 500000\.0$")
    shutil.copyfile(model / "config.json", tmp_path / "teacher" / "config.json")
    other = hf.load(tmp_path / "teacher")
    with torch.no_grad():
        other.norm.weight.mul_(2)
    shutil.rmtree(tmp_path / "teacher")
    hf.save(other, tmp_path / "teacher", tokenizer_from=model)
    refused("teacher", r"train\.teacher: weights was \w{32} and is \w{32}$")


def test_the_file_of_an_advantage_function_is_part_of_a_run(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    own = {"import_path": f"{file}:mine", "kwargs": {"table": str(tmp_path / "table.json")}}
    (tmp_path / "table.json").write_text("[1]")
    file.write_text("def mine(rewards, lengths, table):\n    return rewards\n")
    cfg = from_mapping(tree(model, tmp_path / "run", advantage_function=own))
    saved = identity.run_inputs(cfg)
    identity.refuse_other_files(saved, identity.run_inputs(cfg))
    for path, place in ((tmp_path / "table.json", "table"), (file, "import_path")):
        before = path.read_text()
        path.write_text(before + "\n")
        now = identity.run_inputs(cfg)
        with pytest.raises(ValueError, match=rf": advantage_function: {place} was sha256:\w+"):
            identity.refuse_other_files(saved, now)
        path.write_text(before)
    older = {key: value for key, value in saved.items() if not key.startswith("advantage")}
    identity.refuse_other_files(older, saved)
    moved = shutil.move(tmp_path / "table.json", tmp_path / "moved.json")
    own["kwargs"] = {"table": str(moved)}
    cfg = from_mapping(tree(model, tmp_path / "run", advantage_function=own))
    identity.refuse_other_files(saved, identity.run_inputs(cfg))


def test_arguments_that_name_files_are_read_and_other_texts_are_not(
    tmp_path: Path, model: Path
) -> None:
    """A long system prompt is no path; every file of a list is one."""
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    env = {
        "id": "reverse-text",
        "name": "mine",
        "args": {
            "template": "{text}" + "x" * 5000,
            "files": [str(tmp_path / "a"), {"more": str(tmp_path / "b")}, 3],
        },
    }
    cfg = from_mapping({"model": str(model), "env": [env]})
    before = identity.run_inputs(cfg)
    assert [key for key in before if key.startswith("env")] == [
        f"env mine: files: {tmp_path / n}" for n in ("a", "b")
    ]
    (tmp_path / "b").write_text("other")
    with pytest.raises(
        ValueError, match=rf"env mine: files: {tmp_path / 'b'} was sha256:\w{{12}}\.\.\. and is sha"
    ):
        identity.refuse_other_files(before, identity.run_inputs(cfg))
    older = {
        key: value for key, value in identity.run_inputs(cfg).items() if "rope_theta" not in key
    }
    identity.refuse_other_files(
        older, identity.run_inputs(cfg)
    )  # of a version that did not know the key
    (tmp_path / "b").unlink()
    with pytest.raises(ValueError, match="and is not there$"):
        identity.refuse_other_files(before, identity.run_inputs(cfg))


def test_a_mixture_is_recorded_by_the_names_of_earlier_runs(tmp_path: Path) -> None:
    """Runs of mixtures that began before `MixtureSpec` can be resumed."""
    mixture = hf_model("glm4-moe")
    mixture.save_pretrained(tmp_path)
    config = mixture.config
    inputs = identity.run_inputs(from_mapping({"model": str(tmp_path), "env": [TASK]}))
    values = {key.removeprefix("model: config.json: "): value for key, value in inputs.items()}
    assert values["num_experts"] == repr(config.n_routed_experts)
    assert values["experts_per_token"] == repr(config.num_experts_per_tok)
    assert values["moe_intermediate_size"] == repr(config.moe_intermediate_size)
    assert values["norm_topk_prob"] == repr(config.norm_topk_prob)
    assert values["dense_layers"] == repr(config.first_k_dense_replace)
    assert values["shared_expert_gate"] == "False"
    assert values["scores"].startswith("SigmoidScores(groups=")
    assert not {"mixture", "expert_size", "renormalize", "shared_size"} & values.keys()


def test_a_checkpoint_that_does_not_say_what_was_read_is_refused(
    model: Path, whole: Path, tmp_path: Path
) -> None:
    copy_stopped_after(whole, 2, tmp_path / "cut")
    manifest = tmp_path / "cut" / "checkpoints" / "step_000002" / "MANIFEST.json"
    found = json.loads(manifest.read_text())
    meta = {
        key: value for key, value in found["meta"].items() if key not in ("read", "cache_tokens")
    }
    manifest.write_bytes(encode_manifest(found["files"], meta))
    with pytest.raises(ValueError, match="^resume: the checkpoint is of an older lowroll"):
        train(tree(model, tmp_path / "cut"), resume=True)


def test_data_and_rewards_are_told_apart_by_their_keys(tmp_path: Path, model: Path) -> None:
    """Also where it is the file of a reward function that has changed."""
    (rewards := tmp_path / "rewards.py").write_text("def f(text): return 1.0\n")
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "x"}\n')

    def tree(**changes: Any) -> Any:
        given = {"data": str(tmp_path / "a.jsonl"), "reward_funcs": [f"{rewards}:f"], **changes}
        return from_mapping({"model": str(model), **given})

    saved = yaml.safe_load(tree().dump())
    for changes, where in (
        ({"data": str(tmp_path / "b.jsonl")}, "env[0].args.path was "),
        ({"reward_funcs": [f"{rewards}:g"]}, "env[0].args.reward_funcs[0] was "),
        ({"reward_weights": [2.0]}, "env[0].args.reward_weights was None and is [2.0]"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"checkpoint: {where}")):
            identity.refuse_other_settings(saved, tree(**changes))
    before = identity.run_inputs(tree())
    rewards.write_text("def f(text): return 2.0\n")
    with pytest.raises(ValueError, match="env data: reward_funcs: .*rewards.py:f was sha256"):
        identity.refuse_other_files(before, identity.run_inputs(tree()))


def test_the_number_of_engines_may_change_where_they_are_exact() -> None:
    """They draw alike whatever their number; else it is in the last bits."""

    def tree(exact: bool | None, engines: int) -> Any:
        rollout = {"exact": exact, "engines": engines}
        return from_mapping({"model": "m", "launcher": "local", "rollout": rollout})

    for before, after in ((1, 2), (2, 1)):
        saved = yaml.safe_load(tree(True, before).dump())
        identity.refuse_other_settings(saved, tree(True, after))
    with pytest.raises(ValueError, match=r"rollout\.engines was 2 and is 1$"):
        identity.refuse_other_settings(yaml.safe_load(tree(None, 2).dump()), tree(None, 1))


def test_settings_are_told_apart_key_by_key() -> None:
    saved = yaml.safe_load(from_mapping({"model": "m", "seed": 1}).dump())
    other = from_mapping({"model": "m", "seed": 2, "correction": "acr", "train": {"lora": True}})
    told = "the configuration is not that of the checkpoint: seed was 1 and is 2; train.lora was False and is True"
    with pytest.raises(ValueError, match=f"^resume: {re.escape(told)}$"):
        identity.refuse_other_settings(saved, other)
    with pytest.raises(ValueError, match=r": seed was 1 and is 2$"):
        identity.refuse_other_settings(saved, other, more=("train.lora",))
    identity.refuse_other_settings(saved, other, more=("train", "seed"))


def test_a_folder_with_an_old_name_goes_on_and_has_the_new_one(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(folder: str) -> dict[str, Any]:
        changes = {"rollout": {"bulk": "fp8"}, "train": {"max_steps": 2}}
        return tree(model, tmp_path / folder, **changes)

    dump = RunConfig.dump
    with monkeypatch.context() as before:
        before.setattr(
            RunConfig, "dump", lambda cfg: dump(cfg).replace("large_batch_weights:", "bulk:")
        )
        whole = train(run("whole")).folder
    assert "bulk: fp8" in (whole / "config.yaml").read_text()
    copy_stopped_after(whole, 1, tmp_path / "cut")
    train(run("cut"), resume=True)
    assert learnt(tmp_path / "cut", 2) == learnt(whole, 2)
    assert "large_batch_weights: fp8" in (tmp_path / "cut" / "config.yaml").read_text()
    copy_stopped_after(whole, 1, tmp_path / "other")
    with pytest.raises(ValueError, match="rollout.large_batch_weights was 'fp8' and is None"):
        train(tree(model, tmp_path / "other", train={"max_steps": 2}), resume=True)
