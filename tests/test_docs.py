"""The documentation is true: its code runs, its commands exist, its YAML loads, its tables and links are up to date."""
from __future__ import annotations

import importlib
import importlib.util
import re
import runpy
import shlex
import shutil
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch

import lowroll
from lowroll import demo
from lowroll.cli.main import COMMANDS, main
from lowroll.config import RunConfig, load, load_reference
from lowroll.model import hf, lora

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "recipes" / "README.md"]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
TINY = {**demo.CONFIG, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 2, "num_key_value_heads": 1}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    """The fenced code blocks of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like a clone after `make demo`: the examples, the demo's model (a tiny one) and its run's settings."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "examples", folder / "examples")
    (folder / "outputs/demo/run").mkdir(parents=True)
    original, demo.CONFIG = demo.CONFIG, TINY
    try:
        demo.build_model(folder / "outputs/demo/model", seed=0)
    finally:
        demo.CONFIG = original
    cfg = demo.settings(Path("outputs/demo"), seed=0, device="cpu")
    cfg = cfg.model_copy(update={"batch_size": 32, "score": cfg.score.model_copy(update={"workers": 1})})
    (folder / "outputs/demo/run/config.yaml").write_text(cfg.dump())
    return folder


def run_block(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Run a block of a page as a script in `folder`; its variables."""
    script = folder / "block.py"
    script.write_text(code)
    monkeypatch.chdir(folder)
    return runpy.run_path(str(script))


def test_the_tour_of_the_readme_runs(clone: Path, monkeypatch: pytest.MonkeyPatch,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    tour, = blocks(ROOT / "README.md", "python")
    assert sum(bool(line.strip()) and not line.startswith("#") for line in tour.splitlines()) <= 30
    left = run_block(tour, clone, monkeypatch)
    assert left["first"].behavior.weights == "int8"
    assert left["proximal"].shape == left["behavior"].shape == left["learner"].grad.shape
    assert 0 < float((left["proximal"] - left["behavior"]).abs().max()) < 0.5      # INT8 differs, and not by much
    assert left["learner"].grad.abs().sum() > 0
    assert left["q"].nbytes == 64 * 128 + 64 * 4
    assert [record["step"] for record in left["result"].records] == [1, 2, 3, 4, 5]
    assert "KL a token:" in capsys.readouterr().out


def test_the_python_of_the_usage_page_runs(clone: Path, monkeypatch: pytest.MonkeyPatch,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    validate, merge = blocks(ROOT / "docs/usage.md", "python")
    run_block(validate, clone, monkeypatch)
    assert "Validation(env='examples/my_env.py'" in capsys.readouterr().out

    base = clone / "outputs/demo/model"
    adapted = lora.attach(hf.load(base), 4, 8.0)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in adapted.trainable_parameters().values():
            parameter.copy_(0.1 * torch.randn_like(parameter))
    lora.save(adapted, clone / "outputs/lora/final", base=str(base))
    run_block(merge, clone, monkeypatch)
    ids = [[5, 80, 81, 82, 83, 84]]
    merged, = lowroll.score(clone / "outputs/lora/merged", ids, [1])
    torch.testing.assert_close(merged, lowroll.score(adapted, ids, [1])[0], atol=1e-5, rtol=0)
    assert not torch.allclose(merged, lowroll.score(base, ids, [1])[0], atol=1e-3)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_yaml_of_the_pages_loads(page: Path, tmp_path: Path) -> None:
    for block in blocks(page, "yaml"):
        (tmp_path / "run.yaml").write_text(block)
        assert load(tmp_path / "run.yaml").model


def commands_of(text: str) -> list[list[str]]:
    """The command lines of a page or a file's comments: indented or after a # mark, remarks cut off."""
    lines = re.sub(r"\\\n#?", " ", text).splitlines()
    found = (re.fullmatch(r"(?:#\s+|\s{4})((?:lowroll|make) .*?)(?:\s+#.*)?", line) for line in lines)
    inline = re.findall(r"`((?:lowroll|make) [^`<\n]*)`", text)
    return [shlex.split(line) for line in [*(match[1] for match in found if match), *inline]]


@pytest.mark.parametrize("page", [*PAGES, *RECIPES, *EXAMPLES, ROOT / "examples/three_files/train.yaml"], ids=name)
def test_the_commands_exist_and_take_these_arguments(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for program, command, *arguments in commands_of(page.read_text()):
        if program == "make":
            assert command in targets, f"make {command}"
        else:
            assert command in COMMANDS, f"lowroll {command}"
            parser = importlib.import_module(f"lowroll.cli.{command}").parser()
            if arguments and "..." not in arguments:
                parser.parse_intermixed_args(arguments)


def test_the_reader_of_commands_sees_the_commands() -> None:
    found = {" ".join(words[:2]) for words in commands_of((ROOT / "README.md").read_text())}
    assert {"make demo", "make test", "lowroll grpo", "lowroll report"} <= found
    assert commands_of("    lowroll grpo a.yaml b.c=1   # why\n") == [["lowroll", "grpo", "a.yaml", "b.c=1"]]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        assert not target.startswith("http"), f"{target}: the pages are read offline"
        path, _, anchor = target.partition("#")
        goal = page.parent / path if path else page
        assert goal.exists(), f"{name(page)} links to {target}, which does not exist"
        if anchor:
            heads = re.findall(r"^#+ (.*)$", goal.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}, target


def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_tables", ROOT / "docs/tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_tables_are_up_to_date() -> None:
    made = tables()
    used: set[str] = set()
    for page in made.pages():
        text = page.read_text()
        assert made.filled(text) == text, f"{name(page)} is out of date: run `python docs/tables.py`"
        used |= {match[2] for match in made.BLOCK.finditer(text)}
    assert used == set(made.PARTS)


def test_a_changed_number_would_be_noticed() -> None:
    made, text = tables(), (ROOT / "docs/algorithms.md").read_text()
    wrong = text.replace("0.2 / 0.28", "0.2 / 0.30")
    assert wrong != text and made.filled(wrong) == text
    with pytest.raises(ValueError, match="unknown table 'nothing'"):
        made.filled("<!-- table: nothing -->\n<!-- end -->")


def test_the_benchmark_table_shows_what_was_stored(tmp_path: Path) -> None:
    made = tables()
    made.ROOT = tmp_path
    assert "make bench" in made.measured()
    (tmp_path / "bench/baselines").mkdir(parents=True)
    (tmp_path / "bench/baselines/engine.json").write_text(
        '{"date": "2026-01-02", "machine": {"cpu": "X", "threads": 2, "torch": "2.13", "transformers": "5.23"}, '
        '"rows": [{"name": "demo", "unit": "tokens/s", "ours": 3000.4, "peer": 1000, "ratio": 3.0, '
        '"spread": [2.9, 3.1], "must": 2.0}]}')
    assert "2026-01-02: X, 2 threads" in made.measured()
    assert "| demo | tokens/s | 3,000 | 1,000 | 3.00x (2.90 to 3.10) | 2x |" in made.measured()


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    wanted += [entry for extra in project["project"]["optional-dependencies"].values() for entry in extra]
    names = {re.match(r"[\w.-]+", entry)[0].lower() for entry in wanted}
    rows = {row[1].lower(): row for row in re.findall(r"^(\| `([\w.-]+)` \|.*)$",
                                                      (ROOT / "docs/dependencies.md").read_text(), re.MULTILINE)}
    assert names == set(rows)
    for row, _ in rows.values():
        assert all(cell.strip() for cell in row.split("|")[2:4]), row


# -- examples and recipes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*EXAMPLES, *RECIPES], ids=name)
def test_files_load_and_plan(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grpo", str(path), "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("# model ")


@pytest.mark.parametrize("path", [*EXAMPLES, *RECIPES], ids=name)
def test_the_command_in_a_files_head_plans(path: Path, monkeypatch: pytest.MonkeyPatch,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    for program, *arguments in commands_of(path.read_text()):
        if program == "lowroll" and arguments[1:] and name(path) in arguments:
            assert main([*arguments, "--dry-run"]) == 0
            assert capsys.readouterr().out.startswith("# model ")


def test_the_three_files_load() -> None:
    folder = ROOT / "examples/three_files"
    cfg = load_reference(*(folder / f"{part}.yaml" for part in ("train", "infer", "orch")),
                         overrides=["rollout.weights=int8"])
    assert (cfg.batch_size, cfg.rollouts_per_example, cfg.rollout.weights) == (128, 16, "int8")


def test_every_recipe_is_listed_and_says_where_it_comes_from() -> None:
    listed = (ROOT / "recipes/README.md").read_text()
    for path in RECIPES:
        assert f"]({path.name})" in listed
        head = "".join(line for line in path.read_text().splitlines(True) if line.startswith("#"))
        assert re.search(r"Table \d|section \d|repository|Quick Start", head), path.name
    assert set(re.findall(r"\]\((\w+\.yaml)\)", listed)) == {path.name for path in RECIPES}


# as printed: prompts a step, rollouts a prompt, longest response, learning rate, steps, updates a step, KL coefficient
PUBLISHED = {
    "qurl_gsm8k_int8": (256, 8, 512, 1e-5, 15 * (7473 // 256), 256 // 64, 0.0),
    "qurl_dapo_int8": (512, 16, 3072, 1e-6, 200, 16, 0.0),
    "qurl_deepscaler_int8": (256, 8, 8192, 1e-6, 800, 4, 1e-3),
    "surogate_reverse_text": (128 // 16, 16, 128, 2e-4, 40, 1, 0.0),
    "dapo_aime": (512, 16, 16384 + 4096, 1e-6, 300, 512 * 16 // 512, 0.0),
    "dr_grpo_math": (128, 8, 3000, 1e-6, 20 * 12000 // 128, 128 * 8 // 128, 0.0),
    "deepseekmath_grpo": (1024 // 64, 64, 1024, 1e-6, 500, 1, 0.04),
    "sparse_rl_dense_baseline": (1024 // 8, 8, 4096, 1e-6, 400, 1024 // 256, 1e-4),
    "qerl_gsm8k_bf16_lora": (128 // 8, 8, 4096, 5e-6, 200, 1, 0.0),
}


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_recipes_hold_the_published_numbers(path: Path) -> None:
    cfg: RunConfig = load(path)
    assert (cfg.num_groups, cfg.rollouts_per_example, cfg.rollout.max_tokens, cfg.train.learning_rate,
            cfg.train.max_steps, cfg.train.minibatches, cfg.loss.kl_coef) == PUBLISHED[path.stem]
    low_bit = cfg.rollout.weights == "int8"
    assert path.stem.startswith("qurl") == low_bit and (cfg.correction == "acr") == low_bit
