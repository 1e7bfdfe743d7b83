"""Environments: hand-computed rewards, purity, held-out tasks, and the gold answers of real data
sets."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from lowroll.envs import make
from lowroll.envs.answers.equality import boxed_answer, equal, hash_answer, last_answer, same_number
from lowroll.envs.base import split_of
from lowroll.envs.problems import perturb, problem_of
from lowroll.envs.reverse_text import lcs_length, lcs_ratio

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("LOWROLL_DATA", ROOT.parent / "shared" / "data"))
EXAMPLE = str(ROOT / "examples" / "my_env.py")


def data(name: str) -> str:
    if not (DATA / name).is_file():
        pytest.skip(f"no {name} in {DATA} (set LOWROLL_DATA)")
    return str(DATA / name)


def jsonl(path: Path, *rows: object) -> str:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return str(path)


# ---- reverse-text


@pytest.mark.parametrize(
    "a, b, length",
    [
        ("", "", 0),
        ("abc", "", 0),
        ("abc", "abc", 3),
        ("abc", "cba", 1),
        ("ABCBDAB", "BDCABA", 4),
        ("AGGTAB", "GXTXAYB", 4),
        ("aaaa", "aa", 2),
        ("XMJYAUZ", "MZJAWXU", 4),
    ],
)
def test_lcs_hand_computed(a, b, length):
    assert lcs_length(a, b) == lcs_length(b, a) == length


def test_lcs_against_the_recurrence():
    def oracle(a, b):
        @cache
        def cell(i, j):
            if i == 0 or j == 0:
                return 0
            return (
                cell(i - 1, j - 1) + 1
                if a[i - 1] == b[j - 1]
                else max(cell(i - 1, j), cell(i, j - 1))
            )

        return cell(len(a), len(b))

    rng = random.Random(0)
    for _ in range(200):
        a, b = ("".join(rng.choices("abé", k=rng.randrange(70))) for _ in range(2))
        assert lcs_length(a, b) == oracle(a, b)


def test_lcs_ratio_hand_computed():
    assert lcs_ratio("abcd", "abcd") == 1.0
    assert lcs_ratio("ab", "abab") == pytest.approx(4 / 6)  # padding does not help
    assert lcs_ratio("", "ab") == 0.0


def test_reverse_text_scores_and_shape():
    env = make(
        "reverse-text",
        args={"template": "{text}", "min_words": 2, "max_words": 2, "min_len": 3, "max_len": 3},
    )
    prompt = env.prompt(0)
    text = prompt.messages[0]["content"]
    assert re.fullmatch(r"[a-z]{3} [a-z]{3}", text) and len(prompt.messages) == 1
    assert env.gold(prompt) == text[::-1] and env.score(prompt, f"  {text[::-1]}\n").reward == 1.0
    assert env.score(prompt, text[::-1] + "Z" * 7).reward == pytest.approx(2 * 7 / 21)
    assert env.score(prompt, "").reward == 0.0
    assert env.score(prompt, "Z" * 10**6).reward == 0.0  # bounded


def test_reverse_text_of_a_file(tmp_path):
    path = jsonl(tmp_path / "t.jsonl", *({"text": word} for word in ("one", "two", "three")))
    env = make("reverse-text", args={"path": path, "template": "{text}"})
    assert env.size("train") == 3 and env.size("test") == 0
    epochs = [
        [env.prompt(3 * epoch + i).messages[0]["content"] for i in range(3)] for epoch in range(6)
    ]
    assert all(sorted(epoch) == ["one", "three", "two"] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1  # a fresh permutation
    assert env.validate().ok and env.validate().count == 3
    assert env.prompt(0).id != env.prompt(3).id
    with pytest.raises(ValueError, match="no test split; set 'test_path'"):
        env.prompt(0, "test")


# ---- generated environments


@pytest.mark.parametrize("id", ["reverse-text", "arithmetic", "chain", "records", EXAMPLE])
def test_generated_prompts_are_pure_and_held_out(id):
    def texts(seed, split, order):
        env = make(id, name="e", seed=seed, args=None)
        found = {index: env.prompt(index, split) for index in order}
        return [found[index] for index in sorted(found)]

    train, again = texts(0, "train", range(150)), texts(0, "train", reversed(range(150)))
    assert train == again
    assert train != texts(1, "train", range(150))
    bodies = {p.messages[-1]["content"] for p in train}
    held_out = {
        p.messages[-1]["content"] for seed in (0, 1, 2) for p in texts(seed, "test", range(50))
    }
    assert len(bodies) > 140 and len(held_out) > 140 and not bodies & held_out
    assert len({p.id for p in train}) == 150
    assert make(id, seed=3).validate(100).ok and make(id, seed=3).validate(30, "test").ok


def test_split_share_is_a_quarter():
    share = sum(split_of(str(i)) == "test" for i in range(10_000)) / 10_000
    assert abs(share - 0.25) < 4 * (0.25 * 0.75 / 10_000) ** 0.5


def test_too_small_a_task_space_is_an_error():
    args = {"alphabet": "a", "min_words": 1, "max_words": 1, "min_len": 1, "max_len": 1}
    env = make("reverse-text", args=args)
    with pytest.raises(ValueError, match="allow too few tasks"):
        env.prompt(0, "test" if split_of("a") == "train" else "train")


@pytest.mark.parametrize("ops", ["+-*", "/", "+-*/"])
def test_arithmetic_gold_is_python(ops):
    env = make(
        "arithmetic", args={"ops": ops, "min_steps": 1, "max_steps": 6, "template": "{text}"}
    )
    for index in range(100):
        prompt = env.prompt(index)
        expression = prompt.messages[0]["content"]
        assert set(expression) <= set("0123456789+-*/() ")
        value = eval(expression)  # our own generated text: the independent oracle
        *steps, last = env.gold(prompt).splitlines()
        assert last == f"#### {int(value)}" and value == int(value)
        assert len(steps) == sum(expression.count(f" {op} ") for op in "+-*/")
        assert all(eval(step.replace("=", "==")) for step in steps)


# ---- final answers


@pytest.mark.parametrize(
    "text, answer",
    [
        (r"so \boxed{3} then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{a{b}{c{d}}e}", "a{b}{c{d}}e"),
        (r"\boxed {7}", "7"),
        (r"\boxed 5$", "5"),
        (r"\fbox{x}", "x"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{3} but \boxed{4", None),
        ("no box", None),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{}", ""),
    ],
)
def test_boxed(text, answer):
    assert boxed_answer(text) == answer


@pytest.mark.parametrize(
    "text, answer",
    [
        ("a\n#### 72", "72"),
        ("#### 1\n#### -2.5", "-2.5"),
        ("####$1,000 dollars.", "1,000"),
        ("#### 72 or 73", None),
        ("#### Step two", None),
        ("#### 72\n#### done", "72"),
        ("72", None),
        ("#### 1/2", None),
        ("#### .5", ".5"),
    ],
)
def test_hash(text, answer):
    assert hash_answer(text) == answer


def test_the_last_convention_decides():
    assert last_answer("#### 3 \n \\boxed{4}") == "4" and last_answer("\\boxed{4}\n#### 3") == "3"


def test_same_number():
    assert (
        same_number("1,234.50", "1234.5") and same_number("-3", "-3.00") and same_number("7", "$7")
    )
    assert same_number("0.1", "0.10000001") is False and same_number("3", "-3") is False
    assert same_number("1,23", "123") is None and same_number("x", "3") is None


@pytest.mark.parametrize(
    "gold, answer, same",
    [
        (r"\frac{1}{2}", "0.5", True),
        (r"\frac12", "1/2", True),
        ("x^2-1", "(x-1)(x+1)", True),
        ("3", "1+2", True),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)", True),
        ("(1,2)", "(2,1)", False),
        ("x=5", "5", True),
        (r"\text{east}", "east", True),
        (r"\text{east}", r"\text{west}", False),
        ("90", r"90^\circ", True),
        ("52_8", "52_9", False),
        ("52_8", "52_{8}", True),
        ("3", "3, 4", False),
        ("3", r"\{3, 4\}", False),
        ("3", r"3 \text{ or } 4", False),
        ("3", "3 and 4", False),
        ("5", r"\pm 5", False),
        ("3", r"x \le 3", False),
        ("72", "71, x=72", False),  # hedges
        ("3", "3" * 2000, False),
        ("3", "", False),
    ],
)
def test_equal(gold, answer, same):
    assert equal(gold, answer) is same


# ---- gsm8k and math


def test_problem_rows_of_every_dialect():
    def read(**row):
        problem = problem_of(row, "f:1")
        return problem and (problem.question, problem.answer, problem.solution)

    assert read(question="q", answer="a <<1+1=2>>2\n#### 1,002") == ("q", "1002", "a 2\n#### 1,002")
    assert read(problem="q", answer=r"\pi", solution=r"so \boxed{\pi}") == (
        "q",
        r"\pi",
        r"so \boxed{\pi}",
    )
    assert read(problem="q", solution=r"\boxed{1} or \boxed{1.6}") == (
        "q",
        "1.6",
        r"\boxed{1} or \boxed{1.6}",
    )
    assert read(question="q", answer="$[-2, 1)$") == ("q", "[-2, 1)", "")
    assert read(problem="q", answer=27.0) == ("q", "27", "")
    assert read(question="q", final_answer=["4"]) == ("q", "4", "")
    assert read(question="q", answer=["$1$", "$2$"]) == ("q", "1, 2", "")
    steps = ["work", r"so \boxed{7}"]
    assert read(question="q", solution=steps) == ("q", "7", r"work, so \boxed{7}")
    assert read(question="q", answer=" ") is None and read(problem="q", solution="no box") is None
    for bad in (
        {"answer": "3"},
        {"question": "q"},
        {"question": " ", "answer": "1"},
        {"question": "q", "answer": None},
    ):
        with pytest.raises(ValueError, match="f:1: "):
            problem_of(bad, "f:1")


def test_bad_files_name_the_line(tmp_path):
    rows = {"question": "q", "answer": "#### 1"}, {"question": "q"}
    with pytest.raises(ValueError, match="x.jsonl:2: none of the fields"):
        make("gsm8k", args={"path": jsonl(tmp_path / "x.jsonl", *rows)})


def test_rows_without_gold_are_skipped_and_counted(tmp_path, caplog):
    path = jsonl(
        tmp_path / "x.jsonl", {"question": "a", "answer": "#### 1"}, {"question": "b", "answer": ""}
    )
    env = make("gsm8k", args={"path": path})
    assert env.size() == 1
    assert "skipped 1 of 2" in caplog.text


def test_gsm8k_conventions(tmp_path):
    env = make(
        "gsm8k",
        args={
            "path": jsonl(tmp_path / "x.jsonl", {"question": "q", "answer": "72 = <<72>>\n#### 72"})
        },
    )
    prompt = env.prompt(0)
    rewards = {
        text: env.score(prompt, text).reward
        for text in (
            "#### 72",
            "#### 72.0",
            r"\boxed{72}",
            r"\boxed{\frac{144}{2}}",
            "72",
            "#### 73",
            "#### 72\n#### 73",
            "",
        )
    }
    assert list(rewards.values()) == [1, 1, 1, 1, 0, 0, 0, 0]
    assert env.gold(prompt) == "72 = \n#### 72"
    math = make(
        "math", args={"path": jsonl(tmp_path / "y.jsonl", {"problem": "q", "answer": "72"})}
    )
    assert math.score(math.prompt(0), "#### 72").reward == 0.0


def test_perturb_is_a_near_miss():
    assert (
        perturb("72") == "73" and perturb("9") == "8" and perturb(r"\text{east}") == r"\text{eastx}"
    )
    assert perturb(r"864 \mbox{ inches}^2") == r"865 \mbox{ inches}^2" and perturb("x") == "xx"


GOLD = [
    ("gsm8k_train.jsonl", "gsm8k"),
    ("gsm8k_test.jsonl", "gsm8k"),
    ("math500.jsonl", "math"),
    ("gaokao2023en.jsonl", "math"),
    ("minerva_math.jsonl", "math"),
]


@pytest.mark.slow
@pytest.mark.parametrize("file, id", GOLD)
def test_gold_answers_are_accepted_and_perturbed_ones_rejected(file, id):
    env = make(id, args={"test_path": data(file)})
    outcome = env.validate(10**6, "test")
    assert outcome.count == env.size("test") and outcome.ok, outcome.failures


def test_data_sets_have_their_documented_sizes():
    sizes = {file: make(id, args={"test_path": data(file)}).size("test") for file, id in GOLD}
    assert list(sizes.values()) == [7473, 1319, 500, 383, 272]  # two gaokao rows have no answer


def test_hub_data_set_through_datasets(monkeypatch):
    calls = []

    def load_dataset(path, subset, split, revision, streaming):
        calls.append((path, subset, split))
        return [{"question": f"{split} q", "answer": "#### 4"}]

    def names(path, subset, revision):
        return ["test", "train"]

    known = SimpleNamespace(load_dataset=load_dataset, get_dataset_split_names=names)
    monkeypatch.setitem(sys.modules, "datasets", known)
    env = make("gsm8k", args={"path": "openai/gsm8k", "subset": "main"})
    assert env.prompt(0, "test").messages[0]["content"].startswith("test q")
    assert calls == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="needs the package 'datasets'"):
        make("gsm8k", args={"path": "openai/gsm8k"})


def test_a_division_keeps_the_number_of_steps():
    """Its divisor is a number, so all the steps that are left stand on its left."""
    env = make("arithmetic", args={"min_steps": 3, "max_steps": 3, "ops": ["/", "+"]})
    drawn = [env.prompt(i).info["steps"] for i in range(40)]
    assert {len(steps) for steps in drawn} == {3} and any(
        "/" in line for steps in drawn for line in steps
    )


# ---- the table


def test_an_argument_without_a_default_must_be_given(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(Path(EXAMPLE).read_text().replace("length: int = 5", "length: int"))
    assert make(str(path), args={"length": 4}).prompt(0)
    with pytest.raises(ValueError, match="argument 'length' is missing"):
        make(str(path))


def test_a_user_environment_is_announced_and_short(caplog):
    env = make(EXAMPLE, name="sort", args={"length": 7})
    assert "runs the code of" in caplog.text and "my_env.py" in caplog.text
    assert env.prompt(0).env == "sort" and env.validate().ok
    assert (
        make(EXAMPLE + ":SortLetters")
        .prompt(0)
        .messages[0]["content"]
        .startswith("Sort the letters: ")
    )
    assert len(Path(EXAMPLE).read_text().splitlines()) < 40


@pytest.mark.parametrize(
    "id, args, message",
    [
        ("revers-text", {}, "did you mean 'reverse-text'"),
        ("nope/x", {}, "unknown environment"),
        ("missing.py", {}, "missing.py does not exist"),
        (EXAMPLE + ":Nope", {}, "no Environment subclass 'Nope'"),
        ("reverse-text", {"max_length": 3}, "did you mean 'max_len'"),
        ("reverse-text", {"seed": 3}, "'seed' stands beside args"),
        ("reverse-text", {"max_len": "8"}, "integers"),
        ("gsm8k", {}, "needs 'path'"),
        ("math", {"path": "/no/such.jsonl"}, "neither a file nor a hub id"),
    ],
)
def test_bad_ids_and_arguments(id, args, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(id, args=args)


def test_bad_split_and_index():
    env = make("reverse-text")
    with pytest.raises(ValueError, match="split must be"):
        env.prompt(0, "dev")
    with pytest.raises(ValueError, match="index must be >= 0"):
        env.prompt(-1)


def test_validate_reports_a_broken_scorer(tmp_path):
    source = Path(EXAMPLE).read_text()
    (tmp_path / "broken.py").write_text(
        source.replace("right / max(len(answer), len(response))", "1.0")
    )
    outcome = make(str(tmp_path / "broken.py")).validate(8)
    assert not outcome.ok and outcome.gold_accepted == 8 and outcome.perturbed_rejected == 0
    assert len(outcome.failures) == 5 and "perturbed" in outcome.failures[0]
    (tmp_path / "raising.py").write_text(source.replace("text.strip()", "1 / 0"))
    outcome = make(str(tmp_path / "raising.py")).validate(3)
    assert (
        outcome.gold_accepted == outcome.perturbed_rejected == 0
        and "ZeroDivisionError" in outcome.failures[0]
    )


def test_environments_do_not_import_torch_or_sympy():
    code = (
        "import sys, lowroll.envs, lowroll.envs.scorer_pool, lowroll.envs.worker, lowroll.envs.gsm8k;"
        "from lowroll.envs import make; e = make('reverse-text'); e.score(e.prompt(0), 'x');"
        "print([m for m in ('torch', 'sympy', 'numpy', 'reasoning_gym', 'transformers') if m in "
        "sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


# ---- reasoning-gym

NO_ORACLE = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
SLOW = {
    "arc_agi",
    "knight_swap",
    "futoshiki",
    "zebra_puzzles",
    "intermediate_integration",
}  # a second or more


def generators() -> list[str]:
    factory = pytest.importorskip("reasoning_gym.factory", reason="reasoning-gym is not installed")
    return sorted(factory.DATASETS)


@pytest.mark.slow
def test_reasoning_gym_every_generator_prompts_and_accepts_its_own_answer():
    faults = []
    names = generators()
    for generator in names:
        args = (
            {"datasets": [{"name": "chain_sum"}, {"name": "countdown"}]}
            if generator == "composite"
            else {}
        )
        env = make(f"reasoning-gym/{generator}", args=args, seed=1)
        outcome = env.validate(0 if generator in SLOW else 2)
        missing = outcome.count if generator in NO_ORACLE else 0
        if not outcome.ok or outcome.gold_missing != missing:
            faults.append((generator, outcome))
    assert len(names) > 100 and not faults


@pytest.mark.slow
def test_reasoning_gym_is_pure_held_out_and_checked():
    generators()

    def texts(split, seed=0):
        env = make("reasoning-gym/chain_sum", args={"min_terms": 2, "max_terms": 2}, seed=seed)
        return [env.prompt(index, split).messages[1]["content"] for index in range(300)]

    assert texts("train") == texts("train") and texts("train") != texts("train", seed=1)
    assert not set(texts("train")) & set(texts("test", seed=1))
    for id, args, message in (
        ("chainsum", {}, "did you mean 'chain_sum'"),
        ("chain_sum", {"terms": 2}, "min_terms"),
        ("chain_sum", {"min_terms": -1}, "refused the options"),
        ("composite", {}, "needs datasets"),
        ("chain_sum", {"seed": 2}, "stands beside args"),
        ("chain_sum", {"size": 2}, "no option 'size'"),
    ):
        with pytest.raises(ValueError, match=message):
            make(f"reasoning-gym/{id}", args=args)


@pytest.mark.slow
def test_reasoning_gym_items_do_not_depend_on_the_hash_seed():
    generators()
    code = (
        "from lowroll.envs import make\n"
        "for name in ('isomorphic_strings', 'word_ladder', 'ransom_note', 'codeio', "
        "'polynomial_multiplication'):\n"
        "    env = make('reasoning-gym/' + name); print([env.prompt(i) for i in range(8)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=120,
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
        ).stdout
        for seed in "12"
    }
    assert len(outputs) == 1 and len(outputs.pop()) > 10_000


@pytest.mark.slow
def test_reasoning_gym_child_dies_and_another_item_is_an_error():
    generators()
    from lowroll.envs import generator

    env = make("reasoning-gym/chain_sum")
    prompt = env.prompt(3)
    if generator.server.process is not None:
        generator.server.process.kill()
        with pytest.raises(RuntimeError, match="chain_sum ended by itself"):
            env.prompt(4)
    assert env.prompt(3) == prompt and env.score(prompt, env.gold(prompt)).reward == 1.0
    other = make("reasoning-gym/chain_sum", seed=1)
    with pytest.raises(ValueError, match="does not make the item"):
        other.score(prompt, env.gold(prompt))


def test_reasoning_gym_answers_are_never_run(tmp_path):
    generators()
    canary = tmp_path / "canary"
    payloads = [
        f"__import__('os').system('touch {canary}')",
        f"open('{canary}','w')",
        "exec(chr(120))",
        f"[].__class__.__base__.__subclasses__() or open('{canary}', 'w')",
        "x.__class__",
        "eval(N(3))",
        "3*(4+5j)",
    ]
    for generator in (
        "string_insertion",
        "spiral_matrix",
        "binary_matrix",
        "n_queens",
        "countdown",
        "puzzle24",
        "simple_integration",
        "polynomial_multiplication",
    ):
        env = make(f"reasoning-gym/{generator}")
        prompt = env.prompt(0)
        for payload in payloads:
            assert env.score(prompt, f"<answer>{payload}</answer>").reward == 0.0
        assert env.score(prompt, "no tag").reward == 0.0
    assert not canary.exists()


def test_reasoning_gym_loopholes_are_closed():
    generators()
    env = make("reasoning-gym/puzzle24")
    prompt = env.prompt(0)
    assert env.score(prompt, env.gold(prompt)).reward == 1.0
    assert env.score(prompt, "<answer>6*4*1*1</answer>").reward == 0.0  # 24, out of other numbers
    env = make("reasoning-gym/simple_integration")
    prompt = env.prompt(0)
    another_form = prompt.info["answer"] + " + 0*sin(x)**2"
    assert env.score(prompt, f"<answer>{another_form}</answer>").reward == 1.0
