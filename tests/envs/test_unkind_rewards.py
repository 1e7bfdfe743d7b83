"""Unkind scorers of one's own environment: loud ones, odd results, what they leave behind, and what
they are told."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowroll import machine
from lowroll.envs import Environment, child, make
from lowroll.envs.scorer_pool import ScorerPool
from lowroll.metrics.names import find
from lowroll.metrics.record import Recorder
from lowroll.types import Prompt, Score
from tests.fixtures.processes import alive, eventually

ROOT = Path(__file__).resolve().parents[2]
LINUX = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux hands orphans to a subreaper"
)
UNKIND = """
import asyncio, os, subprocess, sys, threading, time
import helper_beside
from lowroll.envs import Environment
from lowroll.types import Score

class Unkind(Environment):
    def prompt(self, index, split="train"): return self.ask(str(index), index, split, {})
    def gold(self, prompt): raise NotImplementedError
    def perturbed(self, prompt): raise NotImplementedError
    def score(self, prompt, text): return getattr(self, text)()
    def loud(self):
        print("y" * 2**20)
        sys.stderr.write("z" * 2**20)
        return 0.5
    def yes(self): return True
    def one(self): return 1
    def text(self): return "good"
    def nan(self): return float("nan")
    def odd_names(self): return Score(1.0, {"<b>": 1, "words: a/b, c > d": 2.0, "ok?": True})
    def no_name(self): return Score(1.0, {"": 1.0})
    def torn_name(self): return Score(1.0, {"\\ud800": 1.0})
    def surrogate(self): raise KeyError("\\ud83d in the answer")
    async def slowly(self):
        self.loop = getattr(self, "loop", None) or asyncio.get_running_loop()
        await asyncio.sleep(0.01)
        assert self.loop is asyncio.get_running_loop()
        return 0.25
    async def never(self): await asyncio.sleep(1e6)
    async def fails(self): raise OSError("the judge is away")
    def key(self): return float(os.environ.get("JUDGE_KEY") == "sk-very-secret" and "OTHER_KEY" not in os.environ)
    def leak(self):
        print("my key is", os.environ["JUDGE_KEY"], flush=True)
        raise ValueError("401 for " + os.environ["JUDGE_KEY"])
    def leak_and_die(self):
        os.write(2, os.environ["JUDGE_KEY"].encode())
        os._exit(7)
    def daemon(self):
        here = os.path.dirname(__file__)
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                with open(here + "/daemons", "a") as file: file.write(f"{os.getpid()} ")
                time.sleep(600)
            os._exit(0)
        subprocess.Popen(["sh", "-c", 'setsid sleep 600 & echo $! >> "$0"', here + "/daemons"])
        os.wait()
        with open(here + "/daemons", "a+") as file:
            while file.seek(0) or len(file.read().split()) < 2: time.sleep(0.01)
        return 1.0
    def daemon_and_die(self):
        self.daemon()
        os._exit(0)
    def stop_reaper(self):
        import signal
        os.kill(os.getppid(), signal.SIGSTOP)
        return 1.0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unkind")
    (folder / "unkind.py").write_text(UNKIND)
    (folder / "helper_beside.py").write_text("")
    return folder


def prompt(i: int = 0) -> Prompt:
    return Prompt(f"train/{i}", "mine", [], {})


def pool_of(folder: Path, **options) -> ScorerPool:
    return ScorerPool(
        {"mine": (str(folder / "unkind.py"), {}, 0)},
        **{"num_workers": 1, "time_limit": 5.0, **options},
    )


@pytest.mark.slow
def test_scorers_may_print_without_end_and_return_plain_numbers(
    folder: Path, tmp_path: Path, caplog
) -> None:
    """80 scores print 160 MB, more than a worker may write to a file: nobody is hurt, and the log
    has the beginning."""
    names = (
        "yes",
        "one",
        "text",
        "nan",
        "odd_names",
        "no_name",
        "torn_name",
        "surrogate",
        "slowly",
        "slowly",
        "fails",
    )
    with caplog.at_level(logging.INFO, "lowroll"), pool_of(folder) as pool:
        assert pool.score([(prompt(), "loud")] * 80) == [Score(0.5)] * 80 and pool.replaced == 0
        results = dict(
            zip(names, pool.score([(prompt(i), name) for i, name in enumerate(names)]), strict=True)
        )
        (never,) = pool_of(folder, time_limit=1.0).score([(prompt(3), "never")])
    assert (results["yes"], results["one"], results["slowly"]) == (
        Score(1.0),
        Score(1.0),
        Score(0.25),
    )
    wrong = {
        name: (found.kind, found.message.replace(str(folder), ""))
        for name, found in results.items()
        if not isinstance(found, Score)
    }
    assert wrong == {
        "text": (
            "invalid",
            "env 'mine', train/2: score returned 'good', of type str; it must return a number or a "
            "Score",
        ),
        "nan": ("invalid", "env 'mine', train/3: the reward is nan; it must be finite"),
        "no_name": (
            "invalid",
            "env 'mine', train/5: a metric is named '', of type str; it must be text of 1 to 100 "
            "printable characters",
        ),
        "torn_name": (
            "invalid",
            "env 'mine', train/6: a metric is named '\\ud800', of type str; it must be text of 1 "
            "to 100 printable characters",
        ),
        "surrogate": (
            "exception",
            "env 'mine', train/7: KeyError: '\\ud83d in the answer' (/unkind.py:23)",
        ),
        "fails": ("exception", "env 'mine', train/10: OSError: the judge is away (/unkind.py:30)"),
    }
    assert (never.kind, never.message) == ("timeout", "env 'mine', train/3: no score after 1 s")
    assert "a scorer printed: yyyy" in caplog.text and len(caplog.text) < 20_000
    record = Recorder(tmp_path).write(
        1,
        {f"reward/my/env.py/{name}": value for name, value in results["odd_names"].metrics.items()},
    )
    assert record == {
        "step": 1,
        "reward/my/env.py/<b>": 1.0,
        "reward/my/env.py/words: a/b, c > d": 2.0,
        "reward/my/env.py/ok?": 1.0,
    }
    assert find("eval/reasoning-gym/chain_sum/reward").name == "eval/<env>/reward"


def test_more_workers_than_the_machine_holds_are_refused_before_any_starts(
    folder: Path, monkeypatch
) -> None:
    monkeypatch.setattr(child, "start", lambda *_: pytest.fail("a worker was started"))
    with pytest.raises(
        ValueError, match=r"^score\.workers: 100000 is more than the \d+ that this machine holds \("
    ):
        pool_of(folder, num_workers=100_000)
    monkeypatch.setattr(machine, "free_memory", lambda: 600 << 20)
    with pytest.raises(
        ValueError, match=r"more than the 9 .*\(0\.6 GB of free memory, 64 MB each\)"
    ):
        pool_of(folder, num_workers=10)


def daemons(folder: Path, count: int) -> list[int]:
    file = folder / "daemons"
    assert eventually(lambda: file.exists() and len(file.read_text().split()) == count)
    found = [int(word) for word in file.read_text().split()]
    file.unlink()
    return found


@LINUX
def test_what_scorers_leave_running_ends_with_the_worker_and_nothing_else_does(
    folder: Path,
) -> None:
    ours = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        with pool_of(folder) as pool:
            assert [r.reward for r in pool.score([(prompt(), "daemon"), (prompt(), "one")])] == [
                1.0,
                1.0,
            ]
            left = daemons(folder, 2)
            assert all(alive(pid) for pid in left)  # no harm is done to what may be wanted
            assert pool.score([(prompt(), "daemon_and_die")])[0].kind == "crash"
            for_dead = daemons(folder, 2)
            assert not any(alive(pid) for pid in left + for_dead)
            pool.score([(prompt(), "daemon"), (prompt(), "stop_reaper")])
            left = daemons(folder, 2)
        assert not any(alive(pid) for pid in left) and ours.poll() is None
    finally:
        ours.kill()
        ours.wait()


@LINUX
def test_daemons_end_when_the_run_is_killed(folder: Path) -> None:
    code = f"""
import time
from lowroll.envs.scorer_pool import ScorerPool
from lowroll.types import Prompt
pool = ScorerPool({{"mine": ({str(folder / "unkind.py")!r}, {{}}, 0)}}, 1)
pool.score([(Prompt("0", "mine", [], {{}}), "daemon")])
print("left", flush=True)
time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as run:
        try:
            assert run.stdout.readline() == "left\n"
            left = daemons(folder, 2)
        finally:
            run.kill()
    assert eventually(lambda: not any(alive(pid) for pid in left))


@pytest.mark.slow
@LINUX
def test_a_stopped_generator_dies_with_its_parent() -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    code = """
import os, signal, threading, time
from lowroll.envs import generator
def ask():                             # the thread ends; the child goes on
    generator.server.ask("chain_sum", {}, 0, "check")
thread = threading.Thread(target=ask)
thread.start(), thread.join()
time.sleep(0.2)
ask()
pid = generator.server.process.pid
os.kill(pid, signal.SIGSTOP)
print(pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as run:
        try:
            pid = int(run.stdout.readline())
            assert alive(pid)
        finally:
            run.kill()
    try:
        assert eventually(lambda: not alive(pid))
    finally:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_named_variables_reach_the_scorer_and_their_values_nobody_else(
    folder: Path, monkeypatch, caplog
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-very-secret")
    monkeypatch.setenv("OTHER_KEY", "x")
    with caplog.at_level(logging.INFO, "lowroll"), pool_of(folder, pass_env=["JUDGE_KEY"]) as pool:
        key, leak, died = pool.score([(prompt(), how) for how in ("key", "leak", "leak_and_die")])
    assert key == Score(1.0)
    assert "ValueError: 401 for $JUDGE_KEY (" in leak.message and died.message.endswith(
        "\n$JUDGE_KEY"
    )
    assert (
        "a scorer printed: my key is $JUDGE_KEY" in caplog.text
        and "sk-very-secret" not in caplog.text
    )
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(
        ValueError, match="^pass_env: the environment variable JUDGE_KEY is not set$"
    ):
        pool_of(folder, pass_env=["JUDGE_KEY"])
    with pytest.raises(ValueError, match="PYTHONHASHSEED of their own"):
        monkeypatch.setenv("PYTHONHASHSEED", "1")
        pool_of(folder, pass_env=["PYTHONHASHSEED"])


class Async(Environment):
    """Validated inside a running event loop, as in a notebook."""

    def prompt(self, index: int, split: str = "train") -> Prompt:
        return self.ask(str(index), index, split, {})

    async def score(self, prompt: Prompt, text: str) -> float:
        await asyncio.sleep(0)
        return float(text == "gold")

    def gold(self, prompt: Prompt) -> str:
        return "gold"

    def perturbed(self, prompt: Prompt) -> str:
        return "g0ld"


def test_validate_takes_numbers_and_async_scorers_inside_a_running_loop() -> None:
    async def cell() -> bool:
        return Async(name="a").validate(3).ok

    assert asyncio.run(cell())


HEAD = "from lowroll.envs import Environment\nclass Mine(Environment):\n"
PROMPT = "    def prompt(self, index, split='train'): return self.ask('q', index, split, {})\n"
SCORE = "    def score(self, prompt, text): return 1.0\n"
GOLD = "    def gold(self, prompt): return 'g'\n    def perturbed(self, prompt): return 'p'\n"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (
            HEAD + PROMPT + SCORE,
            r"mine\.py: class Mine lacks gold, perturbed; one that knows no such answer raises "
            r"NotImplementedError in gold and perturbed$",
        ),
        (HEAD + PROMPT + GOLD, r"mine\.py: class Mine lacks score$"),
        ("x = 1\n", r"mine\.py: no Environment subclass \(found: none\)$"),
        (
            HEAD + PROMPT + SCORE + GOLD + "class Two(Mine): pass\n",
            r"mine\.py: several environments, Mine, Two: name one, as in mine\.py:Mine$",
        ),
        (
            "import json\nimport nothing_like_it\n",
            r"mine\.py:2: it cannot be imported: ModuleNotFoundError: "
            r"No module named 'nothing_like_it'$",
        ),
        ("x = 1\ndef f(:\n", r"mine\.py:2: it cannot be imported: SyntaxError: "),
        (
            HEAD
            + PROMPT
            + SCORE
            + GOLD
            + "    def __init__(self, **k):\n        super().__init__(**k)\n        k['path']\n",
            r"mine\.py:9: env 'm': KeyError: 'path'$",
        ),
        (
            HEAD + PROMPT + SCORE + GOLD + "    def __init__(self, **k): pass\n",
            r"env 'm': Mine\.__init__ must call super\(\)\.__init__\(name=name, seed=seed\)$",
        ),
    ],
)
def test_what_is_wrong_with_an_environments_file_is_one_line(
    tmp_path: Path, code: str, error: str
) -> None:
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(ValueError, match=error) as caught:
        make(str(tmp_path / "mine.py"), name="m")
    assert "\n" not in str(caught.value)


def test_bad_rows_are_named_by_file_and_line(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    for line, error in (
        (b'{"question": "a \\ud83d b", "answer": "1"}', r"a lone surrogate \(\\ud83d\) is no text"),
        (b'{"question": "\xff", "answer": "1"}', "not UTF-8"),
        (b'{"q": ' + b"[" * 100_000, "nested too deep"),
        (b'{"question":', "not JSON"),
    ):
        rows.write_bytes(
            json.dumps({"question": "1+1", "answer": "2"}).encode() + b"\n" + line + b"\n"
        )
        with pytest.raises(ValueError, match=rf"rows\.jsonl:2: {error}"):
            make("math", args={"path": str(rows)})


def test_the_pool_is_fast(folder: Path) -> None:
    with pool_of(folder, num_workers=2) as pool:
        began = time.process_time()
        pool.score([(prompt(), "one")] * 2000)
        assert time.process_time() - began < 5.0
