"""Errors go where users send them: through pickles to other processes, with their whole text."""

import pickle

import pytest

from attnspan import errors


@pytest.mark.parametrize("name", sorted(x for x in errors.__all__ if x.endswith("Error")))
def test_an_error_survives_pickling(name: str) -> None:
    error = getattr(errors, name)("k", expected="4 dims", got="3", remedy="Add a heads dim")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == str(error) == "k: expected 4 dims, got 3. Add a heads dim."
