"""On a CUDA device: the kernels of compaction against plain torch, and engines whose steps are
captured with either."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lowroll import Engine, Request
from lowroll.kernels import launch
from lowroll.kernels.kv_eviction import score
from lowroll.kernels.kv_eviction.choose import best_and_last
from lowroll.kernels.kv_eviction.move import move
from lowroll.kernels.kv_eviction.recording import add_attended, remember
from lowroll.kv.batch import DecodeRows
from lowroll.kv.policy.h2o import attended
from lowroll.kv.policy.rkv import RKV
from lowroll.kv.policy.snapkv import AttentionSelector, SnapKV
from lowroll.kv.policy.table import make
from lowroll.model import hf
from tests.fixtures.compact import Moves, Pages
from tests.fixtures.engines import prompt
from tests.fixtures.tiny import hf_folder

pytestmark = pytest.mark.gpu

CASES = [
    ([640, 9, 640, 129, 300, 513], 28, 4, 128, 16, torch.bfloat16),
    ([640] * 40, 28, 4, 128, 16, torch.bfloat16),
    ([64, 65, 640], 7, 1, 64, 32, torch.float16),
    ([700, 80], 8, 8, 128, 16, torch.bfloat16),
    ([700, 80], 8, 1, 128, 32, torch.float32),
    ([200], 12, 2, 80, 4, torch.bfloat16),
    ([9000, 640], 6, 2, 128, 16, torch.bfloat16),
]


def by_kernels(policy: SnapKV, pages: Pages) -> Tensor:
    lengths_B, redundant_LBGN, mix = pages.lengths, None, 1.0
    important_LBGN = score.importance(pages.ring, pages.keys, *pages.at)
    if isinstance(policy, RKV):
        mix = policy.mix
        redundant_LBGN = score.redundancy(pages.keys, pages.table, lengths_B, policy.zero_first)
    return score.join(important_LBGN, redundant_LBGN, lengths_B, 8, policy.kernel, mix)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "policy", [SnapKV(9, 1), RKV(9, 1, mix=0.3), RKV(9, 1, zero_first=True)], ids=["snap", "r", "z"]
)
def test_scores_are_those_of_plain_torch_and_choose_the_same_keys(
    case: tuple, policy: SnapKV
) -> None:
    pages = Pages(*case, device="cuda")
    got = by_kernels(policy, pages)
    for kept in (9, max(9, min(min(case[0]), 512))):
        chosen = best_and_last(got, pages.lengths, kept, 8)
        for layer in range(2):
            want = policy.scores(*pages.plain(layer, torch.float64), pages.lengths)
            check(got[layer], want, chosen[layer], case[0], kept)


def check(got: Tensor, want: Tensor, chosen: Tensor, lengths: list[int], kept: int) -> None:
    """Scores within rounding, and the oracle's best keys: another one only where its score is
    within the rounding of the K-th."""
    near = {"rtol": 5e-5, "atol": 5e-7}
    for row, length in enumerate(lengths):
        mine, oracle = (x[row, :, : length - 8].double() for x in (got, want))
        torch.testing.assert_close(mine, oracle, **near)
        most = min(kept, length) - 8
        keys = chosen[row, :, :most].long()
        least = oracle.topk(most).values[:, -1:]
        slack = 2 * (near["atol"] + near["rtol"] * least.abs())
        assert (oracle.gather(1, keys) >= least - slack).all()
        left = oracle.scatter(1, keys, -torch.inf)
        assert (left <= least + slack).all() and (keys.diff() > 0).all()


def test_the_choice_is_a_stable_sorts() -> None:
    g = torch.Generator(device="cuda").manual_seed(2)
    for widest, kept in ((640, 512), (641, 640), (5000, 512), (40000, 512), (30, 20)):
        score_LBGN = torch.randn(2, 3, 4, widest, device="cuda", generator=g)
        score_LBGN = torch.where(score_LBGN > 0.5, score_LBGN, (score_LBGN * 4).round())  # ties
        lengths = torch.tensor([widest, kept, (widest + kept) // 2], device="cuda").int()
        got = best_and_last(score_LBGN, lengths, kept, 8)
        with patch.object(launch, "triton", None):
            assert torch.equal(got, best_and_last(score_LBGN, lengths, kept, 8))


@pytest.mark.parametrize("seed", range(40))
def test_what_stays_moves_in_place(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    page, heads, layers = (4, 16, 1, 32)[seed % 4], 1 + seed % 4, 2
    moves = Moves(seed, page, heads, layers, "cuda")
    kinds = []
    columns = ((128, torch.bfloat16), (96, torch.uint8), (1, torch.float32), (2, torch.uint8))
    for width, dtype in columns:
        shape = (layers, 1000, page, heads, width)
        kinds.append(list(torch.randint(100, shape, generator=g).to("cuda", dtype).unbind()))
    want = [[x.clone() for x in buffers] for buffers in kinds]
    move(kinds, moves.table, moves.kept, moves.slots)
    with patch.object(launch, "triton", None):
        move(want, moves.table, moves.kept, moves.slots)
    for got, expected in zip(kinds, want, strict=True):
        assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("case", CASES[:6])
def test_watching_a_step_in_a_graph(case: tuple) -> None:
    pages = Pages(*case, device="cuda")
    lengths, heads, kv_heads, d, page, dtype = case
    g = torch.Generator(device="cuda").manual_seed(3)
    q = torch.randn(len(lengths), heads, d, device="cuda", generator=g).to(dtype)
    ring = torch.zeros_like(pages.ring[0])
    scores = torch.zeros(len(lengths) + 3, kv_heads, pages.table.shape[1] * page, device="cuda")
    live, positions = pages.lengths.clone(), pages.lengths.long()

    def step() -> None:
        remember(ring, pages.slots, positions, q)
        add_attended(scores, q, pages.keys[1], pages.slots, pages.table, live)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for shorter in (0, 3, 8):
        live.copy_((pages.lengths - shorter).masked_fill(pages.lengths == 65, 0))
        ring.zero_()
        scores.zero_()
        graph.replay()
        want = torch.zeros_like(scores)
        want[pages.slots] = attended(q[:, None], pages.plain(1)[1], live[:, None] - 1)
        torch.testing.assert_close(scores, want, rtol=2e-5, atol=1e-6)
        assert torch.equal(ring[pages.slots, positions % 8], q)
        assert int(ring.any(-1).any(-1).sum()) == len(lengths)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("name", ["snapkv", "rkv", "h2o", "streaming"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_engines_keep_what_plain_torch_keeps(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared prompts over and under the limit. The tokens are equal where no two scores are within
    rounding: always in float32, for most samples in bfloat16."""
    shapes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    master = hf.load(hf_folder(tmp_path / "m", hidden_size=128, **shapes), "cuda", dtype)
    requests = [
        Request(prompt(size, size), n=8, max_tokens=80, seed=size, ignore_eos=True)
        for size in (9, 30, 70)
    ]
    weights = "fp32" if dtype == torch.float32 else "bf16"

    def run() -> list[list[int]]:
        kv = make(name, budget=32, buffer=16)
        engine = Engine(master, weights=weights, kv=kv, cache_tokens=8192, max_batch=32)
        groups = engine.generate(requests)
        return [rollout.token_ids for group in groups for rollout in group.rollouts]

    fused = run()
    monkeypatch.setattr("lowroll.kv.policy.h2o.add_supports", lambda *_: False)
    monkeypatch.setattr(AttentionSelector, "compact", plain_compact)
    for module in ("choose", "move"):
        monkeypatch.setattr(
            f"lowroll.kernels.kv_eviction.{module}.triton_supports", lambda _: False
        )
    plain = run()
    same = sum(map(list.__eq__, fused, plain))
    assert same == len(plain) if dtype == torch.float32 else same > len(plain) // 2


def plain_compact(self: AttentionSelector, rows: DecodeRows, kept: int) -> Tensor:
    layers = range(len(self.cache.keys))
    return torch.stack([self._compact_layer(layer, rows, kept) for layer in layers])
