"""Fixtures of the tests of the torch front end."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attnspan.torch import _eager


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Compilations of one test must not count against the limit of another."""
    yield
    torch._dynamo.reset()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call of `attention`: did it go the short way?"""
    seen: list[bool] = []
    original = _eager.attend

    def spy(*args: Any) -> Any:
        found = original(*args)
        seen.append(found is not None)
        return found

    monkeypatch.setattr(_eager, "attend", spy)
    return seen
