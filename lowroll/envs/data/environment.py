"""data: rows of any data set, scored by the user's reward functions (docs/data.md)."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from lowroll.envs.base import Environment
from lowroll.envs.data.columns import ANSWERS, Columns, DataTask
from lowroll.envs.data.functions import (
    ANSWER,
    OF_ROLLOUTS,
    Logged,
    PromptResponses,
    TrainerState,
    load,
    rewards_of,
)
from lowroll.envs.problems import final_answer, perturb
from lowroll.envs.return_values import Inapplicable, InvalidScore
from lowroll.envs.rows import SplitRows
from lowroll.types import Message, Prompt, Score

logger = logging.getLogger(__name__)

NUMBER = re.compile(r":\d+$|\[\d+\]$")  # a row's number after its source
Said = str | list[Message]  # a response, or the messages after the prompt


class Data(Environment):
    """Prompts from the columns of `path` (file, folder or hub id), scored by `reward_funcs`."""

    def __init__(
        self,
        *,
        name: str,
        seed: int = 0,
        path: str,
        split: str = "train",
        subset: str | None = None,
        revision: str | None = None,
        streaming: bool = False,
        rows: int | None = None,
        test_path: str | None = None,
        test_split: str | None = None,
        held_out: float = 0.05,
        prompt: str | None = None,
        answer: str | None = None,
        completion: str | None = None,
        system: str | None = None,
        template: str = "{text}",
        reward_funcs: Sequence[str] | str = (),
        reward_weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__(name=name, seed=seed, system=system, template=template)
        ids = [reward_funcs] if isinstance(reward_funcs, str) else list(reward_funcs)
        self.functions = load(ids or [ANSWER])
        self.weights = [1.0] * len(self.functions) if reward_weights is None else reward_weights
        if len(self.weights) != len(self.functions):
            raise ValueError(
                f"env {name!r}: {len(self.weights)} reward_weights for {len(self.functions)} "
                "reward_funcs"
            )
        self.is_graded = [function.name for function in self.functions] == [ANSWER]
        if self.is_graded:
            self.overtaxed = Score(0.0, {ANSWER: 0.0})
        self.together = any(function.is_of_several for function in self.functions)
        self.columns = Columns(prompt, answer, completion)
        self.rows: SplitRows[DataTask] = SplitRows(
            name,
            self._task,
            path=path,
            test_path=test_path,
            seed=seed,
            split=split,
            test_split=test_split,
            held_out=held_out,
            subset=subset,
            revision=revision,
            streaming=streaming,
            rows=rows,
        )
        self._looked = False
        self._kinds: dict[str, tuple[str, str]] = {}  # kind of prompts and first row, by source

    def size(self, split: str = "train") -> int | None:
        """Return the number of usable rows. ValueError for a parameter that is not a column."""
        size = len(self.rows[split])
        if size and not self._looked:
            self._look(self.rows[split][0])
        return size

    def prompt(self, index: int, split: str = "train") -> Prompt:
        """Return a row's prompt. `info` has what the reward functions take, and the gold answer if
        that alone is scored."""
        self.check_task(index, split)
        row_index = self.rows.at(split, index)
        task = self.rows[split][row_index]
        is_chat = not isinstance(task.prompt, str)
        if isinstance(task.prompt, str):
            messages = [{"role": "user", "content": self.template.replace("{text}", task.prompt)}]
        else:
            messages = self._in_template(task.prompt)
        if self.system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        info = {"row": row_index, "split": split, "chat": is_chat, "columns": self._wanted(task)}
        takes = [name for name in OF_ROLLOUTS if any(name in f.takes for f in self.functions)]
        if takes:
            info["takes"] = takes
        if self.is_graded and task.answer is not None:
            info["answer"] = _gold_answer(task.answer)
        return Prompt(f"{split}/{index}", self.name, messages, info)

    def prepare(self) -> None:
        for function in self.functions:
            function.prepare()

    def score(self, prompt: Prompt, text: Said) -> Score:
        (result,) = self.score_together(prompt, [text])
        if isinstance(result, InvalidScore):
            raise result
        return result

    def score_conversation(self, prompt: Prompt, messages: list[Message]) -> Score:
        return self.score(prompt, messages)

    def score_together(self, prompt: Prompt, said: Sequence[Said]) -> list[Score | InvalidScore]:
        log = Logged(len(said), [function.name for function in self.functions])
        info, columns = prompt.info, dict(prompt.info["columns"])
        if "answer" in info:
            columns["answer"] = info["answer"]
        responses = PromptResponses(
            prompt=prompt.messages if info["chat"] else prompt.messages[-1]["content"],
            said=[_response_messages(prompt, response) for response in said],
            columns=columns,
            log=log,
            completion_ids=info.get("completion_ids") or [[] for _ in said],
            state=TrainerState(**info.get("trainer_state", {})),
        )
        rewards_by_function = rewards_of(self.functions, responses, self.tell)
        return [
            self._sum(i, rewards, log)
            for i, rewards in enumerate(zip(*rewards_by_function, strict=True))
        ]

    def gold(self, prompt: Prompt) -> str:
        """Return the row's demonstration, or its answer if that alone is scored."""
        task = self.rows[prompt.info["split"]][prompt.info["row"]]
        if task.completion is not None:
            return task.completion
        if not self.is_graded:
            raise NotImplementedError("reward functions say nothing of a response that they like")
        raw = task.answer if isinstance(task.answer, str) else ""
        if "####" in raw or "\\boxed" in raw:
            return raw
        return f"\\boxed{{{_gold_answer(task.answer)}}}"

    def perturbed(self, prompt: Prompt) -> str:
        if not self.is_graded or "answer" not in prompt.info:
            raise NotImplementedError("reward functions say nothing of a response that is wrong")
        return f"\\boxed{{{perturb(prompt.info['answer'])}}}"

    def _task(self, row: dict[str, Any], where: str) -> DataTask | None:
        task = self.columns.task(row, where)
        self._check_kind(task, where)
        if not self.is_graded:
            return task
        if task.answer is not None:
            return task if _gold_answer(task.answer) else None
        if task.completion is not None:
            return task
        if null := [key for key in (self.columns.answer, *ANSWERS) if key in row]:
            raise ValueError(
                f"{where}: column {null[0]!r}, the answer, is null: drop the row, or fill it"
            )
        raise ValueError(
            f"{where}: no answer in it and no reward_funcs to judge without; name the column "
            f"of the answer, as in answer: {next(reversed(row))}, or give reward_funcs; it has: "
            f"{', '.join(row)}"
        )

    def _check_kind(self, task: DataTask, where: str) -> None:
        kind = "a text" if isinstance(task.prompt, str) else "chat messages"
        source = NUMBER.sub("", where)
        first_kind, first_row = self._kinds.setdefault(source, (kind, where))
        if kind != first_kind:
            raise ValueError(
                f"{where}: its prompt is {kind}, and that of {first_row} is {first_kind}; write all prompts of "
                "a file in one way"
            )

    def _look(self, task: DataTask) -> None:
        self._looked = True
        for function in self.functions:
            if function.file is not None:
                function.check(list(self._named(task)))
        files = dict.fromkeys(f.file for f in self.functions if f.file is not None)
        for file in files:
            logger.warning("env %s: its reward functions are the code of %s", self.name, file)

    def _named(self, task: DataTask) -> dict[str, Any]:
        answers = (
            {} if task.answer is None else {"answer": task.answer, "ground_truth": task.answer}
        )
        return answers | task.columns

    def _wanted(self, task: DataTask) -> dict[str, Any]:
        columns = self._named(task)
        taken_names: set[str] = set()
        for function in self.functions:
            if function.columns is None:
                return columns
            taken_names |= function.columns
        return {name: value for name, value in columns.items() if name in taken_names}

    def _in_template(self, messages: list[Message]) -> list[Message]:
        user_indices = [i for i, message in enumerate(messages) if message["role"] == "user"]
        if not user_indices or self.template == "{text}":
            return list(messages)
        last = user_indices[-1]
        text = self.template.replace("{text}", messages[last]["content"])
        return [*messages[:last], {**messages[last], "content": text}, *messages[last + 1 :]]

    def _sum(self, i: int, rewards: Sequence[float | None], log: Logged) -> Score | InvalidScore:
        rewards_by_name: dict[str, float] = {}
        weighted_rewards: list[float] = []
        for function, reward, weight in zip(self.functions, rewards, self.weights, strict=True):
            if reward is not None:
                rewards_by_name[function.name] = reward
                weighted_rewards.append(weight * reward)
        if not rewards_by_name:
            names = ", ".join(function.name for function in self.functions)
            message = f"no reward function applies ({names} said None)"
            return Inapplicable(message, log.metrics, log.extra(i))
        return Score(sum(weighted_rewards), rewards_by_name | log.metrics, log.extra(i))


def _response_messages(prompt: Prompt, said: Said) -> list[Message]:
    if isinstance(said, str):
        return [{"role": "assistant", "content": said}]
    return said[len(prompt.messages) :]


def _gold_answer(answer: Any) -> str:
    if isinstance(answer, list):
        return ", ".join(filter(None, map(_gold_answer, answer)))
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    return final_answer(str(answer))
