"""Isolation of the tests of what comes from other frameworks and other libraries."""

from collections.abc import Iterator

import pytest
import torch
from foreign_kernel import Library


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Compilations of one test must not count against the limit of another."""
    yield
    torch._dynamo.reset()


@pytest.fixture
def foreign() -> Library:
    """A library of attention that torch knows nothing about."""
    return Library()
