"""The report's sample rollouts of several steps, with the gold answers."""

from __future__ import annotations

import html
import json
import statistics
from pathlib import Path
from typing import Any

from lowroll.checkpoint.line_checksum import read_objects
from lowroll.metrics.page import escape, gold_answer, transcript

Record = dict[str, Any]
STEPS = 5  # the first, the last, and evenly spaced ones between
A_STEP = 8  # scored samples a step
ERRORS = 2  # samples a step with a failed score
_MAX_TEXT_LENGTH = 8000  # characters of a text
_SUMMARY_LENGTH = 160  # characters


def sample_section(run_dir: Path, notes: list[str]) -> str:
    """Return the section; what is missing or unreadable is added to `notes`."""
    files = sorted((run_dir / "rollouts").glob("step_*.jsonl"))
    if not files:
        notes.append("no sample rollouts: rollouts/ is absent or empty")
        return ""
    sections = []
    for path in _evenly_spaced(files, STEPS):
        try:
            objects, problems = read_objects(path)
            notes += [
                f"rollouts/{path.name}: line {text.removeprefix(f'{path}:')}; left out"
                for text in problems
            ]
            samples = [record for record in objects if record.get("kind") != "batch"]
            sample_details = [
                _sample_details(label, sample) for label, sample in _pick_samples(samples)
            ]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            notes.append(f"rollouts/{path.name} is unreadable: {error}")
            continue
        step = path.stem.removeprefix("step_").lstrip("0") or "0"
        sections.append(
            f"<details class=step open><summary>Step {html.escape(step)}: {len(sample_details)} of {len(samples)} "
            f"rollouts</summary>{''.join(sample_details)}</details>"
        )
    search = "<p><input id=search type=search placeholder='search the samples' hidden><span id=found></span></p>"
    return (
        f"<section><h2>Sample rollouts</h2>{search}{''.join(sections)}</section>"
        if sections
        else ""
    )


def _evenly_spaced(items: list[Any], count: int) -> list[Any]:
    if len(items) <= count:
        return items
    return [items[round(index * (len(items) - 1) / (count - 1))] for index in range(count)]


def _pick_samples(samples: list[Record]) -> list[tuple[str, Record]]:
    scored = sorted(
        (s for s in samples if s["score"]["type"] == "Score"),
        key=lambda s: -float(s["score"]["reward"]),
    )
    failed = [("no score", s) for s in samples if s["score"]["type"] != "Score"][:ERRORS]
    picked = [("", sample) for sample in _evenly_spaced(scored, A_STEP)]
    if picked:
        picked[-1] = ("worst", picked[-1][1])
        picked[0] = ("best", picked[0][1])
    return picked + failed


def _sample_details(label: str, sample: Record) -> str:
    rollout, score = sample["rollout"], sample["score"]
    behavior, prompt = rollout["behavior"], sample["prompt"]
    scored = score["type"] == "Score"
    logprobs = _drawn_logprobs(rollout)
    reward = f"{float(score['reward']):.3f}" if scored else f"{score['kind']}: {score['message']}"
    versions = ", ".join(map(str, sorted({span["version"] for span in behavior["policy"]})))
    mean_log_prob = f"{statistics.fmean(logprobs):.3f}" if logprobs else "-"
    facts = (
        f"environment {prompt['env']}, {prompt['id']}; {len(logprobs)} tokens{_turns(sample)}, ended by "
        f"{rollout['finish_reason']}, mean log-prob {mean_log_prob}; advantage {float(sample['advantage']):+.2f}; "
        f"drawn by {behavior['weights']} v{versions}"
    )
    last_message = prompt["messages"][-1].get("content", "") if prompt["messages"] else ""
    title = f"<b>{escape(reward, 60)}</b><i>{label}</i>{_summary_line(last_message)} → {_summary_line(sample['text'])}"
    texts = [
        ("prompt", transcript(prompt["messages"])),
        _gold_answer(prompt.get("info") or {}),
        response_text(sample),
    ]
    if not scored:
        texts.append(("score", reward))
    if score.get("extra"):
        texts.append(("logged", json.dumps(score["extra"], ensure_ascii=False, indent=1)))
    body = "".join(
        f"\n<h4>{name}</h4>\n<pre>{escape(text, _MAX_TEXT_LENGTH)}</pre>" for name, text in texts
    )
    return f"<details class=sample><summary>{title}</summary>{body}<p>{escape(facts, 400)}</p></details>"


def _drawn_logprobs(rollout: Record) -> list[float]:
    logprobs = [float(value) for value in rollout["logprobs"]]
    turns = rollout.get("turns")
    if not turns:
        return logprobs
    return [logprob for turn in turns for logprob in logprobs[turn["start"] : turn["end"]]]


def _turns(sample: Record) -> str:
    turns = sample["rollout"].get("turns")
    return f" in {len(turns)} turns ({sample.get('ended')})" if turns else ""


def response_text(sample: Record) -> tuple[str, str]:
    """Return the kind and text of a response or conversation."""
    conversation = sample.get("messages")
    if conversation is None:
        return "response", sample["text"]
    return "conversation", "\n".join(map(_message_text, conversation))


def _message_text(message: Record) -> str:
    calls = message.get("tool_calls") or []
    call_texts = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
    return "\n".join([transcript([message]), *call_texts])


def _gold_answer(info: Record) -> tuple[str, str]:
    has_only_data = info and "answer" not in info
    return "what the scorer knows" if has_only_data else "gold answer", gold_answer(info)


def _summary_line(text: object) -> str:
    return escape(" ".join(str(text).split()), _SUMMARY_LENGTH)
