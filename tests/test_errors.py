"""Errors go where users send them: through pickles to other processes, with their whole text."""

import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from attnspan import errors, window

KINDS = sorted(x for x in errors.__all__ if x.endswith("Error"))


@pytest.mark.parametrize("name", KINDS)
def test_an_error_survives_pickling(name: str) -> None:
    error = getattr(errors, name)("k", expected="4 dims", got="3", remedy="Add a heads dim")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == str(error) == "k: expected 4 dims, got 3. Add a heads dim."


def test_a_worker_process_reports_its_error() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        future = pool.submit(window, -1)
        with pytest.raises(errors.OptionError, match="window: left: expected 0 to"):
            future.result(timeout=120)
