"""Where the documents come from, and which of them are held out."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from attnspan.train.config import TrainConfig
from attnspan.train.errors import DataError
from attnspan.train.packing import Corpus
from attnspan.train.vocabulary import Vocabulary

__all__ = ["Data", "load_data", "read_documents", "split_documents"]

_TABLES = {".jsonl": "json", ".parquet": "parquet"}
_NOT_STANDARD = {"site-packages", "dist-packages"}
# Held-out documents are scored by their beginnings, so that one huge file cannot be the whole evaluation.
_EVAL_DOCUMENT_BYTES = 16_384


@dataclass(frozen=True)
class Data:
    """The tokenized halves of the data.

    Args:
        train: Documents to learn from.
        held_out: Beginnings of documents that are never learned from.
        source: Where they come from, for people.

    Example:
        >>> empty = Corpus.from_documents([], end=256, num_bytes=0)
        >>> Data(empty, empty, "nowhere").source
        'nowhere'
    """

    train: Corpus
    held_out: Corpus
    source: str


def load_data(config: TrainConfig, vocabulary: Vocabulary) -> Data:
    """Read, split and tokenize the documents of a run.

    Args:
        config: Says where the documents are and how many of them are held out.
        vocabulary: Turns text into ids.

    Raises:
        DataError: A path is missing or unknown, a file cannot be read, or there are fewer than two documents.

    Example:
        >>> import tempfile
        >>> from attnspan.train.vocabulary import ByteVocabulary
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name in "abc":
        ...     _ = (folder / name).write_text(name * 10)
        >>> data = load_data(TrainConfig(data=str(folder)), ByteVocabulary())
        >>> len(data.train), len(data.held_out)
        (2, 1)
    """
    documents = read_documents(config.data)
    train, held_out = split_documents(documents, config.held_out)
    beginnings, left = [], config.eval_bytes
    for document in held_out:
        beginnings.append(document[: min(left, _EVAL_DOCUMENT_BYTES)])
        left -= len(beginnings[-1])
        if not left:
            break
    return Data(
        _tokenize(train, vocabulary, close=True),
        _tokenize(beginnings, vocabulary, close=False),
        config.data or f"the standard library of Python {sysconfig.get_python_version()}",
    )


def _tokenize(documents: list[bytes], vocabulary: Vocabulary, *, close: bool) -> Corpus:
    tokens = [vocabulary.encode(document) for document in documents]
    return Corpus.from_documents(tokens, end=vocabulary.end, num_bytes=sum(map(len, documents)), close=close)


def split_documents(documents: list[bytes], held_out: float) -> tuple[list[bytes], list[bytes]]:
    """Split by a hash of each document's content: no name, order or neighbour has a say in it.

    Copies of one document fall on the same side. At least one document is held out: the one of lowest hash.

    Args:
        documents: Texts.
        held_out: Share to hold out, in [0, 1).

    Returns:
        Documents to train on, in their order, and held-out ones, in the order of their hashes.

    Raises:
        DataError: There are not two different documents to split.

    Example:
        >>> train, held_out = split_documents([b"one", b"two", b"three"], held_out=0.1)
        >>> len(train), len(held_out)
        (2, 1)
    """
    keys = [hashlib.blake2b(document, digest_size=8).digest() for document in documents]
    if len(set(keys)) < 2:
        raise DataError(
            expected="at least two different documents, one to train on and one to hold out",
            got=f"{len(set(keys))} among {len(documents)}",
            remedy="add documents; in a .txt file an empty line separates them",
        )
    lowest, highest = min(keys), max(keys)
    limit = held_out * 2.0**64
    out = {key for key in keys if int.from_bytes(key) < limit and key != highest} | {lowest}
    train = [document for document, key in zip(documents, keys, strict=True) if key not in out]
    first = dict(zip(keys, documents, strict=True))
    return train, [first[key] for key in sorted(out)]


def read_documents(path: str | None) -> list[bytes]:
    """All documents of a source, without empty ones, in a stable order.

    A folder gives one document per text file (files with a NUL byte at their beginning are binary and left
    out), and the rows of the .jsonl and .parquet files in it. A .txt file gives one document per paragraph;
    .jsonl and .parquet files give one per row, from the column ``text``. None means the source files of the
    running interpreter's standard library, its tests included.

    Args:
        path: Folder or file, or None.

    Raises:
        DataError: The path is missing, of an unknown kind, unreadable, or has no text in it.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "two.txt"
        >>> _ = path.write_text("first\\n\\nsecond")
        >>> read_documents(str(path))
        [b'first', b'second']
    """
    root = Path(sysconfig.get_path("stdlib") if path is None else path)
    if not root.exists():
        raise DataError(
            expected="--data to name a folder or a .txt, .jsonl or .parquet file",
            got=f"{root}, which does not exist",
            remedy="check the path",
        )
    if path is None:
        found = _read_folder(root, suffix=".py", without=_NOT_STANDARD)
    elif root.is_dir():
        found = _read_folder(root)
    else:
        found = _read_file(root)
    documents = [document for document in found if document.strip()]
    if not documents:
        raise DataError(expected=f"text in {root}", got="none", remedy="check that the files are not empty")
    return documents


def _read_folder(
    root: Path, suffix: str = "", without: frozenset[str] | set[str] = frozenset()
) -> Iterator[bytes]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in without and not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if name.startswith(".") or not name.endswith(suffix) or not path.is_file():
                continue
            if path.suffix in _TABLES:
                yield from _read_rows(path, _TABLES[path.suffix])
                continue
            content = _read_bytes(path)
            if b"\0" not in content[:8192]:
                yield content


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            expected=f"to read {path}", got=str(error), remedy="mend its permissions or remove it"
        ) from None


def _read_file(path: Path) -> Iterator[bytes]:
    if path.suffix == ".txt":
        return _read_rows(path, "text", sample_by="paragraph")
    if path.suffix in _TABLES:
        return _read_rows(path, _TABLES[path.suffix])
    raise DataError(
        expected="--data to name a folder or a .txt, .jsonl or .parquet file",
        got=str(path),
        remedy="rename it, or put it into a folder: there every text file is a document",
    )


def _read_rows(path: Path, builder: str, **options: str) -> Iterator[bytes]:
    # The library asks the network for nothing when told so before its import.
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    if not path.stat().st_size:
        return
    try:
        # Streaming reads the file where it is; otherwise a copy would go into a cache in the home directory.
        rows = load_dataset(builder, data_files=str(path), split="train", streaming=True, **options)
        for row in rows:
            text = row.get("text")
            if not isinstance(text, str):
                raise DataError(
                    expected=f"a string in the field 'text' of every row of {path}",
                    got=f"a row with the fields {sorted(row)}" if text is None else type(text).__name__,
                    remedy="rename the column that holds the documents to 'text'",
                )
            yield text.encode("utf-8", errors="replace")
    except (OSError, UnicodeDecodeError, DatasetGenerationError) as error:
        raise _unreadable(path, error) from None
    except DataError:
        raise
    except ValueError as error:  # pyarrow's and the json reader's errors
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(
        expected=f"a readable {path.suffix} file", got=f"{path}: {error}", remedy="write it anew, in UTF-8"
    )
