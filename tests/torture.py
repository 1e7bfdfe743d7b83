"""Everything that a disk, a signal and a stranger's folder can do to a run, and clients to a server,
on tiny models.

    python -m tests.torture --minutes 30 --seed 1
    python -m tests.torture --suites kills damage --trials 20

    kills      a run is killed at every fault point, at every call to the system, and at random moments, some of them
               again while they resume; gone on with, it is bit for bit the run that nobody
               disturbed
    errors     the same with "no space left" and "input/output error": one error line or none, then as above; and a
               disk of 64 MB that is full for a moment, which the run waits for
    damage     flips, cuts, zeroed tails, deletions and swaps in every kind of file of a run folder: a resume is the
               undisturbed run, and what could not be saved of metrics and rollouts is said
    exports    what `quantize` and `export` write, killed and refused at every point and call: whole or absent
    folders    hostile model folders: an error line or a success, no traceback, no hang, no 2 GB of memory
    pieces     every tensor and every piece of state of a checkpoint left out (tests/fixtures/pieces.py)
    server     good and bad requests, aborts, slow connections, control routes and strangers: good answers are
               the engine's bit for bit, the others documented, nothing is left (tests/fixtures/storm.py)
    transport  both ends of a rollout channel killed at named points and at random, on each transport, and
               damaged frames, words and files: nothing lost, nothing twice, no garbage accepted
               (tests/fixtures/ends.py, frames.py)
    roles      engine, orchestrator, trainer and launcher are killed, stopped and paused, at every point that they
               pass and a moment after it: the run goes on by itself, makes no more than one step again, its
               ledger is clean, and at level 0 it is bit for bit one process (tests/fixtures/losses.py)
    ranks      the same where two ranks learn, which are killed, stopped and paused, too: at level 0 bit for bit the
               run of two ranks that nobody disturbed
    rays       the same on a Ray cluster of three fake nodes, where a role's process, the actor that owns it, its
               node and the launcher are lost, while the role starts and in each phase of the step
               (tests/fixtures/ray_losses.py). Only where it is asked for by name (`make test-ray`)
    fleets     two to five engines of a pool die, hang, lag, forget, lie and come back at random: the rollouts are
               those of one engine that nothing happens to (tests/fixtures/fleets.py)
    programs   requests, aborts, pauses, updates, failures and ends in any order over the engine's loop
               (tests/fixtures/programs.py)

Every suite first takes what can be enumerated in turn, then draws at random until its share of the
time is over. A problem names its trial; the same seed and suite draw the same trials.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from lowroll.checkpoint.atomic_folders import MANIFEST, DamagedError, verify_folder
from lowroll.metrics.record import read, reproducible
from lowroll.runs import demo
from lowroll.transport.rollout_log import read_rollouts
from lowroll.types import RunFailed
from tests.fixtures import hostile, losses, pieces, stormed, strike
from tests.fixtures.ends import Pair
from tests.fixtures.ends import strike as strike_pair
from tests.fixtures.fleets import Fleet
from tests.fixtures.frames import Fuzz
from tests.fixtures.losses import Launch
from tests.fixtures.points import Loss
from tests.fixtures.programs import Trial
from tests.fixtures.roles import outcome
from tests.fixtures.runs import TINY, copy_stopped_after, fingerprint, settings
from tests.fixtures.storm import GUST, Storm
from tests.fixtures.stormed import Stormed
from tests.fixtures.strike import attempt
from tests.fixtures.tiny import hf_folder

STEPS = 4
SHARES = {
    "roles": 3,
    "ranks": 2,
    "kills": 6,
    "errors": 5,
    "damage": 6,
    "exports": 4,
    "folders": 4,
    "pieces": 3,
    "server": 10,
    "transport": 6,
    "fleets": 4,
    "programs": 3,
    "rays": 6,
}


@dataclass
class Bench:
    """The run, model and folder that all suites start from."""

    root: Path
    stack: ExitStack  # what is undone at the end
    model: Path
    whole: Path  # a finished run
    prints: dict[str, str]
    seconds: float  # that it took
    places: list[tuple[list[str], int]] = field(default_factory=list)

    def tree(self, out: Path, **changes: Any) -> dict[str, Any]:
        return settings(
            self.model,
            out,
            **{
                "train": {"max_steps": STEPS},
                "ckpt": {"interval": 1, "keep_last": 4},
                "eval": {"interval": 2, "num_examples": 2},
                **changes,
            },
        )

    def words(self, out: Path, **changes: Any) -> list[str]:
        """A command that makes the run in `out`."""
        path = self.root / f"{out.name}.yaml"
        path.write_text(json.dumps(self.tree(out, **changes)))
        return ["grpo", str(path)]


def build(root: Path, stack: ExitStack) -> Bench:
    model, whole = demo.build_model(root / "model", 0, TINY), root / "whole"
    bench = Bench(root, stack, model, whole, {}, 0.0)
    done = strike.warm_up(bench.words(whole), root)
    assert done.code == 0, done.text
    done = strike.warm_up(["report", str(whole)], root)
    assert done.code == 0, done.text
    bench.prints = fingerprint(whole)
    bench.seconds = attempt(bench.words(root / "again")).seconds
    return bench


def go_on(
    bench: Bench, out: Path, words: list[str], may_end: bool = False
) -> tuple[str, strike.Outcome]:
    """Finish a run that was disturbed; ("", outcome) when it is then the undisturbed one."""
    done = attempt([*words, "--resume"])
    if done.code == 2 and "no run to resume" in done.text:
        done = attempt(words)
    if done.trouble or done.code:
        return (
            ""
            if may_end and not done.trouble
            else f"does not go on: {done.trouble or done.text[-800:]}"
        ), done
    after = fingerprint(out)
    other = sorted(
        name
        for name in bench.prints.keys() | after.keys()
        if bench.prints.get(name) != after.get(name)
    )
    return (f"goes on otherwise: {other}" if other else ""), done


def each(
    rng: random.Random, *ways: Callable[[], Iterator[str]], then: Callable[[], str]
) -> Iterator[str]:
    """Yield what can be enumerated, shuffled together, then draw at random without end."""
    rounds = [way() for way in ways]
    while rounds:
        way = rng.choice(rounds)
        try:
            yield next(way)
        except StopIteration:
            rounds.remove(way)
    for _ in count():
        yield then()


# -- kills and errors ------------------------------------------------------------------------------


def kills(bench: Bench, rng: random.Random) -> Iterator[str]:
    points, calls = _places(bench)

    def trial(
        how: str, before: Callable[[], object] | None = None, after: float | None = None
    ) -> str:
        out = _fresh(bench.root / "killed")
        words = bench.words(out)
        done = attempt(words, before, after)
        if done.code != -9 and done.code != 0:
            return f"{how}: {done.trouble or done.text[-500:]}"
        if rng.random() < 0.3:  # and again, while it resumes
            attempt([*words, "--resume"], kill_after=rng.uniform(0, bench.seconds))
        problem, _ = go_on(bench, out, words)
        return f"{how}: {problem}" if problem else ""

    def moment() -> str:
        after = rng.uniform(0, bench.seconds)
        return trial(f"killed after {after:.3f} s", after=after)

    def at_point() -> Iterator[str]:
        for point in rng.sample(points, len(points)):
            yield trial(f"killed at {point}", strike.arm(point, "kill"))

    def at_call() -> Iterator[str]:
        for call in rng.sample(range(1, calls + 1), calls):
            yield trial(f"killed at call {call}", strike.calls(bench.root / "killed", call, "kill"))

    yield from each(rng, at_point, at_call, lambda: (moment() for _ in range(calls)), then=moment)


def errors(bench: Bench, rng: random.Random) -> Iterator[str]:
    points, calls = _places(bench)
    disk = _small_disk(bench.root / "disk", bench.stack)

    def trial(how: str, before: Callable[[], object]) -> str:
        out = _fresh(bench.root / "killed")
        words = bench.words(out, ckpt={"interval": 1, "keep_last": 3, "wait_for_space": 0})
        done = attempt(words, before)
        problem = done.trouble or (go_on(bench, out, words)[0] if done.code else "")
        return f"{how}: {problem}" if problem else ""

    def at_point() -> Iterator[str]:
        for point in rng.sample(points, len(points)):
            for action in strike.ERRORS:
                yield trial(f"{action} at {point}", strike.arm(point, action))

    def call() -> str:
        number, action = rng.randint(1, calls), rng.choice(sorted(strike.ERRORS))
        return trial(
            f"{action} at call {number}", strike.calls(bench.root / "killed", number, action)
        )

    def at_call() -> Iterator[str]:
        for number in rng.sample(range(1, calls + 1), calls):
            for action in strike.ERRORS:
                yield trial(
                    f"{action} at call {number}",
                    strike.calls(bench.root / "killed", number, action),
                )

    def full() -> Iterator[str]:
        for _ in range(20 if disk else 0):
            yield _fill(bench, rng, disk / "run")

    yield from each(rng, at_point, at_call, full, then=call)


def _places(bench: Bench) -> tuple[list[str], int]:
    """The fault points and the calls of a whole run."""
    folder = _fresh(bench.root / "places")
    folder.mkdir()
    out = _fresh(bench.root / "killed")
    if not bench.places:
        bench.places.append(strike.passed(bench.words(out), out, folder))
    return bench.places[0]


def _fill(bench: Bench, rng: random.Random, out: Path) -> str:
    """The run's disk is full from a moment on, for another moment."""
    words, ballast = bench.words(_fresh(out)), out.parent / "ballast"
    begin, long = rng.uniform(0, bench.seconds), rng.uniform(0.2, 1.5)
    began, filled = time.monotonic(), [0.0]

    def disturb() -> None:
        now = time.monotonic() - began
        if not filled[0] and now > begin:
            filled[0] = now
            _fill_up(ballast)
        elif filled[0] and now > filled[0] + long:
            ballast.unlink(missing_ok=True)

    done = attempt(words, meanwhile=disturb)
    ballast.unlink(missing_ok=True)
    how = f"disk full after {begin:.2f} s, for {long:.2f} s"
    if (
        "attempt_1.log" in done.text or done.code == 2
    ):  # there was no room to begin: nothing has begun
        return f"{how}: {done.trouble}" if done.trouble else ""
    if done.trouble or done.code:
        return f"{how}: {done.trouble or done.text[-500:]}"
    return "" if fingerprint(out) == bench.prints else f"{how}: another run"


def _fill_up(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    for size in (1 << 20, 4096):
        try:
            while True:
                os.write(descriptor, bytes(size))
        except OSError:
            continue
    os.close(descriptor)


def _small_disk(path: Path, stack: ExitStack) -> Path | None:
    """A file system of 64 MB, where we may mount one."""
    path.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(path)], capture_output=True
    ).returncode:
        print("errors: no right to mount a tmpfs, a really full disk is left out", flush=True)
        return None
    stack.callback(subprocess.run, ["umount", "-l", str(path)], capture_output=True)
    return path


# -- damage ----------------------------------------------------------------------------------------


def damage(bench: Bench, rng: random.Random) -> Iterator[str]:
    for _ in count():
        out = _fresh(bench.root / "damaged")
        if rng.random() < 0.5:
            shutil.copytree(bench.whole, out)
        else:
            copy_stopped_after(bench.whole, STEPS - 1, out)
        kinds: dict[str, list[Path]] = {}
        for path in sorted(path for path in out.rglob("*") if path.is_file()):
            kinds.setdefault(_kind(path.relative_to(out)), []).append(path)
        kind = rng.choice(sorted(kinds))
        path = rng.choice(kinds[kind])
        how = f"{hostile.spoil(path, kinds[kind], rng)} {path.relative_to(out)}"
        problem = _noticed(bench, out, path) or _resumed(bench, out, kind)
        yield f"{how}: {problem}" if problem else ""


def _kind(name: Path) -> str:
    """Checkpoints, metrics, rollouts and so on: each is damaged as often as the others."""
    return name.parts[0] if name.parts[0] != "checkpoints" else f"checkpoints/{name.name}"


def _noticed(bench: Bench, out: Path, path: Path) -> str:
    """A published folder knows that it is not what it was."""
    folder = next(
        (above for above in path.parents if (above / MANIFEST).exists() or path.name == MANIFEST),
        None,
    )
    original = bench.whole / path.relative_to(out)
    if (
        out not in (folder, *(folder.parents if folder else ()))
        or path.is_file()
        and original.is_file()
        and (path.read_bytes() == original.read_bytes())
    ):
        return ""
    try:
        verify_folder(folder)
        return "damage is not noticed"
    except DamagedError:
        return ""


def _resumed(bench: Bench, out: Path, kind: str) -> str:
    page = attempt(["report", str(out)])
    if page.trouble or page.code:
        return f"report: {page.trouble or page.text}"
    words = bench.words(out)
    done = attempt([*words, "--resume"])
    if kind == "config.yaml" and done.code == 2 and not done.trouble and not (out / kind).exists():
        return ""  # without it the folder is not known as a run's
    if kind == "final" and done.code == 2 and not done.trouble and "output_dir: " in done.text:
        return ""  # what somebody may have changed is not removed
    if done.trouble or done.code:
        return f"does not go on: {done.trouble or done.text[-800:]}"
    after = fingerprint(out)
    for name in after.keys() | bench.prints.keys():
        if after.get(name) == bench.prints.get(name):
            continue
        if name == "metrics" and _marked(bench, out, done.text + page.text):
            continue
        if name.endswith(".jsonl") and _told(out / "rollouts" / name):
            continue
        return f"goes on otherwise: {name}"
    return ""


def _marked(bench: Bench, out: Path, text: str) -> bool:
    """Every record is what was recorded, or marked as lost and told."""
    whole, found = read(bench.whole), read(out)
    lost = [record["step"] for record in found if record.get("record/lost")]
    same = all(
        reproducible(a) == reproducible(b)
        for a, b in zip(found, whole, strict=True)
        if a["step"] not in lost
    )
    return same and bool(lost) and "are lost" in text


def _told(path: Path) -> bool:
    """Whoever reads the file is told."""
    if not path.exists():
        return True
    try:
        read_rollouts(path)
        return False
    except ValueError:
        return True


# -- exports ---------------------------------------------------------------------------------------


def exports(bench: Bench, rng: random.Random) -> Iterator[str]:
    adapted = bench.root / "adapted"
    done = attempt(
        bench.words(
            adapted, train={"max_steps": 1, "warmup_steps": 0, "lora": True, "lora_rank": 2}
        )
    )
    assert done.code == 0, done.text
    out = bench.root / "exports" / "out"
    commands = {
        "quantize": ["quantize", str(bench.model), str(out), "--format", "int8"],
        "merged": ["export", str(bench.whole), str(out), "--as", "merged"],
        "adapter": ["export", str(adapted), str(out), "--as", "adapter"],
        "rollout": ["export", str(adapted), str(out), "--as", "rollout"],
    }
    jobs: list[tuple[str, str, Callable[[], object]]] = []
    for name, words in commands.items():
        _fresh(out.parent).mkdir()
        folder = _fresh(bench.root / "places")
        folder.mkdir()
        points, number = strike.passed(words, out.parent, folder)
        for action in ("kill", *strike.ERRORS):
            jobs += [(name, f"{action} at {point}", strike.arm(point, action)) for point in points]
            jobs += [
                (name, f"{action} at call {k}", strike.calls(out.parent, k, action))
                for k in range(1, number + 1)
            ]
    for name, how, before in rng.sample(jobs, len(jobs)):
        problem = _whole_or_absent(commands[name], _fresh(out.parent) / "out", before)
        yield f"{name}, {how}: {problem}" if problem else ""


def _whole_or_absent(words: list[str], out: Path, before: Callable[[], object]) -> str:
    out.parent.mkdir()
    done = attempt(words, before)
    if done.code != -9 and done.trouble:
        return done.trouble
    left = sorted(path.name for path in out.parent.iterdir())
    if out.exists():
        verify_folder(out)
        if done.code > 0 and "is published" not in done.text:
            return f"published, and says otherwise: {done.text}"
    elif done.code != -9:
        if left and done.code:
            return f"leaves {left} behind"
        if not done.code or out.name not in done.text:
            return f"nothing written, and says: {done.text}"
    if not out.exists():
        again = attempt(words)
        if again.code or sorted(os.listdir(out.parent)) != [out.name]:
            return f"cannot be done again: {again.text[-500:]} {sorted(os.listdir(out.parent))}"
        verify_folder(out)
    return ""


# -- folders, pieces -------------------------------------------------------------------------------


def folders(bench: Bench, rng: random.Random) -> Iterator[str]:
    for number in count():
        folder, out = _fresh(bench.root / "hostile"), _fresh(bench.root / "quantized")
        shutil.copytree(bench.model, folder)
        how = hostile.mutate(folder, rng)
        words = (
            ["quantize", str(folder), str(out), "--format", "int8"]
            if number % 2
            else ["generate", "--model", str(folder), "--prompt", "abc", "--max-tokens", "2"]
        )
        done = attempt(words, deadline=30.0)
        yield f"{words[0]}, {how}: {done.trouble}" if done.trouble else ""


def every_piece(bench: Bench, rng: random.Random) -> Iterator[str]:
    """One trial a process: sessions are heavy and their parts are not shared."""
    for name in pieces.configurations(bench.model, bench.root):
        code = (
            "import sys; sys.path.insert(0, 'tests'); from contextlib import ExitStack; from "
            "pathlib import Path; "
            "import pieces; model, out, name = sys.argv[1:]; stack = ExitStack(); "
            "trial = pieces.Trial(pieces.configurations(Path(model), Path(out))[name], stack); "
            "found = [*trial.survivors(True), *trial.meta_survivors()]; "
            "n = len([*pieces.mutants(trial.saved, True)]) + len(trial.saved.meta); stack.close(); "
            "print(f'COUNT {n}'); print(*found, sep=chr(10)); sys.exit(bool(found))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(bench.model), str(bench.root / "pieces"), name],
            capture_output=True,
            text=True,
            timeout=900,
            cwd=Path(__file__).parents[1],
        )
        told = done.stdout[done.stdout.rfind("COUNT") :].strip() if "COUNT" in done.stdout else ""
        print(f"pieces: {name}: {told.splitlines()[0] if told else '?'}", flush=True)
        yield f"{name}: {told or done.stderr[-800:]}" if done.returncode else ""


# -- the server ------------------------------------------------------------------------------------


def server(bench: Bench, rng: random.Random) -> Iterator[str]:
    root = _fresh(bench.root / "server")
    with Stormed(stormed.folders(root)) as running:
        storm = Storm(root, running, rng.randrange(1 << 30), measured=50)
        try:
            while running.alive:
                yield from storm.blow(GUST)
        finally:
            print(f"server: {storm.told()}", flush=True)


def programs(bench: Bench, rng: random.Random) -> Iterator[str]:
    logging.getLogger("lowroll.server.engine_loop").setLevel(
        logging.CRITICAL
    )  # failures are on purpose
    trial = Trial([hf_folder(_fresh(bench.root / f"model_{seed}"), seed=seed) for seed in range(2)])
    while True:
        yield trial.run(rng.randrange(1 << 30))


# -- the transport ---------------------------------------------------------------------------------


def transport(bench: Bench, rng: random.Random) -> Iterator[str]:
    """Sixty pieces of garbage for each death of a process: a death costs as much as they do."""
    logging.getLogger("lowroll.transport").setLevel(logging.CRITICAL)  # damage is on purpose
    with ExitStack() as stack:
        fuzz = Fuzz(_fresh(bench.root / "garbage"), rng, stack).trials()
        for number in count():
            pair = Pair(_fresh(bench.root / "pair"), ("filesystem", "zmq")[number % 2])
            pair.folder.mkdir()
            try:
                pair.start("orchestrator")
                pair.start("trainer")
                for _ in range(50):
                    how = strike_pair(pair, rng)
                    yield ""
                    for _ in range(60):
                        yield next(fuzz)
                problems = pair.finish()
                yield f"{pair.transport}, {how}: {problems}" if problems else ""
            except AssertionError as error:
                yield f"{pair.transport}: {error}"
            finally:
                pair.stop()


# -- roles -----------------------------------------------------------------------------------------


def roles(bench: Bench, rng: random.Random) -> Iterator[str]:
    """A trial is a run with some six losses: of a role, at one of the points that roles pass or a moment
    after it, or of the launcher with all roles."""
    steps = {"train": {"max_steps": 12}, "eval": {"interval": None}}
    lora = {"train": {"max_steps": 12, "lora": True, "lora_rank": 2}}
    ways = {
        f"level {level}, {way}": steps
        | ({} if level or way == "filesystem" else lora)
        | {"rollout_transport": {"type": way, "port": 0}}
        | ({"asynchrony": {"max_async_level": level}} if level else {})
        for level in (0, 1)
        for way in ("filesystem", "zmq")
    }

    make = partial(Launch, words=[])

    def begin(name: str) -> tuple[list[Loss], dict[str, str]]:
        return losses.every(_whole(bench, make, ways[name]), rng), _alone(bench, name, ways[name])

    yield from _losses(bench, ways, make, begin)


def ranks(bench: Bench, rng: random.Random) -> Iterator[str]:
    """The same where two ranks learn: of them, too, one is lost at a time."""
    steps = {"max_steps": 12, "gpus": 2}
    ways = {
        "two ranks": {"train": steps},
        "two ranks, lora": {"train": steps | {"lora": True, "lora_rank": 2}},
        "two ranks, level 1": {"train": steps, "asynchrony": {"max_async_level": 1}},
    }
    ways = {name: {"eval": {"interval": None}, **changes} for name, changes in ways.items()}
    names = (*losses.ROLES, losses.RANK_1)
    make = partial(Launch, words=[], roles=names, most_restarts=100, patience=2)

    def begin(name: str) -> tuple[list[Loss], dict[str, str]]:
        launch = _whole(bench, make, ways[name])
        same = {} if "asynchrony" in ways[name] else outcome(launch.run)
        return losses.every(launch, rng), same

    yield from _losses(bench, ways, make, begin)


def rays(bench: Bench, rng: random.Random) -> Iterator[str]:
    """Up to sixteen losses a run: of a process, an actor, a node, and the launcher."""
    from tests.fixtures import ray_cluster, ray_losses

    nodes = bench.stack.enter_context(ray_cluster.Apart())
    steps = {"train": {"max_steps": 32}, "eval": {"interval": None}}
    ways = {
        "level 0": steps,
        "level 0, zmq": steps | {"rollout_transport": {"type": "zmq", "port": 0}},
        "level 1": steps | {"asynchrony": {"max_async_level": 1}},
    }

    def begin(name: str) -> tuple[list[Loss], dict[str, str]]:
        return ray_losses.phases(rng), _alone(bench, name, ways[name])

    yield from _losses(bench, ways, partial(ray_losses.OnRay, words=[], nodes=nodes), begin)


def _alone(bench: Bench, name: str, changes: dict[str, Any]) -> dict[str, str]:
    """Return the outcome of one process; at a level above 0 no two runs are the same."""
    if "asynchrony" in changes:
        return {}
    folder = bench.root / f"one {name}"
    done = attempt(bench.words(folder, **changes), deadline=600.0)
    assert done.code == 0, done.trouble or done.text
    return outcome(folder)


def _whole(bench: Bench, make: Callable[[Path], Launch], changes: dict[str, Any]) -> Launch:
    """A run that nobody disturbed."""
    launch = _launched(bench, make, changes)
    if problem := launch.finish() or "; ".join(launch.wrong()):
        raise RunFailed(f"undisturbed: {problem}")
    return launch


def _losses(
    bench: Bench,
    ways: dict[str, dict[str, Any]],
    make: Callable[[Path], Launch],
    begin: Callable[[str], tuple[list[Loss], dict[str, str]]],
) -> Iterator[str]:
    """Runs of these ways in turn, each disturbed. begin: of a way by its name, the losses, and what it
    comes to undisturbed, where that is always the same."""
    began, counted = {}, Counter[str]()
    for number in count():
        name = list(ways)[number % len(ways)]
        if name not in began:
            try:
                began[name] = begin(name)
            except RunFailed as error:
                yield f"{name}: {error}"
                return
        queue, wanted = began[name]
        launch = _launched(bench, make, ways[name])
        problems = []
        for loss in losses.some(queue, launch):
            problem = launch.lose(loss)
            if problem is None:
                break
            print(f"{name}: {loss}", flush=True)
            counted[launch.kind(loss)] += 1
            problems += [f"{problem}; {launch.text}"] if problem else []
        if problem := launch.finish():
            problems.append(problem)
        else:
            found = outcome(launch.run) if wanted else {}
            other = sorted(k for k in wanted.keys() | found.keys() if wanted.get(k) != found.get(k))
            problems += launch.wrong() + [f"another {key}" for key in other[:5]]
        print(f"{name}: over; losses so far {dict(sorted(counted.items()))}", flush=True)
        yield f"{name}: {'; '.join(problems)}" if problems else ""


def _launched(bench: Bench, make: Callable[[Path], Launch], changes: dict[str, Any]) -> Launch:
    launch = make(_fresh(bench.root / "roles"))
    launch.words = bench.words(launch.run, **changes)
    launch.start()
    return launch


def fleets(bench: Bench, rng: random.Random) -> Iterator[str | None]:
    for _ in count():
        try:
            yield Fleet(random.Random(rng.getrandbits(32))).problem()
        except (RunFailed, AssertionError) as error:
            yield str(error)


SUITES = {
    "roles": roles,
    "ranks": ranks,
    "kills": kills,
    "errors": errors,
    "damage": damage,
    "exports": exports,
    "folders": folders,
    "pieces": every_piece,
    "server": server,
    "transport": transport,
    "fleets": fleets,
    "programs": programs,
    "rays": rays,
}


def _fresh(path: Path) -> Path:
    """A path at which nothing is."""
    shutil.rmtree(path, ignore_errors=True)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="for all suites together")
    parser.add_argument("--trials", type=int, help="of each suite at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--suites", nargs="+", choices=sorted(SUITES), default=[n for n in SUITES if n != "rays"]
    )
    args = parser.parse_args()
    bad, shares = 0, sum(SHARES[name] for name in args.suites)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        bench = build(Path(scratch), stack)
        for name in args.suites:
            done, problems, began = 0, 0, time.monotonic()
            until = began + 60 * args.minutes * SHARES[name] / shares
            for problem in SUITES[name](bench, random.Random(f"{args.seed} {name}")):
                done, problems = done + 1, problems + bool(problem)
                if problem:
                    print(f"PROBLEM {name}: {problem}", flush=True)
                if time.monotonic() > until or done == args.trials:
                    break
            bad += problems
            print(
                f"DONE {name}: {done} trials, {problems} problems, {time.monotonic() - began:.0f} "
                f"s",
                flush=True,
            )
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
