"""What the tests of weights share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures.tiny import hf_folder


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model, of the test module's FAMILY."""
    family = getattr(request.module, "FAMILY", "qwen3")
    return hf_folder(tmp_path_factory.mktemp("models") / family, family)
