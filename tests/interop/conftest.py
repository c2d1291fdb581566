"""Isolation of the tests of what comes from other frameworks and other libraries."""

from collections.abc import Iterator

import pytest
import torch
from foreign_kernel import Library, build


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Compilations of one test must not count against the limit of another."""
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """A C library of attention that torch knows nothing about."""
    return build(tmp_path_factory.mktemp("foreign"))
