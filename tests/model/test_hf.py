"""Folders in and out (rung P8), what is refused and in which words, and the tokenizer that lies
beside the weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lowroll.model import hf, lora, shards, tokenizer
from lowroll.model.attention import varlen
from lowroll.model.families.table import FAMILIES as CONFIGS
from lowroll.model.names import dtype_of
from lowroll.model.spec import spec_from_config
from lowroll.model.tokenizer import ChatTokenizer, load_tokenizer
from lowroll.runs.demo import build_tokenizer
from lowroll.weights.publish import quantize_base
from tests.fixtures.json_files import edit_json
from tests.fixtures.sequences import IDS, logits
from tests.fixtures.tiny import (
    COMMON,
    FAMILIES,
    LLAMA3_ROPE,
    MODELS,
    hf_config,
    hf_folder,
    hf_model,
)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folder(tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture
def folder(qwen3: Path, tmp_path: Path) -> Path:
    """A copy of a good folder, for a test to damage."""
    return Path(shutil.copytree(qwen3, tmp_path / "m"))


@torch.no_grad()
def their_logits(folder: Path, **options: Any) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, **options
    ).eval()
    return model(IDS[None]).logits[0]


def edit_config(folder: Path, **changes: Any) -> None:
    edit_json(folder / "config.json", **changes)


def edit_weights(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    path.unlink()  # the loaded tensors may be views of the file
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def shard(folder: Path) -> dict[str, str]:
    """Rewrite a folder as shards with an index, by transformers; returns the index's weight map."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


# -- there and back --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_save_then_load_is_bitwise_under_hf_names(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    theirs = hf_model(family).to(dtype)
    theirs.save_pretrained(tmp_path / "theirs")
    first = hf.load(tmp_path / "theirs", dtype=dtype)
    hf.save(first, tmp_path / "ours")
    again = hf.load(tmp_path / "ours", dtype=dtype)
    assert first.spec == again.spec
    for (name, p), (_, q) in zip(first.named_parameters(), again.named_parameters(), strict=True):
        assert p.dtype == dtype_of(name, dtype) and torch.equal(p, q), name
    original = load_file(tmp_path / "theirs" / "model.safetensors")
    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert original.keys() == written.keys()  # fused names stay inside
    assert all(
        torch.equal(original[name], written[name].to(dtype))
        and written[name].dtype == dtype_of(name, dtype)
        for name in original
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_what_we_save(family: str, tmp_path: Path) -> None:
    model = hf.load(hf_folder(tmp_path / "theirs", family))
    hf.save(model, tmp_path / "ours")
    assert (their_logits(tmp_path / "ours") - logits(model)).abs().max() < 1e-4


@pytest.mark.parametrize("format", ["int8", "int4", "nvfp4", "int8_rotated"])
@pytest.mark.parametrize("family", ["phi3-partial", "glm"])
def test_low_bit_folders_of_fused_matrices(family: str, format: str, tmp_path: Path) -> None:
    """There and back bitwise; transformers reads what it has an implementation of."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = quantize_base(hf.load(hf_folder(tmp_path / "m", family, **sizes, **heads)), format)
    hf.save(model, tmp_path / "low")
    with safe_open(tmp_path / "low" / "model.safetensors", framework="pt") as opened:
        assert any("mlp.gate_up_proj." in name for name in opened.keys())
    again = hf.load(tmp_path / "low")
    assert again.weight_format == format and torch.equal(logits(again), logits(model))
    if format == "int4":
        want = their_logits(tmp_path / "low")
        assert (logits(again) - want).abs().max() < 1e-4 * want.abs().max() + 1e-4


@pytest.mark.parametrize("family", ["qwen3", "qwen2-tied", "llama-biases"])
def test_shards_load_as_the_single_file_does(family: str, tmp_path: Path) -> None:
    single = hf.load(hf_folder(tmp_path / "m", family))
    assert (
        len(set(shard(tmp_path / "m").values())) > 2
        and not (tmp_path / "m" / "model.safetensors").exists()
    )
    sharded = hf.load(tmp_path / "m")
    assert all(
        torch.equal(p, q) for p, q in zip(single.parameters(), sharded.parameters(), strict=True)
    )


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_what_we_shard_transformers_loads_and_no_bit_differs(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_folder(tmp_path / "m", family)
    model = hf.load(tmp_path / "m")
    hf.save(model, tmp_path / "single")
    monkeypatch.setattr(shards, "SHARD_BYTES", 20_000)
    hf.save(model, tmp_path / "several")
    index = json.loads((tmp_path / "several" / shards.INDEX).read_text())
    names = sorted(set(index["weight_map"].values()))
    assert names == sorted(p.name for p in (tmp_path / "several").glob("*.safetensors"))
    assert len(names) > 2 and names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    held = [load_file(tmp_path / "several" / name) for name in names]
    assert all(
        len(part) == 1 or sum(tensor.nbytes for tensor in part.values()) <= 20_000 for part in held
    )
    assert index["metadata"]["total_size"] == sum(t.nbytes for part in held for t in part.values())
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "several", output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    one, other = (hf.load(tmp_path / name) for name in ("single", "several"))
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_single_file_wins_over_an_index_beside_it_as_in_transformers(
    folder: Path, tmp_path: Path
) -> None:
    other = hf_folder(tmp_path / "other", seed=7)
    shard(other)
    for path in other.glob("model*"):
        shutil.copy(path, folder / path.name)
    assert (logits(hf.load(folder)) - their_logits(folder)).abs().max() < 1e-4


def test_the_file_may_be_wider_than_the_model(folder: Path) -> None:
    """A float32 file read as bfloat16 is rounded once; what overflows there is refused by name."""
    wide, narrow = hf.load(folder, dtype=torch.float32), hf.load(folder, dtype=torch.bfloat16)
    assert all(
        torch.equal(p.bfloat16(), q)
        for p, q in zip(wide.parameters(), narrow.parameters(), strict=True)
    )
    edit_weights(folder, lambda t: t["model.norm.weight"].fill_(3.4028e38))
    hf.load(folder, dtype=torch.float32)
    with pytest.raises(
        ValueError, match=r"model\.norm\.weight holds a value that is not finite in bfloat16"
    ):
        hf.load(folder, dtype=torch.bfloat16)


def test_repeated_lm_head_and_rotary_tables_of_old_checkpoints_are_accepted(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m", "qwen2-tied")
    want = logits(hf.load(folder))
    edit_weights(
        folder,
        lambda t: t.update(
            {
                "lm_head.weight": t["model.embed_tokens.weight"].clone(),
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
            }
        ),
    )
    assert torch.equal(logits(hf.load(folder)), want)


def test_save_refuses_what_it_would_lose(folder: Path, tmp_path: Path) -> None:
    model = hf.load(folder)
    hf.save(model, tmp_path / "out")
    with pytest.raises(FileExistsError, match="out"):
        hf.save(model, tmp_path / "out")  # never over something else
    lora.attach(model, rank=2, alpha=4)
    with pytest.raises(ValueError, match=r"blocks\.0\.qkv.*adapter"):
        hf.save(model, tmp_path / "adapted")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "out"]


# -- refusals: one line, which names what is wrong -------------------------------------------------


def refused(folder: Path | str, *words: str) -> None:
    with pytest.raises(ValueError) as caught:
        hf.load(folder)
    message = str(caught.value)
    assert "\n" not in message.strip() and all(word in message for word in words), message


def drop(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


def put(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update(
        {name: value(tensors.get(name, torch.zeros(3))).contiguous()}
    )


def set_last(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[-1] = value
        return tensor

    return change


K0, UP1, NORM = (
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.1.mlp.up_proj.weight",
    "model.norm.weight",
)
BAD_WEIGHTS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], tuple[str, ...]]] = {
    "missing matrix": (drop(K0), ("missing", K0)),
    "missing norm": (drop(NORM), ("missing", NORM)),
    "missing lm_head": (drop("lm_head.weight"), ("missing", "lm_head.weight")),
    "extra tensor": (
        put("model.layers.2.self_attn.q_proj.weight", lambda t: t),
        ("unexpected", "layers.2.self_attn"),
    ),
    "extra bias": (
        put("model.layers.0.self_attn.q_proj.bias", lambda t: t),
        ("unexpected", "q_proj.bias"),
    ),
    "transposed": (
        put("model.layers.1.mlp.down_proj.weight", lambda t: t.t()),
        ("wrong shape", "down_proj", "[48, 32]", "[32, 48]"),
    ),
    "cut vocabulary": (
        put("lm_head.weight", lambda t: t[:-1]),
        ("wrong shape", "lm_head.weight", "[66, 32]"),
    ),
    "NaN": (put(UP1, set_last(float("nan"))), (UP1, "not finite", "model.safetensors")),
    "inf": (put(NORM, set_last(float("inf"))), (NORM, "not finite")),
    "-inf in the last tensor": (
        put("lm_head.weight", set_last(float("-inf"))),
        ("lm_head.weight", "not finite"),
    ),
    "int8": (put(K0, lambda t: t.to(torch.int8)), (K0, "I8")),
    "float64": (put(NORM, lambda t: t.double()), (NORM, "F64")),
}


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_bad_weights(case: str, folder: Path) -> None:
    edit, words = BAD_WEIGHTS[case]
    edit_weights(folder, edit)
    refused(folder, *words)


def test_a_tied_checkpoint_with_another_lm_head(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m", "qwen2-tied")
    edit_weights(
        folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1e-3})
    )
    refused(folder, "tie_word_embeddings", "lm_head.weight", "differs")


def test_an_index_that_lies(folder: Path) -> None:
    weight_map = shard(folder)
    names = sorted(set(weight_map.values()))
    name = next(n for n, s in weight_map.items() if s == names[0])
    write_index(folder, {**weight_map, name: names[1]})
    refused(folder, "index.json", name)  # it is in another shard
    write_index(folder, {n: s for n, s in weight_map.items() if n != name})
    refused(folder, "index.json", name)  # stored, not listed
    write_index(folder, {**weight_map, "model.ghost": names[0]})
    refused(folder, "index.json", "model.ghost")  # listed, not stored
    write_index(folder, weight_map)
    hf.load(folder)
    (folder / names[1]).unlink()
    refused(folder, "index.json", names[1], "missing")


BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "code": ({"auto_map": {"AutoModelForCausalLM": "modeling.Evil"}}, "auto_map"),
    "architecture": ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
    "no architecture": ({"architectures": None}, "architectures"),
    "quantized": ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    "yarn without numbers": ({"rope_parameters": {"rope_type": "yarn", "factor": -1}}, "factor"),
    "long rope": ({"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
    "half rope": (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "partial_rotary_factor",
    ),
    "rope by layer": (
        {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}},
        "rope_parameters",
    ),
    "half llama3": ({"rope_parameters": {**LLAMA3_ROPE, "factor": None}}, "factor"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act"),
    "odd head": ({"head_dim": 7}, "head_dim"),
    "groups": ({"num_key_value_heads": 3}, "num_key_value_heads"),
    "linear attention": (
        {"layer_types": ["linear_attention", "full_attention"]},
        "linear_attention",
    ),
    "no sizes": ({"hidden_size": None}, "hidden_size"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_configs(case: str, folder: Path) -> None:
    changes, word = BAD_CONFIGS[case]
    edit_config(folder, **changes)
    refused(folder, "config.json", word)


WINDOW = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 0}
WRONG = ("x", "", [], [None], {}, {"a": {}}, -1, 0, 1.5, float("nan"), True, None)
# what these keys may hold all the same
ALLOWED: dict[str, list[object]] = {
    **dict.fromkeys(("vocab_size", "hidden_size", "max_position_embeddings"), []),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads"), []),
    **dict.fromkeys(("intermediate_size", "num_key_value_heads", "head_dim"), [None]),
    "rms_norm_eps": [1.5],
    "tie_word_embeddings": [True],
    "eos_token_id": [[], 0, None],
}


@pytest.mark.parametrize("model_type", CONFIGS)
def test_every_wrong_type_in_a_config_is_named(model_type: str) -> None:
    """Whatever a key holds, the answer is a spec or a ValueError that names the key; never another
    exception."""
    theirs = next(config for config in map(hf_config, FAMILIES) if config.model_type == model_type)
    row = CONFIGS[model_type]
    window = WINDOW if model_type == "qwen3" else {}
    config = {
        **json.loads(theirs.to_json_string(use_diff=False)),
        "architectures": [row.architecture],
        "rope_scaling": None,
        "attention_bias": False,
        "layer_types": None,
        **window,
    }
    spec_from_config(config)
    # of older files, or of those of the hub alone
    others: dict[str, Any] = {"attn_output_gate": True, "output_gate_type": "swish"}
    others |= {"scoring_func": None, "topk_method": None, "mlp_layer_types": None}
    others |= {"first_k_dense_replace": 1, "moe_layer_freq": 1, "num_nextn_predict_layers": 1}
    config |= {key: others.get(key, 6) for key in row.keys if key not in config}
    answered = 0
    for key in config:
        for value in WRONG:
            try:
                spec_from_config({**config, key: value})
                assert value in ALLOWED.get(key, WRONG), (key, value)
            except ValueError as error:
                assert key in str(error) or (key, value) == ("use_sliding_window", "x"), (
                    key,
                    value,
                    error,
                )
                answered += 1
    assert answered > 80


WINDOWS: dict[str, tuple[str, dict[str, Any], bool]] = {
    # name: (architecture, config keys, is the window active within the context of 256?)
    "mistral": ("Mistral", {"sliding_window": 255}, True),
    "mistral, window as long as the context": ("Mistral", {"sliding_window": 256}, False),
    "mistral, none": ("Mistral", {"sliding_window": None}, False),
    "mistral knows no switch": (
        "Mistral",
        {"sliding_window": 8, "use_sliding_window": False},
        True,
    ),
    "qwen2, switched off": ("Qwen2", {"sliding_window": 8, "use_sliding_window": False}, False),
    "qwen2, silent": ("Qwen2", {"sliding_window": 8}, False),
    "qwen2, upper layer": (
        "Qwen2",
        {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
        True,
    ),
    "qwen2, no layer": (
        "Qwen2",
        {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
        False,
    ),
    "qwen2, every layer": (
        "Qwen2",
        {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0},
        True,
    ),
    "qwen3, long": (
        "Qwen3",
        {"sliding_window": 300, "use_sliding_window": True, "max_window_layers": 0},
        False,
    ),
    "layer types": (
        "Qwen3",
        {
            "sliding_window": 8,
            "use_sliding_window": True,
            "layer_types": ["full_attention", "sliding_attention"],
        },
        True,
    ),
    "layer types, all full": (
        "Qwen3",
        {
            "sliding_window": 8,
            "use_sliding_window": True,
            "max_window_layers": 0,
            "layer_types": ["full_attention", "full_attention"],
        },
        False,
    ),
    "llama ignores it": ("Llama", {"sliding_window": 8}, False),
}


@pytest.mark.parametrize("case", WINDOWS)
def test_windows_are_used_exactly_when_transformers_uses_them(case: str, tmp_path: Path) -> None:
    kind, changes, active = WINDOWS[case]
    torch.manual_seed(0)
    full = {**COMMON, "head_dim": 8, **changes} if kind != "Qwen2" else {**COMMON, **changes}
    config = getattr(transformers, f"{kind}Config")(**full, attn_implementation="eager")
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    ids = torch.randint(0, 67, (256,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = model(ids[None]).logits[0]
    model.save_pretrained(tmp_path / "m")
    # an older config has no list of layers
    edit_config(tmp_path / "m", **{"layer_types": ...} | changes)
    loaded = hf.load(tmp_path / "m")
    with torch.no_grad():
        ours = loaded.logits(loaded(ids, torch.arange(256), loaded.causal([256])))
        full = loaded.logits(loaded(ids, torch.arange(256), varlen([256])))
    assert (ours - theirs).abs().max() < 1e-4
    assert bool(loaded.spec.windows) == active
    assert ((full - theirs).abs().max() > 1e-4) == active


def test_a_model_that_is_neither_folder_nor_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "no-such-model",
        "./missing",
        str(tmp_path / "missing"),
        "a/b/c",
        "~/surely-not-here",
    ):
        refused(name, name, "neither a folder, nor a hub id")

    def unreachable(*_args: object, **_options: object) -> str:
        raise OSError("no route to the hub\nsecond line")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    refused("owner/name", "owner/name", "OSError", "no route to the hub")


def test_supported_architectures_are_those_of_the_families() -> None:
    assert {MODELS.get(kind, f"{kind}ForCausalLM") for kind, _ in FAMILIES.values()} == {
        family.architecture for family in CONFIGS.values()
    }


# -- the tokenizer beside the weights --------------------------------------------------------------


def test_tokenizer_and_chat_template_travel_with_the_model(folder: Path, tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(folder)
    hf.save(hf.load(folder), tmp_path / "out", tokenizer_from=folder)
    for place in (folder, tmp_path / "out"):
        chat = ChatTokenizer(load_tokenizer(place))
        ids = chat.encode_chat(
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Añ 🙂"}]
        )
        special = {
            name: chat.tokenizer.convert_tokens_to_ids(f"<|{name}|>")
            for name in ("system", "user", "end", "assistant")
        }
        bytes_of = chat.tokenizer.encode
        assert ids == [
            special["system"],
            *bytes_of("Be brief."),
            special["end"],
            special["user"],
            *bytes_of("Añ 🙂"),
            special["end"],
            special["assistant"],
        ]
        assert len(bytes_of("Añ 🙂")) == len("Añ 🙂".encode())
        for text in ("plain", " two  spaces , and a comma .", "Añ 🙂\n\ttab", "don ' t"):
            response = chat.encode_response(text)
            assert (
                response[-1] == chat.tokenizer.eos_token_id == special["end"]
                and chat.decode(response) == text
            )


def test_tokenizers_that_do_not_load(qwen3: Path) -> None:
    with pytest.raises(ValueError, match=f"{qwen3}: no tokenizer here"):
        load_tokenizer(qwen3)
    plain = build_tokenizer()
    plain.chat_template = None
    with pytest.raises(ValueError, match="chat template"):
        ChatTokenizer(plain)


def test_headers_are_checked_before_anything_is_allocated(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_weights(folder, drop(UP1))
    monkeypatch.setattr(
        hf,
        "Transformer",
        lambda *_: pytest.fail("a model was made before the headers were checked"),
    )
    refused(folder, UP1)
    with safe_open(folder / "model.safetensors", framework="pt") as opened:
        assert UP1 not in opened.keys()


def test_the_end_of_sequence_is_read_without_transformers(
    tmp_path: Path, qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The id that transformers says; and where the files do not say it, or not well, transformers
    is asked."""
    build_tokenizer().save_pretrained(tmp_path)
    want = load_tokenizer(tmp_path).eos_token_id
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    asked = []
    monkeypatch.setattr(
        tokenizer, "load_tokenizer", lambda folder: asked.append(folder) or load_tokenizer(folder)
    )
    for eos in (config["eos_token"], {"content": config["eos_token"], "__type": "AddedToken"}):
        path.write_text(json.dumps({**config, "eos_token": eos}))
        assert tokenizer.eos_id(tmp_path) == want and not asked
    path.write_text(json.dumps({key: value for key, value in config.items() if key != "eos_token"}))
    assert tokenizer.eos_id(tmp_path) == load_tokenizer(tmp_path).eos_token_id and len(asked) == 1
    path.write_text(json.dumps({**config, "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}))
    with pytest.raises(ValueError, match="auto_map"):
        tokenizer.eos_id(tmp_path)
    for damage in ("{", "[]", '{"added_tokens": [1]}', '{"added_tokens": 1}'):
        build_tokenizer().save_pretrained(tmp_path)
        (tmp_path / "tokenizer.json").write_text(damage)
        with pytest.raises(ValueError, match=f"{tmp_path}/tokenizer.json: "):
            tokenizer.eos_id(tmp_path)
    with pytest.raises(ValueError, match="no tokenizer here"):
        tokenizer.eos_id(qwen3)
