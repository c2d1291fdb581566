"""Where the documents come from, how their text becomes tokens, and which of them are held out."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnspan.errors import expect
from attnspan.train.config import DataError, TrainConfig

__all__ = [
    "Corpus",
    "Data",
    "Vocabulary",
    "load_data",
    "load_vocabulary",
    "read_documents",
    "split_documents",
]

_TABLES = {".jsonl": "json", ".parquet": "parquet"}
_NOT_STANDARD = {"site-packages", "dist-packages"}
# Held-out documents are scored by their beginnings, so that one huge file cannot be the whole evaluation.
_EVAL_DOCUMENT_BYTES = 16_384


class Vocabulary:
    """The 256 bytes, and an end marker: the last id.

    Example:
        >>> Vocabulary().encode(b"ab").tolist(), Vocabulary().decode([97, 98, 256]), Vocabulary().end
        ([97, 98], 'ab', 256)
    """

    end = 256

    def encode(self, text: bytes) -> NDArray[Any]:
        """Token ids of a text, (N,) unsigned integers."""
        return np.frombuffer(text, np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids; end markers are dropped and broken UTF-8 shows as U+FFFD."""
        return bytes(token for token in tokens if token < self.end).decode("utf-8", errors="replace")


class _TokenizerVocabulary(Vocabulary):
    """The ids of a `tokenizers` file, and an end marker after the last of them."""

    def __init__(self, path: Path) -> None:
        # Imported here: byte-level training does without the library.
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # The library raises bare Exception, also for a missing file.
            raise DataError(
                "data",
                expected="--tokenizer to name a tokenizers JSON file",
                got=f"{path}: {error}",
                remedy="Save one with tokenizers.Tokenizer.save, or leave --tokenizer away to train on bytes",
            ) from None
        self.end = int(self._tokenizer.get_vocab_size())

    def encode(self, text: bytes) -> NDArray[Any]:
        decoded = text.decode("utf-8", errors="replace")
        return np.array(self._tokenizer.encode(decoded, add_special_tokens=False).ids, np.uint32)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode([token for token in tokens if token < self.end]))


def load_vocabulary(path: str | None) -> Vocabulary:
    """The vocabulary of a run: a `tokenizers` JSON file, or bytes.

    Raises:
        DataError: The file is missing or is not a tokenizer.
    """
    return Vocabulary() if path is None else _TokenizerVocabulary(Path(path))


@dataclass(frozen=True)
class Corpus:
    """Tokenized documents, one after the other, each stored as ``end, t0, ..., tn-1, end``.

    Its first token is predicted from the end marker alone, and the target of its last one is the end marker.

    Args:
        tokens: All documents, each with its end markers, (N,), unsigned integers.
        offsets: Document ``i`` is ``tokens[offsets[i] : offsets[i + 1]]``, (documents + 1,) int64.
        num_bytes: Bytes of text that the tokens stand for, end markers aside.
        end: The token that marks both ends of a document.
    """

    tokens: NDArray[Any]
    offsets: NDArray[np.int64]
    num_bytes: int
    end: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_targets(self) -> int:
        """Tokens to predict in one pass: all but the leading end marker of each document."""
        return len(self.tokens) - len(self)

    @cached_property
    def digest(self) -> str:
        """Fingerprint of the tokens and of where documents begin."""
        digest = hashlib.sha256(self.offsets.tobytes())
        digest.update(np.ascontiguousarray(self.tokens).data)
        return digest.hexdigest()

    def parts(self, longest: int) -> NDArray[np.int64]:
        """Documents as ranges of inputs, those of more than ``longest`` cut into several, (n, 2) int64.

        Example:
            >>> Corpus.from_documents([[5, 6], [7]], end=9, num_bytes=3).parts(2).tolist()
            [[0, 2], [2, 3], [4, 6]]
        """
        starts, stops = self.offsets[:-1], self.offsets[1:] - 1
        counts = -(-(stops - starts) // longest)
        document = np.repeat(np.arange(len(self)), counts)
        number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
        begins = starts[document] + number * longest
        return np.stack([begins, np.minimum(begins + longest, stops[document])], axis=1)

    @classmethod
    def from_documents(
        cls,
        documents: Sequence[Sequence[int] | NDArray[Any]],
        *,
        end: int,
        num_bytes: int,
        close: bool = True,
    ) -> Corpus:
        """Lay documents one after the other, each between end markers.

        Args:
            documents: Token ids of each document.
            end: The end marker.
            num_bytes: Bytes of text in all documents together.
            close: Whether a document is followed by an end marker; false for documents cut short.

        Example:
            >>> corpus = Corpus.from_documents([[5, 6], [7]], end=9, num_bytes=3)
            >>> corpus.tokens.tolist(), corpus.offsets.tolist()
            ([9, 5, 6, 9, 9, 7, 9], [0, 4, 7])
        """
        dtype = np.uint16 if end < 2**16 else np.uint32
        marker = np.array([end], dtype)
        parts: list[NDArray[Any]] = [np.empty(0, dtype)]
        for document in documents:
            parts += [marker, np.asarray(document, dtype)] + ([marker] if close else [])
        lengths = [len(document) + 1 + close for document in documents]
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
        return cls(np.concatenate(parts), offsets, num_bytes, end)


class Data(NamedTuple):
    """The tokenized halves of the data.

    Args:
        train: Documents to learn from.
        held_out: Beginnings of documents that are never learned from.
        source: Where they come from, for people.
    """

    train: Corpus
    held_out: Corpus
    source: str


def load_data(config: TrainConfig, vocabulary: Vocabulary) -> Data:
    """Read, split and tokenize the documents of a run.

    Raises:
        DataError: A path is missing or unknown, a file cannot be read, or there are fewer than two documents.
    """
    train, held_out = split_documents(read_documents(config.data, config.text_field), config.held_out)
    beginnings, left = [], config.eval_bytes
    for document in held_out:
        beginnings.append(document[: min(left, _EVAL_DOCUMENT_BYTES)])
        left -= len(beginnings[-1])
        if not left:
            break

    def tokenize(documents: list[bytes], close: bool) -> Corpus:
        tokens = [vocabulary.encode(document) for document in documents]
        return Corpus.from_documents(
            tokens, end=vocabulary.end, num_bytes=sum(map(len, documents)), close=close
        )

    default = f"the standard library of Python {sysconfig.get_python_version()}"
    return Data(tokenize(train, True), tokenize(beginnings, False), config.data or default)


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
    expect(
        len(set(keys)) > 1,
        "data",
        "at least two different documents, one to train on and one to hold out",
        f"{len(set(keys))} among {len(documents)}",
        "Add documents; in a .txt file an empty line separates them",
        error=DataError,
    )
    lowest, highest = min(keys), max(keys)
    limit = held_out * 2.0**64
    out = {key for key in keys if int.from_bytes(key) < limit and key != highest} | {lowest}
    train = [document for document, key in zip(documents, keys, strict=True) if key not in out]
    first = dict(zip(keys, documents, strict=True))
    return train, [first[key] for key in sorted(out)]


def read_documents(path: str | None, text_field: str = "text") -> list[bytes]:
    """All documents of a source, without empty ones, in a stable order.

    A folder gives one document per text file (files with a NUL byte at their beginning are binary and left
    out), and the rows of the .jsonl and .parquet files in it. A .txt file gives one document per paragraph.
    None means the source files of the running interpreter's standard library, its tests included.

    Args:
        path: Folder or file, or None.
        text_field: Column of .jsonl and .parquet files that holds the text.

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
    name = "--data to name a folder or a .txt, .jsonl or .parquet file"
    expect(root.exists(), "data", name, f"{root}, which does not exist", "Check the path", error=DataError)
    known = root.is_dir() or root.suffix in {".txt", *_TABLES}
    remedy = "Rename it, or put it into a folder: there every text file is a document"
    expect(known, "data", name, str(root), remedy, error=DataError)
    if path is None:
        found = _read_folder(root, text_field, suffix=".py", without=_NOT_STANDARD)
    elif root.is_dir():
        found = _read_folder(root, text_field)
    elif root.suffix == ".txt":
        found = _read_rows(root, "text", "text", sample_by="paragraph")
    else:
        found = _read_rows(root, _TABLES[root.suffix], text_field)
    documents = [document for document in found if document.strip()]
    expect(
        bool(documents), "data", f"text in {root}", "none", "Check that files are not empty", error=DataError
    )
    return documents


def _read_folder(
    root: Path, text_field: str, suffix: str = "", without: frozenset[str] | set[str] = frozenset()
) -> Iterator[bytes]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in without and not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if name.startswith(".") or not name.endswith(suffix) or not path.is_file():
                continue
            if path.suffix in _TABLES:
                yield from _read_rows(path, _TABLES[path.suffix], text_field)
                continue
            try:
                content = path.read_bytes()
            except OSError as error:
                raise _unreadable(path, error, "Change its permissions or remove it") from None
            if b"\0" not in content[:8192]:
                yield content


def _read_rows(path: Path, builder: str, text_field: str, **options: str) -> Iterator[bytes]:
    # The library asks the network for nothing when told so before its import.
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    if not path.stat().st_size:
        return
    try:
        # Streaming reads the file where it is; otherwise a copy would go into a cache in the home directory.
        for row in load_dataset(builder, data_files=str(path), split="train", streaming=True, **options):
            text = row.get(text_field)
            expect(
                isinstance(text, str),
                "data",
                f"a string in the field {text_field!r} of every row of {path}",
                f"a row with the fields {sorted(row)}" if text is None else type(text).__name__,
                "Name the column that holds the documents with --text-field",
                error=DataError,
            )
            yield text.encode("utf-8", errors="replace")
    except DataError:
        raise
    # pyarrow and the reader of json raise ValueError.
    except (OSError, UnicodeDecodeError, DatasetGenerationError, ValueError) as error:
        raise _unreadable(path, error, "Write it anew, in UTF-8") from None


def _unreadable(path: Path, error: Exception, remedy: str) -> DataError:
    kind = f"a readable {path.suffix or 'text'} file"
    return DataError("data", expected=kind, got=f"{path}: {error}", remedy=remedy)
