"""Documents: their source, their tokens, and the held-out split."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from train.config import DataError, TrainConfig

__all__ = ["Corpus", "Data", "Vocabulary", "load_data", "load_vocabulary", "read_documents", "split"]

_NOT_STANDARD = {"site-packages", "dist-packages"}
_TABLES = {".jsonl", ".parquet"}
# Only the beginnings of held-out documents are scored, so that one huge file does not dominate.
_EVAL_DOCUMENT_BYTES = 16_384


class Vocabulary:
    """The 256 bytes, and an end marker with the last id."""

    end = 256

    def encode(self, text: bytes) -> NDArray[Any]:
        """Encode a text to token ids, (N,) unsigned integers."""
        return np.frombuffer(text, np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode token ids. End markers are dropped, and invalid UTF-8 becomes U+FFFD."""
        return bytes(token for token in tokens if token < self.end).decode("utf-8", errors="replace")


class _TokenizerVocabulary(Vocabulary):
    """The ids of a `tokenizers` file, and an end marker after the last id."""

    def __init__(self, path: Path) -> None:
        # Import here, because byte-level training does not need the library.
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # The library raises plain Exception, even for a missing file.
            remedy = "Save a tokenizer there with tokenizers.Tokenizer.save, or start a new run with bytes"
            wanted, got = "--tokenizer to name a tokenizers JSON file", f"{path}: {error}"
            raise DataError.of(wanted, got, remedy) from None
        self.end = int(self._tokenizer.get_vocab_size())

    def encode(self, text: bytes) -> NDArray[Any]:
        decoded = text.decode("utf-8", errors="replace")
        return np.array(self._tokenizer.encode(decoded, add_special_tokens=False).ids, np.uint32)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode([token for token in tokens if token < self.end]))


def load_vocabulary(path: str | None) -> Vocabulary:
    """Load the vocabulary of a run: a `tokenizers` JSON file, or bytes."""
    return Vocabulary() if path is None else _TokenizerVocabulary(Path(path))


@dataclass(frozen=True)
class Corpus:
    """Tokenized documents, each stored as ``end, t0, ..., tn-1, end``.

    The model predicts the first token only from the end marker. The target of the last token is the end
    marker.
    """

    tokens: NDArray[Any]  # (N,), unsigned integers
    offsets: NDArray[np.int64]  # document i is tokens[offsets[i] : offsets[i + 1]], (documents + 1,)
    num_bytes: int  # bytes of the tokens' text
    end: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def nats_per_target(self, bits_per_byte: float) -> float:
        """Convert bits per byte to a loss. The marker before a document is no target."""
        return bits_per_byte * math.log(2) * self.num_bytes / (len(self.tokens) - len(self))

    @cached_property
    def digest(self) -> str:
        """Compute a fingerprint of the tokens and of the documents' boundaries."""
        digest = hashlib.sha256(self.offsets.tobytes())
        digest.update(np.ascontiguousarray(self.tokens).data)
        return digest.hexdigest()

    def parts(self, longest: int) -> NDArray[np.int64]:
        """List documents as ranges of inputs, (n, 2). Documents longer than ``longest`` are cut."""
        starts, stops = self.offsets[:-1], self.offsets[1:] - 1
        counts = -(-(stops - starts) // longest)
        document = np.repeat(np.arange(len(self)), counts)
        number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
        begins = starts[document] + number * longest
        return np.stack([begins, np.minimum(begins + longest, stops[document])], axis=1)

    @classmethod
    def of(cls, documents: Sequence[Any], *, end: int, num_bytes: int, close: bool = True) -> Corpus:
        """Concatenate the token ids of documents. Without ``close``, no end marker follows a document."""
        dtype = np.uint16 if end < 2**16 else np.uint32
        marker, empty = np.array([end], dtype), np.empty(0, dtype)
        parts: list[NDArray[Any]] = [empty]
        for document in documents:
            parts += [marker, np.asarray(document, dtype), marker if close else empty]
        lengths = [len(document) + 1 + close for document in documents]
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
        return cls(np.concatenate(parts), offsets, num_bytes, end)


class Data(NamedTuple):
    """The tokenized training and held-out documents."""

    train: Corpus
    held_out: Corpus  # beginnings of held-out documents
    source: str  # as text

    @property
    def digests(self) -> dict[str, str]:
        """Compute the fingerprints of both parts."""
        return {"training": self.train.digest, "held-out": self.held_out.digest}


def load_data(config: TrainConfig, vocabulary: Vocabulary) -> Data:
    """Read, split and tokenize the documents of a run."""
    train, held_out = split(read_documents(config.data, config.text_field), config.held_out)
    beginnings, left = [], config.eval_bytes
    for document in held_out:
        beginnings.append(document[: min(left, _EVAL_DOCUMENT_BYTES)])
        left -= len(beginnings[-1])
        if not left:
            break

    def tokenized(documents: list[bytes], close: bool) -> Corpus:
        ids, size = map(vocabulary.encode, documents), sum(map(len, documents))
        return Corpus.of(list(ids), end=vocabulary.end, num_bytes=size, close=close)

    source = config.data or f"the standard library of Python {sysconfig.get_python_version()}"
    return Data(tokenized(train, True), tokenized(beginnings, False), source)


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
    except DataError:
        raise
    except (OSError, ValueError) as error:
        # Errors of the system name the path, but errors of Parquet and UTF-8 readers do not.
        refused = getattr(error, "filename", None)
        remedy = "Give this user permission to read it" if refused else "Write the file again, as UTF-8 text"
        got = error if refused else f"{file}: {error}"
        raise DataError.of(f"a readable {file.suffix or 'text'} file", got, remedy) from None
    documents = [document for document in found if document.strip()]
    DataError.unless(documents, f"text in {root}", "none", "Check that its files are text and not empty")
    return documents


def _text_files(root: Path, standard: bool) -> Iterator[Path]:
    """List the files of a folder without hidden files, or the modules of the standard library."""

    def refuse(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(root, onerror=refuse):
        without = _NOT_STANDARD if standard else set()
        folders[:] = sorted(name for name in folders if name not in without and not name.startswith("."))
        for path in (Path(folder, name) for name in sorted(names) if not name.startswith(".")):
            if path.is_file() and (path.suffix == ".py" or not standard):
                yield path


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
                raise DataError.of(wanted, got, "Correct that line, or remove it") from None


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
