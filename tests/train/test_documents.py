"""Every source of documents, the split, and what is said about data that cannot be used."""

from __future__ import annotations

import errno
import json
import os
import sysconfig
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from train.config import DataError, TrainConfig
from train.documents import (
    Corpus,
    Vocabulary,
    load_data,
    load_vocabulary,
    read_documents,
    split,
)

TEXTS = ["ein Anfang", "zwei\nZeilen", "drei", "vier Ä"]


def write(path: Path, **columns: list[str]) -> Path:
    table = pa.table(columns or {"text": TEXTS, "id": TEXTS})
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    elif path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        path.write_text("\n\n".join(TEXTS))
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.txt"])
def test_a_file_gives_its_documents(tmp_path: Path, name: str) -> None:
    assert read_documents(str(write(tmp_path / name))) == [text.encode() for text in TEXTS]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_the_field_of_the_text_can_be_named(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, text=["not this"] * 4, body=TEXTS)
    assert read_documents(str(path), "body") == [text.encode() for text in TEXTS]
    train, held_out, _ = load_data(TrainConfig(data=str(path), text_field="body"), Vocabulary())
    assert train.num_bytes + held_out.num_bytes == sum(len(text.encode()) for text in TEXTS)


def test_a_folder_gives_a_document_per_text_file_and_the_rows_of_tables(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.rs").write_text("fn main() {}")
    (tmp_path / "a.txt").write_text("one\n\ndocument")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / ".hidden").write_text("not this")
    expected = [b"one\n\ndocument", *(text.encode() for text in TEXTS), b"fn main() {}"]
    assert read_documents(str(tmp_path)) == expected


def test_the_default_is_the_standard_library_without_installed_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ast.py").write_text("one")
    (tmp_path / "notes.txt").write_text("no source")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "torch.py").write_text("not this")
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(tmp_path))
    assert read_documents(None) == [b"one"]


def test_the_split_depends_on_content_alone() -> None:
    texts = [str(index).encode() for index in range(200)]
    train, held_out = split(texts, 0.2)
    backwards, held_out_backwards = split(texts[::-1], 0.2)
    assert held_out == held_out_backwards
    assert train == backwards[::-1]
    assert sorted(train + held_out) == sorted(texts)
    assert 20 <= len(held_out) <= 60
    more, _ = split([*texts, b"another"], 0.2)
    assert set(train) <= set(more)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999999])
def test_both_halves_have_a_document_and_copies_never_straddle(share: float) -> None:
    train, held_out = split([str(index % 30).encode() for index in range(90)], share)
    assert train
    assert held_out
    assert not set(train) & set(held_out)
    assert len(set(held_out)) == len(held_out)


def test_held_out_text_is_cut_at_the_limits(tmp_path: Path) -> None:
    for index in range(30):
        (tmp_path / f"{index}.md").write_text(f"{index:05}" * 5000)
    data = load_data(TrainConfig(data=str(tmp_path), held_out=0.5, eval_bytes=40_000), Vocabulary())
    lengths = [int(length) - 1 for length in data.held_out.offsets[1:] - data.held_out.offsets[:-1]]
    assert lengths == [16_384, 16_384, 40_000 - 2 * 16_384]
    assert data.held_out.num_bytes == len(data.held_out.tokens) - len(data.held_out) == 40_000


def test_a_tokenizer_file_gives_the_ids(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE(unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(special_tokens=["?"], show_progress=False))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = load_vocabulary(str(tmp_path / "tokenizer.json"))
    assert vocabulary.end == tokenizer.get_vocab_size()
    ids = vocabulary.encode(b"ein Anfang").tolist()
    assert ids == tokenizer.encode("ein Anfang").ids
    assert vocabulary.decode([*ids, vocabulary.end]) == tokenizer.decode(ids)
    corpus = Corpus.of([ids], end=vocabulary.end, num_bytes=10)
    assert corpus.tokens.tolist() == [vocabulary.end, *ids, vocabulary.end]


ROW = '{"text": "one"}\n'
CASES = {
    "missing.txt": (None, r"which does not exist\. Check the path\."),
    "table.csv": (
        "a,b",
        r"expected --data to name a folder or a \.txt, \.jsonl or \.parquet file, got .*table\.csv",
    ),
    "empty.txt": ("", r"expected text in .*empty\.txt, got none"),
    "blank.jsonl": ('{"text": " "}', r"expected text in .*blank\.jsonl, got none"),
    "packed.jsonl.gz": (b"\x1f\x8b", r"packed\.jsonl\.gz\. Unpack or convert the file"),
    "broken.jsonl": (
        ROW + "{nope\n" + ROW,
        r"in line 2 of .*broken\.jsonl, got .*: column 2 .*Correct that line",
    ),
    "cut.jsonl": (ROW + '{"text":  \r\n', r"in line 2 of .*cut\.jsonl, got Expecting value: column 9 "),
    "mark.jsonl": (
        "\ufeff" + ROW + "\r\n \n]",
        r"line 4 of .*mark\.jsonl, got Expecting value: column 1 ",
    ),
    "bytes.jsonl": (ROW.encode() + b'{"text": "\xff"}', r"JSON in UTF-8 in line 2 of .*bytes\.jsonl, got "),
    "deep.jsonl": (ROW + "[" * 99_999, r"in line 2 of .*deep\.jsonl, got maximum recursion depth"),
    "other.jsonl": (
        "\n" + ROW + '{"body": "x"}',
        r"field 'text' in line 3 of .*other\.jsonl, got a row with the fields \['body'\]",
    ),
    "null.jsonl": (ROW + "null", r"in line 2 of .*null\.jsonl, got a row with the fields \[\]"),
    "number.jsonl": ('{"text": 5}', r"got int\. Pass the column of the documents with --text-field"),
    "broken.parquet": (
        "PAR1",
        r"expected a readable \.parquet file, got .*broken\.parquet.*Write the file again,",
    ),
    "latin.txt": (
        b"\xff\xfe\x80",
        r"expected a readable \.txt file, got .*latin\.txt.*Write the file again, as UTF-8 text",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_unusable_data_gets_one_clear_error(tmp_path: Path, name: str) -> None:
    content, message = CASES[name]
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        read_documents(str(tmp_path / name))


def test_the_row_of_a_table_without_a_text_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["one", None]}), tmp_path / "b.parquet")
    write(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"'text' in row 2 of .*b\.parquet, got NoneType"):
        read_documents(str(tmp_path))


def test_a_mark_of_the_byte_order_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo", "utf-8-sig")
    (tmp_path / "a.jsonl").write_text(ROW, "utf-8-sig")
    assert read_documents(str(tmp_path / "a.txt")) == [b"one", b"two"]
    assert read_documents(str(tmp_path / "a.jsonl")) == [b"one"]


@pytest.mark.parametrize("name", ["scandir", "read_bytes"])
def test_what_the_system_refuses_to_read_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A folder below is not left out in silence. The superuser, as tests may be, reads everything."""
    (tmp_path / "a.md").write_text("text")

    def refuse(path: Any, *_: Any, **__: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(os if name == "scandir" else Path, name, refuse)
        with pytest.raises(
            DataError, match=r"got .*Permission denied.*\. Give this user permission to read it"
        ):
            read_documents(str(tmp_path))


def test_one_document_cannot_be_split() -> None:
    with pytest.raises(DataError, match=r"at least two different documents.*got 1 among 3"):
        split([b"same", b"same", b"same"], 0.1)


@pytest.mark.parametrize("content", [None, "{", '{"version": "1.0"}'])
def test_an_unusable_tokenizer_gets_one_clear_error(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(
        DataError, match=r"expected --tokenizer to name a tokenizers JSON file, got .*tokenizer\.json"
    ):
        load_vocabulary(str(path))
