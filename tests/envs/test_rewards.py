"""The scorer pool: bombs hurt themselves alone, a failure is never a reward, workers do not outlive
their parent."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lowroll.envs import make, scorer_pool
from lowroll.envs.scorer_pool import ScorerPool
from lowroll.types import Prompt, Score, ScoreError
from tests.fixtures.processes import alive, eventually

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 2.0

BOMBS = """
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
    def huge(self, prompt): return Score(1e30)
    def bad_metric(self, prompt): return Score(1.0, {"x": float("nan")})
    def chatter(self, prompt):
        print('{"reward": 1.0, "metrics": {}}', flush=True); os.write(1, b"x" * 10**5)
        assert sys.stdin.read() == ""
        return Score(0.25)
    def environ(self, prompt): return Score(float(any("SECRET" in k or "KEY" in k or "TOKEN" in k for k in os.environ)))
    def fork(self, prompt):
        os.fork()
        return Score(prompt.info["answer"] / 4)
    def fork_and_fail(self, prompt):
        assert os.fork(), "in the copy alone"
        return Score(prompt.info["answer"] / 4)
    def forge(self, prompt):
        for line in (b'{"reward": 77.0, "metrics": {}}', b'{"id": "0", "reward": 77.0, "metrics": {}}'):
            self.to_all(line + b"\\n")
        return Score(prompt.info["answer"] / 4)
    def scribble(self, prompt):
        self.to_all(b"half a line, and not JSON")
        return Score(prompt.info["answer"] / 4)
    def forge_later(self, prompt):
        if not os.fork():
            for _ in range(20):
                time.sleep(0.01)
                self.to_all(b'{"reward": 77.0, "metrics": {}}\\n')
            os._exit(0)
        return Score(prompt.info["answer"] / 4)
    def to_all(self, line):
        for fd in range(3, 40):
            try: os.write(fd, line)
            except OSError: pass
    def slow(self, prompt):
        time.sleep(0.8)
        return Score(prompt.info["answer"] / 4)
    def nap(self, prompt):
        time.sleep(0.02)
        return Score(prompt.info["answer"] / 4)
    def last_words(self, prompt):
        os.write(2, b"a" * 1000 + b"END")
        os._exit(3)
    def torch(self, prompt): return Score(float("torch" in sys.modules))
    def pid(self, prompt): return Score(float(os.getpid() % 10**6), {"pid": float(os.getpid())})
    def child(self, prompt):
        child = subprocess.Popen(["sleep", "600"]); open(os.environ["TMPDIR"] + "/child", "w").write(str(child.pid))
        time.sleep(1e6)
    def big_file(self, prompt):
        with open(os.environ["TMPDIR"] + "/big", "wb") as file:
            file.seek(10**9)
            file.write(b"x")
"""

EXPECTED = {
    "hang": "timeout",
    "hang_in_c": "timeout",
    "memory": "memory",
    "memory_in_pieces": "memory",
    "quit": "crash",
    "segfault": "crash",
    "suicide": "crash",
    "sysexit": "exception",
    "fault": "exception",
    "recurse": "exception",
    "nan": "invalid",
    "inf": "invalid",
    "none": "invalid",
    "nothing": "invalid",
    "string": "invalid",
    "huge": "invalid",
    "bad_metric": "invalid",
    "big_file": "exception",
}


@pytest.fixture(scope="module")
def bombs(tmp_path_factory):
    path = tmp_path_factory.mktemp("env") / "bombs.py"
    path.write_text(BOMBS)
    return str(path)


@pytest.fixture()
def pool(bombs, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("MY_SECRET_API_KEY", "hunter2")
    with ScorerPool(
        {"bombs": (bombs, {}, 0)}, num_workers=2, time_limit=LIMIT, memory_limit_mb=128
    ) as pool:
        yield pool


def prompt(i: int) -> Prompt:
    return Prompt(id=str(i), env="bombs", messages=[], info={"answer": i})


@pytest.mark.slow
def test_every_bomb_is_its_own_error_and_good_items_are_unaffected(pool):
    items, kinds = [], []
    for i, (bomb, kind) in enumerate(EXPECTED.items()):
        items += [(prompt(i), bomb), (prompt(i), "good"), (prompt(i), "chatter")]
        kinds += [kind, i / 4, 0.25]
    results = pool.score(items)
    seen = [r.kind if isinstance(r, ScoreError) else r.reward for r in results]
    assert seen == kinds
    assert all(r.metrics == {"half": 0.5} for r in results[1::3])
    assert re.fullmatch(
        r"env 'bombs', 8: KeyError: 'no such thing' \(.+bombs\.py:\d+\)", results[8 * 3].message
    )
    assert "signal 9" in results[6 * 3].message
    killed = sum(kind in ("timeout", "memory", "crash") for kind in EXPECTED.values())
    assert pool.replaced == killed
    assert pool.score([(prompt(4), "good")]) == [Score(1.0, {"half": 0.5})]  # and it goes on


@pytest.mark.slow
def test_more_hung_scorers_than_workers_starve_nobody(pool):
    results = pool.score([(prompt(0), "hang")] * 4 + [(prompt(i), "good") for i in range(5)])
    assert [r.kind for r in results[:4]] == ["timeout"] * 4
    assert [r.reward for r in results[4:]] == [0, 0.25, 0.5, 0.75, 1]


def test_order_progress_and_empty_batches(pool):
    progress = []
    results = pool.score(
        [(prompt(i), "good") for i in range(1000)], lambda *numbers: progress.append(numbers)
    )
    assert [r.reward for r in results] == [i / 4 for i in range(1000)]
    assert progress[-1] == (1000, 1000) and progress == sorted(set(progress)) and len(progress) > 10
    assert pool.score([]) == [] and pool.replaced == 0


def test_workers_see_no_secrets_and_no_torch(pool):
    assert [r.reward for r in pool.score([(prompt(0), "environ"), (prompt(0), "torch")])] == [
        0.0,
        0.0,
    ]


def test_a_bad_batch_is_refused_before_anything_is_scored(pool):
    good = (prompt(1), "good")
    with pytest.raises(ValueError, match="environment 'other'; the pool has: bombs"):
        pool.score([good, (Prompt("7", "other", []), "good")])
    with pytest.raises(ValueError, match="prompt '8'.*not JSON"):
        pool.score([good, (Prompt("8", "bombs", [], {"answer": {1, 2}}), "good")])
    with pytest.raises(ValueError, match="not JSON"):
        pool.score([good, (Prompt("9", "bombs", [], {"answer": float("nan")}), "good")])
    assert pool.score([good]) == [Score(0.25, {"half": 0.5})]
    assert (
        pool.score([(prompt(0), "\ud800")])[0].kind == "exception"
    )  # a lone surrogate is text too


def test_an_interrupted_call_leaves_no_stale_results(pool):
    class Stop(Exception):
        pass

    def stop(done, total):
        raise Stop

    with pytest.raises(Stop):
        pool.score([(prompt(i), "good") for i in range(500)], stop)
    assert [r.reward for r in pool.score([(prompt(i), "good") for i in range(50)])] == [
        i / 4 for i in range(50)
    ]


def test_callers_in_threads_are_served_and_may_end(pool):
    results: dict[int, list] = {}

    def call(start):
        results[start] = pool.score(
            [(prompt(i), "good") for i in range(start, start + 50)] + [(prompt(0), "quit")]
        )

    for round in range(2):
        threads = [threading.Thread(target=call, args=(1000 * round + 100 * k,)) for k in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert (
        all(
            [r.reward for r in found[:-1]] == [i / 4 for i in range(start, start + 50)]
            and found[-1].kind == "crash"
            for start, found in results.items()
        )
        and len(results) == 6
    )


def test_a_worker_that_dies_between_calls_costs_no_item(pool):
    pids = {int(r.metrics["pid"]) for r in pool.score([(prompt(0), "pid")] * 50)}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not any(alive(pid) for pid in pids))
    assert all(isinstance(r, Score) for r in pool.score([(prompt(0), "good")] * 10))
    assert pool.replaced == len(pids)


@pytest.mark.slow
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


@pytest.mark.skipif(
    sys.platform != "linux", reason="orphans that hang in C code are killed by Linux alone"
)
@pytest.mark.parametrize("bomb", ["hang_in_c", "good"])
def test_workers_die_with_their_parent(bombs, bomb):
    code = f"""
import sys, threading, time
from lowroll.envs.scorer_pool import ScorerPool
from lowroll.types import Prompt
pool = ScorerPool({{"bombs": ({bombs!r}, {{}}, 0)}}, num_workers=2, time_limit=600)
prompt = Prompt("0", "bombs", [], {{"answer": 1}})
print(*{{int(one.metrics["pid"]) for one in pool.score([(prompt, "pid")] * 50)}}, flush=True)
pool.score([(prompt, {bomb!r})] * 4)
print("idle", flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
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
    with pytest.raises(
        RuntimeError, match=r"could not start: .+broken\.py:1: .*nothing_of_this_name"
    ):
        ScorerPool({"x": (str(tmp_path / "broken.py"), {}, 0)}, num_workers=1)
    with pytest.raises(RuntimeError, match="could not start: unknown environment.*did you mean"):
        ScorerPool({"x": ("reverse-tex", {}, 0)}, num_workers=1)


@pytest.mark.slow
def test_pool_equals_direct_scoring_and_math_bombs_are_wrong(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"problem": "q", "answer": "\\\\frac{1}{2}"}\n')
    specs = {
        "rev": ("reverse-text", {"max_words": 1}, 3),
        "math": ("math", {"path": str(tmp_path / "m.jsonl")}, 0),
    }
    envs = {
        name: make(id, name=name, args=args, seed=seed) for name, (id, args, seed) in specs.items()
    }
    items = [
        (p := envs["rev"].prompt(i), p.messages[-1]["content"][-k:])
        for i in range(20)
        for k in (1, 3, 5)
    ]
    q = envs["math"].prompt(0)
    items += [
        (q, text)
        for text in (r"\boxed{0.5}", r"\boxed{2}", "none", "x" * 10**5 + r" \boxed{2^{-1}}")
    ]
    with ScorerPool(specs, num_workers=1, time_limit=5.0) as pool:
        assert pool.score(items) == [envs[p.env].score(p, text) for p, text in items]
        bomb = pool.score([(q, r"\boxed{9^{9^{9^9}}}"), (q, r"\boxed{0.5}")])
    assert bomb == [
        Score(0.0, {"has_answer": 1.0, "unjudged": 1.0}),
        Score(1.0, {"has_answer": 1.0, "unjudged": 0.0}),
    ]


@pytest.mark.slow
def test_pool_scores_generators_that_depend_on_the_hash_seed():
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    specs = {
        name: (f"reasoning-gym/{name}", {}, 7)
        for name in ("isomorphic_strings", "ransom_note", "word_ladder")
    }
    envs = {name: make(id, name=name, seed=seed) for name, (id, _, seed) in specs.items()}
    prompts = [env.prompt(i) for env in envs.values() for i in range(4)]
    with ScorerPool(specs, num_workers=1) as pool:
        results = pool.score(
            [(p, getattr(envs[p.env], kind)(p)) for p in prompts for kind in ("gold", "perturbed")]
        )
    assert [r.reward for r in results[::2]] == [1.0] * 12 and all(
        r.reward < 1.0 for r in results[1::2]
    )


# ---- whose reply it is


@pytest.mark.parametrize("how", ["fork", "fork_and_fail"])
def test_a_scorer_that_forks_gives_no_item_the_reward_of_another(pool, how):
    items = [(prompt(i), how if i % 3 == 0 else "good") for i in range(60)]
    assert [r.reward for r in pool.score(items)] == [i / 4 for i in range(60)]
    assert [r.reward for r in pool.score(items)] == [
        i / 4 for i in range(60)
    ] and pool.replaced == 0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["forge", "scribble", "forge_later"])
def test_what_a_scorer_writes_to_the_pipe_is_nobodys_reward(pool, how):
    bad = {0} if how == "forge_later" else {10, 11, 30}
    others = (
        "nap" if how == "forge_later" else "good"
    )  # so that the lines arrive while other items are in hand
    results = pool.score([(prompt(i), how if i in bad else others) for i in range(50)])
    wrong = [i for i, r in enumerate(results) if isinstance(r, Score) and r.reward != i / 4]
    failed = {i: r.kind for i, r in enumerate(results) if isinstance(r, ScoreError)}
    assert wrong == [] and set(failed.values()) <= {"crash"}
    if how != "forge_later":  # the culprit itself has no reward, and pays alone
        assert set(failed) == bad and pool.replaced == 3
    assert [r.reward for r in pool.score([(prompt(i), "good") for i in range(20)])] == [
        i / 4 for i in range(20)
    ]


@pytest.mark.parametrize(
    "line, result",
    [
        (b'{"reward": 0.5, "metrics": {"a": 1.0}}', Score(0.5, {"a": 1.0})),
        (b"half a li", None),
        (b"[1]", None),
        (b"7", None),
        (b'{"reward": 1, "metrics": {}}', None),
        (b'{"reward": 1.0}', None),
        (b'{"metrics": {}}', None),
        (b"\xff", None),
        (b'{"error": "exception", "message": "m"}', ScoreError("exception", "m")),
        (b'{"error": "memory", "message": "m"}', ScoreError("memory", "m")),
        (b'{"error": "invalid", "message": "m"}', ScoreError("invalid", "m")),
        (b'{"error": "timeout", "message": "m"}', None),
        (b'{"error": "crash", "message": "m"}', None),
    ],
)
def test_replies_are_read_strictly(line, result):
    reply = scorer_pool._decode(line)
    expected = [] if result is None else [result]
    assert scorer_pool._parse_results(reply, 1, responds=False) == expected


# ---- limits at their edges


def test_every_setting_is_checked():
    for field in ("num_workers", "time_limit", "memory_limit_mb"):
        for value in (0, -1):
            with pytest.raises(ValueError, match=f"{field} must be positive, got {value}"):
                ScorerPool({}, **{field: value})


def test_a_reply_may_be_so_long_and_no_longer():
    worker = object.__new__(scorer_pool._Worker)
    read, write = os.pipe()
    os.set_blocking(read, False)
    with (
        os.fdopen(read, "rb", buffering=0) as worker.stdout,
        os.fdopen(write, "wb", buffering=0) as pipe,
    ):
        worker.ended, worker.inbox = False, b""
        assert worker.read() == [] and not worker.ended  # nothing there is not the end
        worker.inbox = b"x" * (scorer_pool.MAX_REPLY - 1)
        pipe.write(b"x")
        assert worker.read() == [] and not worker.ended
        pipe.write(b"\nabc\nde")
        assert (
            worker.read() == [b"x" * scorer_pool.MAX_REPLY, b"abc"]
            and worker.inbox == b"de"
            and not worker.ended
        )
        worker.inbox = b"x" * scorer_pool.MAX_REPLY
        pipe.write(b"x")
        assert worker.read() == [] and worker.ended
        worker.ended, worker.inbox = False, b""
        pipe.write(b"last\n")
        pipe.close()
        assert worker.read() == [b"last"] and not worker.ended
        assert worker.read() == [] and worker.ended


@pytest.mark.parametrize(
    "count, workers, first",
    [
        (1, 2, [1]),
        (3, 2, [1, 1]),
        (8, 2, [2, 1]),
        (40, 1, [20]),
        (64, 1, [32]),
        (66, 1, [32]),
        (1000, 2, [32, 32]),
    ],
)
def test_a_workers_share_of_what_is_left(bombs, monkeypatch, count, workers, first):
    sizes, hand = [], scorer_pool._Worker.hand
    monkeypatch.setattr(
        scorer_pool._Worker,
        "hand",
        lambda self, chunk, limit: (sizes.append(len(chunk)), hand(self, chunk, limit))[1],
    )
    with ScorerPool({"bombs": (bombs, {}, 0)}, workers, LIMIT, 256) as pool:
        assert [r.reward for r in pool.score([(prompt(i), "good") for i in range(count)])] == [
            i / 4 for i in range(count)
        ]
    assert (
        sizes[: len(first)] == first
        and sum(sizes) == count
        and max(sizes) <= scorer_pool.MAX_CHUNK == 32
    )


@pytest.mark.slow
def test_the_clock_starts_anew_with_each_item_and_is_kept(bombs):
    with ScorerPool({"bombs": (bombs, {}, 0)}, 1, time_limit=3.0, memory_limit_mb=256) as pool:
        results = pool.score(
            [(prompt(i), "slow") for i in range(8)]
        )  # four of them are one share: 3.2 s
        assert [r.reward for r in results] == [i / 4 for i in range(8)] and pool.replaced == 0
        start = time.monotonic()
        assert pool.score([(prompt(0), "hang")]) == [
            ScoreError("timeout", "env 'bombs', 0: no score after 3 s")
        ]
        assert time.monotonic() - start >= 3.0 and pool.replaced == 1


def test_how_a_worker_ended_is_told_with_its_last_words(pool):
    words, silent, killed = pool.score(
        [(prompt(0), how) for how in ("last_words", "quit", "suicide")]
    )
    who = "env 'bombs', 0:"
    assert words == ScoreError(
        "crash", f"{who} the scorer's process ended: exit status 3: {'a' * 297}END"
    )
    assert silent == ScoreError("crash", f"{who} the scorer's process ended: exit status 0")
    assert killed == ScoreError("crash", f"{who} the scorer's process ended: signal 9")


def test_a_worker_is_late_only_when_it_owes_an_answer():
    worker = object.__new__(scorer_pool._Worker)
    now = time.monotonic()
    for ready, held, deadline, late in (
        (True, [(0, "a")], now - 1, True),
        (True, [], now - 1, False),
        (False, [], now - 1, True),
        (False, [], now + 60, False),
        (True, [(0, "a")], now + 60, False),
    ):
        worker.ready, worker.held, worker.deadline = ready, held, deadline
        assert worker.late is late


def test_killing_twice_is_once(pool):
    worker = pool._workers[0]
    assert worker.kill() == "signal 9" and worker.kill() == ""


@pytest.mark.slow
def test_a_worker_has_so_long_to_start(tmp_path, monkeypatch):
    (tmp_path / "sleepy.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(scorer_pool, "START_LIMIT", 2.0)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"could not start: not ready after 2 s \(signal 9\)"):
        ScorerPool({"x": (str(tmp_path / "sleepy.py"), {}, 0)}, num_workers=1)
    assert 2.0 <= time.monotonic() - start < 30


@pytest.mark.slow
def test_an_environment_may_say_what_a_response_scores_that_takes_too_long(bombs, tmp_path):
    (tmp_path / "lenient.py").write_text(
        BOMBS.replace(
            "class Bombs(Environment):",
            """class Bombs(Environment):
    overtaxed = Score(-1.0, {"unjudged": 1.0})""",
        )
    )
    specs = {"bombs": (bombs, {}, 0), "lenient": (str(tmp_path / "lenient.py"), {}, 0)}
    with ScorerPool(specs, 2, time_limit=1.0, memory_limit_mb=256) as pool:
        items = [
            (Prompt(str(i), env, [], {"answer": i}), how)
            for i, env in enumerate(specs)
            for how in ("hang", "quit", "fault", "good")
        ]
        results = pool.score(items)
    assert [r.kind if isinstance(r, ScoreError) else r for r in results] == [
        "timeout",
        "crash",
        "exception",
        Score(0.0, {"half": 0.5}),
        Score(-1.0, {"unjudged": 1.0}),
        "crash",
        "exception",
        Score(0.25, {"half": 0.5}),
    ]


@pytest.mark.slow
def test_answers_that_cannot_be_judged_are_wrong_also_where_the_worker_must_be_killed(
    tmp_path, monkeypatch
):
    (tmp_path / "m.jsonl").write_text('{"problem": "q", "answer": "x+1"}\n')
    (tmp_path / "slow_math.py").write_text("""
import time
from lowroll.envs.answers import expressions, forms, limits  # else the first judgement imports them
from lowroll.envs.math import Math
class Slow(Math):
    def score(self, prompt, text):
        if "hang" in text:
            9**9**9                    # in C code: no signal ends it
        return super().score(prompt, text)
""")
    env = make("math", name="m", args={"path": str(tmp_path / "m.jsonl")})
    spec = (f"{tmp_path / 'slow_math.py'}:Slow", {"path": str(tmp_path / "m.jsonl")}, 0)
    with ScorerPool({"m": spec}, 1, time_limit=3.0) as pool:
        results = pool.score(
            [
                (env.prompt(0), text)
                for text in (
                    r"\boxed{x \neq 6}",
                    "hang",
                    r"\boxed{1+x}",
                    r"\boxed{12:00}",
                    r"\boxed{\frac}",
                    "none",
                )
            ]
        )
    assert [r.reward for r in results] == [0, 0, 1, 0, 0, 0]
    assert [r.metrics["unjudged"] for r in results] == [0, 1, 0, 0, 1, 0]
    assert [r.metrics["has_answer"] for r in results] == [1, 1, 1, 1, 1, 0]
