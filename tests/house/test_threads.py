"""How OpenMP's threads wait: chosen when lowroll is imported before torch, unless somebody has
chosen."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ASK = "import os, {imports}; print(os.environ.get('GOMP_SPINCOUNT'))"


@pytest.mark.parametrize(
    ("imports", "chosen", "spins"),
    [
        ("lowroll", {}, "1000"),
        ("lowroll", {"GOMP_SPINCOUNT": "7"}, "7"),
        ("lowroll", {"OMP_WAIT_POLICY": "active"}, "None"),
        ("sys; sys.modules['torch'] = sys; import lowroll", {}, "None"),
    ],
)
def test_threads_spin_for_a_moment_only(imports: str, chosen: dict[str, str], spins: str) -> None:
    bare = {
        key: value for key, value in os.environ.items() if not key.startswith(("GOMP_", "OMP_WAIT"))
    }
    done = subprocess.run(
        [sys.executable, "-c", ASK.format(imports=imports)],
        env=bare | chosen,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == f"{spins}\n", done.stderr
