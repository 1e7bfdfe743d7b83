"""The cache's memory goes back while a learner runs, and comes back empty."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import hf_folder

from lowroll import Engine, Request


def test_released_memory_comes_back_empty_in_the_same_tensors(tmp_path: Path) -> None:
    engine = Engine(hf_folder(tmp_path / "m"), weights="int8", device="cpu", cache_tokens=256)
    request, cache = Request([5, 6, 7, 8], n=3, max_tokens=20, seed=1, ignore_eos=True), engine.runner.cache
    want = [r.token_ids for r in engine.generate([request])[0].rollouts]
    buffers = [*cache.keys, *cache.values]
    assert any(bool(buffer.any()) for buffer in buffers)
    engine.release()
    engine.release()
    assert all(buffer.untyped_storage().nbytes() == 0 for buffer in buffers)
    cache.restore()
    assert all(a is b for a, b in zip(buffers, [*cache.keys, *cache.values], strict=True))
    assert all(buffer.untyped_storage().nbytes() == buffer.nbytes and not buffer.any() for buffer in buffers)
    for use in (lambda: None, engine.release):
        use()                                         # and without a word, when the next step needs it
        assert [r.token_ids for r in engine.generate([request])[0].rollouts] == want
        use()
        assert torch.isfinite(engine.score([[5, 6, 7]], [1])[0]).all()
    held = [buffer.clone() for buffer in buffers]
    cache.restore()                                   # nothing to do: the pages stay
    assert all(torch.equal(a, b) for a, b in zip(buffers, held, strict=True))
    engine.add(request)
    with pytest.raises(RuntimeError, match="in flight"):
        engine.release()
    assert not cache.released
