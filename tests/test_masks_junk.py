"""Every mask function, with what is no mask argument in each place: the library's own errors come out."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import attnspan as a
from attnspan import errors
from attnspan.library.text import names

IDS, CU, BOUNDS = np.array([0, 0, 1, 1]), np.array([0, 2, 4]), a.causal().spans(4, 4).bounds

#: Arguments that each function takes, by its parameters.
GOOD: dict[str, dict[str, Any]] = {
    "window": {"left": 1, "right": 1},
    "segments": {"q_ids": IDS, "kv_ids": IDS, "padding_id": 0, "max_runs": 1},
    "documents": {"cu_seqlens_q": CU, "cu_seqlens_k": CU},
    "prefix": {"lengths": 1, "cu_seqlens": CU},
    "groups": {"ids": IDS},
    "key_padding": {"lengths": 2, "side": "right", "start": 0, "stop": 4},
    "keys": {"valid": IDS > 0, "max_runs": 2},
    "cache": {"lengths": 4},
    "global_keys": {"n": 1},
    "spans": {"bounds": BOUNDS},
    "from_dense": {"visible": np.eye(4) > 0, "max_runs": 2},
    "from_predicate": {"fn": lambda _, __, q, k: q >= k, "max_runs": 2},
    "from_block_mask": {"block_mask": None, "max_runs": 2},
    "Spans": {"bounds": BOUNDS, "k_len": 4},
    "block_causal": {"block": 2},
    "block_diffusion": {"length": 2, "block": 1},
    "draft_blocks": {"prefix": 2, "block": 2},
    "tree": {"parents": np.array([-1, 0, 0, 1]), "prefix": 0, "depth": 3},
    "morton_natten": {"canvas": (2, 2), "kernel": (1, 1)},
    "morton_order": {"canvas": (2, 2)},
    "natten": {"canvas": (2, 2), "kernel": (1, 1), "dilation": 1, "stride": 1, "causal": False, "text": 0},
    "sasa": {"canvas": (2, 2), "radius": (1, 1)},
    "sta": {"canvas": (2, 2), "kernel": (1, 1), "tile": (1, 1), "text": 0},
    "tile_order": {"canvas": (2, 2), "tile": (1, 1)},
    "tiled_natten": {"canvas": (2, 2), "kernel": (1, 1), "tile": (1, 1)},
    "batchify": {"mask": a.causal(), "size": 2},
    "per_document": {"mask": a.causal(), "cu_seqlens": CU},
    "per_head": {"masks": [a.causal()]},
    "per_row": {"masks": [a.causal()]},
    "reordered": {"mask": a.causal(), "order": np.array([1, 0, 3, 2])},
    "dilated": {"window": 1, "dilation": 2, "causal": True},
    "global_sliding": {"window": 1, "tokens": 1, "rows": True, "max_runs": 1},
    "prefix_lm": {"lengths": 1, "cu_seqlens": CU},
    "shared_prefix": {"cu_seqlens": CU, "prefix_of": np.array([0, 0])},
    "strided_order": {"length": 4, "stride": 2},
    "flamingo": {"positions": np.array([0]), "image_length": 2, "earlier": False},
    "selected_blocks": {"chosen": np.zeros((1, 1, 2, 1), int), "block": 2, "sizes": None},
    "spatial_heads": {"prompt": 1, "frame": 1, "width": 1.0, "sink": False, "multiple": 1},
    "temporal_heads": {"prompt": 1, "frames": 3, "frame": 1, "width": 1.0},
    "vision_cross_attention": {"intervals": np.zeros((1, 4, 1, 2), int), "image_length": 2},
}

FUNCTIONS: dict[str, Callable[..., Any]] = names() | {
    "from_predicate": a.from_predicate,
    "from_block_mask": a.from_block_mask,
    "Spans": a.Spans,
}


class _Mine(np.ndarray):
    pass


def _nested(layout: Any) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=layout)


def _junk() -> dict[str, Any]:
    whole = np.arange(4)
    dense = torch.eye(4, dtype=torch.int64)
    return {
        "None": None,
        "a scalar": 3,
        "a negative number": -3,
        "a large number": 2**70,
        "a float": 1.5,
        "nan": float("nan"),
        "a complex number": 1j,
        "a bool": True,
        "text": "causal",
        "bytes": b"causal",
        "a dict": {"a": 1},
        "a set": {1, 2},
        "an object": object(),
        "a class": a.causal,
        "a function": len,
        "a generator": (i for i in range(3)),
        "an empty list": [],
        "a list": [0, 8],
        "a list of lists": [[0, 8], [0, 8]],
        "a jagged list": [[0], [1, 2]],
        "a list with None": [None, 1],
        "a list of text": ["a", "b"],
        "a list of masks": [a.causal(), 1],
        "a list of dicts": [{}],
        "a list of large numbers": [2**70, 0],
        "a tuple": (0, 8),
        "a mask": a.causal(),
        "spans": a.Spans(BOUNDS, 4),
        "an array": whole,
        "no axes": np.array(3),
        "no elements": np.zeros(0, int),
        "two axes": whole[None],
        "six axes": whole.reshape(1, 1, 1, 1, 1, 4),
        "floats": whole * 1.0,
        "floats of nan": np.full(4, np.nan),
        "complex": whole * 1j,
        "bools": whole > 1,
        "objects": np.array([0, None, "a", 3], object),
        "strings": np.array(["a", "b"]),
        "dates": np.array(["2024-01-01"], "datetime64[D]"),
        "records": np.zeros(4, [("a", int)]),
        "a masked array": np.ma.array(whole, mask=[0, 1, 0, 0]),
        "a subclass": whole.view(_Mine),
        "a tensor of floats": torch.arange(4.0),
        "a complex tensor": torch.arange(4) * 1j,
        "a tensor without axes": torch.tensor(3),
        "a sparse tensor": dense.to_sparse(),
        "a sparse tensor of bools": (dense > 0).to_sparse(),
        "a compressed sparse tensor": dense.to_sparse_csr(),
        "a nested tensor": _nested(torch.strided),
        "a jagged tensor": _nested(torch.jagged),
        "a quantized tensor": torch.quantize_per_tensor(torch.ones(4), 1.0, 0, torch.quint8),
        "a list of tensors": [torch.arange(4), torch.arange(3)],
        "a meta tensor": torch.arange(4, device="meta"),
    }


STYLE = re.compile(r": expected .*, got .*\. [A-Z(].*\.$", re.DOTALL)
OURS = (*(getattr(errors, name) for name in errors.__all__ if name.endswith("Error")),)


def _lowered(mask: Any) -> None:
    if isinstance(mask, a.Mask):
        mask.spans(4, 4)


def _raised(function: Callable[..., Any], arguments: dict[str, Any]) -> Exception | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _lowered(function(**arguments))
        except Exception as error:
            return error
    return None


#: What no parameter takes.
NEVER = {"an object", "a dict", "strings", "six axes"}
CELLS = [(name, parameter) for name, good in GOOD.items() for parameter in good]


def test_the_table_has_every_function() -> None:
    assert set(FUNCTIONS) - {"full", "causal"} == set(GOOD)


@pytest.mark.parametrize(("name", "parameter"), CELLS)
def test_junk_is_refused_with_a_remedy(name: str, parameter: str) -> None:
    wrong = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's prototypes
        junk = _junk()
    for kind, value in junk.items():
        error = _raised(FUNCTIONS[name], {**GOOD[name], parameter: value})
        explained = isinstance(error, OURS) and STYLE.search(str(error))
        if (error is not None and not explained) or (error is None and kind in NEVER):
            wrong.append(f"{kind}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)
