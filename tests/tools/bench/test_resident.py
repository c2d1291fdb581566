"""Resident memory: what is there now, and a peak that can be forgotten."""

from __future__ import annotations

import pytest
import torch

from attnspan.tools.bench import resident

BLOCK = 2**26

pytestmark = pytest.mark.skipif(resident.resident_memory() is None, reason="this system has no /proc")


def test_memory_is_what_is_resident_now() -> None:
    before = resident.resident_memory()
    block = torch.ones(BLOCK // 4)
    grown = resident.resident_memory()
    del block
    assert 0.9 * BLOCK < grown - before < 2 * BLOCK


def test_freed_memory_is_given_back() -> None:
    # Small pieces, which the allocator keeps when they are freed, and one at the end, which pins them.
    pieces = [torch.ones(2**14) for _ in range(BLOCK // 2**16)]
    last, grown = torch.ones(2**14), resident.resident_memory()
    del pieces
    resident.trim()
    assert resident.resident_memory() < grown - 0.5 * BLOCK
    del last


def test_the_peak_stays_until_it_is_forgotten() -> None:
    resident.forget_peak()
    before = resident.resident_peak()
    block = torch.ones(BLOCK // 4)
    del block
    resident.trim()
    assert 0.9 * BLOCK < resident.resident_peak() - before < 2 * BLOCK
    resident.forget_peak()
    assert resident.resident_peak() < before + 0.5 * BLOCK
