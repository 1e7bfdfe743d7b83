"""The command line: quick help, thin handlers, one line an error, exit codes."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import lowroll
from lowroll.cli.eval import show
from lowroll.cli.grpo import plan
from lowroll.cli.main import COMMANDS, main
from lowroll.config import from_mapping, load
from lowroll.config.rollout import KvConfig
from lowroll.metrics.report import write_report
from lowroll.types import BehaviorTag, Group, PolicySpan, Request, Rollout, RunFailed

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "pydantic", "numpy", "yaml", "rich")
RUN = "model: some/model\nenv: {id: reverse-text}\n"


@pytest.fixture
def run_yaml(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return str(path)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[..., types.ModuleType]:
    """Stands a module with the given functions in for a heavy one."""

    def module(name: str, **functions: Any) -> types.ModuleType:
        fake = types.ModuleType(name)
        fake.__dict__.update(functions)
        monkeypatch.setitem(sys.modules, name, fake)
        return fake

    return module


@pytest.mark.parametrize(
    "words", [[], *([name] for name in COMMANDS)], ids=lambda words: " ".join(words) or "lowroll"
)
def test_help_is_printed_before_anything_heavy_is_imported(words: list[str]) -> None:
    code = (
        "import sys\nfrom lowroll.cli.main import main\n"
        f"try:\n    code = main({[*words, '--help']!r})\nexcept SystemExit as end:\n    code = "
        f"end.code\n"
        f"print(code, [name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.stdout.rstrip().endswith("0 []"), done.stdout + done.stderr
    assert f"usage: lowroll{''.join(' ' + word for word in words)}" in done.stdout


def test_settings_are_read_without_torch() -> None:
    code = (
        "import sys\nfrom lowroll.cli import grpo\n"
        "cfg = grpo.read_settings(grpo.parser().parse_args(['examples/reverse_text.yaml']))\n"
        "assert grpo.plan(cfg)\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.stdout.endswith("[]\n"), done.stdout + done.stderr


def test_the_list_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in COMMANDS)
    assert main([]) == 2
    assert main(["--version"]) == 0
    assert lowroll.__version__ in capsys.readouterr().out
    assert main(["grop"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown command 'grop' (did you mean grpo?)")


def test_a_bad_setting_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], run_yaml: str
) -> None:
    Path(run_yaml).write_text(RUN + "train:\n  max_stepz: 3\n")
    assert main(["grpo", run_yaml]) == 2
    assert capsys.readouterr().err == (
        f"error: {run_yaml}:4: train.max_stepz: unknown key (did you mean max_steps?)\n"
    )
    assert main(["grpo", run_yaml, "seed=x"]) == 2
    assert capsys.readouterr().err.count("error: ") == 2
    for words, expected in (
        ([], "give one YAML file, got none"),
        ([run_yaml, "b.yaml"], "got"),
        (["--train", run_yaml], "--orch: this file is required beside the others"),
        ([run_yaml, "--orch", run_yaml], "give either one YAML file or --train"),
    ):
        assert main(["grpo", *words]) == 2
        assert expected in capsys.readouterr().err


def test_a_dry_run_prints_settings_that_load_again(
    unseen: None, capsys: pytest.CaptureFixture[str], run_yaml: str, tmp_path: Path
) -> None:
    assert main(["grpo", run_yaml, "--dry-run", "eval.interval=2", "eval.num_examples=2000"]) == 0
    assert (
        "# evaluation before step 1, every 2 steps and after the last: at most 2,000"
        in capsys.readouterr().out
    )
    assert main(["grpo", run_yaml, "train.max_steps=3", "--dry-run", "train.minibatches=2"]) == 0
    out, err = capsys.readouterr()
    assert (
        "# 3 steps of 8 prompts x 8 rollouts of up to 64 tokens: at most 12,288 tokens generated"
        in out
    )
    assert "# 6 updates at learning rate 1e-05" in out
    assert "correction: acr, because the rollouts use int8 weights" in err
    (tmp_path / "again.yaml").write_text(out)
    assert (
        load(tmp_path / "again.yaml").dump()
        == load(run_yaml, ["train.max_steps=3", "train.minibatches=2"]).dump()
    )


def test_a_dry_run_is_a_page(
    unseen: None, capsys: pytest.CaptureFixture[str], run_yaml: str, tmp_path: Path
) -> None:
    """The verdict first, then the plan, then only what is not a default; --verbose has the rest."""
    words = ["grpo", run_yaml, "--dry-run", "train.max_steps=3", f"output_dir={'long/' * 30}"]
    assert main(words) == 0
    page = capsys.readouterr().out
    assert page.startswith("# the run would start")
    assert len(page.splitlines()) <= 20 and "max_steps: 3" in page and "betas" not in page
    assert max(len(line) for line in page.splitlines() if "long/" not in line) <= 100
    assert main([*words, "--verbose"]) == 0
    whole = capsys.readouterr().out
    assert "betas:" in whole and len(whole.splitlines()) > 200
    (tmp_path / "page.yaml").write_text(page)
    (tmp_path / "whole.yaml").write_text(whole)
    assert load(tmp_path / "page.yaml").dump() == load(tmp_path / "whole.yaml").dump()


def test_a_dry_run_of_three_files(unseen: None, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ROOT / "examples" / "three_files"
    words = [
        word
        for name in ("train", "infer", "orch")
        for word in (f"--{name}", str(folder / f"{name}.yaml"))
    ]
    assert main(["grpo", *words, "rollout.weights=int8", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert "with int8 weights" in out and "correction: aipo" in out
    assert "correction: aipo, because" in err


def test_grpo_and_sft_hand_over_the_settings(
    module: Callable[..., types.ModuleType], run_yaml: str
) -> None:
    calls: list[Any] = []

    def run(cfg: Any, resume: bool, overwrite: bool) -> types.SimpleNamespace:
        calls.append((cfg.train.max_steps, cfg.sft.steps, resume, overwrite))
        return types.SimpleNamespace(
            folder=Path("somewhere"),
            ended="",
            signal=signal.SIGTERM if resume else signal.SIGHUP if overwrite else 0,
        )

    module("lowroll.runs.grpo", run=run)
    module("lowroll.runs.sft", run_sft=run)
    for command in ("grpo", "sft"):
        assert main([command, run_yaml, "--resume", "train.max_steps=7"]) == 143
        assert main([command, run_yaml, "--overwrite", "sft.steps=9"]) == 129
        assert main([command, run_yaml]) == 0
    assert calls == [(7, 200, True, False), (100, 9, False, True), (100, 200, False, False)] * 2


@pytest.mark.parametrize(
    ("failure", "code", "told"),
    [
        (ValueError("rollout.max_tokens: too long"), 2, "error: rollout.max_tokens: too long\n"),
        (FileNotFoundError(2, "No such file", "x"), 2, "error: [Errno 2] No such file: 'x'\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (RunFailed("all 8 scores are errors"), 1, "error: all 8 scores are errors\n"),
    ],
)
def test_failures_of_a_run(
    module: Callable[..., types.ModuleType],
    run_yaml: str,
    capsys: pytest.CaptureFixture[str],
    failure: BaseException,
    code: int,
    told: str,
) -> None:
    def run(cfg: Any, resume: bool, overwrite: bool) -> None:
        raise failure

    module("lowroll.runs.grpo", run=run)
    assert main(["grpo", run_yaml, "rollout.weights=dense"]) == code
    assert capsys.readouterr().err.endswith(told)


def test_a_command_is_interrupted_while_it_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupt)
    assert main(["serve", "m"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_bug_keeps_its_traceback(
    module: Callable[..., types.ModuleType], run_yaml: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(cfg: Any, resume: bool, overwrite: bool) -> None:
        raise {"": KeyError("a bug"), "1": ValueError("seen in full")}[wanted]

    module("lowroll.runs.grpo", run=run)
    wanted = ""
    with pytest.raises(KeyError):
        main(["grpo", run_yaml])
    wanted = "1"
    monkeypatch.setenv("LOWROLL_DEBUG", "1")
    with pytest.raises(ValueError, match="seen in full"):
        main(["grpo", run_yaml])


def test_eval_compares_dense_and_rollout_precision(
    module: Callable[..., types.ModuleType],
    run_yaml: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    caches: list[list[str]] = []

    def evaluate(
        cfg: Any, weights: list[str], kv: list[KvConfig], **folder: Any
    ) -> list[dict[str, Any]]:
        seen.append((cfg, weights))
        caches.append([cache.name for cache in kv])
        return [
            {"env": "reverse-text", "weights": name, "pass_at_1": 0.25, "n": 4} for name in "ab"
        ]

    module("lowroll.runs.evaluate", evaluate=evaluate, place=lambda *_: nullcontext(None))
    assert main(["eval", run_yaml, "--k", "4", "--n", "16", "--temperature", "1e-2"]) == 0
    cfg, weights = seen[-1]
    assert weights == []  # the model decides
    assert (cfg.eval.rollouts_per_example, cfg.eval.num_examples, cfg.eval.temperature) == (
        4,
        16,
        0.01,
    )
    out = capsys.readouterr().out
    assert "avg@k" in out and out.count("25.0") == 2 and out.count("reverse-text") == 2
    assert "sampled at T = 0.01, at most 16 held-out prompts, 4 responses each" in " ".join(
        out.split()
    )
    monkeypatch.setenv("COLUMNS", "30")
    show(evaluate(cfg, ["int8"], []), "greedy")
    out = capsys.readouterr().out
    assert "…" not in out and "reverse" in out  # a narrow terminal folds and cuts nothing

    assert (
        main(
            [
                "eval",
                "--model",
                "m",
                "--env",
                "a",
                "--env",
                "b",
                "--weights",
                "int8,bf16",
                "--kv",
                "dense,rkv,snapkv+fp8,rkv",
                "rollout.top_p=0.5",
            ]
        )
        == 0
    )
    cfg, weights = seen[-1]
    assert caches[0] == [] and caches[-1] == ["dense", "rkv", "snapkv+fp8"]
    assert (cfg.model, [env.id for env in cfg.eval.env], weights) == (
        "m",
        ["a", "b"],
        ["int8", "bf16"],
    )
    assert cfg.rollout.top_p == 0.5
    assert main(["eval", "--model", "m"]) == 2
    assert "give a run's YAML file, or a model and what to ask" in capsys.readouterr().err
    assert main(["eval", "--model", "m", "--env", "a", "--n", "0"]) == 2
    assert capsys.readouterr().err == "error: override eval.num_examples: must be >= 1, got 0\n"
    done = len(seen)
    for words, told in (
        (["--kv", "lru"], "error: --kv: unknown cache 'lru'; known: dense, streaming, h2o, snapkv"),
        (["--kv", "fp8+rkv"], "error: --kv: unknown cache 'fp8+rkv'; known: dense, streaming"),
        (["--kv", "rkv+auto"], "error: --kv: unknown cache 'rkv+auto'; known: dense, streaming"),
        (
            ["--kv", "streaming", "rollout.kv={policy: h2o, budget: 3}"],
            "error: rollout.kv.budget: streaming expects at least 5 (sinks 4 and 1), got 3\n",
        ),
    ):
        assert main(["eval", "--model", "m", "--env", "a", *words]) == 2
        assert capsys.readouterr().err.startswith(told)
    assert len(seen) == done


class FakeEngine:
    """Answers with the prompt's length and counts; stands in for the real engine."""

    requests: list[Request] = []

    def __init__(self, model: str, *, weights: str, device: str, max_batch: int) -> None:
        self.tokenizer = self
        self.loaded = (model, weights, device, max_batch)
        self.capabilities = types.SimpleNamespace(context_length=300)

    chat_template = "{% for m in messages %}{{ m.content | length }}{% endfor %}"
    special_tokens_map: dict[str, str] = {}

    def get_chat_template(self) -> str:
        return self.chat_template

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [int(digit) for digit in text]}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return f"text\x1b of {ids}"

    def stats(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(weights="int8")

    def generate(self, requests: list[Request]) -> list[Group]:
        self.requests.extend(requests)
        if requests[0].temperature < 0:
            raise ValueError("requests[0].temperature: must be at least 0")
        tag = BehaviorTag((PolicySpan(0, ""),), weights="int8")
        return [
            Group(r, [Rollout([7, 8], [-0.5, -1.5], "stop", tag) for _ in range(r.n)])
            for r in requests
        ]


def test_generate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(lowroll.__dict__, "Engine", FakeEngine)
    monkeypatch.setattr(FakeEngine, "requests", [])
    assert (
        main(
            [
                "generate",
                "--model",
                "m",
                "--prompt",
                "four",
                "--system",
                "be",
                "--n",
                "2",
                "--seed",
                "3",
            ]
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert out == "text\ufffd of [7, 8]\n" * 2
    assert "[2 tokens, stop, mean log-prob -1.000]" in err and "tokens/s, int8 weights]" in err
    request = FakeEngine.requests[-1]
    assert (request.prompt_ids, request.n, request.seed, request.max_tokens) == ([2, 4], 2, 3, 256)
    with monkeypatch.context() as long:
        long.setattr(FakeEngine, "chat_template", "1" * 200)
        assert (
            main(["generate", "--model", "m", "--prompt", "long"]) == 0
        )  # the context leaves 100 tokens
    assert FakeEngine.requests[-1].max_tokens == 100

    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\nthree\n"))
    assert main(["generate", "--model", "m"]) == 0
    assert [r.prompt_ids for r in FakeEngine.requests[-2:]] == [[3], [5]]
    capsys.readouterr()
    assert main(["generate", "--model", "m", "--prompt", "x", "--n", "0"]) == 2
    assert capsys.readouterr().err == "error: --n: expected at least 1, got 0\n"
    assert main(["generate", "--model", "m", "--prompt", "x", "--temperature=-1"]) == 2
    assert capsys.readouterr().err == "error: --temperature: must be at least 0\n"


def test_report_and_demo(
    module: Callable[..., types.ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module("lowroll.metrics.report", write_report=lambda run, out: out or run / "report.html")
    assert main(["report", str(tmp_path)]) == 2
    assert (
        capsys.readouterr().err
        == f"error: {tmp_path}: not a run folder (no config.yaml and no metrics.jsonl)\n"
    )
    (tmp_path / "config.yaml").write_text("")
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/report.html\n"
    assert main(["report", str(tmp_path), "--out", "x.html"]) == 0
    assert capsys.readouterr().out == "x.html\n"
    assert main(["report", str(tmp_path / "gone")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/gone: no such run folder\n"
    module(
        "lowroll.runs.demo",
        main=lambda **options: int(options == {"output_dir": "d", "seed": 4, "device": "cpu"}),
    )
    assert main(["demo", "--output-dir", "d", "--seed", "4", "--device", "cpu"]) == 1


@pytest.mark.slow
def test_the_demo_deletes_no_folder_but_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from types import SimpleNamespace

    from lowroll.runs import demo

    mine = tmp_path / "demo" / "model" / "weights.bin"
    mine.parent.mkdir(parents=True)
    mine.write_text("precious")
    with pytest.raises(ValueError, match="not empty and holds no earlier demo"):
        demo.main(str(tmp_path / "demo"))
    (tmp_path / "demo" / demo.MARK).touch()
    with pytest.raises(
        ValueError, match="model/MANIFEST.json: missing. The demo would write there"
    ):
        demo.main(str(tmp_path / "demo"))
    assert mine.read_text() == "precious"
    monkeypatch.setattr(demo, "warm_start", lambda *_: {"sft/loss": 1.0})
    monkeypatch.setattr(demo, "rewards", lambda *_: {"sampled": 0.5})

    def interrupted(cfg: object, overwrite: bool) -> SimpleNamespace:
        return SimpleNamespace(signal=overwrite and 2, folder=tmp_path / "run")

    monkeypatch.setattr(demo, "run", interrupted)
    monkeypatch.setattr(
        demo,
        "CONFIG",
        {
            **demo.CONFIG,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "head_dim": 8,
        },
    )
    shutil.rmtree(mine.parent)
    (tmp_path / "demo" / "notes.txt").write_text("mine")
    for _ in range(2):  # the second replaces the first; an interrupted run measures nothing
        assert demo.main(str(tmp_path / "demo")) == 130
    assert (tmp_path / "demo" / "notes.txt").read_text() == "mine"
    told = "".join(capsys.readouterr().out.split())
    assert f"`lowrollgrpo{tmp_path / 'run/config.yaml'}--resume`" in told


def test_the_plan_names_the_cache() -> None:
    kv = {"policy": "rkv", "dtype": "fp8"}
    bounded, dense = (from_mapping({"model": "m", "rollout": {"kv": one}}) for one in (kv, None))
    assert plan(bounded)[0].endswith("int8 weights and a cache of rkv+fp8")
    assert plan(dense)[0].endswith("int8 weights")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--train.max_steps", "3"], "--train.max_steps: a setting is written train.max_steps=3"),
        (
            ["--learning-rate=1e-5"],
            "--learning-rate=1e-5: a setting is written train.learning_rate=1e-5",
        ),
        (["--lora", "seed=1"], "--lora: a setting is written train.lora=true"),
        (
            ["--kv", "rkv"],
            "--kv: rollout.kv is a section; a setting of it is written rollout.kv.policy=...",
        ),
        (
            ["--num_generations", "8"],
            "--num_generations: here it is rollouts_per_example (rollouts a prompt)",
        ),
        (["--use-vllm"], "--use-vllm: here it is rollout.engine: vllm"),
        (["--sglang"], "--sglang: not there yet: another engine"),
        (["--dryrun"], "--dryrun: lowroll grpo has no such option (did you mean --dry-run?)"),
        (
            ["--zz"],
            "--zz: lowroll grpo has no such option; lowroll grpo --help lists what there is",
        ),
        (
            ["train.max_steps", "=", "3"],
            "a setting is one word with its value, such as train.max_steps=20",
        ),
    ],
)
def test_settings_in_other_tools_words(
    words: list[str], told: str, run_yaml: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["grpo", run_yaml, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and told in line


@pytest.mark.slow
@pytest.mark.parametrize(("greedy", "code"), [(0.6, 0), (0.5, 1)])
def test_a_demo_that_only_got_sharper_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    greedy: float,
    code: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What sampling at a lower temperature gives is shown beside the gain, and a second model shows
    what INT8 buys."""
    from types import SimpleNamespace

    from lowroll.runs import demo

    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    rewards = iter(
        [
            {"sampled": 0.3, "fp32": 0.3, "sharper": 0.49, "greedy": 0.5},
            {"sampled": 0.55, "fp32": 0.55, "sharper": greedy, "greedy": greedy},
        ]
    )
    record = {"step": 1, "reward/mean": 0.3, "mismatch/kl_k3": 1e-4}
    monkeypatch.setattr(demo, "warm_start", lambda *_: {"sft/loss": 1.0})
    monkeypatch.setattr(demo, "rewards", lambda *_: next(rewards))
    monkeypatch.setattr(
        demo,
        "run",
        lambda cfg, **_: SimpleNamespace(
            interrupted=False, signal=0, folder=tmp_path, records=[record]
        ),
    )
    monkeypatch.setattr(demo, "CONFIG", {**demo.CONFIG, **small})
    monkeypatch.setattr(demo, "LARGER", {**demo.LARGER, **small})
    monkeypatch.setattr(demo, "engine_speed", lambda *_: {"int8": 1010.0, "fp32": 1000.0})
    assert demo.main(str(tmp_path / "demo")) == code
    told = " ".join(capsys.readouterr().out.split())
    assert "sampled at T = 0.5, scores 0.490" in told and f"greedily, {greedy - 0.5:+.3f}" in told
    assert "int8 1,010, fp32 1,000 tokens/s; INT8 is 1.01 times as fast" in told
    assert re.search(
        r"1 layers of Qwen2\.5-0\.5B's shape \(\d+ M parameters, random weights\), 64 sequences: "
        "int8 "
        r"[\d,]+, fp32 [\d,]+, bf16 [\d,]+ tokens/s; INT8 is \d\.\d\d times as fast",
        told,
    )


def test_what_argparse_refuses_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in (
        (["eval", "--n", "ten"], "argument --n: invalid int value: 'ten'; lowroll eval --help"),
        (["serve"], "the following arguments are required: MODEL | FILE; lowroll serve --help"),
        (["quantize", "a", "b"], "the following arguments are required: --format;"),
        (["export", "a", "b", "--as", "adaptor"], "argument --as: invalid choice: 'adaptor'"),
    ):
        assert main(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {told}")


def test_a_report_that_cannot_be_written_is_refused_before_it_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowroll.metrics.report._plots", lambda *_: pytest.fail("it is drawn"))
    mine = tmp_path / "mine.html"
    mine.write_text("my notes")
    with pytest.raises(ValueError, match="is no report of lowroll"):
        write_report(tmp_path, mine)
    monkeypatch.setattr("os.access", lambda *_: False)  # who is root may write everywhere
    with pytest.raises(ValueError, match="cannot be written to; name another file with --out"):
        write_report(tmp_path, tmp_path / "report.html")


def test_commands_in_other_words(capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in (
        (["finetune", "x.yaml"], "did you mean sft?"),
        (["merge"], "did you mean export RUN OUT --as"),
        (["run.yaml", "seed=1"], "did you mean lowroll grpo run.yaml seed=1?"),
    ):
        assert main(words) == 2
        assert told in capsys.readouterr().err
    assert main(["help"]) == 0
    with pytest.raises(SystemExit):
        main(["help", "export"])
    assert "usage: lowroll export" in capsys.readouterr().out


def test_the_module_runs_and_completion_knows_commands_options_and_keys(tmp_path: Path) -> None:
    script = subprocess.run(
        [sys.executable, "-m", "lowroll", "completion", "bash"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=True,
    ).stdout

    def complete(*words: str) -> list[str]:
        line = " ".join(map(shlex.quote, words))
        code = f'{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _lowroll; echo "${{COMPREPLY[@]}}"'
        return subprocess.run(
            ["bash", "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path,
            check=True,
        ).stdout.split()

    (tmp_path / "runs.yaml").write_text("")
    assert complete("lowroll", "gr") == ["grpo"]
    assert complete("lowroll", "grpo", "train.lora_r") == ["train.lora_rank="]
    assert complete("lowroll", "grpo", "env.0.i") == ["env.0.id="]
    assert complete("lowroll", "grpo", "run") == ["runs.yaml"]
    assert complete("lowroll", "export", "--") == [
        "--help",
        "--as",
        "--step",
        "--push-to-hub",
    ]
    assert complete("lowroll", "completion", "z") == ["zsh"]
    for shell in ("zsh", "fish"):
        assert main(["completion", shell]) == 0
