"""lowroll's side of `bench.race`: one run by its configuration, in a process of its own.

The settings have `config`, the run's configuration, `device`, and `bytes_before` of
`bench.worker.peak`. Evaluations are the run's own: greedy, in the rollouts' format, with the clock
stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from bench.worker import channel, end_with_input, peak
from lowroll import __version__
from lowroll.config import RunConfig, from_mapping
from lowroll.runs.assembly.compute import Compute
from lowroll.runs.grpo import run


def lines(records: Iterable[Mapping[str, Any]], env: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of a run's records. env: the name of its environment."""
    for record in records:
        before, after = (record.get(f"eval/{env}/reward{word}") for word in ("_before", ""))
        if before is not None:
            yield {"step": 0, "score": before}
        yield {
            "step": record["step"],
            "seconds": record["time/step"] - record.get("time/eval", 0.0),
            "tokens": round(record["rollout/tokens"]),
            "reward": record["reward/mean"],
            "kl": record.get("mismatch/kl_k3"),
            **{part: record.get(f"time/{part}") for part in ("generate", "learn", "publish")},
            **({} if after is None else {"score": after}),
        }


def about(cfg: RunConfig) -> dict[str, Any]:
    """Return the choices that a run makes where its settings leave them open."""
    chosen = cfg.resolved()
    return {
        "lowroll": __version__,
        "rollouts": chosen.rollout.weights,
        "correction": chosen.correction,
        "forward": chosen.train.forward,
        "dtype": str(Compute.of(chosen).dtype).removeprefix("torch."),
    }


def main() -> None:
    """Make the run, and write its lines when it is over."""
    settings, say = channel()
    end_with_input()
    cfg = from_mapping(settings["config"])
    say({"ready": True, "about": about(cfg)})
    with peak(settings["device"], settings["bytes_before"]) as most:
        result = run(cfg)
        end = {"end": True, "peak_bytes": most(), "folder": str(result.folder / "final")}
    env = cfg.env[0].name or cfg.env[0].id
    for line in lines(result.records, env):
        say(line)
    say(end)


if __name__ == "__main__":
    main()
