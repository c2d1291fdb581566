"""What groups need and fetch, against sets of keys."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from random_problems import any_spans, as_set, seen

from attnspan import Spans, causal
from attnspan.parallel.chunks import Chunks
from attnspan.parallel.needs import Holders, Needs, Pieces, foreign, foreign_pieces, needs_of


def dealt(spans: Spans, size: int, groups: int, seed: int) -> tuple[Chunks, np.ndarray, Needs]:
    chunks = Chunks.of(spans, size)
    owner = np.random.default_rng(seed).integers(0, groups, len(chunks)).astype(np.int32)
    return chunks, owner, needs_of(chunks, owner, groups)


def keys_by_group(holders: Holders) -> list[set[int]]:
    found: list[set[int]] = [set() for _ in range(holders.groups)]
    for group, lo, hi in zip(holders.group, holders.lo, holders.hi, strict=True):
        assert not found[group] & set(range(lo, hi))
        found[group] |= set(range(lo, hi))
    return found


def listed(pieces: Pieces) -> list[tuple[int, int, int, int]]:
    return list(zip(*(x.tolist() for x in (pieces.group, pieces.source, pieces.lo, pieces.hi)), strict=True))


@given(any_spans(), st.integers(1, 12), st.integers(1, 5), st.integers(0, 99))
def test_needs_are_the_union_of_what_rows_see(spans: Spans, size: int, groups: int, seed: int) -> None:
    _, owner, needs = dealt(spans, size, groups, seed)
    sees, group_of = seen(spans), np.repeat(owner, size)[: spans.q_len]
    assert needs.groups == groups
    for group in range(groups):
        here = slice(needs.starts[group], needs.starts[group + 1])
        wanted = set(np.flatnonzero(sees[group_of == group].any(axis=0)))
        assert as_set(needs.lo[here], needs.hi[here]) == wanted
        assert needs.rows[group] == len(wanted)


@given(any_spans(square=True), st.integers(1, 12), st.integers(1, 5), st.integers(0, 99))
def test_foreign_keys_are_those_of_others(spans: Spans, size: int, groups: int, seed: int) -> None:
    chunks, owner, needs = dealt(spans, size, groups, seed)
    holders = Holders.of(chunks, owner, groups)
    group_of = np.repeat(owner, size)[: spans.q_len]
    held = keys_by_group(holders)
    for group in range(groups):
        own = {
            p * spans.k_len + int(x) for p in range(chunks.planes) for x in np.flatnonzero(group_of == group)
        }
        assert held[group] == own
    check_pieces(needs, holders, held)


@given(any_spans(), st.integers(1, 12), st.integers(1, 5), st.integers(0, 99))
def test_keys_of_cross_attention_lie_in_order(spans: Spans, size: int, groups: int, seed: int) -> None:
    chunks, _, needs = dealt(spans, size, groups, seed)
    holders = Holders.contiguous(spans.k_len, chunks.planes, groups)
    held = keys_by_group(holders)
    each = -(-spans.k_len // groups)
    for group in range(groups):
        keys = range(group * each, min((group + 1) * each, spans.k_len))
        assert held[group] == {p * spans.k_len + x for p in range(chunks.planes) for x in keys}
    check_pieces(needs, holders, held)


def check_pieces(needs: Needs, holders: Holders, held: list[set[int]]) -> None:
    """Pieces cover exactly what is needed and held elsewhere, each from its holder; filters only filter."""
    pieces, counts = foreign_pieces(needs, holders), foreign(needs, holders)
    assert (pieces.lo < pieces.hi).all(), "no empty pieces"
    for group in range(needs.groups):
        here = slice(needs.starts[group], needs.starts[group + 1])
        wanted = as_set(needs.lo[here], needs.hi[here]) - held[group]
        got = [(s, x) for g, s, lo, hi in listed(pieces) if g == group for x in range(lo, hi)]
        assert sorted(x for _, x in got) == sorted(wanted)
        assert [x for _, x in got] == sorted(wanted)
        assert all(source != group and x in held[source] for source, x in got)
        assert counts[group] == len(wanted)
        assert listed(foreign_pieces(needs, holders, group=group)) == [
            p for p in listed(pieces) if p[0] == group
        ]
        assert listed(foreign_pieces(needs, holders, source=group)) == [
            p for p in listed(pieces) if p[1] == group
        ]
        for source in range(needs.groups):
            assert listed(foreign_pieces(needs, holders, group=group, source=source)) == [
                p for p in listed(pieces) if p[:2] == (group, source)
            ]
    assert pieces.rows == counts.sum()


def test_counts_of_many_chunks_by_a_formula() -> None:
    spans = causal().spans(2**16, 2**16)
    chunks = Chunks.of(spans, 64)
    owner = np.arange(len(chunks), dtype=np.int32) % 7
    counts = foreign(needs_of(chunks, owner, 7), Holders.of(chunks, owner, 7))
    last = [max(c for c in range(len(chunks)) if c % 7 == group) for group in range(7)]
    own = np.bincount(owner)
    assert counts.tolist() == [64 * (c + 1 - n) for c, n in zip(last, own, strict=True)]
