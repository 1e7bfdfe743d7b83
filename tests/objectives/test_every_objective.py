"""What every row of the tables of algorithms and corrections keeps, and that one file and one row
are all that a new objective takes: the correction `soft` and the algorithm `tight` are made up, the
second of a row alone."""

from __future__ import annotations

import copy
import inspect
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from docs import tables
from lowroll.config import ConfigError, from_mapping
from lowroll.metrics import names as metrics
from lowroll.objectives.kl import penalty
from lowroll.objectives.mismatch import by_length, by_staleness, mismatch, spread
from lowroll.objectives.objective import GIVEN, named, select
from lowroll.objectives.reduce import Denominators
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
from tests.fixtures.objectives import VARIANTS, batch_with_teacher, call, pack
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
CASES = {name: (name, {}) for name in NAMES} | VARIANTS
# rows that no log-probs of a behaviour enter
BEHAVIOR_FREE = (*ALGORITHMS, "tight", "none")
RULES_ALONE = [
    ("reweight", {"reject": {rule: (0.8, 1.2) if rule.endswith("k1") else 0.1}}) for rule in RULES
]


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CORRECTIONS, "soft", SOFT)
    monkeypatch.setitem(ALGORITHMS, "tight", TIGHT)


@pytest.mark.parametrize("name", NAMES)
def test_every_option_has_a_default_and_an_argument(name):
    objective = named(name)
    taken = inspect.signature(objective.function).parameters
    assert {*objective.row.options, *objective.row.fixed} <= {*taken, "reduce"}
    given = {*objective.options, *objective.row.fixed, *GIVEN}
    assert set(taken) <= given and inspect.Parameter.empty not in objective.options.values()
    assert objective.row.formula and objective.row.source


@pytest.mark.parametrize("name", NAMES)
def test_the_statistics_have_names(name):
    J, statistics = call(name, batch_with_teacher(3))
    assert J.isfinite() and statistics
    for statistic, value in statistics.items():
        assert math.isfinite(value) and metrics.find(statistic).meaning


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
    batch = batch_with_teacher(1)
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


# -- packed, micro-batched, masked -----------------------------------------------------------------


def counted(case, batch, segments=None):
    name, options = case
    return named(name).count(
        mask=batch["mask"],
        proximal=batch["lpo"],
        behavior=batch["lpr"],
        segments=segments,
        **options,
    )


@hypothesis_settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    case=st.sampled_from(sorted(CASES)),
    mode=st.sampled_from(MODES),
)
def test_packed_equals_padded(seed, case, mode):
    name, options = CASES[case]
    batch = batch_with_teacher(seed, B=3, T=5)
    batch["mask"][-1, 0] = True  # the last segment id must occur for S to be known without counts
    order = torch.randperm(int(batch["mask"].sum()), generator=torch.Generator().manual_seed(seed))
    if "repair" in options:  # the tokens of a sequence come in their order
        order = batch["mask"].nonzero()[:, 1].argsort(stable=True)
    packed, segments = pack(batch, order)
    padded_learner, packed_learner = (x["lpn"].clone().requires_grad_() for x in (batch, packed))
    J_padded, stats_padded = call(name, batch, padded_learner, reduce=mode, **options)
    J_packed, stats_packed = call(
        name, packed, packed_learner, reduce=mode, segments=segments, **options
    )
    J_padded.backward()
    J_packed.backward()
    assert J_packed.item() == pytest.approx(J_padded.item(), rel=1e-12, abs=1e-14)
    assert stats_packed == pytest.approx(stats_padded, rel=1e-12, abs=1e-14)
    expected = pack(batch | {"lpn": padded_learner.grad}, order)[0]["lpn"]
    torch.testing.assert_close(packed_learner.grad, expected, rtol=1e-12, atol=1e-14)
    assert counted(CASES[case], packed, segments).weight_sum == pytest.approx(
        counted(CASES[case], batch).weight_sum
    )


@pytest.mark.parametrize("case", CASES)
def test_micro_batches_add_up(case):
    """In float32, with a row that is masked whole and a token without a behaviour."""
    name, options = CASES[case]
    batch = {
        key: value.float() if value.is_floating_point() else value
        for key, value in batch_with_teacher(5, 6, 9).items()
    }
    batch["mask"][2] = False
    batch["lpr"][1, batch["mask"][1].nonzero()[0, 0]] = -math.inf
    parts = [
        {key: value[rows] for key, value in batch.items()}
        for rows in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    counts = sum((counted(CASES[case], part) for part in parts), Denominators(0, 0))
    dropped = int(named(name).needs_behavior)
    assert (counts.num_tokens, counts.num_sequences) == (int(batch["mask"].sum()) - dropped, 6)
    assert (counts.weight_sum > 0) == named(name).normalizes(**options)
    for mode in MODES:
        learner = batch["lpn"].clone().requires_grad_()
        whole, _ = call(name, batch, learner, reduce=mode, **options)
        whole.backward()
        total, gradients = 0.0, []
        for part in parts:
            micro = part["lpn"].clone().requires_grad_()
            J, _ = call(name, part, micro, reduce=mode, counts=counts, **options)
            J.backward()
            total += J.item()
            gradients.append(micro.grad)
        assert total == pytest.approx(whole.item(), rel=1e-5, abs=1e-6)
        torch.testing.assert_close(torch.cat(gradients), learner.grad, rtol=1e-5, atol=1e-7)
        assert learner.grad.abs().sum() > 0


@pytest.mark.parametrize("case", CASES)
def test_masked_tokens_hold_anything(case):
    name, options = CASES[case]
    results = []
    for fill in (-1.0, math.nan, -math.inf, math.inf, 1e30):
        batch = batch_with_teacher(7)
        assert not batch["mask"].all()
        for key in ("lpn", "lpo", "lpr", "lpt", "A"):
            batch[key] = torch.where(batch["mask"], batch[key], fill)
        learner = batch["lpn"].requires_grad_()
        J, stats = call(name, batch, learner, **options)
        J.backward()
        assert (learner.grad[~batch["mask"]] == 0).all()
        results.append((J.item(), stats, learner.grad.tolist(), counted(CASES[case], batch)))
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("case", CASES)
def test_an_empty_mask_gives_zero_and_zero_gradient(case):
    name, options = CASES[case]
    for mode in MODES:
        batch = batch_with_teacher(3)
        batch["mask"][:] = False
        learner = (batch["lpn"] + math.nan).requires_grad_()
        J, stats = call(name, batch, learner, reduce=mode, **options)
        J.backward()
        assert J.item() == 0 and torch.equal(learner.grad, torch.zeros_like(learner))
        assert all(math.isfinite(value) for value in stats.values())
        empty = {key: value[:0, 0] for key, value in batch.items()}
        learner = empty["lpn"].requires_grad_()
        none = torch.zeros(0, dtype=torch.int64)
        J, _ = call(name, empty, learner, reduce=mode, segments=none, **options)
        J.backward()
        assert J.item() == 0


@pytest.mark.parametrize("missing", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize(
    "case", [case for case, (name, _) in CASES.items() if name not in BEHAVIOR_FREE]
)
def test_a_token_without_a_behavior_is_dropped_and_counted(case, missing):
    name, options = CASES[case]
    batch, without = batch_with_teacher(11), batch_with_teacher(11)
    row, column = batch["mask"].nonzero()[2].tolist()
    batch["lpr"][row, column] = missing
    without["mask"][row, column] = False
    learner = batch["lpn"].clone().requires_grad_()
    J, stats = call(name, batch, learner, **options)
    J.backward()
    expected, expected_stats = call(name, without, **options)
    assert J.item() == expected.item()
    assert learner.grad[row, column] == 0
    assert stats == expected_stats | {"correction/dropped_tokens": 1}
    assert counted(CASES[case], batch) == counted(CASES[case], without)


@pytest.mark.parametrize("case", CASES)
def test_extreme_ratios_stay_finite(case):
    name, options = CASES[case]
    batch = {
        "lpn": torch.tensor([[-200.0, -1e-3]]).requires_grad_(),
        "lpo": torch.tensor([[-1e-3, -200.0]]),
        "lpr": torch.tensor([[-300.0, -1e-3]]),
        "lpt": torch.tensor([[-1e-3, -200.0]]),
        "mask": torch.ones(1, 2),
    }
    for sign in (1.0, -1.0):
        J, stats = call(name, batch | {"A": torch.full((1, 2), sign)}, **options)
        (gradient,) = torch.autograd.grad(J, batch["lpn"])
        assert J.isfinite() and gradient.isfinite().all()
        assert all(map(math.isfinite, stats.values()))


@pytest.mark.parametrize("case", CASES)
def test_a_non_finite_learner_shows(case):
    name, options = CASES[case]
    batch = batch_with_teacher(2)
    batch["lpn"][batch["mask"]] = math.nan
    assert call(name, batch, **options)[0].isnan()


@pytest.mark.parametrize("case", CASES)
def test_only_the_learner_carries_gradient_and_halves_are_upcast(case):
    name, options = CASES[case]
    batch = batch_with_teacher(1)
    batch = {k: v.requires_grad_() if v.is_floating_point() else v for k, v in batch.items()}
    call(name, batch, **options)[0].backward()
    assert batch["lpn"].grad is not None
    assert all(batch[key].grad is None for key in ("lpo", "lpr", "lpt", "A"))
    halves = {k: v.detach().bfloat16() if v.is_floating_point() else v for k, v in batch.items()}
    upcast = {k: v.float() if v.is_floating_point() else v for k, v in halves.items()}
    J, _ = call(name, halves, **options)
    assert J.dtype == torch.float32 and J.item() == call(name, upcast, **options)[0].item()


# -- tokens of an environment ----------------------------------------------------------------------


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


@pytest.mark.parametrize(("name", "options"), [*CASES.values(), *RULES_ALONE])
def test_an_environments_tokens_count_nowhere(name, options):
    """However many there are, and whatever is said of them."""
    batch = batch_with_teacher(11, B=4, T=9)
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
    batch = batch_with_teacher(13, B=4, T=9)
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


def test_an_objective_can_be_copied_after_its_use() -> None:
    """With options that are its caller's own."""
    objective = named("grpo")
    objective.options["eps_low"] = 0.5
    assert objective.options["eps_low"] != 0.5
    assert copy.deepcopy(objective) == objective
