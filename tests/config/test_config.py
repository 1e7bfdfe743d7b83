"""Settings: every mistake is one line that names file, line, key and remedy; what is right loads
and round-trips."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lowroll.config import ConfigError, RunConfig, from_mapping, load
from lowroll.config.auto import AUTO, CorrectionRow, Rollouts, choose_correction
from lowroll.config.build import known_keys
from lowroll.config.document import ConfigDumper, parse, resolve_plain
from lowroll.config.foreign import ABSENT, NEEDLESS, RENAMED
from lowroll.config.load import as_config
from lowroll.config.loss import SparseConfig
from lowroll.kv.policy.table import BOUNDED, POLICIES, CachePolicyRow, Option, filled
from lowroll.objectives.table import ALGORITHMS, CORRECTIONS, RULES

ROOT = Path(__file__).parents[2]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def problems(path: Path, overrides: object = ()) -> list[str]:
    """The lines of the error, without the folder."""
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)  # type: ignore[arg-type]
    return str(caught.value).replace(f"{path.parent}/", "").splitlines()


def test_a_minimal_file_has_the_documented_defaults(write: Callable[[str], Path]) -> None:
    cfg = load(write("model: some/model\n"))
    assert (cfg.batch_size, cfg.rollouts_per_example, cfg.num_groups) == (64, 8, 8)
    assert (cfg.rollout.weights, cfg.rollout.max_tokens, cfg.train.learning_rate) == (
        "int8",
        64,
        1e-5,
    )
    assert [env.id for env in cfg.env] == [env.name for env in cfg.env] == ["reverse-text"]
    with pytest.raises(ValidationError):
        cfg.seed = 3  # type: ignore[misc]


def test_every_key_file_is_exactly_the_defaults() -> None:
    path = ROOT / "examples" / "every_key.yaml"
    tree = parse(path.read_text(), "every_key.yaml").value
    defaults = RunConfig(model="Qwen/Qwen3-0.6B").model_dump(mode="json")
    assert tree == defaults
    assert list(tree) == list(defaults)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name
)
def test_examples_load(path: Path) -> None:
    assert load(path).model


# text, overrides -> the lines of the error
MISTAKES: list[tuple[str, list[str], list[str]]] = [
    # keys
    (
        "model: m\n\ttrain: {}\n",
        [],
        [
            "run.yaml:2: not valid YAML: found character '\\t' that cannot start any token; "
            "indent with spaces"
        ],
    ),
    (
        "model: m\ntrain.max_steps: 3\n",
        [],
        [
            "run.yaml:2: train.max_steps: unknown key; with dots it is an override, "
            "in a file it is train: {max_steps: ...}"
        ],
    ),
    (
        "model: m\ntrain:\n  max_stepz: 3\n",
        [],
        ["run.yaml:3: train.max_stepz: unknown key (did you mean max_steps?)"],
    ),
    (
        "model: m\n\nmax_steps: 3\n",
        [],
        ["run.yaml:3: max_steps: unknown key (did you mean train.max_steps?)"],
    ),
    (
        "model: m\nenv:\n  - id: x\n  - id: y\n    arg: {}\n",
        [],
        ["run.yaml:5: env[1].arg: unknown key (did you mean args?)"],
    ),
    (
        "model: m\nenv: {id: x,\n  wieght: 2}\n",
        [],
        ["run.yaml:3: env.wieght: unknown key (did you mean weight?)"],
    ),
    ("model: m\nzzzz: 1\n", [], ["run.yaml:2: zzzz: unknown key"]),
    ("seed: 1\n", [], ["run.yaml: model: this key is required"]),
    ("model: m\nenv: [{name: x}]\n", [], ["run.yaml:2: env[0].id: this key is required"]),
    ("", [], ["run.yaml: model: this key is required"]),
    (
        "model: m\nseed: 1\nseed: 2\n",
        [],
        ["run.yaml:3: seed: duplicated key (first written in line 2)"],
    ),
    (
        "model: m\ntrain: {lora: true, eps: 1e-6,\n  lora: false}\n",
        [],
        ["run.yaml:3: train.lora: duplicated key (first written in line 2)"],
    ),
    # several at once, in the order of the file
    (
        "model: m\nseed: x\ntrain:\n  lora_rank: 0\n  learning_rate: fast\n",
        [],
        [
            "run.yaml:2: seed: must be a whole number, got 'x'",
            "run.yaml:4: train.lora_rank: must be >= 1, got 0",
            "run.yaml:5: train.learning_rate: must be a number, got 'fast'",
        ],
    ),
    # types
    ("model: 3\n", [], ["run.yaml:1: model: must be text, got 3"]),
    ("model: ''\n", [], ["run.yaml:1: model: must not be empty"]),
    ("model: m\nseed: true\n", [], ["run.yaml:2: seed: must be a whole number, got true"]),
    ("model: m\nseed: 1.0\n", [], ["run.yaml:2: seed: must be a whole number, got 1.0"]),
    ("model: m\nseed: -1\n", [], ["run.yaml:2: seed: must be >= 0, got -1"]),
    (
        "model: m\nbatch_size: '64'\n",
        [],
        ["run.yaml:2: batch_size: must be a whole number, got '64' (drop the quotes)"],
    ),
    (
        "model: m\nrollout: {temperature: false}\n",
        [],
        ["run.yaml:2: rollout.temperature: must be a number, got false"],
    ),
    ("model: m\ntrain: {lora: 1}\n", [], ["run.yaml:2: train.lora: must be true or false, got 1"]),
    ("model: m\ntrain: fast\n", [], ["run.yaml:2: train: must be a section of keys, got 'fast'"]),
    (
        "model: m\nrollout: {stop: END}\n",
        [],
        ["run.yaml:2: rollout.stop: must be a list, got 'END'"],
    ),
    (
        "model: m\ntrain:\n  betas: [0.9, 1.0]\n",
        [],
        ["run.yaml:3: train.betas[1]: must be < 1.0, got 1.0"],
    ),
    ("model: m\nenv: []\n", [], ["run.yaml:2: env: must not be empty"]),
    # values
    (
        "model: m\nalgorithm: grop\n",
        [],
        [
            f"run.yaml:2: algorithm: must be one of {', '.join(ALGORITHMS)}, got 'grop' "
            "(did you mean grpo?)"
        ],
    ),
    (
        "model: m\ncorrection: sprase\n",
        [],
        [
            f"run.yaml:2: correction: must be one of auto, {', '.join(CORRECTIONS)}, "
            "got 'sprase' (did you mean sparse?)"
        ],
    ),
    (
        "model: m\nloss:\n  aipo: {tau: 1}\n",
        [],
        ["run.yaml:3: loss.aipo.tau: unknown key (did you mean kl_tau?)"],
    ),
    (
        "model: m\ncorrection: aipo\nloss:\n  aipo: {teacher_tau: 0.5}\n",
        [],
        [
            "run.yaml:4: loss.aipo.teacher_tau: needs train.teacher, the model whose log-probs it "
            "pulls to"
        ],
    ),
    (
        "model: m\nloss:\n  aipo: {mode: mask,\n    geo_mask_low: 11}\n",
        [],
        ["run.yaml:4: loss.aipo.geo_mask_low: geo_mask_low (11) is more than geo_mask_high (10)"],
    ),
    (
        "model: m\nloss:\n  sparse: {token_rs: [1.5, 0.5]}\n",
        [],
        [
            "run.yaml:3: loss.sparse.token_rs: the lower bound (1.5) is more than the upper one "
            "(0.5)"
        ],
    ),
    (
        "model: m\nloss:\n  reweight: {reject: {token_k1: 2.0}}\n",
        [],
        [
            "run.yaml:3: loss.reweight.reject.token_k1: needs [low, high], bounds on sampler over "
            "learner"
        ],
    ),
    (
        "model: m\nloss:\n  reweight:\n    reject:\n      seq_mean_k3: [0, 1]\n",
        [],
        ["run.yaml:5: loss.reweight.reject.seq_mean_k3: needs one number, an upper bound"],
    ),
    (
        "model: m\nloss: {reweight: {icepop: [0.5]}}\n",
        [],
        ["run.yaml:2: loss.reweight.icepop: needs 2 entries"],
    ),
    (
        "model: m\ncorrection: aipo\nloss: {eps_low: 0.1, dual_clip: 3}\n",
        [],
        [
            "run.yaml:3: loss.dual_clip: aipo has no dual clip; write null",
            "run.yaml:3: loss.eps_low: aipo does not clip; write null",
        ],
    ),
    (
        "model: m\ncorrection: tbpo\nloss: {dual_clip: 3}\n",
        [],
        ["run.yaml:3: loss.dual_clip: tbpo has no dual clip; write null"],
    ),
    (
        "model: m\nalgorithm: gspo\ncorrection: sparse\n",
        [],
        [
            "run.yaml:3: correction: sparse bounds single tokens and has no form under gspo; use "
            "auto, tis, decoupled, tbpo "
            "or none"
        ],
    ),
    # the cache
    (
        "model: m\nrollout:\n  kv: {policy: lru}\n",
        [],
        [
            "run.yaml:3: rollout.kv.policy: must be one of dense, streaming, h2o, snapkv, rkv, got 'lru'"
        ],
    ),
    (
        "model: m\nrollout:\n  kv: rkv\n",
        [],
        ["run.yaml:3: rollout.kv: must be a section of keys, got 'rkv'"],
    ),
    (
        "model: m\nrollout:\n  kv: {policy: rkv,\n    budget: 8}\n",
        [],
        ["run.yaml:4: rollout.kv.budget: rkv expects at least 9 (window 8 and 1), got 8"],
    ),
    (
        "model: m\nrollout:\n  kv:\n    policy: streaming\n    sinks: 512\n",
        [],
        [
            "run.yaml:3: rollout.kv.budget: streaming expects at least 513 (sinks 512 and 1), got 512"
        ],
    ),
    (
        "model: m\nrollout:\n  kv: {policy: h2o, budget: 1}\n",
        [],
        ["run.yaml:3: rollout.kv.budget: h2o expects at least 2, got 1"],
    ),
    (
        "model: m\nalgorithm: dapo\nbuffer: {skip_verification: true}\n",
        [],
        [
            "run.yaml:3: buffer.skip_verification: every reward would be 0, and dynamic sampling "
            "would drop every group; write dapo.dynamic_sampling: false"
        ],
    ),
    (
        "model: m\nrollout:\n  kv:\n    policy: snapkv\n    buffer: -1\n    kernel: 4\n",
        [],
        [
            "run.yaml:5: rollout.kv.buffer: snapkv expects at least 1, got -1",
            "run.yaml:6: rollout.kv.kernel: snapkv expects an odd number, got 4",
        ],
    ),
    (
        "model: m\nrollout:\n  kv:\n    policy: rkv\n    buffer: true\n    window: 0\n    mix: 1.5\n"
        "    zero_first: 1\n    budget: 512.0\n    kernel: '7'\n",
        [],
        [
            "run.yaml:5: rollout.kv.buffer: rkv expects a whole number, got True",
            "run.yaml:6: rollout.kv.window: rkv expects at least 1, got 0",
            "run.yaml:7: rollout.kv.mix: rkv expects a number of 0 to 1, got 1.5",
            "run.yaml:8: rollout.kv.zero_first: rkv expects true or false, got 1",
            "run.yaml:9: rollout.kv.budget: rkv expects a whole number, got 512.0",
            "run.yaml:10: rollout.kv.kernel: rkv expects a whole number, got '7'",
        ],
    ),
    (
        "model: m\nrollout:\n  kv: {policy: rkv, sinks: 4, budgett: 9}\n",
        [],
        [
            "run.yaml:3: rollout.kv.budgett: rkv has no such option; its options: budget, buffer, "
            "window, kernel, mix, zero_first (did you mean budget?)",
            "run.yaml:3: rollout.kv.sinks: rkv has no such option; its options: budget, buffer, "
            "window, kernel, mix, zero_first",
        ],
    ),
    (
        "model: m\n",
        ["rollout.kv.budget=64"],
        [
            "override rollout.kv.budget: dense has no options; name a policy: streaming, h2o, "
            "snapkv, rkv"
        ],
    ),
    (
        "model: m\nrollout: {kv: {policy: rkv, budget: 64}}\n",
        ["rollout.kv.policy=h2o", "rollout.kv.window=4", "rollout.kv.dtype=int8"],
        ["override rollout.kv.dtype: must be one of auto, fp8, got 'int8'"],
    ),
    (
        "model: m\nrollout: {kv: {polcy: rkv}}\n",
        [],
        ["run.yaml:2: rollout.kv.polcy: dense has no options (did you mean policy?)"],
    ),
    (
        "model: m\ncorrection: none\nrollout: {weights: dense, kv: {policy: rkv}}\n",
        [],
        [
            "run.yaml:2: correction: none with a cache that rkv bounds is known to collapse "
            "(Sparse-RL's Fig. 1: the reward falls and the gradient spikes after about 200 steps; "
            "its Table 1 ends at 45.1 with R-KV and 34.0 with SnapKV, where dense rollouts end at "
            "53.1); write auto, or force: true to compare with it"
        ],
    ),
    (
        "model: m\nloss: {eps_low: -0.1}\n",
        [],
        ["run.yaml:2: loss.eps_low: must be >= 0.0, got -0.1"],
    ),
    (
        "model: m\nrollout: {temperature: 0}\n",
        [],
        ["run.yaml:2: rollout.temperature: must be >= 0.0001, got 0"],
    ),
    (
        "model: m\nrollout: {temperature: .nan}\n",
        [],
        ["run.yaml:2: rollout.temperature: .nan is not a finite number"],
    ),
    ("model: m\nloss:\n  cap: .inf\n", [], ["run.yaml:3: loss.cap: .inf is not a finite number"]),
    ("model: m\nloss:\n  cap: 1e999\n", [], ["run.yaml:3: loss.cap: 1e999 is too large a number"]),
    # YAML traps
    (
        "model: m\ntrain: {lora: yes}\n",
        [],
        ["run.yaml:2: train.lora: yes is ambiguous in YAML: write true, or quote it if it is text"],
    ),
    (
        "model: no\n",
        [],
        ["run.yaml:1: model: no is ambiguous in YAML: write false, or quote it if it is text"],
    ),
    (
        "model: m\nseed: 010\n",
        [],
        [
            "run.yaml:2: seed: 010 is ambiguous in YAML: write plain decimal digits, or quote it "
            "if it is text"
        ],
    ),
    (
        "model: m\nbatch_size: 1_024\n",
        [],
        [
            "run.yaml:2: batch_size: 1_024 is ambiguous in YAML: write plain decimal digits, or "
            "quote it if it is text"
        ],
    ),
    (
        "model: m\nscore: {time_limit: 1:30}\n",
        [],
        [
            "run.yaml:2: score.time_limit: 1:30 is ambiguous in YAML: write plain decimal digits, "
            "or quote it if it is "
            "text"
        ],
    ),
    (
        "model: &m some\noutput_dir: *m\n",
        [],
        ["run.yaml:1: anchors and aliases (&, *) are not allowed; write the value out"],
    ),
    ("model: !!python/object/apply:os.getcwd []\n", [], ["run.yaml:1: tags (!) are not allowed"]),
    ("model: m\n---\nmodel: n\n", [], ["run.yaml:2: more than one document in a file"]),
    ("- model\n", [], ["run.yaml:1: a mapping of keys is needed here"]),
    ("model: m\n? [a, b]\n: 3\n", [], ["run.yaml:2: top level: a key must be text"]),
    (
        "model: m\nenv: [a\nseed: 1\n",
        [],
        ["run.yaml:3: not valid YAML: expected ',' or ']', but got ':'"],
    ),
    # settings that cannot work together
    (
        "model: m\nbatch_size: 60\n",
        [],
        ["run.yaml:2: batch_size: batch_size (60) is not a multiple of rollouts_per_example (8)"],
    ),
    (
        "model: m\nrollouts_per_example: 7\n",
        [],
        [
            "run.yaml:2: rollouts_per_example: batch_size (64) is not a multiple of "
            "rollouts_per_example (7)"
        ],
    ),
    (
        "model: m\nrollouts_per_example: 1\n",
        [],
        [
            "run.yaml:2: rollouts_per_example: one rollout has no group that grpo could compare it "
            "with; write 2 or more, or "
            "algorithm: ppo, whose critic needs no group"
        ],
    ),
    (
        "model: m\nalgorithm: rloo\nadvantage: length_weighted\nstages:\n- {step: 2, "
        "rollouts_per_example: 1}\n",
        [],
        [
            "run.yaml:5: stages[0].rollouts_per_example: from stages[0] on: one rollout has no "
            "group that length_weighted "
            "could compare it with; write 2 or more, or algorithm: ppo, whose critic needs no group"
        ],
    ),
    (
        "model: m\ntrain:\n  minibatches: 3\n",
        [],
        [
            "run.yaml:3: train.minibatches: the 8 groups of a batch (batch_size / "
            "rollouts_per_example) cannot be split "
            "into 3 equal minibatches"
        ],
    ),
    (
        "model: m\nrollout:\n  min_tokens: 65\n",
        [],
        [
            "run.yaml:3: rollout.min_tokens: rollout.min_tokens (65) is more than "
            "rollout.max_tokens (64)"
        ],
    ),
    (
        "model: m\nrollout: {max_tokens: 8192}\n",
        [],
        [
            "run.yaml:2: rollout.max_tokens: train.tokens_per_microbatch (8192) cannot hold a "
            "prompt and its response of up "
            "to 8192 tokens (rollout.max_tokens)"
        ],
    ),
    (
        "model: m\nrollout: {cache_tokens: 64}\n",
        [],
        [
            "run.yaml:2: rollout.cache_tokens: rollout.cache_tokens (64) cannot hold a prompt and "
            "its response of up to 64 "
            "tokens (rollout.max_tokens)"
        ],
    ),
    (
        "model: m\ndapo:\n  overlong_max: 64\n",
        [],
        ["run.yaml:3: dapo.overlong_max: needs dapo.overlong_cache beside it"],
    ),
    (
        "model: m\ndapo: {overlong_max: 64, overlong_cache: 65}\n",
        [],
        [
            "run.yaml:2: dapo.overlong_cache: dapo.overlong_cache (65) is more than "
            "dapo.overlong_max (64)"
        ],
    ),
    (
        "model: m\nalgorithm: gspo\ncorrection: acr\n",
        [],
        [
            "run.yaml:3: correction: acr bounds single tokens and has no form under gspo; use "
            "auto, tis, decoupled, tbpo or "
            "none"
        ],
    ),
    (
        "model: m\ntrain: {max_steps: 5, warmup_steps: 6}\n",
        [],
        [
            "run.yaml:2: train.warmup_steps: train.warmup_steps (6) is more than the 5 steps of "
            "the run"
        ],
    ),
    (
        "model: m\nenv:\n  - id: x\n  - id: x\n",
        [],
        ["run.yaml:4: env[1].id: two environments are called 'x'; give one another name"],
    ),
    (
        "model: m\nrollout:\n  temperature: 0.5\n  temp_scheduler: {type: linear, "
        "start_temperature: 1.0, "
        "end_temperature: 0.5}\n",
        [],
        [
            "run.yaml:4: rollout.temp_scheduler: set either rollout.temperature or "
            "rollout.temp_scheduler, not both"
        ],
    ),
    (
        "model: m\nenv: reverse-text\n",
        [],
        ["run.yaml:2: env: an environment is a section: write [{id: reverse-text}]"],
    ),
    (
        "model: m\neval:\n  env: [a, b]\n",
        [],
        ["run.yaml:3: eval.env: an environment is a section: write [{id: a}, {id: b}]"],
    ),
    (
        "model: m\nalgorithm: GRPO\n",
        [],
        [
            f"run.yaml:2: algorithm: must be one of {', '.join(ALGORITHMS)}, got 'GRPO' "
            "(did you mean grpo?)"
        ],
    ),
    # overrides
    (
        "model: m\n",
        ["train.max_stepz=20"],
        ["override train.max_stepz: unknown key (did you mean max_steps?)"],
    ),
    ("model: m\n", ["trian.max_steps=20"], ["override trian: unknown key (did you mean train?)"]),
    (
        "model: m\n",
        ["train.max_steps=2.5"],
        ["override train.max_steps: must be a whole number, got 2.5"],
    ),
    (
        "model: m\n",
        ["train.lora=yes"],
        ["override train.lora: yes is ambiguous in YAML: write true, or quote it if it is text"],
    ),
    (
        "model: m\n",
        ["train.max_steps"],
        ["override train.max_steps: write it as key=value, for example train.max_steps=20"],
    ),
    ("model: m\n", ["seed.x=3"], ["override seed: must be a whole number, got a section"]),
    ("model: m\nseed: 2\n", ["seed.x=3"], ["override seed.x: seed has no x"]),
    ("model: m\n", ["env.3.id=x"], ["override env.3.id: env has no 3"]),
    ("model: m\n", ["train..eps=1"], ["override train..eps: not a dotted key"]),
    (
        "model: m\n",
        ["rollout={max_tokens: 5, min_tokens: &a 3}"],
        ["override rollout: anchors and aliases (&, *) are not allowed; write the value out"],
    ),
    (
        "model: m\nbatch_size: 64\n",
        ["batch_size=60"],
        ["override batch_size: batch_size (60) is not a multiple of rollouts_per_example (8)"],
    ),
]


def foreign(tree: dict[str, object]) -> list[str]:
    """The lines about a tree, without "config: "."""
    with pytest.raises(ConfigError) as error:
        from_mapping({"model": "m", **tree})
    return [line.removeprefix("config: ") for line in str(error.value).splitlines()]


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("n_gpus", "here it is train.gpus"),
        ("pp", "not there yet: other ways to share"),
        ("report_to", "here it is track (a list of wandb, "),
        ("async_level", "here it is asynchrony.max_async_level"),
        ("sglang", "not there yet: another engine"),
        ("use_vllm", "here it is rollout.engine: vllm"),
        ("vllm_server_base_url", "here it is rollout.vllm.url"),
        ("deepspeed", "here it is train.sharding"),
        ("num_generations", "here it is rollouts_per_example"),
        ("per_device_train_batch_size", "here it is batch_size"),
        ("beta", "here it is loss.kl_coef"),
        ("max_completion_length", "here it is rollout.max_tokens"),
        ("bf16", "here it is dtype: bfloat16"),
        ("seq_len", "here it is train.tokens_per_microbatch"),
        ("trust_remote_code", "not needed: lowroll runs no code"),
    ],
)
def test_what_other_tools_call_it(key: str, told: str) -> None:
    (line,) = foreign({key: 1})
    assert line.startswith(f"{key}: unknown key; {told}"), line


def test_foreign_keys_in_sections_and_near_ones_elsewhere() -> None:
    assert foreign({"rollout": {"name": "vllm"}})[0].startswith(
        "rollout.name: unknown key; here it is rollout.engine"
    )
    assert foreign({"tensor_parallel_size": 2}) == [
        "tensor_parallel_size: unknown key (did you mean rollout.vllm.tensor_parallel_size?)"
    ]
    verl = foreign(
        {
            "trainer": {"n_gpus_per_node": 8},
            "actor_rollout_ref": {"rollout": {"n": 8, "name": "vllm"}},
        }
    )
    assert [line.split(":")[0] for line in verl] == [
        "actor_rollout_ref.rollout.n",
        "actor_rollout_ref.rollout.name",
        "trainer.n_gpus_per_node",
    ]
    assert foreign({"learning_rate": 1e-5}) == [
        "learning_rate: unknown key (did you mean train.learning_rate?)"
    ]
    assert foreign({"temprature": 1}) == [
        "temprature: unknown key (did you mean rollout.temperature?)"
    ]


def test_every_foreign_key_leads_to_a_key_of_ours() -> None:
    known = set(known_keys(RunConfig))
    for theirs, ours in RENAMED.items():
        assert theirs not in {key.rpartition(".")[2] for key in known}, f"{theirs} is a key of ours"
        named = re.match(r"[\w.]+", ours)
        assert named is not None
        assert ours.startswith("lowroll ") or re.sub(r"\.\d.*", "", named[0]) in known, ours
    assert not {*RENAMED} & {*ABSENT} | {*ABSENT} & {*NEEDLESS} | {*NEEDLESS} & {*RENAMED}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "rollout: {temperature: 1.0e+9}",
            "rollout.temperature: must be <= 10000.0, got 1000000000.0",
        ),
        (
            "rollout: {repetition_penalty: 1.0e-3}",
            "rollout.repetition_penalty: must be >= 0.01, got 0.001",
        ),
        ("eval: {repetition_penalty: 101}", "eval.repetition_penalty: must be <= 100.0, got 101"),
        (
            "eval: {temperature: 1.0e-5}",
            "eval.temperature: must be 0 (greedy) or from 0.0001 to 10000, got 1e-05",
        ),
        (
            "rollout: {temp_scheduler: {type: linear, start_temperature: 1, end_temperature: "
            "1.0e+5}}",
            "rollout.temp_scheduler.end_temperature: must be <= 10000.0, got 100000.0",
        ),
        (
            "{batch_size: 4096, rollouts_per_example: 2048}",
            "rollouts_per_example: must be <= 1024, got 2048",
        ),
        (
            "eval: {rollouts_per_example: 2048}",
            "eval.rollouts_per_example: must be <= 1024, got 2048",
        ),
    ],
)
def test_what_the_engine_would_refuse_is_refused_by_the_file(text: str, told: str) -> None:
    assert foreign(parse(text, "x").value) == [told]


@pytest.mark.parametrize(
    ("text", "overrides", "expected"), MISTAKES, ids=lambda value: repr(value)[:40]
)
def test_mistakes_name_file_line_key_and_remedy(
    write: Callable[[str], Path], text: str, overrides: list[str], expected: list[str]
) -> None:
    assert problems(write(text), overrides) == expected


def test_unreadable_files(tmp_path: Path, write: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"gone\.yaml: cannot be read: No such file"):
        load(tmp_path / "gone.yaml")
    path = write("")
    path.write_bytes(b"model: \xff\xfe\n")
    assert problems(path) == ["run.yaml: not UTF-8 text (byte 7)"]
    path.write_text("model: m\noutput_dir: a\x00b\n")
    assert problems(path) == ["run.yaml:2: not valid YAML: special characters are not allowed"]
    path.write_text("model: " + "[" * 40 + "]" * 40)
    assert problems(path) == ["run.yaml:1: nested more than 32 levels deep"]
    path.write_text("model: m\n# " + "x" * (1 << 20))
    assert problems(path) == ["run.yaml: longer than 1048576 characters"]


def test_an_alias_bomb_is_refused_before_it_is_built(write: Callable[[str], Path]) -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 100)]
    assert problems(write("\n".join(lines))) == [
        "run.yaml:1: anchors and aliases (&, *) are not allowed; write the value out"
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        ("+1.5", 1.5),
        (".5", 0.5),
        ("2.", 2.0),
        ("-3", -3),
        ("0", 0),
        ("0x10", 16),
        ("0o17", 15),
        ("~", None),
        ("", None),
        ("null", None),
        ("true", True),
        ("FALSE", False),
        ("y", "y"),
        ("1.2.3", "1.2.3"),
        ("2020-01-01", "2020-01-01"),
        ("nan", "nan"),
        ("inf", "inf"),
        ("e5", "e5"),
        (".", "."),
    ],
)
def test_plain_scalars_follow_the_core_schema(text: str, value: object) -> None:
    result = resolve_plain(text)
    assert result == value and type(result) is type(value)


def test_numbers_in_exponent_form_reach_float_fields(write: Callable[[str], Path]) -> None:
    cfg = load(write("model: m\ntrain: {learning_rate: 3e-6, lora_alpha: 8}\n"), ["train.eps=1e-6"])
    assert (cfg.train.learning_rate, cfg.train.eps, cfg.train.lora_alpha) == (3e-6, 1e-6, 8.0)


def test_overrides(write: Callable[[str], Path]) -> None:
    path = write("model: m\nenv: {id: x, args: {depth: 1}}\ntrain: {max_steps: 5}\n")
    cfg = load(
        path,
        [
            "train.max_steps=20",
            "env.0.args.depth=2",
            "env[0].weight=0.5",
            "rollout.stop=[a, 'no']",
            "eval={interval: 3}",
            "output_dir=out=put",
        ],
    )
    assert cfg.train.max_steps == 20
    assert (cfg.env[0].args, cfg.env[0].weight) == ({"depth": 2}, 0.5)
    assert cfg.rollout.stop == ("a", "no")
    assert (cfg.eval.interval, cfg.output_dir) == (3, "out=put")
    assert load(path, {"train.max_steps": 20, "env.args.depth": 2}).env[0].args == {"depth": 2}
    assert load(write("model: m\n"), ["env.0.args.max_len=5"]).env[0].id == "reverse-text"
    in_python = from_mapping({"model": "m", "env": {"id": "x"}}, ["env.0.weight=0.5"])
    assert (in_python.env[0].id, in_python.env[0].weight) == ("x", 0.5)
    with pytest.raises(ConfigError, match="override loss.cap: must be a finite number"):
        load(path, {"loss.cap": math.inf})
    with pytest.raises(ConfigError, match="override train.eps: set is no configuration value"):
        load(path, {"train.eps": {1.0}})


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("batch_size", "0 6 -8"),
        ("rollouts_per_example", "0 1"),
        ("advantage", "vtrace custom"),
        ("dapo.max_rounds", "0"),
        ("dapo.no_signal", "stop"),
        ("dapo.overlong_max", "5"),
        ("dapo.overlong_cache", "0 5"),
        ("score.max_error_rate", "-0.001 1.0"),
        ("rollout.temperature", "0.0 -1.0 .inf .nan"),
        ("asynchrony.max_async_level", "-1 9"),
        ("asynchrony.max_off_policy_steps", "-1"),
        ("asynchrony.oversampling_factor", "0.99 .inf .nan"),
        ("asynchrony.partial", "half"),
        ("buffer.easy_threshold", ".inf"),
        ("buffer.hard_threshold", ".nan"),
        ("buffer.easy_fraction", "-0.1 1.1"),
        ("buffer.hard_fraction", "1.1"),
        ("loss.kl_coef", "-1.0 .nan"),
        ("train.minibatches", "0"),
        ("train.tokens_per_microbatch", "0"),
        ("train.logprob_chunk", "0"),
        ("train.learning_rate", "-1.0e-9 .inf .nan"),
        ("train.warmup_steps", "-1"),
        ("train.min_lr_ratio", "-0.1 .nan"),
        ("train.weight_decay", "-1.0e-9 .inf"),
        ("train.betas", "[1.0,0.5] [0.5,1.0] [-0.1,0.5] [0.5,-0.1]"),
        ("train.eps", "-1.0e-9 .nan"),
        ("train.max_grad_norm", "0.0 -1.0 .inf .nan"),
        ("train.optimizer", "sgd"),
        ("train.lr_scheduler_type", "step"),
        ("critic.gamma", "-0.001 1.001"),
        ("critic.lam", "-0.1 1.1"),
        ("critic.value_clip", "0.0 -1.0"),
        ("critic.warmup_steps", "-1"),
        ("ckpt.keep_last", "0 -1 1.5 true"),
        ("ckpt.keep_interval", "0"),
        ("sft.batch_size", "0"),
        ("eval.num_examples", "0"),
        ("eval.rollouts_per_example", "0"),
    ],
)
def test_what_no_loop_can_use_is_refused(key: str, values: str) -> None:
    for value in values.split():
        with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
            from_mapping({"model": "m"}, [f"{key}={value}"])


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"buffer": {"easy_threshold": 0.2, "hard_threshold": 0.2}}, "hard_threshold"),
        (
            {"buffer": {"skip_verification": True}, "dapo": {"dynamic_sampling": True}},
            "skip_verification",
        ),
        (
            {"buffer": {"skip_verification": True, "online_difficulty_filtering": True}},
            "skip_verification",
        ),
        (
            {"asynchrony": {"max_off_policy_steps": 1, "max_async_level": 2}},
            "max_off_policy_steps",
        ),
        ({"env": [{"id": "countdown", "weight": 0.0}]}, "weight"),
    ],
)
def test_what_no_loop_can_use_together_is_refused(tree: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        from_mapping({"model": "m", **tree})


def test_from_mapping_checks_the_same_things() -> None:
    assert from_mapping({"model": "m", "train": {"max_steps": 3}}, ["seed=4"]).seed == 4
    with pytest.raises(
        ConfigError, match=r"^config: train\.max_stepz: unknown key \(did you mean max_steps\?\)$"
    ):
        from_mapping({"model": "m", "train": {"max_stepz": 3}})


# algorithm, weights -> correction, eps_low, eps_high, reduce, advantage, dynamic sampling
@pytest.mark.parametrize(
    ("algorithm", "weights", "expected"),
    [
        ("grpo", "int8", ("acr", 0.2, 0.2, "seq-mean-token-mean", "grpo", False)),
        ("grpo", "nvfp4", ("acr", 0.2, 0.2, "seq-mean-token-mean", "grpo", False)),
        ("grpo", "dense", ("none", 0.2, 0.2, "seq-mean-token-mean", "grpo", False)),
        ("grpo_no_std", "bf16", ("none", 0.2, 0.2, "seq-mean-token-mean", "grpo_no_std", False)),
        ("dr_grpo", "int8", ("acr", 0.2, 0.2, "constant", "grpo_no_std", False)),
        ("rloo", "int8", ("acr", 0.2, 0.2, "seq-mean-token-sum", "rloo", False)),
        ("dapo", "int8", ("acr", 0.2, 0.28, "token-mean", "grpo", True)),
        ("gspo", "int8", ("tbpo", 3e-4, 4e-4, "seq-mean-token-mean", "grpo", False)),
        ("gspo", "dense", ("none", 3e-4, 4e-4, "seq-mean-token-mean", "grpo", False)),
        ("ppo", "int8", ("acr", 0.2, 0.2, "token-mean", "gae", False)),
        ("ppo", "dense", ("none", 0.2, 0.2, "token-mean", "gae", False)),
    ],
)
def test_what_auto_and_null_become(
    algorithm: str, weights: str, expected: tuple[object, ...]
) -> None:
    cfg = from_mapping({"model": "m", "algorithm": algorithm, "rollout": {"weights": weights}})
    assert (
        cfg.correction,
        cfg.loss.eps_low,
        cfg.loss.eps_high,
        cfg.loss.reduce,
        cfg.advantage,
        cfg.dapo.dynamic_sampling,
    ) == expected
    assert cfg.notes[0].startswith(f"correction: {expected[0]}, because")
    chosen = {"eps_low": 0.1, "eps_high": 0.3, "reduce": "token-mean"}
    own = from_mapping(
        {
            "model": "m",
            "algorithm": algorithm,
            "loss": chosen,
            "correction": "none",
            "force": True,
            "dapo": {"dynamic_sampling": algorithm != "ppo"},
        }
    )
    assert own.correction == "none" and own.dapo.dynamic_sampling is (algorithm != "ppo")
    assert {name: getattr(own.loss, name) for name in chosen} == chosen


@pytest.mark.parametrize(
    ("algorithm", "weights", "expected"),
    [
        ("grpo", "int8", "tbpo"),
        ("dapo", "int4", "tbpo"),
        ("gspo", "fp8", "tbpo"),
        ("grpo", "dense", "none"),
        ("grpo", "fp32", "none"),
    ],
)
def test_auto_under_an_aligned_forward(algorithm: str, weights: str, expected: str) -> None:
    tree = {
        "model": "m",
        "algorithm": algorithm,
        "rollout": {"weights": weights},
        "train": {"forward": "aligned"},
    }
    cfg = from_mapping(tree)
    assert cfg.correction == expected and cfg.notes[0].startswith(
        f"correction: {expected}, because the rollouts use"
    )
    assert from_mapping(yaml.safe_load(cfg.dump())).dump() == cfg.dump()
    if expected == "tbpo":
        assert "forward is aligned" in cfg.notes[0]
        assert (cfg.loss.eps_low, cfg.loss.eps_high, cfg.loss.tbpo.eps_negative) == (
            3e-4,
            4e-4,
            7e-4,
        )
        assert (
            cfg.advantage == ALGORITHMS[algorithm].advantage
            and cfg.loss.reduce == ALGORITHMS[algorithm].options["reduce"]
        )
        assert from_mapping(tree | {"correction": "tis"}).correction == "tis"
        with pytest.raises(
            ConfigError, match=r"^config: loss\.dual_clip: tbpo has no dual clip; write null$"
        ):
            from_mapping(tree | {"loss": {"dual_clip": 3.0}})


@pytest.mark.parametrize("row", AUTO, ids=lambda row: f"{row.price}, {row.forward}")
def test_the_table_of_auto_is_what_auto_does(row: CorrectionRow) -> None:
    for algorithm in ALGORITHMS:
        tree = {"model": "m", "algorithm": algorithm, **row.example}
        cfg = from_mapping(tree)
        assert cfg.correction == (row.gspo if algorithm == "gspo" else row.correction)
        assert row.reason in cfg.notes[0] and cfg.notes[0].startswith(
            f"correction: {cfg.correction}, because"
        )
        assert not any(note.startswith("warning") for note in cfg.notes)
        chosen = row.sets if cfg.correction == row.correction else {}
        assert (
            cfg.chosen_options == tuple(chosen) and chosen.items() <= cfg.objective_options.items()
        )
        again = from_mapping(yaml.safe_load(cfg.dump()))
        assert again.dump() == cfg.dump() and again.chosen_options == ()


@pytest.mark.parametrize(
    ("rollouts", "expected"),
    [
        (Rollouts("dense"), "none"),
        (Rollouts("bf16", aligned=True), "none"),
        (Rollouts("fp32", lora=True), "none"),
        (Rollouts("dense", noisy=True), "acr"),
        (Rollouts("nvfp4", noisy=True, lora=True), "acr"),
        (Rollouts("int4", noisy=True, aligned=True), "tbpo"),
        (Rollouts("int4", lora=True, aligned=True), "tbpo"),
        (Rollouts("fp8", lora=True), "tis"),
        (Rollouts("fp8"), "acr"),
        (Rollouts("dense", ("top_k 5",)), "reweight"),
        (Rollouts("int8", ("min_p 0.1",), True, True, True), "reweight"),
        (Rollouts("dense+int8"), "acr"),
        (Rollouts("dense", kv_policy="rkv"), "sparse"),
        (Rollouts("int8", kv_policy="h2o", lora=True), "sparse"),
        (Rollouts("int4", kv_policy="snapkv", aligned=True), "sparse"),
        (Rollouts("dense", ("top_p 0.9",), noisy=True, kv_policy="streaming"), "sparse"),
        (Rollouts("dense", kv_policy="rkv", kv_dtype="fp8"), "sparse"),
        (Rollouts("dense", kv_dtype="fp8"), "tis"),
        (Rollouts("dense", ("top_p 0.9",), kv_dtype="fp8"), "reweight"),
        (Rollouts("dense", noisy=True, kv_dtype="fp8"), "acr"),
        (Rollouts("int8", kv_dtype="fp8"), "acr"),
        (Rollouts("nvfp4", lora=True, kv_dtype="fp8"), "tis"),
        (Rollouts("int4", aligned=True, kv_dtype="fp8"), "tbpo"),
        (Rollouts("dense", lora=True, rounds=True), "acr"),
        (Rollouts("dense", rounds=True, kv_dtype="fp8"), "acr"),
        (Rollouts("dense", rounds=True, engine="vllm"), "acr"),
        (Rollouts("dense", rounds=True, kv_policy="rkv"), "sparse"),
        (Rollouts("int8", rounds=True), "acr"),
        (Rollouts("dense", stale="asynchrony.partial keep"), "tis"),
        (Rollouts("int8", stale="asynchrony.partial keep"), "acr"),
        (Rollouts("int8", exact=True, stale="asynchrony.partial keep"), "tis"),
        (Rollouts("dense", stale="asynchrony.partial keep", noisy=True), "acr"),
        (Rollouts("dense", stale="asynchrony.partial keep", kv_policy="rkv"), "sparse"),
    ],
)
def test_the_first_row_that_applies(rollouts: Rollouts, expected: str) -> None:
    assert choose_correction("dapo", rollouts)[0] == expected
    assert rollouts.words in choose_correction("dapo", rollouts)[1]


@pytest.mark.parametrize(
    ("asynchrony", "stale"),
    [
        ({}, False),
        ({"oversampling_factor": 1.5}, False),
        ({"partial": "keep"}, False),
        ({"oversampling_factor": 1.5, "partial": "replay"}, True),
        ({"oversampling_factor": 1.5, "partial": "keep"}, True),
        ({"max_async_level": 4}, True),
    ],
)
def test_rollouts_of_earlier_weights_are_corrected(
    asynchrony: dict[str, object], stale: bool
) -> None:
    tree = {
        "model": "m",
        "rollout": {"weights": "dense"},
        "launcher": "local",
        "asynchrony": asynchrony,
    }
    assert from_mapping(tree).correction == ("tis" if stale else "none")
    exact = from_mapping({**tree, "rollout": {"weights": "int8", "exact": True}})
    assert exact.correction == ("tis" if stale else "none")
    plain = from_mapping({**tree, "correction": "none"})
    assert any("earlier weights are learnt from" in note for note in plain.notes) == stale
    weighted = from_mapping({**tree, "correction": "tis"})
    assert any("almost nothing to correct" in note for note in weighted.notes) != stale


def test_a_threshold_that_is_written_is_not_chosen() -> None:
    tree = {"model": "m", "rollout": {"top_p": 0.9}}
    assert from_mapping(tree).loss.reweight.veto == 1e-4
    for veto in (None, 1e-6):
        cfg = from_mapping({**tree, "loss": {"reweight": {"veto": veto}}})
        assert cfg.loss.reweight.veto == veto and cfg.chosen_options == ()


@pytest.mark.parametrize("correction", ["none", "is"])
def test_what_is_known_to_collapse_needs_force(correction: str) -> None:
    for weights in ("int8", "fp8", "nvfp4"):
        tree: dict[str, object] = {
            "model": "m",
            "correction": correction,
            "rollout": {"weights": weights},
        }
        with pytest.raises(
            ConfigError,
            match=rf"^config: correction: {correction} with {weights} rollouts is known to "
            r"collapse \(QuRL's .*\); write auto, or force: true",
        ):
            from_mapping(tree)
        assert from_mapping(tree | {"force": True}).correction == correction
        for train in ({"lora": True}, {"forward": "aligned"}):
            assert from_mapping(tree | {"train": train}).correction == correction
    assert from_mapping({"model": "m", "correction": correction, "rollout": {"weights": "bf16"}})


@pytest.mark.parametrize("weights", ["dense", "int8"])
def test_what_auto_sets_for_a_cache_that_forgets(weights: str) -> None:
    tree: dict[str, Any] = {"model": "m", "rollout": {"weights": weights, "kv": {"policy": "rkv"}}}
    cfg = from_mapping(tree)
    assert cfg.correction == "sparse"
    assert cfg.loss.sparse == SparseConfig(veto=1e-4, xi_cap=1.5, token_rs=None)
    own = from_mapping({**tree, "loss": {"sparse": {"xi_cap": 3.0, "veto": None}}})
    assert own.loss.sparse == SparseConfig(veto=None, xi_cap=3.0) and own.chosen_options == ()
    for learner in ({"lora": True}, {"forward": "aligned"}):
        with pytest.raises(ConfigError, match="none with a cache that rkv bounds is known to col"):
            from_mapping({**tree, "train": learner, "correction": "none"})
    assert from_mapping({**tree, "correction": "none", "force": True}).correction == "none"


def test_the_cache_is_filled_from_its_policy_and_loads_again() -> None:
    for kv, full in (
        (None, None),
        ({}, {"policy": "dense", "dtype": "auto"}),
        ({"dtype": "fp8"}, {"policy": "dense", "dtype": "fp8"}),
        (
            {"policy": "streaming", "budget": 5, "sinks": None},
            {"policy": "streaming", "dtype": "auto", "budget": 5, "buffer": 128, "sinks": 4},
        ),
        *(
            ({"policy": name}, {"policy": name, "dtype": "auto", **filled(name, {})})
            for name in POLICIES
        ),
        (
            {"policy": "rkv", "mix": 0, "dtype": "fp8"},
            {"policy": "rkv", "dtype": "fp8", **filled("rkv", {"mix": 0})},
        ),
    ):
        cfg = from_mapping({"model": "m", "rollout": {"kv": kv}})
        tree = yaml.safe_load(cfg.dump())
        assert tree["rollout"]["kv"] == full
        assert from_mapping(tree).dump() == cfg.dump()
        assert from_mapping(tree).rollout.kv == cfg.rollout.kv == cfg.resolved().rollout.kv


def test_a_cache_that_is_a_row_more() -> None:
    """A policy that the table gets is known to the file, with options of its own."""
    with pytest.MonkeyPatch.context() as patch:
        row = CachePolicyRow("nowhere:Made", {**BOUNDED, "reach": Option(3, least=1, stays=True)})
        patch.setitem(POLICIES, "made", row)
        tree = {"model": "m", "rollout": {"kv": {"policy": "made", "budget": 9}}}
        cfg = from_mapping(tree, ["rollout.kv.reach=4"])
        assert cfg.correction == "sparse" and cfg.rollout.cache.options["reach"] == 4
        assert "rollout.kv.reach" in known_keys(RunConfig)
        with pytest.raises(
            ConfigError, match=r"budget: made expects at least 10 \(reach 9 and 1\)"
        ):
            from_mapping(tree, ["rollout.kv.reach=9"])


def test_a_cache_is_checked_without_torch(write: Callable[[str], Path]) -> None:
    """In a fresh interpreter: what is right, what is wrong, and what is evaluated beside it."""
    path = write("model: m\nrollout: {kv: {policy: rkv, budget: 64}}\n")
    code = f"""
import sys
from lowroll.cli.main import main
from lowroll.config import load
cfg = load({str(path)!r})
cfg.rollout.cache.another("snapkv+fp8"), cfg.dump(), cfg.correction
codes = [main(["grpo", {str(path)!r}, "rollout.kv.budget=8"]), main(["eval", {str(path)!r}, "--kv=x"])]
sys.exit("torch" in sys.modules or codes != [2, 2])"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("error: ") == 2 and "expects at least 9" in done.stderr


def test_overrides_of_the_cache() -> None:
    plain = {"model": "m"}
    made = from_mapping(plain, ["rollout.kv.policy=rkv", "rollout.kv.budget=64"])
    assert made == from_mapping(plain, ["rollout.kv={policy: rkv, budget: 64}"])
    assert made.rollout.cache.options["budget"] == 64
    base = {"model": "m", "rollout": {"kv": {"policy": "rkv", "budget": 64}}}
    assert from_mapping(base, ["rollout.kv=null"]).rollout.kv is None
    again = as_config(made, {"rollout.kv.buffer": 9})
    assert again.rollout.cache.options == {**made.rollout.cache.options, "buffer": 9}
    assert made.at(9) == made and made.rollout.with_kv(None).kv is None
    # a whole response need not lie in a cache that is bounded
    small = {"max_tokens": 900, "cache_tokens": 800}
    assert from_mapping({"model": "m", "rollout": {**base["rollout"], **small}})
    with pytest.raises(ConfigError, match="cannot hold a prompt and its response"):
        from_mapping({"model": "m", "rollout": small})


def test_warnings_for_what_rarely_is_meant() -> None:
    def warnings(**tree: object) -> list[str]:
        return [
            note for note in from_mapping({"model": "m"} | tree).notes if note.startswith("warning")
        ]

    assert warnings() == []
    assert (
        "top_p 0.9, top_k 5"
        in warnings(rollout={"weights": "dense", "top_p": 0.9, "top_k": 5}, correction="none")[0]
    )
    assert warnings(rollout={"weights": "int8", "top_p": 0.9}) == []
    assert "not corrected" in warnings(correction="none", force=True)[0]
    assert "nothing caps the weights" in warnings(correction="decoupled")[0]
    assert "saw it drift and collapse" in warnings(algorithm="gspo", correction="tis")[0]
    assert warnings(algorithm="gspo") == []
    for name in ("is", "decoupled"):
        told = warnings(correction=name, rollout={"weights": "dense", "kv": {"policy": "rkv"}})
        assert len(told) == 1 and "no response is rejected that lost what it needed" in told[0]
        told = warnings(correction=name, rollout={"weights": "dense", "kv": {"dtype": "fp8"}})
        assert any("its rounding is not corrected" in note for note in told) == (name == "is")
    assert warnings(correction="tis", rollout={"weights": "dense", "kv": {"policy": "rkv"}}) == []
    told = [
        {
            name: any(
                "greedy" in note
                for note in from_mapping({"model": "m", "eval": {name: value, **warm}}).notes
            )
            for name, value in (("top_p", 0.9), ("top_k", 5), ("min_p", 0.1))
        }
        for warm in ({}, {"temperature": 0.6})
    ]
    assert set(told[0].values()) == {True} and set(told[1].values()) == {False}


def test_defaults_agree_with_the_tables_of_the_other_rooms() -> None:
    from lowroll.objectives.objective import select

    for algorithm in ALGORITHMS:
        for correction in CORRECTIONS:
            tree = {"model": "m", "algorithm": algorithm, "correction": correction, "force": True}
            try:
                options = select(algorithm, correction).options
            except ValueError:
                with pytest.raises(ConfigError, match="has no form under gspo"):
                    from_mapping(tree)
                continue
            cfg = from_mapping(tree)
            assert cfg.objective_options.keys() <= options.keys()
            length = cfg.rollout.max_tokens if algorithm == "dr_grpo" else None
            for name, value in cfg.objective_options.items():
                assert value == (length if name == "max_length" else options[name]), (
                    algorithm,
                    correction,
                    name,
                )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    "advantage", [None, "grpo", "grpo_no_std", "rloo", "length_weighted", "gae"]
)
@pytest.mark.parametrize("n", [1, 2])
def test_one_rollout_has_no_group_to_compare_it_with(
    algorithm: str, advantage: str | None, n: int
) -> None:
    """Whatever credits a group; a critic credits single rollouts."""
    tree = {"model": "m", "algorithm": algorithm, "advantage": advantage, "rollouts_per_example": n}
    estimator = advantage or ALGORITHMS[algorithm].advantage
    if (algorithm == "ppo") != (estimator == "gae"):
        return  # refused for another reason (test_critic)
    if n > 1 or algorithm == "ppo":
        assert from_mapping(tree).advantage == estimator
        return
    with pytest.raises(
        ConfigError, match=rf"rollouts_per_example: one rollout has no group that {estimator} "
    ):
        from_mapping(tree)


def test_the_choices_are_those_of_the_objectives() -> None:
    for correction in ("auto", *CORRECTIONS):
        tree = {"model": "m", "correction": correction, "force": True}
        assert from_mapping(tree).correction == ("acr" if correction == "auto" else correction)
    for rule in RULES:
        bound = [0.5, 2.0] if rule.endswith("k1") else 3.0
        given = {"correction": "reweight", "loss": {"reweight": {"reject": {rule: bound}}}}
        assert from_mapping({"model": "m", **given}).loss.reweight.reject.keys() == {rule}
    for key in ("algorithm", "advantage", "correction", "rollout.weights", "loss.reduce"):
        with pytest.raises(ConfigError, match=f"override {key}: must be one of .*, got 'dapper'"):
            from_mapping({"model": "m"}, {key: "dapper"})
    with pytest.raises(ConfigError, match="must be one of .*, got 3$"):
        from_mapping({"model": "m"}, {"rollout.weights": 3})


@pytest.mark.parametrize(
    ("correction", "loss", "expected"),
    [
        (
            "sparse",
            {"sparse": {"token_rs": [0.5, 1.5], "xi_cap": 1.5}},
            {"token_rs": (0.5, 1.5), "xi_cap": 1.5},
        ),
        ("aipo", {"aipo": {"kl_tau": 0.1}}, {"kl_tau": 0.1, "token_mask_high": 8.0}),
        (
            "ipo",
            {"ipo": {"signed": True, "width": 0.1}},
            {"signed": True, "width": 0.1, "kl_tau": 1e-3},
        ),
        (
            "tbpo",
            {"tbpo": {"eps_negative": 1e-3}, "cap": 3},
            {"eps_negative": 1e-3, "cap": 3.0, "eps_high": 4e-4},
        ),
        (
            "reweight",
            {"reweight": {"reject": {"token_k1": [0.5, 2], "seq_max_k2": 3}}},
            {"reject": {"token_k1": (0.5, 2.0), "seq_max_k2": 3.0}, "cap": 2.0},
        ),
    ],
)
def test_a_corrections_own_section_reaches_its_objective(
    write: Callable[[str], Path],
    correction: str,
    loss: dict[str, object],
    expected: dict[str, object],
) -> None:
    from lowroll.objectives.objective import select

    cfg = from_mapping({"model": "m", "correction": correction, "loss": loss, "algorithm": "dapo"})
    options = cfg.objective_options
    assert {name: options[name] for name in expected} == expected
    assert options.keys() <= select("dapo", correction).options.keys()
    assert load(write(cfg.dump())).objective_options == options
    other = from_mapping({"model": "m", "correction": "acr", "loss": loss})
    assert f"loss.{correction}: no effect, the correction is acr" in other.notes


def test_a_teacher_goes_with_a_teacher_tau() -> None:
    loss = {"aipo": {"teacher_tau": 0.5}}
    cfg = from_mapping(
        {"model": "m", "correction": "aipo", "loss": loss, "train": {"teacher": "t"}}
    )
    assert cfg.objective_options["teacher_tau"] == 0.5 and not any(
        "train.teacher" in note for note in cfg.notes
    )
    for idle in ({"correction": "acr", "loss": loss}, {"correction": "aipo"}):
        assert any(
            note.startswith("train.teacher: no effect")
            for note in from_mapping({"model": "m", "train": {"teacher": "t"}, **idle}).notes
        )


def test_dump_loads_to_the_same_tree(write: Callable[[str], Path]) -> None:
    cfg = load(
        write(
            "model: m\nalgorithm: dapo\n"
            "rollout: {stop: ['no', '1e5', '~', '<<', '&a', ' x ', \"\\n\\t\\x07\"]}\n"
            "env: [{id: a, args: {s: ['010', 'null', ''], n: 1e-7, d: {}}}]\ntrain: "
            "{learning_rate: 1e-22}\n"
        )
    )
    again = load(write(cfg.dump()))
    assert again.model_dump() == cfg.model_dump() == cfg.resolved().model_dump()
    assert again.dump() == cfg.dump()
    assert cfg.resolved().notes == cfg.notes


@pytest.mark.slow
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**63)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(exclude_categories=["Cs"])),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.text(min_size=1, max_size=5), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
@settings(max_examples=150)
def test_every_value_survives_dump_and_parse(value: object) -> None:
    text = yaml.dump(
        {"args": value}, Dumper=ConfigDumper, sort_keys=False, allow_unicode=True, width=10**6
    )
    assert parse(text, "dump").value == {"args": value}


@given(
    st.text(alphabet=st.sampled_from("model: train{}[],\n-&*!'\"|>?%@`#~01eyx.\t"), max_size=60)
    | st.text(max_size=40)
)
@settings(max_examples=300)
def test_no_text_gives_anything_but_a_config_error(text: str) -> None:
    try:
        parse(text, "fuzz.yaml")
    except ConfigError as error:
        assert str(error).startswith("fuzz.yaml")


def test_an_environment_of_a_file_is_called_without_the_folders_of_its_path() -> None:
    for id, name in (
        ("examples/my_env.py", "my_env.py"),
        ("/a/b/my_env.py:Mine", "my_env.py:Mine"),
        ("gsm8k", "gsm8k"),
    ):
        assert from_mapping({"model": "m", "env": [{"id": id}]}).resolved().env[0].name == name
    with pytest.raises(ValueError, match="two environments are called 'my_env.py'"):
        from_mapping({"model": "m", "env": [{"id": "/a/my_env.py"}, {"id": "/b/my_env.py"}]})
