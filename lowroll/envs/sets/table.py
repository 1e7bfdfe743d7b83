"""The table of held-out sets: sources, columns, templates and scorers.

Of a list of columns the first present one counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from lowroll.types import nearest

PREFIX = "set/"
Rule = Literal["hash", "boxed", "choice", "program"]
RULES: dict[Rule, str] = {
    "hash": "the last `#### number` or `\\boxed{}`, equal as numbers or formulas",
    "boxed": "the last `\\boxed{}`, equal as numbers or formulas",
    "choice": "the last `Answer: X` names the right option",
    "program": "the last fenced block passes every test",
}
CLASSES: dict[Rule, str] = {
    "hash": "lowroll.envs.sets.problems:Hashed",
    "boxed": "lowroll.envs.sets.problems:Boxed",
    "choice": "lowroll.envs.sets.choices:Choices",
    "program": "lowroll.envs.sets.programs:Programs",
}
BOXED = "{text}\nPlease reason step by step, and put your final answer within \\boxed{}."
HASHED = (
    "{text}\nThink step by step and write the final number on a line of its own after ####, such "
    "as: #### 7"
)
CHOSEN = (
    "Answer the following multiple choice question. Think step by step. The last line of your "
    "response must be of the form 'Answer: X' (without quotes), where X is the letter of one of "
    "the options.\n\n{text}"
)
TEMPLATES: dict[Rule, str] = {"hash": HASHED, "boxed": BOXED, "choice": CHOSEN, "program": "{text}"}
Columns = Mapping[str, tuple[str, ...]]

_QUESTION = ("problem", "question", "Problem", "Question")
_WORDED: Columns = {
    "question": _QUESTION,
    "answer": ("answer", "Answer", "final_answer", "expected_answer", "solution"),
}
_OPTIONS: Columns = {
    "question": ("question",),
    "options": ("choices", "options"),
    "answer": ("answerKey", "answer"),
}
_SEPARATE_OPTIONS: Columns = {
    "question": ("Question",),
    "correct": ("Correct Answer",),
    "wrong": ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"),
}
_PROGRAM: Columns = {
    "question": ("question_content",),
    "starter": ("starter_code",),
    "public": ("public_test_cases",),
    "private": ("private_test_cases",),
    "metadata": ("metadata",),
}


@dataclass(frozen=True)
class EvalSet:
    """A set. `count` is the number of rows in papers, `path` a hub id; `checked` says what was
    tested."""

    name: str
    title: str
    path: str
    split: str
    rule: Rule
    count: int
    source: str
    licence: str
    subset: str | None = None
    columns: Columns = field(default_factory=lambda: _WORDED)
    shuffled: bool = False  # the options, the right one first, are shuffled
    checked: str = "not fetched"

    @property
    def template(self) -> str:
        """The text around a question, {text}."""
        return TEMPLATES[self.rule]


_CHECKED_WHOLE = "read whole"
_MAA_LICENCE = "text of the Mathematical Association of America"

SETS = {
    one.name: one
    for one in (
        EvalSet(
            "gsm8k",
            "GSM8K",
            "openai/gsm8k",
            "test",
            "hash",
            1319,
            "Cobbe et al. 2021, arXiv 2110.14168",
            "MIT",
            subset="main",
            checked=_CHECKED_WHOLE,
        ),
        EvalSet(
            "math500",
            "MATH500",
            "HuggingFaceH4/MATH-500",
            "test",
            "boxed",
            500,
            "Hendrycks et al. 2021, arXiv 2103.03874; the split of Lightman et al. 2023",
            "MIT",
            checked=_CHECKED_WHOLE,
        ),
        EvalSet(
            "gaokao2023en",
            "Gaokao 2023 en",
            "MARIO-Math-Reasoning/Gaokao2023-Math-En",
            "train",
            "boxed",
            385,
            "Zhang et al. 2023, arXiv 2305.12474; translated exam questions",
            "not stated",
            checked=_CHECKED_WHOLE,
        ),
        EvalSet(
            "minerva",
            "Minerva Math",
            "math-ai/minervamath",
            "test",
            "boxed",
            272,
            "Lewkowycz et al. 2022, arXiv 2206.14858",
            "MIT OpenCourseWare, CC BY-NC-SA",
            checked=_CHECKED_WHOLE,
        ),
        EvalSet(
            "olympiadbench",
            "OlympiadBench",
            "Hothan/OlympiadBench",
            "train",
            "boxed",
            675,
            "He et al. 2024, arXiv 2402.14008; English competition maths without images",
            "Apache-2.0",
            subset="OE_TO_maths_en_COMP",
            columns={
                "question": ("question", "problem"),
                "answer": ("final_answer", "answer"),
            },
        ),
        EvalSet(
            "aime24",
            "AIME24",
            "HuggingFaceH4/aime_2024",
            "train",
            "boxed",
            30,
            "AIME I and II 2024",
            _MAA_LICENCE,
        ),
        EvalSet(
            "aime25",
            "AIME25",
            "yentinglin/aime_2025",
            "train",
            "boxed",
            30,
            "AIME I and II 2025",
            _MAA_LICENCE,
        ),
        EvalSet(
            "amc23",
            "AMC23",
            "math-ai/amc23",
            "test",
            "boxed",
            40,
            "AMC 12 2023",
            _MAA_LICENCE,
        ),
        EvalSet(
            "arc-c",
            "ARC-C",
            "allenai/ai2_arc",
            "test",
            "choice",
            1172,
            "Clark et al. 2018, arXiv 1803.05457",
            "CC BY-SA 4.0",
            subset="ARC-Challenge",
            columns=_OPTIONS,
        ),
        EvalSet(
            "gpqa-d",
            "GPQA-D",
            "Idavidrein/gpqa",
            "train",
            "choice",
            198,
            "Rein et al. 2024, arXiv 2311.12022",
            "CC BY 4.0; gated, and asks that its text is not published",
            subset="gpqa_diamond",
            columns=_SEPARATE_OPTIONS,
            shuffled=True,
        ),
        EvalSet(
            "mmlu-pro",
            "MMLU-Pro",
            "TIGER-Lab/MMLU-Pro",
            "test",
            "choice",
            12032,
            "Wang et al. 2024, arXiv 2406.01574",
            "MIT",
            columns=_OPTIONS,
        ),
        EvalSet(
            "livecodebench",
            "LiveCodeBench",
            "livecodebench/code_generation_lite",
            "test",
            "program",
            0,
            "Jain et al. 2024, arXiv 2403.07974",
            "Creative Commons",
            columns=_PROGRAM,
            checked="by file alone",
        ),
    )
}
SUITES = {
    "math7": ("gsm8k", "math500", "gaokao2023en", "minerva", "olympiadbench", "aime24", "amc23"),
    "ood": ("arc-c", "gpqa-d", "mmlu-pro", "livecodebench"),
}


def chosen(words: str) -> list[EvalSet]:
    """Return the sets of `math7`, `gsm8k,aime24` and the like, without duplicates."""
    requested = [word.strip() for word in words.split(",")]
    names = dict.fromkeys(name for word in requested for name in SUITES.get(word, (word,)))
    return [named(name) for name in names]


def named(name: str) -> EvalSet:
    """Return a set; ValueError names the nearest known one."""
    if name in SETS:
        return SETS[name]
    hint = nearest(name, [*SUITES, *SETS], repr)
    raise ValueError(f"unknown set {name!r}{hint}; known: {', '.join((*SUITES, *SETS))}")
