"""Text to token ids and back: bytes by default, a local `tokenizers` file by choice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from attnspan.train.errors import DataError

__all__ = ["ByteVocabulary", "TokenizerVocabulary", "Vocabulary", "load_vocabulary"]


class Vocabulary(Protocol):
    """What the job asks of a vocabulary; `end` is the last id, so that there are ``end + 1`` ids.

    Example:
        >>> vocabulary: Vocabulary = ByteVocabulary()
        >>> vocabulary.end
        256
    """

    end: int

    def encode(self, text: bytes) -> NDArray[Any]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class ByteVocabulary:
    """The 256 bytes and an end marker.

    Example:
        >>> ByteVocabulary().encode(b"ab").tolist(), ByteVocabulary().decode([97, 98, 256])
        ([97, 98], 'ab')
    """

    end = 256

    def encode(self, text: bytes) -> NDArray[Any]:
        """Token ids of a text, (N,) uint8.

        Example:
            >>> ByteVocabulary().encode(b"def").tolist()
            [100, 101, 102]
        """
        return np.frombuffer(text, np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids; end markers are dropped and broken UTF-8 shows as U+FFFD.

        Example:
            >>> ByteVocabulary().decode([100, 101, 102])
            'def'
        """
        return bytes(token for token in tokens if token < self.end).decode("utf-8", errors="replace")


class TokenizerVocabulary:
    """The ids of a `tokenizers` file, and an end marker after the last of them.

    Args:
        path: JSON file as written by `tokenizers.Tokenizer.save`.

    Raises:
        DataError: The file is missing or is not a tokenizer.

    Example:
        >>> import tempfile
        >>> from tokenizers import Tokenizer, models
        >>> path = Path(tempfile.mkdtemp()) / "tokenizer.json"
        >>> Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save(str(path))
        >>> vocabulary = TokenizerVocabulary(path)
        >>> vocabulary.end, vocabulary.encode(b"a").tolist(), vocabulary.decode([0, 2])
        (2, [0], 'a')
    """

    def __init__(self, path: Path) -> None:
        # Imported here: byte-level training does without the library.
        from tokenizers import Tokenizer

        if not path.is_file():
            raise DataError(
                expected="--tokenizer to name a tokenizers JSON file",
                got=f"{path}, which is no file",
                remedy="give the path of a tokenizer.json, or leave --tokenizer away to train on bytes",
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise DataError(
                expected="--tokenizer to name a tokenizers JSON file",
                got=f"{path}: {error}",
                remedy="save it with tokenizers.Tokenizer.save",
            ) from None
        self.end = int(self._tokenizer.get_vocab_size())

    def encode(self, text: bytes) -> NDArray[Any]:
        """Token ids of a text, (N,) uint32; broken UTF-8 becomes U+FFFD first."""
        decoded = text.decode("utf-8", errors="replace")
        return np.array(self._tokenizer.encode(decoded, add_special_tokens=False).ids, np.uint32)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids; end markers are dropped."""
        return str(self._tokenizer.decode([token for token in tokens if token < self.end]))


def load_vocabulary(path: str | None) -> Vocabulary:
    """The vocabulary of a run.

    Args:
        path: A `tokenizers` JSON file, or None for bytes.

    Raises:
        DataError: The file is missing or is not a tokenizer.

    Example:
        >>> load_vocabulary(None).end
        256
    """
    return ByteVocabulary() if path is None else TokenizerVocabulary(Path(path))
