"""Every source of documents, the split, and the errors about data that cannot be used."""

from __future__ import annotations

import errno
import json
import sysconfig
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from train.config import DataError, TrainConfig
from train.documents import Corpus, Vocabulary, load_data, load_vocabulary
from train.sources import read_documents, split

TEXTS = ["ein Anfang", "zwei\nZeilen", "drei", "vier Ä"]
BYTES = [text.encode() for text in TEXTS]


def write(path, **columns):
    table = pa.table(columns)
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        rows = (json.dumps(row) for row in table.to_pylist())
        # Files of other systems begin with a mark of the byte order.
        path.write_text("\n".join(rows) if path.suffix == ".jsonl" else "\n\n".join(TEXTS), "utf-8-sig")
    return path


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
def test_a_file_gives_its_documents(tmp_path, name):
    path = str(write(tmp_path / name, text=TEXTS, body=TEXTS[::-1]))
    assert read_documents(path) == BYTES
    if name != "a.txt":
        assert read_documents(path, "body") == BYTES[::-1]
        train, held_out, source = load_data(TrainConfig(data=path, text_field="body"), Vocabulary())
        assert (train.num_bytes + held_out.num_bytes, source) == (sum(map(len, BYTES)), path)


def test_a_folder_gives_text_files_and_rows_and_the_default_is_the_standard_library(tmp_path, monkeypatch):
    for name in ("sub", "site-packages"):
        (tmp_path / name).mkdir()
    write(tmp_path / "b.jsonl", text=TEXTS)
    files = {"a.txt": b"one\n\ndocument", "empty.txt": b" \n", "image.png": b"\x89PNG\0\0", ".hidden": b"no"}
    for name, content in (files | {"sub/c.py": b"code", "site-packages/torch.py": b"installed"}).items():
        (tmp_path / name).write_bytes(content)
    assert read_documents(str(tmp_path)) == [b"one\n\ndocument", *BYTES, b"installed", b"code"]
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(tmp_path))
    assert read_documents(None) == [b"code"]


@pytest.mark.parametrize("share", [0.0, 0.2, 0.3, 0.999999])
def test_the_split_depends_on_content_alone_and_both_sides_have_a_document(share):
    texts = [str(index).encode() for index in range(200)]
    train, held_out = split(texts, share)
    assert split(texts[::-1], share) == (train[::-1], held_out)
    assert sorted(train + held_out) == sorted(texts)
    assert min(len(train), len(held_out)) > 0
    assert set(train) <= set(split([*texts, b"another"], share)[0]) or share > 0.9
    assert share != 0.2 or 20 <= len(held_out) <= 60
    # Copies stay together.
    train, held_out = split([str(index % 30).encode() for index in range(90)], share)
    assert not set(train) & set(held_out)
    assert len(set(held_out)) == len(held_out) > 0
    with pytest.raises(DataError, match=r"at least two different documents.*got 1 among 3"):
        split([b"same"] * 3, share)


def test_held_out_text_is_cut_at_the_limits(tmp_path):
    for index in range(30):
        (tmp_path / f"{index}.md").write_text(f"{index:05}" * 5000)
    config = TrainConfig(data=str(tmp_path), held_out=0.5, eval_bytes=40_000)
    held_out = load_data(config, Vocabulary()).held_out
    lengths = [int(length) - 1 for length in held_out.offsets[1:] - held_out.offsets[:-1]]
    assert lengths == [16_384, 16_384, 40_000 - 2 * 16_384]
    assert held_out.num_bytes == len(held_out.tokens) - len(held_out) == 40_000


def test_a_tokenizer_file_gives_the_ids(tmp_path):
    path, tokenizer = str(tmp_path / "tokenizer.json"), Tokenizer(models.BPE(unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(special_tokens=["?"], show_progress=False))
    wanted = r"--tokenizer to name a tokenizers JSON file, got .*tokenizer\.json"
    for content in (None, "{", '{"version": "1.0"}'):
        if content is not None:
            Path(path).write_text(content)
        with pytest.raises(DataError, match=wanted):
            load_vocabulary(path)
    tokenizer.save(path)
    vocabulary, end = load_vocabulary(path), tokenizer.get_vocab_size()
    ids = vocabulary.encode(b"ein Anfang").tolist()
    assert (vocabulary.end, ids) == (end, tokenizer.encode("ein Anfang").ids)
    assert vocabulary.decode([*ids, end]) == tokenizer.decode(ids)


@pytest.mark.parametrize("end", [65_534, 65_535, 100_000])
def test_tokens_fit_their_type(end):
    assert Corpus.of([[end - 1, 5]], end=end, num_bytes=2).tokens.tolist() == [end, end - 1, 5, end]


ROW = b'{"text": "one"}\n'
CASES = {
    "missing.txt": (None, r"which does not exist\. Check the path\."),
    "table.csv": (b"a,b", r"--data to name a folder or a \.txt, \.jsonl or \.parquet file, got .*table\.csv"),
    "empty.txt": (b"", r"expected text in .*empty\.txt, got none"),
    "blank.jsonl": (b'{"text": " "}', r"expected text in .*blank\.jsonl, got none"),
    "packed.jsonl.gz": (b"\x1f\x8b", r"packed\.jsonl\.gz\. Unpack or convert the file"),
    "broken.jsonl": (
        ROW + b"{nope\n" + ROW,
        r"line 2 of .*broken\.jsonl, got .*: column 2 .*Correct that line",
    ),
    "cut.jsonl": (ROW + b'{"text":  \r\n', r"in line 2 of .*cut\.jsonl, got Expecting value: column 9 "),
    "blanks.jsonl": (ROW + b"\r\n \n]", r"line 4 of .*blanks\.jsonl, got Expecting value: column 1 "),
    "bytes.jsonl": (ROW + b'{"text": "\xff"}', r"JSON in UTF-8 in line 2 of .*bytes\.jsonl, got "),
    "deep.jsonl": (ROW + b"[" * 99_999, r"in line 2 of .*deep\.jsonl, got maximum recursion depth"),
    "other.jsonl": (
        b"\n" + ROW + b'{"body": ""}',
        r"'text' in line 3 of .*got a row with the fields \['body'\]",
    ),
    "null.jsonl": (ROW + b"null", r"in line 2 of .*null\.jsonl, got a row with the fields \[\]"),
    "number.jsonl": (b'{"text": 5}', r"got int\. Pass the column of the documents with --text-field"),
    "broken.parquet": (b"PAR1", r"a readable \.parquet file, got .*broken\.parquet.*Write the file again,"),
    "row.parquet": (None, r"'text' in row 2 of .*row\.parquet, got NoneType"),
    "latin.txt": (b"\xff\xfe\x80", r"a readable \.txt file, got .*latin\.txt.*again, as UTF-8 text"),
}


@pytest.mark.parametrize("name", CASES)
def test_unusable_data_get_one_clear_error(tmp_path, name):
    content, message = CASES[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    if name == "row.parquet":
        pq.write_table(pa.table({"text": ["one", None]}), tmp_path / name)
    with pytest.raises(DataError, match=message):
        read_documents(str(tmp_path / name))


@pytest.mark.parametrize("name", ["iterdir", "read_bytes"])
def test_the_error_of_the_system_is_not_swallowed(tmp_path, monkeypatch, name):
    (tmp_path / "a.md").write_text("text")

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, name, refuse)  # The superuser, as tests may be, reads everything.
    with pytest.raises(DataError, match=r"got .*Permission denied.*\. Give this user permission to read it"):
        read_documents(str(tmp_path))
