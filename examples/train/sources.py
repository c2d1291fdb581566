"""Documents: their files, and the held-out split."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from train.config import DataError

__all__ = ["read_documents", "split"]

_NOT_STANDARD = {"site-packages", "dist-packages"}
_TABLES = {".jsonl", ".parquet"}


def split(documents: list[bytes], held_out: float) -> tuple[list[bytes], list[bytes]]:
    """Split by a hash of each document's content, independent of names, order and other documents.

    Copies of a document are on the same side. At least one document is held out: the one with the lowest
    hash. The training documents keep their order. The held-out documents are sorted by hash.
    """
    keys = [hashlib.blake2b(document, digest_size=8).digest() for document in documents]
    wanted = "at least two different documents, one to train on and one to hold out"
    remedy = "Add documents. In a .txt file, an empty line separates documents"
    DataError.unless(len(set(keys)) > 1, wanted, f"{len(set(keys))} among {len(documents)}", remedy)
    lowest, highest = min(keys), max(keys)
    limit = held_out * 2.0**64
    out = {key for key in keys if int.from_bytes(key) < limit and key != highest} | {lowest}
    train = [document for document, key in zip(documents, keys, strict=True) if key not in out]
    first = dict(zip(keys, documents, strict=True))
    return train, [first[key] for key in sorted(out)]


def read_documents(path: str | None, text_field: str = "text") -> list[bytes]:
    """Read all documents of a source in a stable order, without empty documents.

    In a folder, each text file is a document, and so is each row of .jsonl and .parquet files. Files that
    begin with a NUL byte are binary and are left out. In a .txt file, each paragraph is a document. None
    means the source files of the interpreter's standard library, including its tests.
    """
    root = Path(sysconfig.get_path("stdlib") if path is None else path)
    wanted = "--data to name a folder or a .txt, .jsonl or .parquet file"
    DataError.unless(root.exists(), wanted, f"{root}, which does not exist", "Check the path")
    remedy = "Unpack or convert the file, or pass a folder, in which every text file is a document"
    DataError.unless(root.is_dir() or root.suffix in {".txt", *_TABLES}, wanted, root, remedy)
    found: list[bytes] = []
    file = root
    try:
        for file in [root] if root.is_file() else _text_files(root, standard=path is None):
            if file.suffix in _TABLES:
                found += _rows(file, text_field)
            elif root.is_file():
                found += [part.strip("\n").encode() for part in file.read_text("utf-8-sig").split("\n\n")]
            elif b"\0" not in (content := file.read_bytes())[:8192]:
                found.append(content)
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        # Errors of the system name the path, but errors of Parquet and UTF-8 readers do not.
        refused = getattr(error, "filename", None)
        remedy = "Give this user permission to read it" if refused else "Write the file again, as UTF-8 text"
        got = error if refused else f"{file}: {error}"
        raise DataError(f"a readable {file.suffix or 'text'} file", got, remedy) from None
    documents = [document for document in found if document.strip()]
    DataError.unless(documents, f"text in {root}", "none", "Check that its files are text and not empty")
    return documents


def _text_files(folder: Path, standard: bool) -> Iterator[Path]:
    """List the files of a folder without hidden files, or the modules of the standard library."""
    inside = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    yield from (path for path in inside if path.is_file() and (path.suffix == ".py" or not standard))
    for path in inside:
        installed = standard and path.name in _NOT_STANDARD
        if path.is_dir() and not path.is_symlink() and not installed:
            yield from _text_files(path, standard)


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a .jsonl file with their line numbers. Blank lines count."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                if text := line.decode("utf-8-sig").strip():
                    yield f"line {number}", json.loads(text)
            except (ValueError, RecursionError) as error:
                wanted = f"JSON in UTF-8 in line {number} of {path}"
                got = str(error).replace("line 1 column", "column")  # The parser knows only this line.
                raise DataError(wanted, got, "Correct that line, or remove it") from None


def _table(path: Path, field: str) -> Iterator[tuple[str, Any]]:
    """Read the rows of a .parquet file. Other columns are skipped if possible."""
    if path.stat().st_size:
        from pyarrow import parquet

        table = parquet.ParquetFile(path)
        batches = table.iter_batches(columns=[field] if field in table.schema_arrow.names else None)
        rows = (row for batch in batches for row in batch.to_pylist())
        yield from ((f"row {number}", row) for number, row in enumerate(rows, 1))


def _rows(path: Path, field: str) -> Iterator[bytes]:
    for place, row in _lines(path) if path.suffix == ".jsonl" else _table(path, field):
        fields = row if isinstance(row, dict) else {}
        text: Any = fields.get(field)
        wanted = f"a string in the field {field!r} in {place} of {path}"
        got = type(text).__name__ if field in fields else f"a row with the fields {sorted(fields)}"
        remedy = "Pass the column of the documents with --text-field"
        DataError.unless(isinstance(text, str), wanted, got, remedy)
        yield text.encode("utf-8", errors="replace")
