"""Packing loses nothing, mixes nothing, and can be taken up anywhere; workers and ranks change no row."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from train.config import TrainConfig
from train.data import IGNORE, PADDING, Batches, PackedStream, settle_strategy
from train.documents import Corpus

END = 99
documents = st.lists(st.lists(st.integers(0, 98), min_size=1, max_size=30), min_size=1, max_size=12)


def pieces(batch):
    """(inputs, targets) of every segment, and all promises about a row checked on the way."""
    found = []
    rows = batch.tokens, batch.targets, batch.ids, batch.positions
    for tokens, targets, ids, positions in zip(*rows, strict=True):
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


def corpus_of(texts, close=True):
    return Corpus.of(texts, end=END, num_bytes=sum(map(len, texts)), close=close)


@settings(max_examples=60, deadline=None)
@given(documents, st.integers(1, 17), st.integers(1, 3), st.booleans())
def test_one_pass_predicts_every_token_once_and_in_order(texts, seq_len, batch_size, close):
    corpus = corpus_of(texts, close)
    batches = list(PackedStream(corpus, seq_len=seq_len, batch_size=batch_size, seed=None))
    found = [piece for batch in batches for piece in pieces(batch)]
    predicted = [token for _, targets in found for token in targets]
    assert predicted == [token for text in texts for token in [*text, *([END] if close else [])]]
    assert sum(int((batch.targets != IGNORE).sum()) for batch in batches) == len(corpus.tokens) - len(texts)
    # Inputs are the targets one step earlier: an end marker where a document begins, else the token before.
    seen = [token for inputs, _ in found for token in inputs]
    assert seen == [token for text in texts for token in [END, *(text if close else text[:-1])]]


@settings(max_examples=60, deadline=None)
@given(documents, st.integers(1, 17), st.integers(0, 5))
def test_no_target_crosses_into_another_document(texts, seq_len, seed):
    stream = PackedStream(corpus_of(texts), seq_len=seq_len, batch_size=2, seed=seed)
    stored = ["," + ",".join(map(str, [END, *text, END])) + "," for text in texts]
    for _, batch in zip(range(3), stream, strict=False):
        for inputs, targets in pieces(batch):
            window = "," + ",".join(map(str, [*inputs, targets[-1]])) + ","
            assert inputs[1:] == targets[:-1]
            assert any(window in document for document in stored)


@settings(max_examples=40, deadline=None)
@given(documents, st.integers(1, 17), st.integers(0, 12), st.integers(0, 5))
def test_a_stream_goes_on_where_its_state_was_taken(texts, seq_len, taken, seed):
    corpus = corpus_of(texts)
    stream = PackedStream(corpus, seq_len=seq_len, batch_size=2, seed=seed)
    for _ in range(taken):
        next(stream)
    other = PackedStream(corpus, seq_len=seq_len, batch_size=2, seed=seed + 1)
    other.load_state_dict(stream.state_dict())
    for _ in range(4):
        assert all(map(torch.equal, next(stream), next(other)))


def test_an_epoch_has_every_document_once_and_the_next_has_another_order():
    texts = [[index] for index in range(50)]
    stream = PackedStream(corpus_of(texts), seq_len=20, batch_size=1, seed=0)
    tokens = torch.cat([next(stream).targets.flatten() for _ in range(10)])
    first, second = (part[part != END].tolist() for part in tokens.split(100))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first != list(range(50)), "shuffled"


CONFIG = TrainConfig(seq_len=24, batch_size=1, heads=4, kv_heads=2, head_dim=8, workers=0, dtype="float32")
TEXTS = [[index] * (index % 30 + 1) for index in range(60)]


# Torch starts its workers by fork, about which newer Pythons warn.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_workers_make_the_same_batches_in_the_same_order(workers, accumulate):
    config, corpus = replace(CONFIG, accumulate=accumulate), corpus_of(TEXTS)
    alone = list(Batches(config, corpus, 0, 5).loader())
    ahead = list(Batches(replace(config, workers=workers), corpus, 0, 5).loader())
    again = list(Batches(config, corpus, 0, 3, alone[1].place).loader())
    for expected, found in (*zip(alone, ahead, strict=True), *zip(alone[2:], again, strict=True)):
        assert found[1:] == expected[1:]
        assert len(found.parts) == accumulate
        for mine, whole in zip(found.parts, expected.parts, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine[:3], whole[:3], strict=True))
            assert torch.equal(mine.mask.lowered.bounds, whole.mask.lowered.bounds)


@pytest.mark.parametrize("method", ["balanced", "contiguous", "zigzag"])
@pytest.mark.parametrize("strategy", ["auto", "exchange", "ring", "ulysses"])
def test_ranks_share_the_rows_of_one(strategy, method):
    config = replace(CONFIG, cp=2, dp=2, strategy=strategy, method=method)
    corpus = corpus_of(TEXTS)
    [whole] = Batches(replace(CONFIG, batch_size=2), corpus, 0, 1)
    batches = [next(iter(Batches(config, corpus, rank, 1))) for rank in range(4)]
    for name in ("tokens", "targets", "pairs"):
        assert sum(getattr(batch, name) for batch in batches) == getattr(whole, name)
    for rank, batch in enumerate(batches):
        [part] = batch.parts
        sent = pickle.loads(pickle.dumps(part))
        assert sent.mask.layout == sent.shared.marks.layout == part.shared.marks.layout
        rows = sent.shared["q_index"][0]
        for mine, theirs in zip(part[:3], whole.parts[0][:3], strict=True):
            assert torch.equal(mine[0][rows >= 0], theirs[rank // 2][rows[rows >= 0]])


def test_auto_is_decided_once():
    config = settle_strategy(replace(CONFIG, cp=2), corpus_of(TEXTS))
    assert config.strategy in ("exchange", "ring", "ulysses")
    assert settle_strategy(config, corpus_of(TEXTS)) is config
    assert (config.moved(cp=4).strategy, config.moved(dp=1).strategy) == ("auto", config.strategy)
