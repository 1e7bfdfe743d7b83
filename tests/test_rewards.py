"""The scorer pool: bombs hurt themselves alone, a failure is never a reward, workers do not outlive their parent."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lowroll.envs import make
from lowroll.envs.rewards import ScorerPool
from lowroll.types import Prompt, Score, ScoreError

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 2.0

BOMBS = '''
import os, sys, time, ctypes, subprocess
from lowroll.envs import Environment
from lowroll.types import Prompt, Score

class Bombs(Environment):
    def prompt(self, index, split="train"):
        return self.ask(str(index), index, split, {"answer": index})
    def gold(self, prompt): return "good"
    def perturbed(self, prompt): return "bad"
    def score(self, prompt, text):
        return getattr(self, text)(prompt)
    def good(self, prompt): return Score(prompt.info["answer"] / 4, {"half": 0.5})
    def hang(self, prompt): time.sleep(1e6)
    def hang_in_c(self, prompt): return 9**9**9
    def memory(self, prompt): return bytearray(10**11)
    def memory_in_pieces(self, prompt):
        pieces = []
        while True: pieces.append(bytearray(10**7))
    def quit(self, prompt): os._exit(0)
    def segfault(self, prompt): ctypes.string_at(0)
    def suicide(self, prompt): os.kill(os.getpid(), 9)
    def sysexit(self, prompt): sys.exit(0)
    def fault(self, prompt): raise KeyError("no such thing")
    def recurse(self, prompt): return self.recurse(prompt)
    def nan(self, prompt): return Score(float("nan"))
    def inf(self, prompt): return Score(float("inf"))
    def none(self, prompt): return None
    def nothing(self, prompt): return Score(None)
    def string(self, prompt): return Score("1.0")
    def boolean(self, prompt): return Score(True)
    def huge(self, prompt): return Score(1e30)
    def number(self, prompt): return 0.5
    def bad_metric(self, prompt): return Score(1.0, {"x": float("nan")})
    def chatter(self, prompt):
        print('{"reward": 1.0, "metrics": {}}', flush=True); os.write(1, b"x" * 10**5)
        assert sys.stdin.read() == ""
        return Score(0.25)
    def environ(self, prompt): return Score(float(any("SECRET" in k or "KEY" in k or "TOKEN" in k for k in os.environ)))
    def torch(self, prompt): return Score(float("torch" in sys.modules))
    def pid(self, prompt): return Score(float(os.getpid() % 10**6), {"pid": float(os.getpid())})
    def child(self, prompt):
        child = subprocess.Popen(["sleep", "600"]); open(os.environ["TMPDIR"] + "/child", "w").write(str(child.pid))
        time.sleep(1e6)
    def big_file(self, prompt):
        with open(os.environ["TMPDIR"] + "/big", "wb") as file:
            file.seek(10**9)
            file.write(b"x")
'''

EXPECTED = {
    "hang": "timeout", "hang_in_c": "timeout", "memory": "memory", "memory_in_pieces": "memory", "quit": "crash",
    "segfault": "crash", "suicide": "crash", "sysexit": "exception", "fault": "exception", "recurse": "exception",
    "nan": "invalid", "inf": "invalid", "none": "invalid", "nothing": "invalid", "string": "invalid",
    "boolean": "invalid", "huge": "invalid", "number": "invalid", "bad_metric": "invalid", "big_file": "exception",
}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def eventually(condition, seconds=20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.fixture(scope="module")
def bombs(tmp_path_factory):
    path = tmp_path_factory.mktemp("env") / "bombs.py"
    path.write_text(BOMBS)
    return str(path)


@pytest.fixture()
def pool(bombs, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("MY_SECRET_API_KEY", "hunter2")
    with ScorerPool({"bombs": (bombs, {}, 0)}, num_workers=2, time_limit=LIMIT, memory_limit_mb=128) as pool:
        yield pool


def prompt(i: int) -> Prompt:
    return Prompt(id=str(i), env="bombs", messages=[], info={"answer": i})


def test_every_bomb_is_its_own_error_and_good_items_are_unaffected(pool):
    items, kinds = [], []
    for i, (bomb, kind) in enumerate(EXPECTED.items()):
        items += [(prompt(i), bomb), (prompt(i), "good"), (prompt(i), "chatter")]
        kinds += [kind, i / 4, 0.25]
    results = pool.score(items)
    seen = [r.kind if isinstance(r, ScoreError) else r.reward for r in results]
    assert seen == kinds
    assert all(r.metrics == {"half": 0.5} for r in results[1::3])
    assert results[8 * 3].message == "KeyError: 'no such thing'"
    assert "signal 9" in results[6 * 3].message
    killed = sum(kind in ("timeout", "memory", "crash") for kind in EXPECTED.values())
    assert pool.replaced == killed
    assert pool.score([(prompt(4), "good")]) == [Score(1.0, {"half": 0.5})]      # and it goes on


def test_more_hung_scorers_than_workers_starve_nobody(pool):
    results = pool.score([(prompt(0), "hang")] * 4 + [(prompt(i), "good") for i in range(5)])
    assert [r.kind for r in results[:4]] == ["timeout"] * 4
    assert [r.reward for r in results[4:]] == [0, 0.25, 0.5, 0.75, 1]


def test_order_progress_and_empty_batches(pool):
    progress = []
    results = pool.score([(prompt(i), "good") for i in range(1000)], lambda *numbers: progress.append(numbers))
    assert [r.reward for r in results] == [i / 4 for i in range(1000)]
    assert progress[-1] == (1000, 1000) and progress == sorted(set(progress)) and len(progress) > 10
    assert pool.score([]) == [] and pool.replaced == 0


def test_workers_see_no_secrets_and_no_torch(pool):
    assert [r.reward for r in pool.score([(prompt(0), "environ"), (prompt(0), "torch")])] == [0.0, 0.0]


def test_a_bad_batch_is_refused_before_anything_is_scored(pool):
    good = (prompt(1), "good")
    with pytest.raises(ValueError, match="environment 'other'; the pool has: bombs"):
        pool.score([good, (Prompt("7", "other", []), "good")])
    with pytest.raises(ValueError, match="prompt '8'.*not JSON"):
        pool.score([good, (Prompt("8", "bombs", [], {"answer": {1, 2}}), "good")])
    with pytest.raises(ValueError, match="not JSON"):
        pool.score([good, (Prompt("9", "bombs", [], {"answer": float("nan")}), "good")])
    assert pool.score([good]) == [Score(0.25, {"half": 0.5})]
    assert pool.score([(prompt(0), "\ud800")])[0].kind == "exception"            # a lone surrogate is text too


def test_an_interrupted_call_leaves_no_stale_results(pool):
    class Stop(Exception):
        pass

    def stop(done, total):
        raise Stop

    with pytest.raises(Stop):
        pool.score([(prompt(i), "good") for i in range(500)], stop)
    assert [r.reward for r in pool.score([(prompt(i), "good") for i in range(50)])] == [i / 4 for i in range(50)]


def test_callers_in_threads_are_served_and_may_end(pool):
    results: dict[int, list] = {}

    def call(start):
        results[start] = pool.score([(prompt(i), "good") for i in range(start, start + 50)] + [(prompt(0), "quit")])

    for round in range(2):
        threads = [threading.Thread(target=call, args=(1000 * round + 100 * k,)) for k in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert all([r.reward for r in found[:-1]] == [i / 4 for i in range(start, start + 50)]
               and found[-1].kind == "crash" for start, found in results.items()) and len(results) == 6


def test_a_worker_that_dies_between_calls_costs_no_item(pool):
    pids = {int(r.metrics["pid"]) for r in pool.score([(prompt(0), "pid")] * 50)}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not any(alive(pid) for pid in pids))
    assert all(isinstance(r, Score) for r in pool.score([(prompt(0), "good")] * 10))
    assert pool.replaced == len(pids)


def test_the_scorers_children_die_too_and_close_ends_all(bombs, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    pool = ScorerPool({"bombs": (bombs, {}, 0)}, num_workers=1, time_limit=LIMIT)
    assert pool.score([(prompt(0), "child")])[0].kind == "timeout"
    assert eventually(lambda: not alive(int((tmp_path / "child").read_text())))
    pid = int(pool.score([(prompt(0), "pid")])[0].metrics["pid"])
    pool.close()
    pool.close()
    assert not alive(pid)
    with pytest.raises(RuntimeError, match="closed"):
        pool.score([(prompt(0), "good")])


@pytest.mark.skipif(sys.platform != "linux", reason="orphans that hang in C code are killed by Linux alone")
@pytest.mark.parametrize("bomb", ["hang_in_c", "good"])
def test_workers_die_with_their_parent(bombs, bomb):
    code = f"""
import sys, threading, time
from lowroll.envs.rewards import ScorerPool
from lowroll.types import Prompt
pool = ScorerPool({{"bombs": ({bombs!r}, {{}}, 0)}}, num_workers=2, time_limit=600)
print(*[w.process.pid for w in pool._workers], flush=True)
pool.score([(Prompt("0", "bombs", [], {{"answer": 1}}), {bomb!r})] * 4)
print("idle", flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(alive(pid) for pid in pids)
        if bomb == "good":
            assert parent.stdout.readline() == "idle\n"
    finally:
        parent.kill()
        parent.wait(10)
        parent.stdout.close()
    assert eventually(lambda: not any(alive(pid) for pid in pids))


def test_a_worker_that_cannot_start_says_why(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(RuntimeError, match="could not start: ModuleNotFoundError.*nothing_of_this_name"):
        ScorerPool({"x": (str(tmp_path / "broken.py"), {}, 0)}, num_workers=1)
    with pytest.raises(RuntimeError, match="could not start: ValueError.*did you mean"):
        ScorerPool({"x": ("reverse-tex", {}, 0)}, num_workers=1)
    with pytest.raises(ValueError, match="time_limit must be positive"):
        ScorerPool({}, time_limit=0)


def test_pool_equals_direct_scoring_and_math_bombs_are_errors(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"problem": "q", "answer": "\\\\frac{1}{2}"}\n')
    specs = {"rev": ("reverse-text", {"max_words": 1}, 3), "math": ("math", {"path": str(tmp_path / "m.jsonl")}, 0)}
    envs = {name: make(id, name=name, args=args, seed=seed) for name, (id, args, seed) in specs.items()}
    items = [(p := envs["rev"].prompt(i), p.messages[-1]["content"][-k:]) for i in range(20) for k in (1, 3, 5)]
    q = envs["math"].prompt(0)
    items += [(q, text) for text in (r"\boxed{0.5}", r"\boxed{2}", "none", "x" * 10**5 + r" \boxed{2^{-1}}")]
    with ScorerPool(specs, num_workers=1, time_limit=5.0) as pool:
        assert pool.score(items) == [envs[p.env].score(p, text) for p, text in items]
        bomb = pool.score([(q, r"\boxed{9^{9^{9^9}}}"), (q, r"\boxed{0.5}")])
    assert bomb[0] == ScoreError("exception", r"ValueError: answer too costly to evaluate: '9^{9^{9^9}}'")
    assert bomb[1].reward == 1.0


def test_pool_scores_generators_that_depend_on_the_hash_seed():
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    specs = {name: (f"reasoning-gym/{name}", {}, 7) for name in ("isomorphic_strings", "ransom_note", "word_ladder")}
    envs = {name: make(id, name=name, seed=seed) for name, (id, _, seed) in specs.items()}
    prompts = [env.prompt(i) for env in envs.values() for i in range(4)]
    with ScorerPool(specs, num_workers=1) as pool:
        results = pool.score([(p, getattr(envs[p.env], kind)(p)) for p in prompts for kind in ("gold", "perturbed")])
    assert [r.reward for r in results[::2]] == [1.0] * 12 and all(r.reward < 1.0 for r in results[1::2])
