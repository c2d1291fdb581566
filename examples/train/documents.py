"""The tokens of the documents."""

from __future__ import annotations

import hashlib
import math
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from train.config import DataError, JobError, TrainConfig
from train.sources import read_documents, split

__all__ = ["Corpus", "Data", "Vocabulary", "load_data", "load_vocabulary"]

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
            raise DataError(wanted, got, remedy) from None
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
        whole = [(start, stop - 1) for start, stop in pairwise(self.offsets.tolist())]
        cut = [(at, min(at + longest, stop)) for start, stop in whole for at in range(start, stop, longest)]
        return np.array(cut, np.int64)

    @classmethod
    def of(cls, documents: Sequence[Any], *, end: int, num_bytes: int, close: bool = True) -> Corpus:
        """Concatenate the token ids of documents. Without ``close``, no end marker follows a document."""
        dtype = np.uint16 if end < 2**16 else np.uint32
        arrays = (np.asarray(document, dtype) for document in documents)
        parts = [np.pad(array, (1, int(close)), constant_values=end) for array in arrays]
        offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
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

    def check(self, expected: dict[str, str], where: str, remedy: str, error: type[JobError]) -> None:
        """Raise an error unless these are the documents with the expected fingerprints."""
        for part, digest in self.digests.items():
            wanted = f"the same {part} documents {where}, sha256 {expected.get(part)}"
            error.unless(digest == expected.get(part), wanted, f"{digest} from {self.source}", remedy)


def load_data(config: TrainConfig, vocabulary: Vocabulary) -> Data:
    """Read, split and tokenize the documents of a run."""
    train, held_out = split(read_documents(config.data, config.text_field), config.held_out)
    starts = accumulate((min(len(document), _EVAL_DOCUMENT_BYTES) for document in held_out), initial=0)
    sizes = (min(config.eval_bytes - start, _EVAL_DOCUMENT_BYTES) for start in starts)
    beginnings = [document[:size] for document, size in zip(held_out, sizes, strict=False) if size > 0]

    def tokenized(documents: list[bytes], close: bool) -> Corpus:
        ids, size = map(vocabulary.encode, documents), sum(map(len, documents))
        return Corpus.of(list(ids), end=vocabulary.end, num_bytes=size, close=close)

    source = config.data or f"the standard library of Python {sysconfig.get_python_version()}"
    return Data(tokenized(train, True), tokenized(beginnings, False), source)
