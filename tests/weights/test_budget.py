"""The order of steps of a budget's search, by hand."""

from __future__ import annotations

from lowroll.weights.format_search import _Choice, _hull


def hull(*choices: tuple[str, int, float]) -> list[str]:
    return [choice.format for choice in _hull([_Choice(*choice) for choice in choices])]


def test_a_layers_choices_are_those_that_no_mix_of_two_others_beats() -> None:
    assert hull(("a", 4, 1.0), ("b", 8, 0.1), ("c", 16, 0.0)) == ["a", "b", "c"]
    assert hull(("a", 4, 1.0), ("b", 8, 0.9), ("c", 16, 0.0)) == ["a", "c"]  # b is above the line
    assert hull(("a", 4, 1.0), ("b", 8, 1.2), ("c", 16, 0.0)) == ["a", "c"]  # more bits for worse


def test_of_two_formats_of_one_size_the_nearer_one_is_left() -> None:
    assert hull(("int8", 8, 0.5), ("int8_rotated", 8, 0.1), ("dense", 32, 0.0)) == [
        "int8_rotated",
        "dense",
    ]
    assert hull(("int8_rotated", 8, 0.1), ("int8", 8, 0.5)) == ["int8_rotated"]
