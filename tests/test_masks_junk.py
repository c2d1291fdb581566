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

#: Parameters => what every function takes there, where the default is not that.
COMMON = """
cu_seqlens cu_seqlens_q cu_seqlens_k => CU
ids q_ids kv_ids => IDS
bounds => BOUNDS
k_len length stop => 4
mask => a.causal()
masks => [a.causal()]
n left right tokens window stride dilation prompt frame => 1
block size max_runs image_length => 2
canvas => (2, 2)
kernel tile radius => (1, 1)
valid => IDS > 0
visible => np.eye(4) > 0
fn => lambda _, __, q, k: q >= k
order => [1, 0, 3, 2]
padding_id prefix => 0
parents => [-1, 0, 0, 1]
prefix_of => [0, 0]
positions => [0]
chosen => np.zeros((1, 1, 2, 1), int)
intervals => np.zeros((1, 4, 1, 2), int)
frames => 3
width => 1.0
"""
GOOD = {
    name: eval(value)
    for names, value in (line.split(" => ") for line in COMMON.strip().splitlines())
    for name in names.split()
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
    values = GOOD | OWN.get(name, {})
    taken = inspect.signature(FUNCTIONS[name]).parameters.values()
    return {x.name: values.get(x.name, x.default) for x in taken}


class _Mine(np.ndarray):
    pass


WHOLE, DENSE = np.arange(4), torch.eye(4, dtype=torch.int64)
#: Values of each kind.
JUNK = """
None; 3; -3; 2**70; 1.5; float('nan'); 1j; True; 'causal'; b'causal'; {'a': 1}; {1, 2}; object(); a.causal
len; (i for i in range(3)); (0, 8); a.causal(); a.Spans(BOUNDS, 4)
[]; [0, 8]; [[0, 8], [0, 8]]; [[0], [1, 2]]; [None, 1]; ['a', 'b']; [a.causal(), 1]; [{}]; [2**70, 0]
WHOLE; np.array(3); np.zeros(0, int); WHOLE[None]; WHOLE.reshape(1, 1, 1, 1, 1, 4); np.full(4, np.nan)
WHOLE * 1j; WHOLE > 1; np.array([0, None, 'a', 3], object); np.array(['a', 'b']); WHOLE.view(_Mine)
np.array(['2024-01-01'], 'datetime64[D]'); np.zeros(4, [('a', int)]); np.ma.array(WHOLE, mask=[0, 1, 0, 0])
torch.arange(4.0); torch.arange(4) * 1j; torch.tensor(3); torch.arange(4, device='meta')
DENSE.to_sparse(); (DENSE > 0).to_sparse(); DENSE.to_sparse_csr()
torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.strided)
torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged)
torch.quantize_per_tensor(torch.ones(4), 1.0, 0, torch.quint8); [torch.arange(4), torch.arange(3)]
"""


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
NEVER = {"object()", "{'a': 1}", "np.array(['a', 'b'])", "WHOLE.reshape(1, 1, 1, 1, 1, 4)"}
CELLS = [(name, parameter) for name in sorted(FUNCTIONS) for parameter in _good(name)]


@pytest.mark.filterwarnings("ignore")  # of torch's prototypes
@pytest.mark.parametrize(("name", "parameter"), CELLS)
def test_junk_is_refused_with_a_remedy(name: str, parameter: str) -> None:
    wrong = []
    for code in re.split("; |\n", JUNK.strip()):
        error = _raised(FUNCTIONS[name], {**_good(name), parameter: eval(code)})
        explained = isinstance(error, OURS) and STYLE.search(str(error))
        if (error is not None and not explained) or (error is None and code in NEVER):
            wrong.append(f"{code}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)
