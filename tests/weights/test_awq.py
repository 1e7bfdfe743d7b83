"""AWQ: the function stays, the quantized blocks lose less and never more, and the search is that of
the formula."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import lowroll
from lowroll.cli.main import main
from lowroll.model import hf, lora
from lowroll.model.attention import varlen
from lowroll.model.rope import rotations
from lowroll.model.transformer import Transformer, whole
from lowroll.quant.formats import get_format
from lowroll.runs.calibration import calibration_sequences
from lowroll.runs.demo import build_tokenizer
from lowroll.weights import awq, blockwise
from lowroll.weights.publish import quantize_base, rollout_copy
from tests.fixtures.loud import TEXT, logits, loud
from tests.fixtures.tiny import CALIBRATED, NORMED_UPDATES, hf_folder

LOW_BIT = [name for name in lowroll.formats() if not get_format(name).dense]


@pytest.mark.slow
@pytest.mark.parametrize("family", CALIBRATED)
def test_the_dense_model_stays(tmp_path: Path, family: str) -> None:
    model = loud(tmp_path / "m", family)
    before, weights = (
        logits(model),
        {name: p.detach().clone() for name, p in model.named_parameters()},
    )
    records = awq.calibrate(model, "int4", TEXT)
    assert (logits(model) - before).abs().max() <= 3e-5 * before.abs().max()
    assert any(record.kept for record in records)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, weights[name])}
    for i, record in enumerate(records):
        folded = {
            part for part, ratio in record.ratios.items() if record.kept and ratio is not None
        }
        assert (f"blocks.{i}.qkv.weight" in changed) == bool({"qkv", "o"} & folded)
        assert (f"blocks.{i}.input_norm.weight" in changed) == ("qkv" in folded)
        assert (f"blocks.{i}.post_attention_norm.weight" in changed) == ("gate_up" in folded)
        assert (f"blocks.{i}.down.weight" in changed) == ("down" in folded)
        has_heads = model.spec.num_heads == model.spec.num_kv_heads
        assert list(record.ratios) == ["qkv", *["o"] * has_heads, "gate_up", "down"]
    may = (
        "input_norm.weight",
        "post_attention_norm.weight",
        "qkv.weight",
        "o.weight",
        "gate_up.weight",
        "down.weight",
        "qkv.bias",
        "gate_up.bias",
    )
    assert all(name.endswith(may) for name in changed)


@pytest.mark.slow
@pytest.mark.parametrize("format", LOW_BIT)
def test_a_quantized_block_is_never_worse(tmp_path: Path, format: str) -> None:
    """Measured here again, block by block, on the dense model's inputs; and loud channels are worth
    the search."""
    model, plain = (loud(tmp_path / name, "llama-biases") for name in "ab")
    records = awq.calibrate(model, format, TEXT)
    lengths = [len(row) for row in TEXT]
    attend, pos = varlen(lengths), torch.tensor([i for n in lengths for i in range(n)])
    x = F.embedding(torch.tensor([t for row in TEXT for t in row]), plain.embedding)
    cos, sin = rotations(pos, plain.freqs)
    low, low_plain = (rollout_copy(m, format, torch.float32) for m in (model, plain))
    with torch.no_grad():
        for i, record in enumerate(records):
            dense = whole(plain.blocks[i], x, cos, sin, attend)
            error, plain_error = (
                float((whole(m.blocks[i], x, cos, sin, attend) - dense).square().mean())
                for m in (low, low_plain)
            )
            assert record.error == pytest.approx(error, rel=1e-3)
            assert record.plain_error == pytest.approx(plain_error, rel=1e-3)
            assert (
                record.error <= record.plain_error
                and (record.error < record.plain_error) == record.kept
            )
            x = dense
    assert sum(r.error for r in records) < (
        0.9 if format not in ("fp8", "fp8_block") else 1.0
    ) * sum(r.plain_error for r in records)


@pytest.mark.slow
def test_the_whole_model_loses_less_on_other_text(tmp_path: Path) -> None:
    plain, model = loud(tmp_path / "a"), loud(tmp_path / "b")
    dense = logits(plain).log_softmax(-1)
    awq.calibrate(model, "int4", TEXT)

    def kl(m: Transformer) -> float:
        return float(
            (dense.exp() * (dense - logits(rollout_copy(m, "int4", torch.float32)).log_softmax(-1)))
            .sum(-1)
            .mean()
        )

    assert kl(model) < 0.8 * kl(plain)


def test_factors_by_hand() -> None:
    """wm = mean over the rows of |w| / amax(group of 2); s = xm^r / (wm^(1-r) + 1e-4), over
    sqrt(max min)."""
    w = torch.tensor([[1.0, -2.0, 0.5, 0.25], [4.0, 1.0, 0.0, -3.0]])
    size = torch.tensor(
        [(0.5 + 1) / 2, (1 + 0.25) / 2, (1 + 0) / 2, (0.5 + 1) / 2], dtype=torch.float64
    )
    x = torch.tensor([4.0, 1.0, 0.25, 9.0])
    for ratio in (0.0, 0.5, 0.95):
        s = x.double() ** ratio / (size ** (1 - ratio) + 1e-4)
        expected = (s / (s.max() * s.min()).sqrt()).float()
        torch.testing.assert_close(awq.factors(w, x, ratio, 2), expected, rtol=1e-6, atol=0)
    row = torch.tensor([(0.5 + 1) / 2, (1 + 0.25) / 2, (0.25 + 0) / 2, (0.125 + 0.75) / 2])
    s = 1 / (row + 1e-4)
    torch.testing.assert_close(
        awq.factors(w, x, 0.0, None), s / (s.max() * s.min()).sqrt(), rtol=1e-6, atol=0
    )
    silent = awq.factors(
        w, torch.tensor([1.0, 0.0, 1.0, 1.0]), 0.5, 2
    )  # a channel that never speaks
    assert silent.isfinite().all() and silent.min() > 0 and silent.argmin() == 1


@pytest.mark.slow
def test_the_search_is_the_formula(tmp_path: Path) -> None:
    """gate and up of the first block, searched by plain loops over one sequence."""
    model, oracle = loud(tmp_path / "a"), loud(tmp_path / "b")
    text = TEXT[:1]
    ratio = awq.calibrate(model, "int4", text)[0].ratios["gate_up"]
    block, n = oracle.blocks[0], len(text[0])
    with torch.no_grad():
        x = F.embedding(torch.tensor(text[0]), oracle.embedding)
        cos, sin = rotations(torch.arange(n), oracle.freqs)
        x = x + block.attention(block.input_norm(x), cos, sin, varlen([n]))
        h, w = block.post_attention_norm(x), block.gate_up.weight
        target, errors = block.mlp(h), {}
        size = (w.abs() / w.abs().amax(1, keepdim=True)).mean(
            0
        )  # 32 features: one group of at most 128 a row
        for i in range(20):
            s = h.abs().mean(0) ** (i / 20) / (size ** (1 - i / 20) + 1e-4)
            s = s / (s.max() * s.min()).sqrt()
            rounded = get_format("int4").quantize(w * s).dequantize() / s
            gate, up = F.linear(h, rounded).chunk(2, -1)
            errors[i / 20] = float((block.down(F.silu(gate) * up) - target).square().mean())
        gate, up = F.linear(h, get_format("int4").quantize(w).dequantize()).chunk(2, -1)
        plain = float((block.down(F.silu(gate) * up) - target).square().mean())
    best = min(errors, key=errors.__getitem__)
    assert errors[best] < plain and ratio == best


@pytest.mark.slow
def test_chunks_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, many = loud(tmp_path / "a"), loud(tmp_path / "b")
    seen: list[tuple[int, int]] = []
    first = awq.calibrate(
        one, "nvfp4", TEXT, on_progress=lambda done, total: seen.append((done, total))
    )
    monkeypatch.setattr(blockwise, "CHUNK_TOKENS", 45)
    second = awq.calibrate(many, "nvfp4", TEXT)
    assert [r.ratios for r in first] == [r.ratios for r in second] and seen == [(1, 2), (2, 2)]
    torch.testing.assert_close(logits(one), logits(many), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_block_that_would_lose_stays_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Factors that serve the readers but wreck the whole block are taken back."""
    model = loud(tmp_path / "m", "llama-biases")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = iter([1.0, 2.0] * 2)
    monkeypatch.setattr(awq, "_block_error", lambda *_: next(found))
    records = awq.calibrate(model, "int4", TEXT)
    assert [(r.kept, r.error, r.plain_error) for r in records] == [(False, 1.0, 1.0)] * 2
    assert any(ratio is not None for r in records for ratio in r.ratios.values())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("family", NORMED_UPDATES)
def test_updates_with_a_norm_or_scale_are_refused(tmp_path: Path, family: str) -> None:
    model = hf.load(hf_folder(tmp_path / "m", family))
    with pytest.raises(ValueError, match="awq: .*not supported"):
        awq.calibrate(model, "int4", TEXT)


def test_refusals(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m")
    for format, sequences, words in [
        ("bf16", TEXT, "bf16 does not round to low bits"),
        ("int4", [], "no calibration sequences"),
        ("int4", [[1], []], r"sequences\[1\] has 0 tokens"),
        ("int4", [[1] * 257], r"sequences\[0\] has 257 tokens"),
        ("int4", [[1, 67]], r"sequences\[0\]: an id is outside the vocabulary of 67"),
        ("int5", TEXT, "known: "),
    ]:
        with pytest.raises(ValueError, match=words):
            awq.calibrate(hf.load(folder), format, sequences)
    for odd in (quantize_base(hf.load(folder), "int8"), lora.attach(hf.load(folder), 2, 4.0)):
        with pytest.raises(
            ValueError, match=r"blocks\.0\.qkv is quantized, aligned or has an adapter"
        ):
            awq.calibrate(odd, "int4", TEXT)


def test_calibration_text(tmp_path: Path) -> None:
    """A token is a byte here. Rows give their beginning, a plain text all its pieces, the file's
    order stays."""
    tokenizer = build_tokenizer()
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"text": "abcdef"}\n{"text": ""}\n{"messages": [{"role": "user", "content": "hi"}]}\n'
        '{"text": "zz"}\n'
    )
    chat = tokenizer.encode("<|user|>hi<|end|>")
    assert len(chat) == 4
    assert calibration_sequences(rows, tokenizer, 9, 5) == [
        tokenizer.encode("abcde"),
        chat,
        tokenizer.encode("zz"),
    ]
    assert calibration_sequences(rows, tokenizer, 1, 2) == [tokenizer.encode("ab")]
    drawn = tmp_path / "drawn.jsonl"
    drawn.write_text(
        '{"kind": "asked", "k": 2}\n'
        '{"kind": "drawn", "messages": [{"role": "user", "content": "hi"}], '
        '"responses": [{"text": "yo"}, {"text": "you"}]}\n'
        '{"kind": "scored", "scores": []}\n{"kind": "batch"}\n'
        '{"prompt": {"messages": [{"role": "user", "content": "hi"}]}, "text": "me"}\n'
        '{"prompt": {"messages": [{"role": "user", "content": "hi"}]}, "text": "b", '
        '"messages": [{"role": "assistant", "content": "a"}]}\n'
    )
    assert calibration_sequences(drawn, tokenizer, 9, 99) == [
        tokenizer.encode(f"<|user|>hi<|end|><|assistant|>{said}<|end|>")
        for said in ("yo", "you", "me", "a")
    ]
    plain = tmp_path / "book.txt"
    plain.write_text("one two three")
    assert [tokenizer.decode(ids) for ids in calibration_sequences(plain, tokenizer, 9, 5)] == [
        "one t",
        "wo th",
        "ree",
    ]
    assert len(calibration_sequences(plain, tokenizer, 2, 5)) == 2
    bad = tmp_path / "bad.jsonl"
    for content, words in [
        ('{"text": "a"}\n{"prompt": "b"}\n', r"bad\.jsonl:2.*'text'.*found prompt"),
        ('{"text": ""}\n', "no text in it"),
        ('{"text"\n', "bad.jsonl"),
    ]:
        bad.write_text(content)
        with pytest.raises(ValueError, match=words):
            calibration_sequences(bad, tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"rows\.jsonl:3: messages: the chat template refuses"):
        calibration_sequences(rows, tokenizer)
    plain.write_bytes(b"\xff\xfe\xfa")
    for path, samples, words in [
        (plain, 1, "not UTF-8"),
        (tmp_path / "none.txt", 1, "no such file"),
        (rows, 0, "samples: must be at least 1"),
    ]:
        with pytest.raises(ValueError, match=words):
            calibration_sequences(path, tokenizer, samples)


@pytest.mark.slow
def test_the_command_calibrates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder holds the codes of the model that `calibrate` makes of the same text; refusals
    come before it."""
    tokenizer = build_tokenizer()
    source = hf.save(loud(tmp_path / "plain", vocab_size=len(tokenizer)), tmp_path / "m")
    tokenizer.save_pretrained(source)
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 9)
    options = [
        "--awq",
        "--calibration",
        str(text),
        "--calibration-samples",
        "5",
        "--calibration-length",
        "40",
    ]
    assert (
        main(
            [
                "quantize",
                str(source),
                str(tmp_path / "out"),
                "--format",
                "int4",
                "--device",
                "cpu",
                *options,
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "AWQ on 5 sequences, 200 tokens" in said and "of 2 rescaled" in said
    model = hf.load(source)
    awq.calibrate(model, "int4", calibration_sequences(text, tokenizer, 5, 40))
    made = hf.load(tmp_path / "out")
    for (_, ours), (_, theirs) in zip(
        quantize_base(model, "int4").linears(), made.linears(), strict=True
    ):
        assert all(
            torch.equal(t, theirs.weight.tensors[name]) for name, t in ours.weight.tensors.items()
        )
    assert torch.equal(model.blocks[0].input_norm.weight, made.blocks[0].input_norm.weight)
    for words, message in [
        (["--awq", *options[3:5]], "they are of --calibration FILE"),
        (options[1:], "--calibration: without --awq"),
        (["--awq", "--calibration", "none.txt"], "none.txt: no such file"),
        ([*options[:-1], "999"], r"sequences[0] has 405 tokens; 1 to 256 fit the model"),
    ]:
        assert (
            main(["quantize", str(source), str(tmp_path / "no"), "--format", "int4", *words]) == 2
        )
        assert message in capsys.readouterr().err and not (tmp_path / "no").exists()
