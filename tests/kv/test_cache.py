"""The cache's memory goes back while a learner runs, and comes back empty; later chunks see all
that came before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lowroll import Engine, Request
from lowroll.kv import attention as kv_attention
from lowroll.kv import virtual_memory as kv_arena
from lowroll.kv.attention import PagedAttention
from lowroll.kv.batch import PromptChunk
from lowroll.kv.cache import KVCache
from lowroll.kv.virtual_memory import VirtualMemory
from lowroll.model import attention
from lowroll.model.attention import AttentionInputs, suffixes, varlen
from lowroll.model.spec import read_spec
from tests.fixtures.tiny import hf_folder

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCE = {"cpu": {"rtol": 1e-5, "atol": 1e-6}, "cuda": {"rtol": 2e-2, "atol": 1e-2}}


@pytest.mark.slow
def test_released_memory_comes_back_empty_in_the_same_tensors(tmp_path: Path) -> None:
    engine = Engine(hf_folder(tmp_path / "m"), weights="int8", device="cpu", cache_tokens=256)
    request, cache = (
        Request([5, 6, 7, 8], n=3, max_tokens=20, seed=1, ignore_eos=True),
        engine.runner.cache,
    )
    want = [r.token_ids for r in engine.generate([request])[0].rollouts]
    buffers = [*cache.keys, *cache.values]
    assert any(bool(buffer.any()) for buffer in buffers)
    engine.release()
    engine.release()
    assert all(buffer.untyped_storage().nbytes() == 0 for buffer in buffers)
    cache.restore()
    assert all(a is b for a, b in zip(buffers, [*cache.keys, *cache.values], strict=True))
    assert all(
        buffer.untyped_storage().nbytes() == buffer.nbytes and not buffer.any()
        for buffer in buffers
    )
    for use in (lambda: None, engine.release):
        use()  # and without a word, when the next step needs it
        assert [r.token_ids for r in engine.generate([request])[0].rollouts] == want
        use()
        assert torch.isfinite(engine.score([[5, 6, 7]], [1])[0]).all()
    cache.restore()
    held = [buffer.clone() for buffer in buffers]
    cache.restore()  # nothing to do: the pages stay
    assert all(torch.equal(a, b) for a, b in zip(buffers, held, strict=True))
    engine.add(request)
    with pytest.raises(RuntimeError, match="in flight"):
        engine.release()
    assert not cache.released


def test_memory_that_does_not_come_back_ends_the_step_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine gives up what was in flight without touching storages that are not there, and goes
    on later."""
    engine = Engine(hf_folder(tmp_path / "m"), weights="int8", device="cpu", cache_tokens=256)
    request = Request([5, 6, 7, 8], n=3, max_tokens=20, seed=1, ignore_eos=True)
    want = [r.token_ids for r in engine.generate([request])[0].rollouts]
    engine.release()

    def full() -> None:
        raise torch.OutOfMemoryError("the learner has it")

    with monkeypatch.context() as patched:
        patched.setattr(engine.runner.cache, "restore", full)
        with pytest.raises(torch.OutOfMemoryError, match="the learner has it"):
            engine.generate([request])
    assert not engine.has_work
    assert [r.token_ids for r in engine.generate([request])[0].rollouts] == want


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("most", [1 << 24, 1300])
@pytest.mark.parametrize(
    "device, dtype",
    [
        ("cpu", torch.float32),
        pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_a_suffix_sees_what_the_whole_sequence_saw(
    device: str, dtype: torch.dtype, most: int, stacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "MOST_SCORES", most)
    totals, lengths = [40, 7, 40, 300, 129, 40, 40], [16, 7, 16, 1, 100, 16, 15]
    g = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(sum(totals), heads, 64, generator=g).to(device, dtype) for heads in (6, 2, 2)
    )
    whole = varlen(totals, device)(0, AttentionInputs(q, k, v)).split(totals)
    ends = [x[-n:] for x, n in zip(q.split(totals), lengths, strict=True)]
    attend = suffixes(lengths, totals, device, stacked)
    got = attend(0, AttentionInputs(torch.cat(ends), k, v)).split(lengths)
    tolerance = TOLERANCE["cpu" if dtype == torch.float32 else "cuda"]
    for x, y, n in zip(got, whole, lengths, strict=True):
        torch.testing.assert_close(x, y[-n:], **tolerance)


@pytest.mark.parametrize("most", [1 << 17, 50])
@pytest.mark.parametrize("device", DEVICES)
def test_chunks_of_many_sequences_attend_over_their_pages(
    device: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two fresh prompts and three later chunks in one step, against each sequence alone and
    whole."""
    monkeypatch.setattr(kv_attention, "MOST_GATHERED", most)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    spec = read_spec(
        hf_folder(tmp_path / "m", num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    )
    cache = KVCache(spec, 64, 4, dtype, device)
    g = torch.Generator().manual_seed(4)
    totals, starts = [9, 30, 21, 48, 5], [0, 16, 20, 4, 0]
    pages = iter((torch.randperm(63, generator=g) + 1).tolist())
    tables = [[next(pages) for _ in range(-(-n // 4))] for n in totals]
    sequences = [
        [torch.randn(n, heads, 64, generator=g).to(device, dtype) for heads in (4, 2, 2)]
        for n in totals
    ]
    for (_, k, v), table, start in zip(sequences, tables, starts, strict=True):
        if start:
            slots = torch.tensor([table[t // 4] * 4 + t % 4 for t in range(start)], device=device)
            cache.write(1, slots, k[:start], v[:start])
    order = [0, 4, 1, 2, 3]
    chunks = [PromptChunk(starts[i], totals[i], tables[i]) for i in order]
    attend = PagedAttention(cache, chunks[:2], chunks[2:])
    inputs = [torch.cat([sequences[i][part][starts[i] :] for i in order]) for part in range(3)]
    got = attend(1, AttentionInputs(*inputs)).split([totals[i] - starts[i] for i in order])
    for i, x in zip(order, got, strict=True):
        want = varlen([totals[i]], device)(1, AttentionInputs(*sequences[i]))[starts[i] :]
        torch.testing.assert_close(x, want, **TOLERANCE[device])


@pytest.mark.parametrize(
    ("most", "portions"),
    [
        (51, [[30, 21], [48]]),
        (50, [[30], [21], [48]]),
        (98, [[30, 21], [48]]),
        (99, [[30, 21, 48]]),
        (1, [[30], [21], [48]]),
    ],
)
def test_what_is_gathered_at_once_stays_within_its_bound(
    most: int, portions: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of the whole sequences count, not of the chunks; a sequence longer than the bound
    comes alone."""
    monkeypatch.setattr(kv_attention, "MOST_GATHERED", most)
    chunks = [PromptChunk(stop - 2, stop, []) for stop in (30, 21, 48)]
    assert [[c.stop for c in some] for some in kv_attention.portions(chunks)] == portions


def test_device_memory_that_fails_half_way_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver of paper: whichever call fails, what was made before it is undone, and a later try
    succeeds."""
    calls: list[str] = []
    failing = ""

    class Driver:
        def __getattr__(self, name: str) -> Callable[..., int]:
            def call(*args: Any) -> int:
                calls.append(name)
                if name == "cuMemGetAllocationGranularity":
                    args[0]._obj.value = 1 << 21
                return int(name == failing)

            return call

    monkeypatch.setattr(kv_arena, "_driver", Driver)
    monkeypatch.setattr(VirtualMemory, "tensor", lambda self: torch.ones(1))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    virtual_memory = VirtualMemory(100, torch.device("cpu", 0))
    virtual_memory.release()
    for failing, undone in (
        ("cuMemCreate", []),
        ("cuMemMap", ["cuMemRelease"]),
        ("cuMemSetAccess", ["cuMemUnmap", "cuMemRelease"]),
    ):
        calls.clear()
        with pytest.raises(RuntimeError, match=failing):
            virtual_memory.restore()
        assert [
            name for name in calls if name in ("cuMemUnmap", "cuMemRelease")
        ] == undone and not virtual_memory.mapped
    failing = ""
    virtual_memory.restore()
    assert virtual_memory.mapped
    virtual_memory.release()
    virtual_memory._address = None  # nothing for the real driver to free
