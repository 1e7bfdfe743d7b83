"""`lowroll eval`: sets from files, responses that are kept and gone on from, engines side by side,
and what is left in the folder."""

from __future__ import annotations

import json
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import lowroll
from lowroll.cli.eval import parser, settings
from lowroll.cli.main import main
from lowroll.config import from_mapping
from lowroll.metrics.failures import Attempt, Failure, failure_page
from lowroll.orchestrator.errors import ScoringFailed
from lowroll.orchestrator.examples import Example, ExampleResponse
from lowroll.runs import results
from lowroll.runs.assembly import prompts
from lowroll.runs.evaluate import evaluate
from lowroll.runs.preflight import look_at_run
from lowroll.runs.presets import PRESETS, preset
from lowroll.runs.results import EngineAnswers, rows_of, shown
from lowroll.types import Prompt, Score, ScoreError
from tests.fixtures.runs import settings as run_settings

HOSTILE = "<script>alert(1)</script>\x1b[2J</pre><b>"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Eight problems in GSM8K's shape."""
    path = tmp_path / "rows.jsonl"
    lines = [{"question": f"{i}+1?", "answer": f"#### {i + 1}"} for i in range(8)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def cfg_of(model: Path, rows: Path, **changes: Any) -> Any:
    env = [{"id": "set/gsm8k", "name": "gsm8k", "args": {"test_path": str(rows)}}]
    asked = {"env": env, "num_examples": 6, "rollouts_per_example": 2, "temperature": 1.0}
    return from_mapping(run_settings(model, rows.parent / "run", eval={**asked, **changes}))


def lines(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*.jsonl"))}


def answers(folder: Path) -> dict[str, Any]:
    """The responses and scores of each file, by example."""
    found: dict[str, Any] = {}
    for name, data in lines(folder).items():
        for line in map(json.loads, data.splitlines()[1:]):
            line.pop("crc")
            found[f"{name} {line['kind']} {line['id']}"] = line
    return found


class Killed(BaseException):
    pass


FLAKY = """from lowroll.envs.reverse_text import ReverseText


class Flaky(ReverseText):
    def score(self, prompt, text):
        if int(prompt.id.rpartition("/")[2]) % 5 == 0:
            raise RuntimeError("the judge is away")
        return super().score(prompt, text)
"""


@pytest.mark.slow
def test_failed_scores_end_an_evaluation_by_the_settings_limit(model: Path, tmp_path: Path) -> None:
    (tmp_path / "flaky.py").write_text(FLAKY)
    tree = run_settings(
        model,
        tmp_path / "run",
        env=[{"id": str(tmp_path / "flaky.py"), "args": {"template": "{text}", "max_words": 1}}],
        eval={"interval": 1, "num_examples": 60},
        score={"workers": 1, "max_error_rate": 0.5},
        train={"max_steps": 1, "warmup_steps": 0},
    )
    lowroll.run(from_mapping(tree))
    assert evaluate(from_mapping(tree), ["int8"])
    tree["score"] = {"workers": 1}
    with pytest.raises(ScoringFailed, match="12 of the last 60 scores are errors"):
        evaluate(from_mapping(tree), ["int8"])


@pytest.mark.slow
def test_a_run_that_could_not_be_evaluated_does_not_begin(model: Path, tmp_path: Path) -> None:
    tree = run_settings(
        model,
        tmp_path / "run",
        eval={"interval": 2, "env": [{"id": "chain"}], "eval_base_model": False},
        rollout={"max_model_len": 30},
    )
    with pytest.raises(ValueError, match="max_model_len: 30 .* held-out prompts of env 'chain'"):
        lowroll.run(from_mapping(tree))
    assert not (tmp_path / "run" / "rollouts").exists()


def test_held_out_prompts_beyond_those_that_are_looked_at_may_fit(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "LOOKED_AT", 1)
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("long " * 9, "ab")))
    texts = {"path": str(path), "test_path": str(path), "template": "{text}"}
    env = {"id": "reverse-text", "args": texts}
    tree = run_settings(
        model,
        tmp_path / "run",
        eval={"interval": 2, "env": [env], "eval_base_model": False, "num_examples": 2},
        rollout={"max_model_len": 30},
    )
    found = look_at_run(from_mapping(tree))
    assert not found.problems
    assert any("1 of the first 1 prompts" in note for note in found.notes)
    tree["eval"]["num_examples"] = 1
    assert any("held-out prompts" in str(one) for one in look_at_run(from_mapping(tree)).problems)


@pytest.mark.slow
def test_a_killed_evaluation_goes_on_where_it_was(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same responses and numbers; what was drawn is not drawn again."""
    cfg, step, asked = cfg_of(model, rows), lowroll.Engine.step, list[str]()
    add = lowroll.Engine.add

    def added(engine: lowroll.Engine, request: lowroll.Request) -> int:
        asked.append(request.id)
        return add(engine, request)

    monkeypatch.setattr(lowroll.Engine, "add", added)
    whole = evaluate(cfg, ["fp32", "int8"], out=tmp_path / "whole")
    assert len(asked) == 12 and [row["weights"] for row in whole] == ["fp32", "int8"]

    one = run_settings(model, tmp_path / "run", eval=cfg.eval.model_dump(mode="json"))
    few = from_mapping({**one, "rollout": {**one["rollout"], "max_batch": 4}})
    for steps in (8, 7):
        left = iter(range(steps))

        def killed(engine: lowroll.Engine) -> Any:
            if next(left, None) is None:  # noqa: B023 (called in this turn of the loop alone)
                raise Killed
            return step(engine)

        with monkeypatch.context() as now, pytest.raises(Killed):
            now.setattr(lowroll.Engine, "step", killed)
            evaluate(few, ["fp32", "int8"], out=tmp_path / "cut")
    (file,) = (tmp_path / "cut/responses/fp32,dense").iterdir()
    file.write_bytes(file.read_bytes()[:-7])  # the power went while a line was written
    asked.clear()
    resumed = evaluate(few, ["fp32", "int8"], out=tmp_path / "cut")
    assert 0 < len(asked) < 12
    assert answers(tmp_path / "cut") == answers(tmp_path / "whole")
    for rows_ in (whole, resumed):
        for row in rows_:
            row.pop("seconds")
    assert resumed == whole

    asked.clear()
    evaluate(cfg, ["fp32", "int8"], out=tmp_path / "whole")
    assert asked == []
    before = lines(tmp_path / "whole")
    evaluate(cfg_of(model, rows, num_examples=8), ["fp32"], out=tmp_path / "whole")
    assert len(asked) == 2  # more examples of the same are added
    after = lines(tmp_path / "whole")
    assert all(after[name].startswith(data) for name, data in before.items())


@pytest.mark.slow
def test_what_was_asked_otherwise_is_not_gone_on_from(
    model: Path, rows: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    evaluate(cfg_of(model, rows, num_examples=1), ["fp32"], out=out)
    (file,) = (out / "responses").rglob("*.jsonl")
    kept = file.read_bytes()
    with pytest.raises(ValueError, match=r"drawn with n 2, and this asks for 3; name another"):
        evaluate(cfg_of(model, rows, num_examples=1, rollouts_per_example=3), ["fp32"], out=out)
    with pytest.raises(ValueError, match="drawn with sampling .*; name another folder by --out"):
        evaluate(cfg_of(model, rows, num_examples=1, temperature=0.5), ["fp32"], out=out)
    rows.write_text(rows.read_text().replace("0+1?", "1+0?"))
    with pytest.raises(ValueError, match="test/0 was asked with another prompt: the data"):
        evaluate(cfg_of(model, rows, num_examples=1), ["fp32"], out=out)
    assert file.read_bytes() == kept
    file.write_bytes(kept.replace(b'"tokens": ', b'"tokens":  ', 1))
    with pytest.raises(ValueError, match=r"jsonl:2: damaged: .*remove the file to draw"):
        evaluate(cfg_of(model, rows, num_examples=1), ["fp32"], out=out)


@pytest.mark.slow
def test_the_command_takes_a_model_and_sets(
    model: Path,
    rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--suite", "gsm8k", "--data", str(rows), "--k", "2", "--max-tokens", "4"]
    fixed = ["device=cpu", "score.workers=1", "rollout.cache_tokens=1024"]
    assert main(["eval", str(model), *words, "--weights", "dense,int8", *fixed]) == 0
    said = capsys.readouterr().out
    (out,) = (tmp_path / "outputs/eval").iterdir()
    assert out.name.startswith("model-") and str(out.relative_to(tmp_path)) in said.replace(
        "\n", ""
    )
    assert "gsm8k" in said and "difference" in said and "maj@k" in said
    found = json.loads((out / "results.json").read_text())["rows"]
    assert [row["weights"] for row in found] == ["fp32", "int8"]
    assert found[0]["examples"] == 8 and "difference" not in found[0] and "difference" in found[1]
    page = (out / "failures.html").read_text()
    assert "7+1?" in page and "gold answer" in page and "fp32, dense 0/2" in page

    files = lines(out)
    assert main(["eval", str(model), *words, "--weights", "dense,int8", *fixed]) == 0
    assert lines(out) == files and len(list((tmp_path / "outputs/eval").iterdir())) == 1
    newer = tmp_path / "model"  # of the same name: other weights have another folder
    shutil.copytree(model, newer)
    assert main(["eval", str(newer), *words, "--weights", "dense", *fixed, "--n", "1"]) == 0
    assert len(list((tmp_path / "outputs/eval").iterdir())) == 2


def asked(*words: str) -> Any:
    arguments = parser().parse_intermixed_args(list(words))
    found = None if arguments.preset is None else preset(arguments.preset)
    return settings(arguments, found)


def test_options_become_settings(tmp_path: Path) -> None:
    cfg = asked("m", "--suite", "math7")
    assert cfg.model == "m" and cfg.eval.num_examples is None and cfg.eval.temperature == 0
    assert [env.id for env in cfg.eval.env][:2] == ["set/gsm8k", "set/math500"]
    assert cfg.score.time_limit == asked("m", "--env", "reverse-text").score.time_limit
    assert asked("m", "--suite", "ood").score.time_limit == 120
    assert asked("m", "--suite", "ood", "score.time_limit=9").score.time_limit == 9
    assert asked("m", "--suite", "aime24", "--n", "5").eval.num_examples == 5

    cfg = asked("m", "--preset", "qerl")
    assert (cfg.eval.temperature, cfg.eval.top_p, cfg.rollout.max_tokens) == (0.6, 0.95, 4096)
    cfg = asked(
        "m", "--preset", "qurl", "--suite", "aime24", "--temperature", "1", "eval.top_p=0.5"
    )
    assert (cfg.eval.temperature, cfg.eval.top_p) == (1.0, 0.5)
    assert cfg.eval.rollouts_per_example == 32 and len(cfg.eval.env) == 1

    (run := tmp_path / "run.yaml").write_text("model: a\nenv: {id: math, args: {path: x}}\n")
    assert asked(str(run), "--suite", "gsm8k").model == "a"
    cfg = asked("m", "--suite", "gsm8k,aime24", "--data", "aime24=a.jsonl", "--env", "math")
    assert [(env.name, env.args) for env in cfg.eval.env] == [
        ("gsm8k", {}),
        ("aime24", {"test_path": "a.jsonl"}),
        ("math", {}),
    ]
    assert asked("m", "--env", "math", "--data", "x=1.jsonl").eval.env[0].args == {
        "test_path": "x=1.jsonl"
    }


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["m"], "give a run's YAML file, or a model and what to ask: --suite, --preset or --env"),
        (["m", "--suite", "math"], "unknown set 'math' (did you mean 'math7'?); known: math7, ood"),
        (["m", "--preset", "qrl"], "--preset: unknown 'qrl' (did you mean 'qurl'?); known: greedy"),
        (["m", "--model", "n", "--suite", "ood"], "m: the model is named by --model too"),
        (
            ["m", "--suite", "gsm8k,aime24", "--data", "x.jsonl"],
            "--data x.jsonl: is for none of what is asked: write NAME=FILE (gsm8k, aime24)",
        ),
        (["m", "--data", "x.jsonl"], "--data x.jsonl: is for none of what is asked: write NAME"),
    ],
)
def test_what_does_not_go_together(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *words]) == 2
    assert capsys.readouterr().err.startswith(f"error: {told}")


def test_presets_are_whole() -> None:
    from lowroll.envs.sets.table import chosen

    for name, one in PRESETS.items():
        known = {found.name for found in chosen(one.sets)}
        assert one.name == name and set(one.each) <= known and one.source
        cfg = asked("m", "--preset", name)
        assert cfg.eval.temperature == one.temperature


# -- numbers side by side --------------------------------------------------------------------------


def measured(name: str, solved: list[list[bool | None]], env: str = "e") -> EngineAnswers:
    def response(one: bool | None) -> ExampleResponse:
        score = ScoreError("timeout", "x") if one is None else Score(float(one))
        return ExampleResponse("text", 5, "stop", score)

    examples = [
        Example(
            str(i), Prompt(str(i), env, [{"role": "user", "content": "q"}]), list(map(response, r))
        )
        for i, r in enumerate(solved)
    ]
    return EngineAnswers(env, {"weights": name, "kv": "dense"}, examples, None, 1.0)


def test_rows_by_hand() -> None:
    first = measured("bf16", [[True, True], [True, False], [False, False], [None, None]])
    other = measured("int8", [[True, False], [False, False], [False, None], [True, True]])
    top, low = rows_of([first, other])
    assert top["avg_at_k"] == 0.5 and low["avg_at_k"] == (0.5 + 0 + 0 + 1) / 4
    assert top["pass_at"] == {1: 0.5, 2: 2 / 3} and low["pass_at"][2] == 2 / 3  # of whole examples
    assert top["unscored"] == 0.25 and "difference" not in top
    # paired over the examples that both have a score of
    assert low["difference"] == pytest.approx((-0.5 - 0.5 + 0) / 3)
    assert low["difference_low"] <= low["difference"] <= low["difference_high"] <= 0
    same = rows_of([first, measured("fp8", [[True, True], [True, False], [False, False], [None]])])
    assert same[1]["difference"] == same[1]["difference_low"] == same[1]["difference_high"] == 0


def test_the_average_weighs_sets_alike() -> None:
    sides = [
        measured(name, [[True]] * right + [[False]] * (count - right), env)
        for name, rights in (("bf16", (9, 1)), ("int8", (6, 1)))
        for env, right, count in zip("ab", rights, (10, 2), strict=True)
    ]
    rows = rows_of(sides)
    assert [(row["env"], row["weights"]) for row in rows] == [
        (env, name) for name in ("bf16", "int8") for env in ("a", "b", "average")
    ]
    assert rows[2]["avg_at_k"] == pytest.approx(0.7)  # and not 10 of 12
    assert rows[5]["difference"] == pytest.approx(-0.15)
    head, cells = shown(rows)
    assert "k" not in head and "difference" in head and len(cells) == 6
    assert cells[5][head.index("difference")].startswith("-15.0 (")


# -- the page --------------------------------------------------------------------------------------


class Texts(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_escapes_what_a_model_says() -> None:
    failures = [
        Failure(
            f"test/{i}",
            [{"role": "user", "content": HOSTILE}],
            {"answer": HOSTILE},
            [
                Attempt("bf16", i, 1, None if i else HOSTILE, HOSTILE),
                Attempt("int8", 0, 1, HOSTILE),
            ],
        )
        for i in (0, 1)
    ]
    page = failure_page(
        HOSTILE, [(HOSTILE, HOSTILE)], ([HOSTILE], [[HOSTILE]]), {HOSTILE: failures}
    )
    found = Texts(page)
    assert found.tags.count("script") == 1 and "\x1b" not in page  # the page's own
    assert sum("<script>alert(1)</script>\\x1b[2J" in text for text in found.texts) > 8
    assert "Content-Security-Policy" in page and "engines part on 1" in page
    assert page.index("test/1") < page.index("test/0")  # where engines part comes first


def test_the_page_shows_all_turns_of_a_conversation() -> None:
    said = [("assistant", "4"), ("user", "higher"), ("assistant", "7")]
    talk = ExampleResponse("7", 2, "stop", messages=[{"role": r, "content": c} for r, c in said])
    talk.score = Score(0.0)
    example = Example("test/0", Prompt("test/0", "e", [{"role": "user", "content": "1-9"}]), [talk])
    (failure,) = results.failures([EngineAnswers("e", {"weights": "int8"}, [example], None, 1.0)])[
        "e"
    ]
    assert failure.attempts[0].wrong == "assistant: 4\nuser: higher\nassistant: 7"


TWICE = """
from lowroll.envs import Environment


class Twice(Environment):
    max_turns = 2

    def prompt(self, index, split="train"):
        return self.ask(f"{index}?", index, split, {})

    def respond(self, prompt, messages):
        return [{"role": "user", "content": "And?"}]

    def score(self, prompt, text):
        return 0.0

    def score_conversation(self, prompt, messages):
        return float([m["role"] for m in messages] == ["user", "assistant"] * 2)

    def gold(self, prompt):
        raise NotImplementedError

    perturbed = gold
"""


@pytest.mark.slow
def test_conversations_are_kept_and_scored_whole(model: Path, tmp_path: Path) -> None:
    (file := tmp_path / "twice.py").write_text(TWICE)
    asked = {"env": [{"id": str(file)}], "num_examples": 2, "temperature": 1.0}
    drawn = {"max_tokens": 60, "stop": list("abcdefghijklmnopqrstuvwxyz012345 ")}  # turns end soon
    cfg = from_mapping(run_settings(model, tmp_path / "run", eval=asked, rollout=drawn))
    (row,) = evaluate(cfg, ["fp32"], out=tmp_path / "out")
    assert row["pass_at_1"] == 1.0 and row["env"] == "twice.py"
    assert not row["env_failed"]
    (kept,) = (tmp_path / "out/responses").rglob("*.jsonl")
    lines = kept.read_bytes().splitlines(keepends=True)
    (first,) = json.loads(lines[1])["responses"]
    assert [m["role"] for m in first["messages"]] == ["assistant", "user", "assistant"]
    assert first["text"] == first["messages"][-1]["content"]
    kept.write_bytes(b"".join(lines[:3]))  # drawn, and not scored yet
    (again,) = evaluate(cfg, ["fp32"], out=tmp_path / "out")
    assert again | {"seconds": 0} == row | {"seconds": 0}
