"""A format for each linear layer, under one name."""

import pytest
import torch

from lowroll.quant import mixed
from lowroll.quant.formats import get_format
from lowroll.quant.mixed import Mixed

ASSIGNMENT = {"blocks.0.qkv": "int8", "blocks.0.o": "nvfp4", "blocks.0.down": "fp32"}
SIZES = {"blocks.0.qkv": 300, "blocks.0.o": 600, "blocks.0.down": 100}


def test_a_plain_format_is_that_of_every_layer() -> None:
    assert get_format("int8").of("blocks.0.qkv") is get_format("int8")


def test_a_mixed_format_says_which_each_layer_has() -> None:
    form = get_format(mixed.register(ASSIGNMENT, SIZES))
    assert {layer: form.of(layer).name for layer in ASSIGNMENT} == ASSIGNMENT
    assert form.bits == pytest.approx(0.3 * 8 + 0.6 * 4.5 + 0.1 * 32)
    assert not form.dense and form.dtype is None
    with pytest.raises(ValueError, match=r"assigns no format to blocks\.1\.o"):
        form.of("blocks.1.o")
    with pytest.raises(ValueError, match="none was named"):
        form.quantize(torch.ones(2, 2))


def test_its_name_is_a_function_of_the_assignment() -> None:
    name = mixed.register(ASSIGNMENT, SIZES)
    assert name == "mixed-" + name[6:] and len(name) == 14
    assert mixed.register(dict(reversed(ASSIGNMENT.items())), SIZES) == name
    assert mixed.register(ASSIGNMENT | {"blocks.0.o": "int8"}, SIZES) != name


def test_one_format_for_all_layers_is_that_format() -> None:
    assert mixed.register(dict.fromkeys(ASSIGNMENT, "nvfp4"), SIZES) == "nvfp4"


def test_what_it_states_is_read_again() -> None:
    name = mixed.register(ASSIGNMENT, SIZES)
    form = get_format(name)
    assert isinstance(form, Mixed)
    assert form.stated()["nvfp4"] == {"blocks.0.o": 600}
    assert mixed.read(form.stated()) == name


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ([], "names no layer"),
        ({"int8": []}, "names no layer"),
        ({"int7": {"blocks.0.o": 1}}, "'int7' is none of"),
        ({"int8": {"blocks.0.o": 0}}, "its number of weights"),
        ({"int8": {"blocks.0.o": True}}, "its number of weights"),
        ({"int8": {"blocks.0.o": 1}, "fp8": {"blocks.0.o": 1}}, "once"),
        ({"mixed-00000000": {"blocks.0.o": 1}}, "is none of"),
    ],
)
def test_what_states_no_assignment_is_refused(stated: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        mixed.read(stated)


def test_dense_layers_have_the_runs_own_dtype() -> None:
    layers = {"a": "dense", "b": "int8"}
    assert mixed.in_dtype(layers, torch.bfloat16) == {"a": "bf16", "b": "int8"}
    with pytest.raises(ValueError, match="float16"):
        mixed.in_dtype(layers, torch.float16)


def test_a_name_that_was_never_registered_is_unknown() -> None:
    with pytest.raises(ValueError, match="unknown weight format 'mixed-00000000'"):
        get_format("mixed-00000000")
