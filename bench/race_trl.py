"""TRL's side of `bench.race`: GRPOTrainer in a process, and mostly in an environment, of its own.

The settings are plain numbers (`bench.race.plain`), prompts in files, and a `Setting` by name. What
TRL gets beside its own defaults:

- float32 weights and moments, torch's fused AdamW and SDPA attention, no gradient checkpointing, the
  rates of lowroll's schedule step by step, the loss averaged over all tokens of a batch (`dapo`);
- generate of transformers within the autocast of the learner, which GRPOTrainer leaves out: it would
  draw in float32 where it learns in bfloat16. Or vLLM in the same process, where the setting says so;
- greedy evaluations by generate, with the clock stopped.

Its prompts must have the token ids of lowroll's, else ValueError names the first that has others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.worker import Say, channel, end_with_input, peak
from lowroll.envs import Environment, table
from lowroll.envs.base import judge
from lowroll.types import Prompt

EVAL_ROWS = 256  # prompts that are evaluated together
MEASURED = 16  # rollouts of which the mismatch is measured, where training keeps no log-probs


class Setting(NamedTuple):
    """A way to run TRL: its autocast, and who draws."""

    bf16: bool
    vllm: bool


SETTINGS = {
    "fp32": Setting(False, False),
    "bf16": Setting(True, False),
    "bf16 vllm": Setting(True, True),
}


@dataclass(frozen=True)
class RacePrompt:
    """A prompt of the race: its task, and its token ids in lowroll."""

    prompt: Prompt
    ids: list[int]


def read(path: str) -> list[RacePrompt]:
    """Read the prompts that `bench.race.write_prompts` wrote."""
    stored = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [RacePrompt(Prompt(**one["prompt"]), one["ids"]) for one in stored]


def check_ids(tokenizer: Any, rows: Sequence[RacePrompt]) -> None:
    """Raise ValueError for the first prompt that has other token ids here."""
    for row in rows:
        made = tokenizer.apply_chat_template(
            row.prompt.messages, add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
        if list(made) != row.ids:
            raise ValueError(f"prompt {row.prompt.id}: it has other token ids here than in lowroll")


def k3(learner: Tensor, rollout: Tensor) -> Tensor:
    """Return w - ln w - 1 of each token, w the learner's probability over the rollouts'. Its mean
    estimates the KL of the rollouts to the learner (Schulman 2020, k3)."""
    log_w = learner.double() - rollout.double()
    return log_w.exp() - log_w - 1.0


class Meter:
    """The counts of a step: seconds, drawn tokens, rewards, and terms of the mismatch."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.clear()

    def clear(self) -> None:
        self.seconds, self.tokens = 0.0, 0
        self.rewards: list[float] = []
        self.kl: list[float] = []

    def now(self) -> float:
        """Return the time when the device has done what it was given."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def line(self, step: int) -> dict[str, Any]:
        """Return the line of a step."""
        mean = sum(self.rewards) / max(1, len(self.rewards))
        found = {"step": step, "seconds": self.seconds, "tokens": self.tokens, "reward": mean}
        return found | ({"kl": sum(self.kl) / len(self.kl)} if self.kl else {})


def scorer(env: Environment, tasks: Mapping[str, Prompt], meter: Meter) -> Callable[..., Any]:
    """Return the reward function: the environment's score, counted."""

    def score(completions: Any, completion_ids: Any, task: list[str], **more: Any) -> list[float]:
        texts = [messages[-1]["content"] for messages in completions]
        found = [judge(env, tasks[i], text).reward for i, text in zip(task, texts, strict=True)]
        meter.tokens += sum(map(len, completion_ids))
        meter.rewards += found
        return found

    return score


def trainer_class(rates: Sequence[float], meter: Meter) -> Any:
    """Return GRPOTrainer with the race's rates, autocast where it draws, and its mismatch kept."""
    from trl import GRPOTrainer

    class Racer(GRPOTrainer):
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            optimizer = self.optimizer if optimizer is None else optimizer
            per_step = max(1, num_training_steps // len(rates))
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer,
                lambda i: rates[min(i // per_step, len(rates) - 1)] / self.args.learning_rate,
            )
            return self.lr_scheduler

        def _generate_single_turn(self, *args: Any, **more: Any) -> Any:
            with nullcontext() if self.use_vllm else self.accelerator.autocast():
                return super()._generate_single_turn(*args, **more)

        def _generate_and_score_completions(self, *args: Any, **more: Any) -> Any:
            made = super()._generate_and_score_completions(*args, **more)
            if "sampling_per_token_logps" in made:
                terms = k3(made["old_per_token_logps"], made["sampling_per_token_logps"])
                kept = made["completion_mask"].bool()
                meter.kl.append(float(terms[kept].mean()))
            return made

    return Racer


def arguments(asked: Mapping[str, Any], setting: Setting) -> dict[str, Any]:
    """Return the fields of GRPOConfig."""
    micro, minibatches = asked["micro"], asked["minibatches"]
    return {
        **asked["fields"],
        "output_dir": asked["output"],
        "seed": asked["seed"],
        "max_steps": asked["steps"] * minibatches,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": (
            asked["fields"]["generation_batch_size"] // minibatches // micro
        ),
        "shuffle_dataset": False,
        "temperature": 1.0,
        "beta": 0.0,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "optim": "adamw_torch_fused",
        "bf16": setting.bf16,
        "gradient_checkpointing": False,
        "use_vllm": setting.vllm,
        "vllm_mode": "colocate",
        "use_cpu": asked["device"] == "cpu",
        "model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"},
        "report_to": "none",
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


class Evaluator:
    """Greedy scores on the held-out prompts, and the mismatch of some sampled responses."""

    def __init__(self, trainer: Any, tokenizer: Any, env: Environment, asked: Mapping[str, Any]):
        self.trainer, self.tokenizer, self.env = trainer, tokenizer, env
        self.rows = read(asked["test"])
        self.new_tokens = asked["fields"]["max_completion_length"]

    def line(self, mismatch: bool) -> dict[str, float]:
        """Return the score; and the KL of the rollouts to the learner, where it is asked for."""
        model = self.trainer.model
        model.eval()
        with torch.no_grad(), self.trainer.accelerator.autocast():
            found = {"score": self.score(model)}
            if mismatch:
                found["kl"] = self.mismatch(model)
        model.train()
        return found

    def score(self, model: Any) -> float:
        """Return the mean reward of greedy responses."""
        total = 0.0
        for at in range(0, len(self.rows), EVAL_ROWS):
            part = self.rows[at : at + EVAL_ROWS]
            ids, width = self.generate(model, part, do_sample=False)
            texts = self.tokenizer.batch_decode(ids[:, width:], skip_special_tokens=True)
            pairs = zip(part, texts, strict=True)
            total += sum(judge(self.env, row.prompt, text).reward for row, text in pairs)
        return total / len(self.rows)

    def mismatch(self, model: Any) -> float:
        """Return the KL of drawn tokens, by the logits that they were drawn from and by the
        learner's own pass over them."""
        part = self.rows[:MEASURED]
        out, width = self.generate(
            model, part, do_sample=True, output_logits=True, return_dict_in_generate=True
        )
        drawn, logits = out.sequences[:, width:], torch.stack(out.logits, 1).float()
        rollout = logits.log_softmax(-1).gather(-1, drawn[..., None])[..., 0]
        ended = torch.isin(drawn, torch.tensor(self.trainer.eos_token_ids, device=drawn.device))
        kept = ended.int().cumsum(1) - ended.int() == 0  # up to the first end, which counts
        prompts = torch.ones_like(out.sequences[:, :width])
        for i, row in enumerate(part):
            prompts[i, : width - len(row.ids)] = 0
        learner = self.trainer._get_per_token_logps_and_entropies(
            model, out.sequences, torch.cat([prompts, kept.long()], 1), drawn.size(1)
        )[0]
        return float(k3(learner, rollout)[kept].mean())

    def generate(self, model: Any, rows: Sequence[RacePrompt], **how: Any) -> tuple[Any, int]:
        """Return what generate makes of prompts that are padded on the left, and their width."""
        width, pad = max(len(row.ids) for row in rows), self.tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (width - len(row.ids)) + row.ids for row in rows])
        mask = torch.tensor([[0] * (width - len(r.ids)) + [1] * len(r.ids) for r in rows])
        from transformers import GenerationConfig

        ends = {"eos_token_id": self.trainer.eos_token_ids, "pad_token_id": pad}
        top = {"top_k": 0} if how["do_sample"] else {}
        config = GenerationConfig(max_new_tokens=self.new_tokens, **ends, **top, **how)
        device = model.device
        made = model.generate(
            input_ids=ids.to(device), attention_mask=mask.to(device), generation_config=config
        )
        return made, width


def clock(meter: Meter, evaluator: Evaluator, asked: Mapping[str, Any], say: Say) -> Any:
    """Return the callback that times the steps, and evaluates between them."""
    from transformers import TrainerCallback

    def evaluated() -> dict[str, float]:
        return evaluator.line(mismatch=not SETTINGS[asked["setting"]].vllm)

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **more: Any) -> None:
            if asked["interval"]:
                say({"step": 0, **evaluated()})
            meter.clear()

        def on_step_begin(self, *_: Any, **more: Any) -> None:
            self.began = meter.now()

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            meter.seconds += meter.now() - self.began
            step, updates = divmod(state.global_step, asked["minibatches"])
            if updates:
                return
            due = asked["interval"] and (step % asked["interval"] == 0 or step == asked["steps"])
            line = meter.line(step) | (evaluated() if due else {})
            say(line)
            meter.clear()

    return Clock()


def about(trainer: Any, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the versions, and how the trainer was set up."""
    names = ("trl", "transformers", "torch", "accelerate")
    drawn = f"vLLM {version('vllm')}" if trainer.use_vllm else "generate of transformers"
    return {
        **{name: version(name) for name in names},
        "rollouts": drawn,
        "setting": asked["setting"],
        "micro": asked["micro"],
        "threads": torch.get_num_threads(),
    }


def prepared(asked: Mapping[str, Any], meter: Meter) -> tuple[Any, Any, Environment]:
    """Return the trainer, its tokenizer and the environment. ValueError for other token ids."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig

    env = table.make(**asked["env"], seed=asked["seed"])
    rows = read(asked["train"])
    tokenizer = AutoTokenizer.from_pretrained(asked["model"])
    check_ids(tokenizer, rows)
    tasks = {row.prompt.id: row.prompt for row in rows}
    data = [{"prompt": row.prompt.messages, "task": row.prompt.id} for row in rows]
    trainer = trainer_class(asked["rates"], meter)(
        asked["model"],
        reward_funcs=scorer(env, tasks, meter),
        args=GRPOConfig(**arguments(asked, SETTINGS[asked["setting"]])),
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer,
    )
    return trainer, tokenizer, env


def main() -> None:
    """Train, and write a line after each step."""
    asked, say = channel()
    end_with_input()
    meter = Meter(asked["device"])
    with peak(asked["device"], asked["bytes_before"]) as most:
        trainer, tokenizer, env = prepared(asked, meter)
        evaluator = Evaluator(trainer, tokenizer, env, asked)
        trainer.add_callback(clock(meter, evaluator, asked, say))
        say({"ready": True, "about": about(trainer, asked)})
        trainer.train()
        end = {"end": True, "peak_bytes": most(), "folder": asked["output"]}
    if asked["interval"]:
        trainer.save_model(asked["output"])
    say(end)


if __name__ == "__main__":
    main()
