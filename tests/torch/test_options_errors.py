"""What is said of options that do not fit."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from attnspan import alibi, causal, dense_bias, relative
from attnspan.torch import attention

SEED = torch.tensor(11)

BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "softcap 0": ({"softcap": 0.0}, ValueError, "softcap: expected a positive, finite number .* got 0.0"),
    "softcap tiny": (
        {"softcap": 1e-40},
        ValueError,
        "softcap: expected a positive, finite .*1e-30.* got 1e-40",
    ),
    "softcap nan": ({"softcap": float("nan")}, ValueError, "softcap: expected a positive, finite .* got nan"),
    "softcap inf": ({"softcap": float("inf")}, ValueError, "softcap: expected a positive, finite .* got inf"),
    "softcap tensor": ({"softcap": torch.tensor(3.0)}, TypeError, "softcap: expected a Python number"),
    "sinks length": ({"sinks": torch.zeros(3)}, ValueError, r"sinks: expected \(4,\): .* got \(3,\)"),
    "sinks rank": ({"sinks": torch.zeros(4, 1)}, ValueError, r"sinks: expected \(4,\)"),
    "sinks dtype": ({"sinks": torch.zeros(4).long()}, TypeError, "sinks: expected a floating tensor, got"),
    "sinks kind": ({"sinks": [0.0] * 4}, TypeError, "sinks: expected a floating tensor, got list"),
    "sinks of NumPy": (
        {"sinks": np.zeros(4, "float32")},
        TypeError,
        "sinks: expected a floating tensor, got ndarray. Convert it with torch.as_tensor",
    ),
    "sinks device": ({"sinks": torch.zeros(4, device="meta")}, ValueError, "sinks: expected device cpu"),
    "slopes length": ({"bias": alibi(torch.zeros(3))}, ValueError, r"slopes: expected \(4,\) or \(2, 4\)"),
    "slopes batch": ({"bias": alibi(torch.zeros(3, 4))}, ValueError, r"slopes: expected .* got \(3, 4\)"),
    "slopes device": (
        {"bias": alibi(torch.zeros(4, device="meta"))},
        ValueError,
        "bias: slopes: expected device cpu",
    ),
    "table heads": ({"bias": relative(torch.zeros(3, 9))}, ValueError, r"relative: table: expected \(4, n\)"),
    "dense keys": ({"bias": torch.zeros(7, 8)}, ValueError, r"dense bias: expected .*k_len=9, got \(7, 8\)"),
    "dense one key": ({"bias": torch.zeros(7, 1)}, ValueError, "dense bias: expected"),
    "dense heads": ({"bias": dense_bias(torch.zeros(2, 7, 9))}, ValueError, "dense bias: expected"),
    "dense dtype": ({"bias": torch.zeros(7, 9).bool()}, TypeError, "dense_bias: expected a floating array"),
    "bias kind": ({"bias": lambda s, *_: s}, TypeError, "bias: expected a tensor, or what .* got function"),
    "dropout 1": ({"dropout_p": 1.0}, ValueError, "dropout_p: expected at least 0 and below 1, got 1.0"),
    "dropout below 0": ({"dropout_p": -0.1}, ValueError, "dropout_p: expected at least 0"),
    "dropout nan": (
        {"dropout_p": float("nan"), "dropout_seed": SEED},
        ValueError,
        "dropout_p: expected at least",
    ),
    "dropout tensor": ({"dropout_p": torch.tensor(0.1)}, TypeError, "dropout_p: expected a Python number"),
    "no seed": ({"dropout_p": 0.1}, ValueError, "dropout_seed: expected an integer tensor with"),
    "seed number": (
        {"dropout_p": 0.1, "dropout_seed": 3},
        TypeError,
        r"dropout_seed: expected an integer tensor, got int. Pass torch.tensor\(seed\)",
    ),
    "seed dtype": ({"dropout_p": 0.1, "dropout_seed": torch.tensor(0.5)}, TypeError, "got torch.float32"),
    "seed without dropout": (
        {"dropout_seed": torch.tensor(True)},
        TypeError,
        "dropout_seed: .* got torch.bool",
    ),
    "seed shape": (
        {"dropout_p": 0.1, "dropout_seed": torch.zeros(4).long()},
        ValueError,
        r"dropout_seed: expected shape \(\) or \(B, H\) = \(2, 4\), got \(4,\). .*dropout_seeds\(",
    ),
    "seed device": (
        {"dropout_p": 0.1, "dropout_seed": torch.zeros((), dtype=torch.int64, device="meta")},
        ValueError,
        "dropout_seed: expected device cpu",
    ),
    "index of a lowered mask": (
        {"mask": causal().prepare(7, 9), "q_index": torch.arange(7), "softcap": 3.0},
        ValueError,
        "q_index, k_index: expected None with a mask that is already lowered and no option that goes by",
    ),
    "index length": (
        {"mask": causal().prepare(7, 9), "q_index": torch.arange(6), "bias": alibi(torch.ones(4))},
        ValueError,
        r"q_index: expected \(7,\) or \(2, 7\), got \(6,\)",
    ),
    "index batch": (
        {"mask": causal().spans(7, 9), "k_index": torch.zeros(3, 9).long(), "bias": alibi(torch.ones(4))},
        ValueError,
        r"k_index: expected \(9,\) or \(2, 9\)",
    ),
    "index dtype": (
        {"mask": causal().spans(7, 9), "k_index": torch.zeros(9), "bias": alibi(torch.ones(4))},
        TypeError,
        "k_index: expected an integer tensor, got torch.float32",
    ),
    "index of NumPy": (
        {"mask": causal().prepare(7, 9), "q_index": np.arange(7), "bias": alibi(torch.ones(4))},
        TypeError,
        "q_index: expected an integer tensor, got ndarray. Convert it with torch.as_tensor",
    ),
    "index beyond int32": (
        {"mask": causal().spans(7, 9), "k_index": torch.arange(9) + 2**40, "bias": alibi(torch.ones(4))},
        ValueError,
        "k_index: expected int32 indices, got 1099511627776 to 1099511627784",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options_say_what_how_and_why(name: str) -> None:
    options, kind, message = BAD[name]
    q, k, v = torch.randn(2, 4, 7, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
    with pytest.raises(kind, match=re.compile(message, re.DOTALL)) as caught:
        attention(q, k, v, **options)
    assert str(caught.value).count(", got ") == 1
    assert str(caught.value).endswith(".")
