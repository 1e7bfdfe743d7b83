"""A prompt that is fed once for all its responses gives the results of one that is fed with each:
attention, packing, and whole updates in every family."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowroll.kernels.batch_invariant import rows
from lowroll.model import hf, lora
from lowroll.model.attention import AttentionInputs, varlen
from lowroll.model.shared_prompts import PromptGroup, grouped
from lowroll.model.transformer import Transformer
from lowroll.parallel.ranks import ALONE
from lowroll.trainer.mismatch_probe import probe
from lowroll.trainer.optim import OptimSettings
from lowroll.trainer.packing import PackedBatch, collate, num_fed_together, pack
from lowroll.trainer.step import PackedForward, learn
from lowroll.types import Batch, Sample
from lowroll.weights.aligned_forward import align, refresh
from tests.fixtures.exact import CPU, exact_model
from tests.fixtures.learner import Probe, make_batch, settings, tiny_model
from tests.fixtures.prompt_groups import alone
from tests.fixtures.samples import sample
from tests.fixtures.tiny import FAMILIES, hf_folder


def random_group(rng: random.Random) -> PromptGroup:
    return PromptGroup(
        rng.randint(1, 9), tuple(rng.choice([0, 1, 7]) for _ in range(rng.randint(1, 4)))
    )


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_in_groups_is_attention_over_whole_sequences(seed: int, has_sinks: bool) -> None:
    rng = random.Random(seed)
    groups = [random_group(rng) for _ in range(rng.randint(1, 4))]
    rows, lengths = alone(groups)
    tokens = sum(prompt + sum(responses) for prompt, responses in groups)
    generator = torch.Generator().manual_seed(seed)
    sinks = torch.randn(4, generator=generator).requires_grad_(True) if has_sinks else None
    q, k, v = (
        torch.randn(tokens, heads, 8, generator=generator).requires_grad_(True)
        for heads in (4, 2, 2)
    )
    upstream = torch.randn(tokens, 4, 8, generator=generator)
    shared = grouped(groups)(0, AttentionInputs(q, k, v, sinks))
    whole = varlen(lengths)(0, AttentionInputs(q[rows], k[rows], v[rows], sinks))
    torch.testing.assert_close(shared[rows], whole, atol=1e-5, rtol=1e-5)
    # a row that stands in several sequences passes its gradient on once
    times = torch.bincount(torch.tensor(rows), minlength=tokens).clamp(min=1)[:, None, None]
    inputs = [x for x in (q, k, v, sinks) if x is not None]
    got = torch.autograd.grad((shared * upstream).sum(), inputs)
    want = torch.autograd.grad((whole * (upstream / times)[rows]).sum(), inputs)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, atol=1e-5, rtol=1e-4)


def random_samples(seed: int) -> list[Sample]:
    rng = random.Random(seed)
    prompts = [[rng.randint(2, 60) for _ in range(rng.randint(1, 9))] for _ in range(4)]
    return [
        sample(list(rng.choice(prompts)), [rng.randint(2, 60) for _ in range(rng.randint(1, 9))])
        for _ in range(rng.randint(1, 14))
    ]


@pytest.mark.parametrize("seed", range(20))
def test_packing_keeps_every_sample_and_the_bound(seed: int) -> None:
    samples = random_samples(seed)
    capacity, ranks = random.Random(seed).choice([(12, 1), (30, 1), (30, 3), (200, 2)])
    portions = [range(0, len(samples), 2), range(1, len(samples), 2)]
    costs = [1.0 + len(one.prompt_ids) for one in samples]
    packed = pack(samples, portions, capacity, costs, ranks, share_prompts=True)
    assert sorted(chain.from_iterable(packed)) == list(range(len(samples)))
    for indices in packed:
        batch = collate(samples, indices, share_prompts=True)
        assert len(indices) == 1 or loaded(batch) <= capacity
        assert len({i % 2 for i in indices}) == 1


def loaded(batch: PackedBatch) -> int:
    rest, total = iter(batch.chosen), 0
    for group in batch.groups:
        total += num_fed_together([next(rest) for _ in group.responses])
    return total


@pytest.mark.parametrize("seed", range(20))
def test_a_packed_batch_has_each_sequence(seed: int) -> None:
    samples = random_samples(seed)
    (indices,) = pack(samples, [range(len(samples))], 10_000, share_prompts=True)
    batch = collate(samples, indices, share_prompts=True)
    rows, lengths = alone(batch.groups)
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    want = [[*one.prompt_ids, *one.rollout.token_ids] for one in batch.chosen]
    assert [batch.ids_T[rows[a:b]].tolist() for a, b in pairwise(bounds)] == [
        ids[:-1] for ids in want
    ]
    for a, b in pairwise(bounds):
        assert batch.pos_T[rows[a:b]].tolist() == list(range(b - a))
    # the hidden state of a token predicts the next
    following = {}
    for (a, b), ids in zip(pairwise(bounds), want, strict=True):
        following |= {(row, n): ids[n + 1] for n, row in enumerate(rows[a:b])}
    predicted = [(int(row), int(batch.pos_T[row])) for row in batch.index_N]
    assert all(place in following for place in predicted)
    assert torch.equal(batch.predicting(batch.ids_T), batch.ids_T[batch.index_N])
    last_seen = [batch.ids_T[row] for row in batch.index_N]
    before = [
        ids[len(one.prompt_ids) - 1 : -1] for one, ids in zip(batch.chosen, want, strict=True)
    ]
    assert [int(x) for x in last_seen] == list(chain.from_iterable(before))
    distinct = {tuple(one.prompt_ids) for one in samples}
    assert len(batch.groups) == len(distinct)


def updated(
    model: Transformer, batch: Batch, **more: object
) -> tuple[dict[str, float], list[dict[str, Tensor]]]:
    optimizer = Probe(model.trainable_parameters(), OptimSettings(learning_rate=1e-4))
    metrics = learn(model, batch, optimizer, settings(**more))
    return metrics, optimizer.seen


def assert_same_update(model_of, batch: Batch, within: float = 2e-4, **more: object) -> None:
    shared, gradients = updated(model_of(), batch, share_prompts=True, **more)
    whole, want = updated(model_of(), batch, share_prompts=False, **more)
    assert shared == pytest.approx(whole, rel=1e-3, abs=1e-5)
    for got_update, want_update in zip(gradients, want, strict=True):
        for name, gradient in want_update.items():
            bound = within * float(gradient.abs().max()) + 1e-6
            assert (got_update[name] - gradient).abs().max() <= bound, name


CASES = {
    "plain": {},
    "kl": {"kl_coef": 0.1},
    "ppo": {"algorithm": "ppo"},
    "gspo": {"algorithm": "gspo", "correction": "tis"},
    "small": {"tokens_per_microbatch": 9},
    "large": {"tokens_per_microbatch": 4096},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1, 2, 8])
def test_an_update_is_that_of_whole_sequences(name: str, size: int) -> None:
    batch = make_batch(tiny_model(), size=size)

    def model() -> Transformer:
        trained = tiny_model()
        return lora.attach(trained, rank=2, alpha=4, seed=0) if name == "kl" else trained

    assert_same_update(lambda: ready(model()), batch, **CASES[name])


def ready(model: Transformer) -> Transformer:
    has_adapter = any(linear.adapter is not None for _, linear in model.linears())
    return model if has_adapter else model.requires_grad_(True)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_learns_the_same(family: str, tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m", family)
    rng = random.Random(3)
    vocab = hf.load(folder).spec.vocab_size
    samples = []
    for group in range(3):
        prompt = [rng.randrange(2, vocab) for _ in range(11)]
        for k in range(3):
            ids = [rng.randrange(2, vocab) for _ in range(rng.choice([1, 4, 13]))]
            samples.append(sample(list(prompt), ids, [-3.0] * len(ids), None, 1.0 - k, group))
    batch = Batch(1, samples, 1.0)

    def model() -> Transformer:
        return hf.load(folder).requires_grad_(True)

    spec = model().spec
    assert model().can_share_prompts == (spec.delta is None and not any(spec.windows))
    assert_same_update(model, batch, within=1e-3)


def test_an_aligned_forward_learns_the_same() -> None:
    batch = make_batch(tiny_model(), size=4)

    def model() -> Transformer:
        aligned = align(tiny_model().requires_grad_(True), "int8")
        refresh(aligned)
        return aligned

    assert_same_update(model, batch, within=1e-3)


def test_a_batch_without_a_shared_prompt_keeps_its_bits() -> None:
    batch = make_batch(tiny_model(), groups=6, size=1)
    prompts = {tuple(one.prompt_ids) for one in batch.samples}
    assert len(prompts) == len(batch.samples)
    metrics = [
        updated(ready(tiny_model()), batch, share_prompts=share)[0] for share in (True, False)
    ]
    assert metrics[0] == metrics[1]


def test_ratios_are_one_until_the_weights_change() -> None:
    """The pass without a gradient is packed as the update, bit for bit."""
    model = ready(tiny_model())
    batch = make_batch(model, groups=6, size=4)
    forward = PackedForward.of(model, batch, settings(share_prompts=True), ALONE)
    portion = [range(len(batch.samples))]
    before = forward.run(portion).log_probs
    after = forward.run(portion, lambda packed, learner_N: learner_N.sum()).log_probs
    assert before.keys() == after.keys()
    assert all(torch.equal(before[i], after[i]) for i in before)


def test_a_prompt_is_fed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default; not where a cache is replayed."""
    model = tiny_model()
    batch = make_batch(model, groups=2, size=4)
    fed: list[int] = []
    plain = Transformer.forward
    monkeypatch.setattr(
        Transformer,
        "forward",
        lambda self, ids, *rest: fed.append(len(ids)) or plain(self, ids, *rest),
    )

    def tokens(**more: object) -> int:
        fed.clear()
        assert probe(model, batch, settings(**more)) is not None
        return sum(fed)

    responses = sum(len(one.rollout.token_ids) - 1 for one in batch.samples)
    prompts = {one.group: len(one.prompt_ids) for one in batch.samples}
    assert tokens() == sum(prompts.values()) + responses
    whole = sum(len(one.prompt_ids) for one in batch.samples) + responses
    assert tokens(share_prompts=False) == tokens(replay_kv=True) == whole


EXACT = pytest.mark.skipif(
    not rows.supports_device(CPU), reason="needs a CPU with AVX2 and a C++ compiler"
)


@EXACT
@pytest.mark.parametrize(
    ("format", "adapter"),
    [("fp32", False), ("int8_rotated", True), ("mixed", True), ("int4", False), ("nvfp4", True)],
)
@pytest.mark.parametrize(
    "family", ["qwen3", "llama-biases", "qwen2-tied", "qwen3-moe", "deepseek-v2"]
)
def test_an_exact_learner_shares_prompts_with_the_same_bits(
    family: str, format: str, adapter: bool, tmp_path: Path
) -> None:
    """Also where a block of 64 keys begins in the prompt and ends in a response."""
    heads = 2 if family == "deepseek-v2" else 1
    sizes = {"num_attention_heads": 2, "num_key_value_heads": heads, "head_dim": 16}
    folder = hf_folder(tmp_path / "m", family, **sizes)
    model = exact_model(folder, format, adapter)
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(2, model.spec.vocab_size) for _ in range(count)]

    groups = [(ids(prompt), [ids(n) for n in (1, 2, 30, 70)]) for prompt in (1, 5, 50, 64, 90)]
    samples = [
        sample(prompt, response, [0.0] * len(response), [1] * len(response), 1.0, group)
        for group, (prompt, responses) in enumerate(groups)
        for response in responses
    ]
    assert model.can_share_prompts

    def log_probs(share: bool, capacity: int) -> list[Tensor]:
        forward = PackedForward(model, samples, capacity, 32, share_prompts=share)
        found = forward.run([range(len(samples))]).log_probs
        return [found[i] for i in range(len(samples))]

    whole = log_probs(False, 200)
    for capacity in (200, 4096):
        assert all(map(torch.equal, log_probs(True, capacity), whole))


@EXACT
def test_an_exact_learner_learns_the_same(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m", "qwen3", head_dim=16)
    batch = make_batch(exact_model(folder, "int8", True), groups=5, size=4)
    assert_same_update(lambda: exact_model(folder, "int8", True), batch, within=1e-3)


def test_temperatures_are_not_mixed() -> None:
    batch = make_batch(tiny_model(), size=4)
    samples = [replace(one, temperature=(0.7, 1.1)[i % 2]) for i, one in enumerate(batch.samples)]
    assert_same_update(lambda: ready(tiny_model()), Batch(1, samples, 1.0))
