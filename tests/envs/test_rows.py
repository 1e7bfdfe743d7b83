"""Rows of data sets in the shapes that people have them, and what is said of those that are none."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from lowroll.envs.data.rows import DataSource, located, read, splits
from lowroll.envs.data.rows import test_split as split_for_tests
from lowroll.envs.rows import SplitRows

ROWS = [{"question": f"{i}+1?", "answer": str(i + 1)} for i in range(5)]


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    lines = [list(rows[0]), *(row.values() for row in rows)]
    path.write_text("".join(",".join(f'"{cell}"' for cell in line) + "\r\n" for line in lines))


WRITERS = {
    ".jsonl": lambda path, rows: path.write_text("\n".join(map(json.dumps, rows))),
    ".json": lambda path, rows: path.write_text(json.dumps(rows, indent=1)),
    ".csv": write_csv,
    ".parquet": lambda path, rows: parquet.write_table(pyarrow.Table.from_pylist(rows), path),
}


@pytest.mark.parametrize("suffix", WRITERS)
def test_one_data_set_in_every_kind_of_file(tmp_path: Path, suffix: str) -> None:
    for name, part in (("a-0", ROWS[:3]), ("a-1", ROWS[3:])):
        WRITERS[suffix](tmp_path / f"{name}{suffix}", part)
    whole = tmp_path / f"whole{suffix}"
    WRITERS[suffix](whole, ROWS)
    assert list(read(str(whole))) == ROWS == list(read(str(tmp_path / f"a-*{suffix}")))
    assert (
        list(read({"path": str(whole), "rows": 2, "split": None, "prompt": "question"}))
        == (ROWS[:2])
    )
    (first, _), (second, _), *_ = located(DataSource(str(whole)))
    assert (first, second) == {
        ".jsonl": (f"{whole}:1", f"{whole}:2"),
        ".csv": (f"{whole}:2", f"{whole}:3"),
    }.get(suffix, (f"{whole}[0]", f"{whole}[1]"))


def test_json_of_three_kinds(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    for text in (
        json.dumps({"data": ROWS}),
        "\n".join(map(json.dumps, ROWS)),
        "\ufeff" + json.dumps(ROWS),
    ):
        file.write_text(text)
        assert list(read(str(file))) == ROWS
    file.write_text(json.dumps({"question": "q", "answer": ["1", "2"]}))
    assert list(read(str(file))) == [{"question": "q", "answer": ["1", "2"]}]


@pytest.mark.parametrize(
    "name, text, says",
    [
        ("a.jsonl", '{"x": 1}\n{', "a.jsonl:2: not JSON"),
        ("a.jsonl", '{"x": 1}\n[2]', "a.jsonl:2: expected a JSON object, got list"),
        ("a.json", '[{"x": 1}, 2]', r"a.json\[1\]: expected a JSON object, got int"),
        ("a.json", '"x"', "a.json: expected a JSON list of objects, got str"),
        ("a.json", "[{]", "a.json: not JSON"),
        ("a.csv", "x,y\n1,2\n3\n", "a.csv:3: 1 cells, and 2 columns"),
        ("a.csv", "x,x\n1,2\n", "a.csv:1: the columns must have names, each another one"),
        ("a.csv", 'x,y\n1,"2\n', "a.csv:2: not CSV"),
        ("a.parquet", "x", "a.parquet: cannot be read as parquet"),
        ("a.pkl", "x", r"is of no known kind \(a.pkl; known: .jsonl,"),
    ],
)
def test_a_bad_row_is_named_by_file_and_place(
    tmp_path: Path, name: str, text: str, says: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=says):
        list(read(str(tmp_path / name)))


def test_what_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("none.jsonl", "none-*.parquet"):
        with pytest.raises(ValueError, match="is neither a file nor a hub id"):
            list(read(str(tmp_path / path)))
    with pytest.raises(ValueError, match="rows: must be at least 1, is 0"):
        read({"path": "a.jsonl", "rows": 0})
    WRITERS[".parquet"](tmp_path / "a.parquet", ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    for path in (str(tmp_path / "a.parquet"), "owner/name", str(tmp_path)):
        with pytest.raises(
            ValueError, match=r"needs the package 'datasets' \(pip install 'lowroll\[data\]'\)"
        ):
            list(read(path))


@pytest.mark.slow
def test_folders_of_datasets_and_their_splits(tmp_path: Path) -> None:
    import datasets

    whole = datasets.Dataset.from_list(ROWS)
    parts = datasets.DatasetDict({"train": whole.select(range(4)), "dev": whole.select([4])})
    whole.save_to_disk(tmp_path / "one")
    parts.save_to_disk(tmp_path / "parts")
    (tmp_path / "files").mkdir()
    WRITERS[".parquet"](tmp_path / "files" / "train-00000.parquet", ROWS[:4])
    WRITERS[".parquet"](tmp_path / "files" / "test-00000.parquet", ROWS[4:])
    one, saved, files = (str(tmp_path / name) for name in ("one", "parts", "files"))
    assert list(read(one)) == ROWS and splits(DataSource(one)) == []
    assert list(read({"path": saved, "split": "dev"})) == ROWS[4:]
    assert (
        split_for_tests(DataSource(saved)) == "dev" and split_for_tests(DataSource(files)) == "test"
    )
    assert list(read({"path": files, "streaming": True})) == ROWS[:4]
    with pytest.raises(ValueError, match="parts: has no split 'test'; it has train, dev"):
        list(read({"path": saved, "split": "test"}))
    with pytest.raises(ValueError, match=r"files\[tset\]: .*tset.*train"):
        list(read({"path": files, "split": "tset", "streaming": True}))


def test_a_hub_id_is_asked_for_with_all_that_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def load_dataset(*args: Any, **options: Any) -> Iterator[dict[str, Any]]:
        calls.append((args, options))
        return iter(ROWS)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    spec = {
        "path": "owner/name",
        "subset": "main",
        "split": "test",
        "revision": "v1",
        "streaming": True,
        "rows": 2,
    }
    assert list(read(spec)) == ROWS[:2]
    assert calls == [
        (("owner/name", "main"), {"split": "test", "revision": "v1", "streaming": True})
    ]


def test_test_rows_that_are_trained_on_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # a row's other columns say nothing
    asked = lambda row, where: SimpleNamespace(question=row["question"], at=where)  # noqa: E731
    train, test = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    train.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    test.write_text(
        "".join(json.dumps(row) + "\n" for row in [ROWS[4], ROWS[4], {"question": "?"}])
    )
    rows = SplitRows("e", asked, path=str(train), test_path=str(test))
    assert len(rows.test) == 3 and not caplog.text, "an evaluation alone reads no train rows"
    rows = SplitRows("e", asked, path=str(train), test_path=str(test))
    assert len(rows.train) == 5 and len(rows.test) == 3
    assert "1 of the 2 different prompts" in caplog.text
    caplog.clear()
    test.write_text(json.dumps({"question": "?"}))
    rows = SplitRows("e", asked, path=str(train), test_path=str(test))
    assert len(rows.train) == 5 and len(rows.test) == 1 and not caplog.text


def test_a_share_is_held_out_where_there_is_no_test_split(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "a.jsonl"
    texts = [f"t{i}" for i in range(40)]

    def parts(order: list[str], **options: Any) -> tuple[list[Any], list[Any]]:
        file.write_text("\n".join(json.dumps({"text": text}) for text in order))
        rows = SplitRows("e", lambda row, _: row, path=str(file), test_path=None, **options)
        return [row["text"] for row in rows.train], [row["text"] for row in rows.test]

    assert parts(texts) == (texts, []) and not caplog.text
    train, test = parts(texts, held_out=0.1)
    assert len(test) == 4 and sorted(train + test) == sorted(texts)
    assert "4 of its 40 rows are held out for evaluation (held_out: 0 trains on all)" in caplog.text
    again, same = parts(texts[::-1] + texts, held_out=0.1)
    assert set(same) == set(test) and len(same) == 8 and not set(again) & set(test)
    assert len(parts(texts[:2], held_out=0.01)[1]) == 1
    with pytest.raises(ValueError, match="has one row, and none can be held out"):
        parts(texts[:1], held_out=0.5)
    with pytest.raises(ValueError, match="held_out must be a share from 0 to below 1, got 1"):
        parts(texts, held_out=1)
    other = tmp_path / "test.jsonl"
    other.write_text('{"text": "x"}')
    rows = SplitRows(
        "e", lambda row, _: row, path=str(file), test_path=str(other), split="train", held_out=0.5
    )
    assert rows.test == [{"text": "x"}] and len(rows.train) == 40 and not rows.is_held_out
