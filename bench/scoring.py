"""Does the scorer of mathematics say the truth? Gold answers in their usual forms must be right,
near misses wrong.

    python -m bench.scoring --data FOLDER      # with the files of FILES

Of every gold answer: the forms in which people and models write it, and near misses of four kinds
(a digit, a sign, a name, a bracket or function). It prints a line a file: forms, refused forms,
near misses, accepted ones, errors, answers that could not be judged, CPU seconds. Ends with 1 where
a form is refused, more than one near miss in a thousand is accepted, or anything is an error.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lowroll.envs import make
from lowroll.envs.problems import Problems
from lowroll.types import Prompt

FILES = {
    "gsm8k_test.jsonl": "gsm8k",
    "gsm8k_train.jsonl": "gsm8k",
    "math500.jsonl": "math",
    "minerva_math.jsonl": "math",
    "gaokao2023en.jsonl": "math",
}
PLAIN = re.compile(r"-?[\d.]+")
QUANTITY = re.compile(r"[-\d.,]+|\\frac\{\d+\}\{\d+\}")
CHANGES = (
    ("+", "-"),
    ("-", "+"),
    ("-", ""),
    ("(", "["),
    ("[", "("),
    (")", "]"),
    ("]", ")"),
    ("<", ">"),
    (r"\leq", "<"),
    ("=", r"\neq "),
    (r"\sin", r"\cos"),
    (r"\cos", r"\sin"),
    (r"\cup", r"\cap"),
    (r"\pi", ""),
    (r"\sqrt", ""),
    (r"\infty", "0"),
)
ACCEPTED = 0.001


@dataclass
class Count:
    """What was seen in one file; `examples` are the first few that are not as they should be."""

    forms: int = 0
    refused: int = 0
    misses: int = 0
    accepted: int = 0
    errors: int = 0
    unjudged: int = 0
    seconds: float = 0.0
    examples: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Tell if no form is refused, nothing is an error, and at most one near miss in a thousand
        is accepted."""
        return not self.refused and not self.errors and self.accepted <= ACCEPTED * self.misses


def usual_forms(gold: str, hashes: bool) -> Iterator[str]:
    for content in (
        gold,
        f"{gold}.",
        f"${gold}$",
        rf"\,{gold}\;",
        f" {gold} ",
        gold.replace(r"\frac", r"\dfrac"),
        gold.replace(r"\cdot", r"\times"),
        re.sub(r"(?<!\\left)\(", r"\\left(", re.sub(r"(?<!\\right)\)", r"\\right)", gold)),
    ):
        yield rf"\boxed{{{content}}}"
    yield rf"**\boxed{{{gold}}}**"
    yield rf"\fbox{{{gold}}}"
    if QUANTITY.fullmatch(gold):
        for unit in (r"\text{ units}", r"\ \mathrm{cm}", r"^\circ", r"\text{ cm}^2"):
            yield rf"\boxed{{{gold}{unit}}}"
        yield from (rf"\boxed{{{name} = {gold}}}" for name in ("x", r"\text{Area}", "f(x)", "AB"))
    if PLAIN.fullmatch(gold):
        for form in (rf"\text{{{gold}}}", rf"\${gold}", f"{gold} dollars", rf"{gold}\%"):
            yield rf"\boxed{{{form}}}"
        yield rf"-\boxed{{{gold[1:]}}}" if gold[0] == "-" else rf"\boxed{{+{gold}}}"
    if re.fullmatch(r"-?\d{4,}", gold):
        for separator in (",", r"\,", "{,}", r",\!"):
            yield rf"\boxed{{{int(gold):,}}}".replace(",", separator)
    if hashes:
        yield from (
            f"#### {form}"
            for form in (
                gold,
                f"**{gold}**",
                rf"\${gold}",
                f"${gold}$",
                f"{gold} dollars.",
                f"{gold}.00",
                f"**\\${gold}**",
                rf"\({gold}\)",
                f"x = {gold}",
                f"Answer: {gold}",
                f"{gold} m^3",
                f"{float(gold):.12e}" if PLAIN.fullmatch(gold) else gold,
                gold.replace("-", "\u2212"),
                f"\u200b{gold}",
            )
        )


def near_misses(gold: str) -> Iterator[str]:
    """Yield other answers, one change away."""
    for digit in re.finditer(r"\d", gold):
        for other in (
            "8" if digit[0] == "9" else str(int(digit[0]) + 1),
            str((int(digit[0]) + 5) % 10),
        ):
            yield gold[: digit.start()] + other + gold[digit.end() :]
    for old, new in CHANGES:
        for place in re.finditer(re.escape(old), gold):
            if old not in "()[]" or not re.search(r"left|right|sqrt|text", gold):
                yield gold[: place.start()] + new + gold[place.end() :]
    if not PLAIN.fullmatch(gold) and r"\{x|" not in gold:
        for name in re.finditer(r"(?<![A-Za-z\\])[a-pr-z](?![A-Za-z])", gold):
            yield gold[: name.start()] + "q" + gold[name.end() :]
    yield from (f"{gold}+1", f"7919-({gold})", f"{gold}, 77777")
    if gold != "0":
        yield from (f"-({gold})", f"2({gold})") if len(gold) > 1 or not gold.isalpha() else ()


def score_file(path: Path, env_id: str, limit: int | None = None) -> Count:
    """Score the forms and near misses of the first `limit` gold answers of a file, each different
    one once."""
    env = make(env_id, args={"test_path": str(path)})
    assert isinstance(env, Problems)
    count, seen = Count(), set()
    start = time.process_time()
    for index in range(min(limit or 10**9, env.size("test") or 0)):
        prompt = env.prompt(index, "test")
        gold = prompt.info["answer"]
        judge(env, prompt, env.gold(prompt), 1.0, count)
        if gold not in seen:
            seen.add(gold)
            for text in usual_forms(gold, env.hashes):
                judge(env, prompt, text, 1.0, count)
            for text in (rf"\boxed{{{miss}}}" for miss in near_misses(gold)):
                judge(env, prompt, text, 0.0, count)
    count.seconds = time.process_time() - start
    return count


def judge(env: Problems, prompt: Prompt, text: str, reward: float, count: Count) -> None:
    try:
        score = env.score(prompt, text)
        seen: float | str = score.reward
        count.unjudged += score.metrics["unjudged"] > 0
    except Exception as error:  # counted and shown
        seen = f"{type(error).__name__}: {error}"
        count.errors += 1
    count.forms += reward == 1.0
    count.misses += reward == 0.0
    count.refused += reward == 1.0 and seen != 1.0
    count.accepted += reward == 0.0 and seen == 1.0
    if seen != reward:
        count.examples.append(f"{prompt.info['answer']!r}: {text[-100:]!r} scored {seen}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="the folder of the data sets")
    parser.add_argument("--limit", type=int, help="gold answers a file; all by default")
    options = parser.parse_args(arguments)
    ok = True
    for name, env_id in FILES.items():
        count = score_file(options.data / name, env_id, options.limit)
        ok = ok and count.ok
        print(
            f"{name}: {count.forms} forms, {count.refused} refused; {count.misses} near misses, "
            f"{count.accepted} "
            f"accepted; {count.errors} errors; {count.unjudged} not judged; {count.seconds:.1f} s",
            flush=True,
        )
        for example in count.examples[:20]:
            print(f"    {example}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
