"""math: problems with a LaTeX answer in a box (Hendrycks et al. 2021, "Measuring Mathematical
Problem Solving").

Also reads MATH-500, Minerva (a solution field alone), Gaokao (answers between dollars), AMC and
AIME rows.
"""

from __future__ import annotations

from lowroll.envs.problems import Problems


class Math(Problems):
    r"""Rows {problem or question, answer and/or solution}; the last `\boxed{}` is the answer."""

    default_template = "{text}\nThink step by step and put the final answer within \\boxed{}."
