"""Every mask function, with what is no mask argument in each place: the library's own errors come out."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import attnspan as a
from attnspan import errors
from attnspan.library.text import names

IDS, CU, BOUNDS = np.array([0, 0, 1, 1]), np.array([0, 2, 4]), a.causal().spans(4, 4).bounds

FUNCTIONS: dict[str, Callable[..., Any]] = names() | {
    "from_predicate": a.from_predicate,
    "from_block_mask": a.from_block_mask,
    "Spans": a.Spans,
}

#: Arguments by parameter, where the default is not one that every function takes.
COMMON: dict[str, Any] = {
    "cu_seqlens": CU,
    "cu_seqlens_q": CU,
    "cu_seqlens_k": CU,
    "ids": IDS,
    "q_ids": IDS,
    "kv_ids": IDS,
    "bounds": BOUNDS,
    "k_len": 4,
    "mask": a.causal(),
    "masks": [a.causal()],
    "n": 1,
    "left": 1,
    "right": 1,
    "canvas": (2, 2),
    "kernel": (1, 1),
    "tile": (1, 1),
    "radius": (1, 1),
    "valid": IDS > 0,
    "tokens": 1,
    "visible": np.eye(4) > 0,
    "fn": lambda _, __, q, k: q >= k,
    "max_runs": 2,
    "order": [1, 0, 3, 2],
    "block": 2,
    "length": 4,
    "stride": 1,
    "window": 1,
    "dilation": 1,
    "size": 2,
    "padding_id": 0,
    "parents": [-1, 0, 0, 1],
    "prefix": 0,
    "prefix_of": [0, 0],
    "positions": [0],
    "image_length": 2,
    "chosen": np.zeros((1, 1, 2, 1), int),
    "intervals": np.zeros((1, 4, 1, 2), int),
    "prompt": 1,
    "frame": 1,
    "frames": 3,
    "width": 1.0,
    "stop": 4,
}
#: Other ones of a function.
OWN: dict[str, dict[str, Any]] = {
    "prefix": {"lengths": 1},
    "prefix_lm": {"lengths": 1},
    "key_padding": {"lengths": 2},
    "cache": {"lengths": 4},
    "from_block_mask": {"block_mask": None},
    "block_diffusion": {"length": 2, "block": 1},
}


def _good(name: str) -> dict[str, Any]:
    values = COMMON | OWN.get(name, {})
    taken = inspect.signature(FUNCTIONS[name]).parameters.values()
    return {x.name: values.get(x.name, x.default) for x in taken}


class _Mine(np.ndarray):
    pass


def _nested(layout: Any) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=layout)


def _junk() -> dict[str, Any]:
    whole, dense = np.arange(4), torch.eye(4, dtype=torch.int64)
    numbers = {"None": None, "a scalar": 3, "a negative number": -3, "a large number": 2**70, "a float": 1.5}
    numbers |= {"nan": float("nan"), "a complex number": 1j, "a bool": True}
    others = {
        "text": "causal",
        "bytes": b"causal",
        "a dict": {"a": 1},
        "a set": {1, 2},
        "an object": object(),
    }
    others |= {"a class": a.causal, "a function": len, "a generator": (i for i in range(3))}
    others |= {"a mask": a.causal(), "spans": a.Spans(BOUNDS, 4)}
    lists = {
        "an empty list": [],
        "a list": [0, 8],
        "a list of lists": [[0, 8], [0, 8]],
        "a jagged list": [[0], [1, 2]],
        "a list with None": [None, 1],
        "a list of text": ["a", "b"],
        "a list of masks": [a.causal(), 1],
        "a list of dicts": [{}],
        "a list of large numbers": [2**70, 0],
        "a list of tensors": [torch.arange(4), torch.arange(3)],
        "a tuple": (0, 8),
    }
    arrays = {
        "an array": whole,
        "no axes": np.array(3),
        "no elements": np.zeros(0, int),
        "two axes": whole[None],
        "six axes": whole.reshape(1, 1, 1, 1, 1, 4),
        "floats of nan": np.full(4, np.nan),
        "complex": whole * 1j,
        "bools": whole > 1,
        "objects": np.array([0, None, "a", 3], object),
        "strings": np.array(["a", "b"]),
        "dates": np.array(["2024-01-01"], "datetime64[D]"),
        "records": np.zeros(4, [("a", int)]),
        "a masked array": np.ma.array(whole, mask=[0, 1, 0, 0]),
        "a subclass": whole.view(_Mine),
    }
    tensors = {
        "a tensor of floats": torch.arange(4.0),
        "a complex tensor": torch.arange(4) * 1j,
        "a tensor without axes": torch.tensor(3),
        "a sparse tensor": dense.to_sparse(),
        "a sparse tensor of bools": (dense > 0).to_sparse(),
        "a compressed sparse tensor": dense.to_sparse_csr(),
        "a nested tensor": _nested(torch.strided),
        "a jagged tensor": _nested(torch.jagged),
        "a quantized tensor": torch.quantize_per_tensor(torch.ones(4), 1.0, 0, torch.quint8),
        "a meta tensor": torch.arange(4, device="meta"),
    }
    return numbers | others | lists | arrays | tensors


STYLE = re.compile(r": expected .*, got .*\. [A-Z(].*\.$", re.DOTALL)
OURS = (*(getattr(errors, name) for name in errors.__all__ if name.endswith("Error")),)


def _raised(function: Callable[..., Any], arguments: dict[str, Any]) -> Exception | None:
    try:
        mask = function(**arguments)
        if isinstance(mask, a.Mask):
            mask.spans(4, 4)
    except Exception as error:
        return error
    return None


#: What no parameter takes.
NEVER = {"an object", "a dict", "strings", "six axes"}
CELLS = [(name, parameter) for name in sorted(FUNCTIONS) for parameter in _good(name)]


@pytest.mark.filterwarnings("ignore")  # of torch's prototypes
@pytest.mark.parametrize(("name", "parameter"), CELLS)
def test_junk_is_refused_with_a_remedy(name: str, parameter: str) -> None:
    wrong = []
    for kind, value in _junk().items():
        error = _raised(FUNCTIONS[name], {**_good(name), parameter: value})
        explained = isinstance(error, OURS) and STYLE.search(str(error))
        if (error is not None and not explained) or (error is None and kind in NEVER):
            wrong.append(f"{kind}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)
