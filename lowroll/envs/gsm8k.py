"""gsm8k: grade-school word problems (Cobbe et al. 2021, "Training Verifiers to Solve Math Word
Problems").

The last `#### number` or `\\boxed{number}` of a response decides.
"""

from __future__ import annotations

from lowroll.envs.problems import Problems


class GSM8K(Problems):
    """Rows {question, answer} with worked solutions that end in `#### number`."""

    hashes = True
    default_template = (
        "{text}\nThink step by step and write the final number on a line of its own after ####, "
        "such as: #### 7"
    )
