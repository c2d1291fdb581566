"""Rows that the compiled module moves by index: in parallel, and never out of bounds."""

from typing import Any

import numpy as np
import pytest
import torch

from attnspan.kernels import cpu

TARGET, SOURCE = (2, 7, 3, 2, 5), (3, 4, 3, 2, 5)


def test_many_rows_over_threads() -> None:
    source, order = torch.randn(1, 5000, 1, 1, 3), torch.randperm(5000, dtype=torch.int32)
    target = torch.zeros_like(source)
    cpu.move_rows(target, order, source, None, num_threads=4)
    assert torch.equal(target[0, order.long()], source[0])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beyond the target": ({"to": [0, 14]}, "row 1: expected numbers below 14 and 12, got 14 and 1"),
    "beyond the source": ({"at": [0, 12]}, "row 1: .*got 1 and 12"),
    "negative": ({"to": [-1, 0]}, "row 0: .*got -1 and 0"),
    "counts": ({"to": [0]}, "from: expected as many rows as `to`, 1, got 2"),
    "dtypes": ({"source": torch.zeros(SOURCE, dtype=torch.float16)}, "source: expected rows as those"),
    "widths": ({"source": torch.zeros(3, 4, 3, 2, 6)}, "source: expected rows as those of the target"),
    "axes": ({"target": torch.zeros(2, 7, 3, 2)}, "target: expected floats"),
    "last stride": ({"source": torch.zeros(3, 4, 3, 5, 2).transpose(3, 4)}, "source: .*unit last stride"),
    "index dtype": ({"to": np.array([0, 1])}, "to: expected int32"),
    "narrow sums": (
        {"target": torch.zeros(TARGET).half(), "source": torch.ones(TARGET).half(), "add": True},
        "target: expected float32 to add to",
    ),
}


@pytest.mark.compiled_module("rows are moved by the module itself")
@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_written(what: str) -> None:
    changes, message = REFUSED[what]
    given = {
        "target": torch.zeros(TARGET),
        "to": [0, 1],
        "source": torch.ones(SOURCE),
        "at": [0, 1],
        "add": False,
        **changes,
    }
    to, at = (np.array(x, np.int32) if isinstance(x, list) else x for x in (given["to"], given["at"]))
    with pytest.raises(ValueError, match=message):
        cpu.move_rows(given["target"], to, given["source"], at, num_threads=1, add=given["add"])
    assert not given["target"].any()
