"""A probe that exits with 0 where a Ray cluster answers clients without a token. Its one argument
is the cluster's address.

A process of its own, since Ray reads at its import whether it has a token.
"""

from __future__ import annotations

import sys
from importlib import import_module

ANSWER_S = 10.0

if __name__ == "__main__":
    client = import_module("ray._raylet").GcsClient(address=sys.argv[1])
    client.internal_kv_keys(b"", None, timeout=ANSWER_S)
