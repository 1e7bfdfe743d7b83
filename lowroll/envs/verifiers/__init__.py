"""Environments of the package `verifiers`, by the id of an installed one: "verifiers/<name>".

Both of its interfaces: `load_environment` with a rubric (verifiers below 0.4: SingleTurnEnv,
MultiTurnEnv, ToolEnv), and tasksets of 0.4 (`verifiers.v1`: Taskset, Task, Env). What a conversation
says next, and its score, come from verifiers' own loop: it is played again with what the model said
so far, so it must do the same each time. Prompts, the system prompt, tools and what is called are
the environment's; its rewards, weighted as it says, are the reward, each of them also a metric.

The package is optional, and what an environment brings runs here and in the scoring workers.
"""

from lowroll.envs.verifiers.environment import Verifiers

__all__ = ["Verifiers"]
