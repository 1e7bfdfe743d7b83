"""The keys of a run's configuration are counted, so that a new one is a decision."""

from __future__ import annotations

from pathlib import Path

from lowroll.config import RunConfig
from lowroll.config.build import known_keys

LIST = Path(__file__).with_name("configuration_keys.txt")


def test_no_key_comes_or_goes_unnoticed() -> None:
    listed, known = LIST.read_text().splitlines(), sorted(known_keys(RunConfig))
    new, gone = sorted({*known} - {*listed}), sorted({*listed} - {*known})
    assert not new, (
        f"new keys: {', '.join(new)}. A key is a decision: each one is documented, tested and kept for users. "
        "Where nobody would choose another value, write a constant. Else say in the change which run needs the key, "
        f"and add it to {LIST.name}, which is sorted"
    )
    assert not gone, (
        f"keys that are gone: {', '.join(gone)}. Take them out of {LIST.name}, and give each a row in "
        "lowroll/config/renamed.py, which says what is there instead"
    )
    assert listed == known, f"{LIST.name} is not sorted, or names a key twice"
