"""What every row of the tables of algorithms and corrections keeps, and that one file and one row
are all that a new objective takes: the correction `soft` and the algorithm `tight` are made up, the
second of a row alone."""

from __future__ import annotations

import inspect
import math
from pathlib import Path

import pytest
import torch

from docs import tables
from lowroll.config import ConfigError, from_mapping
from lowroll.metrics import names as metrics
from lowroll.objectives.kl import penalty
from lowroll.objectives.mismatch import by_length, by_staleness, mismatch, spread
from lowroll.objectives.objective import INPUTS, named, select
from lowroll.objectives.reduce import Denominators, count
from lowroll.objectives.rejection import rejection
from lowroll.objectives.table import (
    ALGORITHMS,
    CLIP,
    CORRECTIONS,
    MODES,
    RULES,
    Algorithm,
    Correction,
    forms,
)
from tests.fixtures.objectives import random_batch
from tests.fixtures.runs import settings, train

SOFT = Correction(
    "sqrt(min(w, C)) min(R A, clip(R, 1-el, 1+eh) A)",
    "made up",
    "tests.fixtures.soft:soft",
    ("proximal", "behavior"),
    {"cap": 3.0, **CLIP},
)
TIGHT = Algorithm(
    "min(R A, clip(R, 1-el, 1+eh) A), el = eh = .1",
    "made up",
    options={**CLIP, "eps_low": 0.1, "eps_high": 0.1, "reduce": "token-mean"},
    advantage="rloo",
)
NAMES = (*ALGORITHMS, *CORRECTIONS, "soft", "tight")


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CORRECTIONS, "soft", SOFT)
    monkeypatch.setitem(ALGORITHMS, "tight", TIGHT)


def call(name, batch, learner=None, **options):
    return named(name)(
        learner=batch["lpn"] if learner is None else learner,
        proximal=batch["lpo"],
        behavior=batch["lpr"],
        advantages=batch["A"],
        mask=batch["mask"],
        max_length=9,
        **options,
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_option_has_a_default_and_an_argument(name):
    objective = named(name)
    taken = inspect.signature(objective.function).parameters
    assert {*objective.row.options, *objective.row.fixed, *objective.row.log_probs} <= set(taken)
    given = {*objective.options, *objective.row.fixed, *INPUTS}
    assert set(taken) <= given and inspect.Parameter.empty not in objective.options.values()
    assert objective.row.formula and objective.row.source


@pytest.mark.parametrize("name", NAMES)
def test_the_statistics_have_names(name):
    J, statistics = call(name, random_batch(3))
    assert J.isfinite() and statistics
    for statistic, value in statistics.items():
        assert math.isfinite(value) and metrics.find(statistic).meaning


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_add_up(name, mode):
    batch = random_batch(5, B=6, T=9)
    learner, micro = (batch["lpn"].clone().requires_grad_() for _ in range(2))
    whole, _ = call(name, batch, learner, reduce=mode)
    whole.backward()
    parts = [slice(0, 1), slice(1, 4), slice(4, 6)]
    counts = sum((count(mask=batch["mask"][part]) for part in parts), Denominators(0, 0))
    total = 0.0
    for part in parts:
        piece = {key: value[part] for key, value in batch.items()}
        J, _ = call(name, piece, micro[part], reduce=mode, counts=counts)
        J.backward()
        total += J.item()
    assert total == pytest.approx(whole.item(), rel=1e-12, abs=1e-14)
    torch.testing.assert_close(micro.grad, learner.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", NAMES)
def test_masked_tokens_hold_anything_and_only_the_learner_learns(name):
    clean, dirty = random_batch(7), random_batch(7)
    results = []
    for batch, fill in ((clean, -1.0), (dirty, math.nan)):
        for key in ("lpn", "lpo", "lpr", "A"):
            batch[key] = torch.where(batch["mask"], batch[key], fill).requires_grad_()
        J, statistics = call(name, batch)
        J.backward()
        assert all(batch[key].grad is None for key in ("lpo", "lpr", "A"))
        results.append((J.item(), statistics, batch["lpn"].grad))
    assert results[0][:2] == results[1][:2] and torch.equal(results[0][2], results[1][2])
    assert (results[0][2][~clean["mask"]] == 0).all()


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "tight"])
@pytest.mark.parametrize("correction", [*CORRECTIONS, "soft"])
def test_the_settings_take_it(algorithm, correction):
    tree = {"model": "m", "algorithm": algorithm, "correction": correction, "force": True}
    if correction not in ("none", *forms(algorithm)):
        with pytest.raises(ConfigError, match=f"has no form under {algorithm}"):
            from_mapping(tree)
        with pytest.raises(ValueError, match=f"has no form under {algorithm}"):
            select(algorithm, correction)
        return
    cfg, objective = from_mapping(tree), select(algorithm, correction)
    assert from_mapping({"model": "m"}, tree).objective_options == cfg.objective_options
    for name, value in cfg.objective_options.items():
        assert name == "max_length" or value == objective.options[name], name
    batch = random_batch(1)
    J, _ = objective(
        learner=batch["lpn"],
        proximal=batch["lpo"],
        behavior=batch["lpr"],
        advantages=batch["A"],
        mask=batch["mask"],
        **cfg.objective_options,
    )
    assert J.isfinite()


def test_what_is_shared_has_the_defaults_of_the_algorithm():
    cfg = from_mapping({"model": "m", "algorithm": "tight", "correction": "soft"})
    assert (cfg.advantage, cfg.loss.reduce, cfg.loss.eps_high) == ("rloo", "token-mean", 0.1)
    assert select("tight", "soft").options["cap"] == 3.0


def test_the_pages_name_it():
    rows = tables.objectives() + tables.algorithms()
    for name in NAMES:
        formula = named(name).row.formula.replace("|", "\\|")
        assert f"| `{name}` | `{formula}` | learner" in rows
    assert "| `tight` | `rloo` | 0.1 / 0.1 | `token-mean` | no |" in rows


def test_a_run_learns_by_it(model: Path, tmp_path: Path):
    how = {"algorithm": "tight", "correction": "soft", "rollout": {"weights": "int8"}}
    tree = settings(model, tmp_path / "run", train={"max_steps": 2}, **how)
    records = train(tree).records
    assert 0 < records[1]["correction/weight_mean"] <= math.sqrt(2)


def heard(batch, seed):
    """The batch with tokens of an environment in and before its rows: they hold anything."""
    B, T = batch["mask"].shape
    generator = torch.Generator().manual_seed(seed)
    most = T + 7
    columns = torch.stack(
        [torch.randperm(most, generator=generator)[:T].sort()[0] for _ in "x" * B]
    )

    def widened(x):
        anything = torch.where(torch.arange(most) % 2 == 0, -8.0, math.nan).to(x.dtype)
        wide = torch.zeros(B, most, dtype=x.dtype) if x.dtype == torch.bool else anything
        return wide.expand(B, most).clone().scatter(1, columns, x)

    return {key: widened(value) for key, value in batch.items()}, columns


OPTIONS = [(name, {}) for name in NAMES] + [
    ("reweight", {"weight": "sequence"}),
    ("reweight", {"normalize": True, "veto": 0.3}),
    *(
        ("reweight", {"reject": {rule: (0.8, 1.2) if rule.endswith("k1") else 0.1}})
        for rule in RULES
    ),
    ("sparse", {"veto": 0.5, "repair": "mask"}),
    ("sparse", {"normalize_xi": True, "token_rs": (0.5, 1.5)}),
    ("aipo", {"ratio_type": "sequence", "kl_tau": 0.1}),
]


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_an_environments_tokens_count_nowhere(name, options):
    """However many there are, and whatever is said of them."""
    batch = random_batch(11, B=4, T=9)
    wide, columns = heard(batch, 1)
    for mode in MODES:
        found = []
        for one in (batch, wide):
            learner = one["lpn"].clone().requires_grad_()
            J, statistics = call(name, one, learner, reduce=mode, **options)
            J.backward()
            found.append((J.item(), statistics, learner.grad))
        (J, statistics, gradient), (again, others, whole) = found
        assert again == pytest.approx(J, rel=1e-12, abs=1e-14)
        assert others == pytest.approx(statistics, rel=1e-12, abs=1e-14)
        torch.testing.assert_close(whole.gather(1, columns), gradient, rtol=1e-12, atol=1e-14)
        assert whole.scatter(1, columns, 0.0).abs().sum() == 0
    assert gradient.abs().sum() > 0 or "reject" in options


def test_an_environments_tokens_are_not_measured():
    batch = random_batch(13, B=4, T=9)
    wide, _ = heard(batch, 2)
    found = []
    for one in (batch, wide):
        rows, _ = one["mask"].shape
        policies = {
            "learner": one["lpn"].reshape(-1),
            "behavior": one["lpr"].reshape(-1),
            "mask": one["mask"].reshape(-1),
            "segments": torch.arange(rows).repeat_interleave(one["mask"].shape[1]),
        }
        age = (one["A"] > 0).float().reshape(-1)
        kept = one["lpr"].reshape(-1) < -0.5
        rewards = torch.arange(rows, dtype=torch.float64)
        divergence, more = penalty(
            learner=one["lpn"], reference=one["lpo"], mask=one["mask"], reduce="token-mean"
        )
        found.append(
            {
                **mismatch(**policies),
                **by_length(**policies),
                **by_staleness(**policies, staleness=age),
                **rejection(**policies, rewards=rewards, kept=kept, veto=0.5),
                **spread(**policies),
                **more,
                "kl": divergence.item(),
            }
        )
    assert len(found[0]) > 30 and found[1] == pytest.approx(found[0], rel=1e-12, abs=1e-14)
