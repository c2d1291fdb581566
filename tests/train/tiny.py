"""The smallest job that still has everything: layers, grouped heads, packed documents."""

from typing import Any

TINY: dict[str, Any] = {
    "dim": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "hidden": 48,
    "seq_len": 48,
    "batch_size": 2,
    "steps": 12,
    "warmup": 2,
    "eval_bytes": 256,
    "dtype": "float32",
    "compile": False,
    "threads": 1,
    "workers": 0,
    "device": "cpu",
}
