"""Packing loses nothing, mixes nothing, and can be taken up anywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnspan.train.packing import IGNORE, PADDING, Batch, Corpus, PackedStream, pack_once

END = 99
documents = st.lists(st.lists(st.integers(0, 98), min_size=1, max_size=30), min_size=1, max_size=12)


def pieces(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """(inputs, targets) of every segment, and all promises about a row checked on the way."""
    found = []
    for tokens, targets, ids, positions in zip(
        batch.tokens, batch.targets, batch.ids, batch.positions, strict=True
    ):
        real = ids != PADDING
        assert torch.equal(real, targets != IGNORE)
        count = int(real.sum())
        assert real[:count].all(), "padding stands at the end"
        assert (positions[count:] == 0).all()
        segments = ids[:count].unique_consecutive()
        assert segments.tolist() == list(range(len(segments))), "ids ascend from 0 without gaps"
        for segment in segments:
            here = ids == segment
            assert positions[here].tolist() == list(range(int(here.sum()))), "positions restart"
            found.append((tokens[here].tolist(), targets[here].tolist()))
    return found


def corpus_of(texts: list[list[int]], close: bool = True) -> Corpus:
    return Corpus.from_documents(texts, end=END, num_bytes=sum(map(len, texts)), close=close)


@settings(max_examples=60, deadline=None)
@given(documents, st.integers(1, 17), st.integers(1, 3), st.booleans())
def test_one_pass_predicts_every_token_once_and_in_order(
    texts: list[list[int]], seq_len: int, batch_size: int, close: bool
) -> None:
    corpus = corpus_of(texts, close)
    batches = pack_once(corpus, seq_len=seq_len, batch_size=batch_size)
    found = [piece for batch in batches for piece in pieces(batch)]
    predicted = [token for _, targets in found for token in targets]
    assert predicted == [token for text in texts for token in [*text, *([END] if close else [])]]
    assert sum(batch.num_targets for batch in batches) == corpus.num_targets
    # Inputs are the targets one step earlier: an end marker where a document begins, else the token before.
    seen = [token for inputs, _ in found for token in inputs]
    assert seen == [token for text in texts for token in [END, *(text if close else text[:-1])]]


@settings(max_examples=60, deadline=None)
@given(documents, st.integers(1, 17), st.integers(0, 5))
def test_no_target_crosses_into_another_document(texts: list[list[int]], seq_len: int, seed: int) -> None:
    stream = PackedStream(corpus_of(texts), seq_len=seq_len, batch_size=2, seed=seed)
    stored = ["," + ",".join(map(str, [END, *text, END])) + "," for text in texts]
    for _, batch in zip(range(3), stream, strict=False):
        for inputs, targets in pieces(batch):
            window = "," + ",".join(map(str, [*inputs, targets[-1]])) + ","
            assert inputs[1:] == targets[:-1]
            assert any(window in document for document in stored)


@settings(max_examples=40, deadline=None)
@given(documents, st.integers(1, 17), st.integers(0, 12), st.integers(0, 5))
def test_a_stream_goes_on_where_its_state_was_taken(
    texts: list[list[int]], seq_len: int, taken: int, seed: int
) -> None:
    corpus = corpus_of(texts)
    stream = PackedStream(corpus, seq_len=seq_len, batch_size=2, seed=seed)
    for _ in range(taken):
        next(stream)
    other = PackedStream(corpus, seq_len=seq_len, batch_size=2, seed=seed + 1)
    other.load_state_dict(stream.state_dict())
    for _ in range(4):
        a, b = next(stream), next(other)
        for name in ("tokens", "targets", "ids", "positions"):
            assert torch.equal(getattr(a, name), getattr(b, name))


def test_an_epoch_has_every_document_once_and_the_next_has_another_order() -> None:
    texts = [[index] for index in range(50)]
    stream = PackedStream(corpus_of(texts), seq_len=20, batch_size=1, seed=0)
    tokens = torch.cat([next(stream).targets.flatten() for _ in range(10)])
    first, second = (part[part != END].tolist() for part in tokens.split(100))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first != list(range(50)), "shuffled"


def test_tokens_beyond_sixteen_bits_are_kept() -> None:
    corpus = Corpus.from_documents([[70_000, 5]], end=100_000, num_bytes=2)
    assert corpus.tokens.tolist() == [100_000, 70_000, 5, 100_000]
    assert corpus.tokens.dtype == np.uint32


@pytest.mark.parametrize("end", [65_534, 65_535])
def test_the_end_marker_fits_its_type(end: int) -> None:
    assert Corpus.from_documents([[1]], end=end, num_bytes=1).tokens[0] == end
