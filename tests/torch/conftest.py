"""Fixtures of the tests of the torch front end."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Compilations of one test must not count against the limit of another."""
    yield
    torch._dynamo.reset()
