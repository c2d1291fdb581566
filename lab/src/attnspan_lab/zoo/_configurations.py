"""Small configurations of transformers models, from rules for the names of their fields."""

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

__all__ = ["BENCH", "TINY", "Sizes", "small_configuration"]


@dataclass(frozen=True)
class Sizes:
    """Values for each kind of field. ``groups`` query heads share one key head, if the family supports it."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    groups: int = 2
    head_dim: int = 16
    intermediate: int | None = 128  # None keeps the family's multiple of the hidden size
    vocab: int = 128
    positions: int = 512
    window: int = 16
    experts: int = 4
    image: int = 32
    patch: int = 4


TINY = Sizes()
_DEEP: dict[str, Any] = {"layers": 12, "hidden": 512, "heads": 8, "groups": 4, "head_dim": 64}
BENCH = replace(TINY, intermediate=None, vocab=1024, positions=16384, window=512, **_DEEP)

_FIELDS: dict[str, dict[str, Any]] = tomllib.loads(
    (Path(__file__).parent / "fields.toml").read_text(encoding="utf-8")
)
_SPELLINGS: dict[str, list[str]] = {kind: names.split() for kind, names in _FIELDS["spellings"].items()}


def _table(sizes: Sizes) -> dict[str, Any]:
    """Map the names of fields to values."""
    plain = ("hidden", "layers", "heads", "head_dim", "vocab", "positions", "experts", "window")
    values = {kind: getattr(sizes, kind) for kind in plain}
    values |= {"chosen": sizes.experts // 2, "expert_intermediate": sizes.hidden // 2}
    values |= {"latent": sizes.hidden // 2}
    table = {name: value for kind, value in values.items() for name in _SPELLINGS[kind]}
    table |= {"qk_head_dim": 2 * sizes.head_dim, "mamba_d_ssm": sizes.heads * sizes.head_dim}
    return table | _FIELDS["constants"]


def small_configuration(
    model_type: str, sizes: Sizes = TINY, changes: dict[str, Any] | None = None
) -> PreTrainedConfig:
    """Build the default configuration of a family with small sizes and without dropout or other randomness.

    Args:
        model_type: A key of transformers' ``CONFIG_MAPPING``.
        sizes: Values of the fields.
        changes: Values of fields that need an exception. A dict changes a nested configuration.
    """
    return _small(CONFIG_MAPPING[model_type](), sizes, changes or {})


def _small(default: PreTrainedConfig, sizes: Sizes, changes: dict[str, Any]) -> PreTrainedConfig:
    had, table = vars(default), _table(sizes)
    given: dict[str, Any] = {}
    kinds = list(dict.fromkeys(had.get("layer_types") or ()))
    layers = max(sizes.layers, len(kinds))
    for name, value in had.items():
        if isinstance(value, PreTrainedConfig):
            given[name] = _small(value, sizes, changes.get(name, {}))
        elif name in _SPELLINGS["layers"] and kinds:
            given[name] = layers
        elif name.endswith("layer_types") and value:
            given[name] = _first_of_each(value, layers)
        elif value is not None:
            given[name] = _field(name.removeprefix("swa_"), value, had, sizes, table)
    plain = {k: v for k, v in changes.items() if not isinstance(had.get(k), PreTrainedConfig)}
    given = {k: v for k, v in given.items() if v is not None} | _token_ids(had) | plain
    return type(default)(**given | _rope(default, given))


def _field(name: str, value: Any, had: dict[str, Any], sizes: Sizes, table: dict[str, Any]) -> Any:
    """Choose the value of one field, or None to keep it."""
    if name in _SPELLINGS["key_heads"]:
        heads = next((had[x] for x in _SPELLINGS["heads"] if isinstance(had.get(x), int)), value)
        return sizes.heads if value in (heads, 0) else sizes.heads // sizes.groups
    if name in _SPELLINGS["intermediate"]:
        return _intermediate(value, had, sizes)
    if name in table and isinstance(value, list | tuple) == isinstance(table[name], list):
        return table[name]
    if "drop" in name and isinstance(value, int | float) and not isinstance(value, bool):
        return type(value)(0)
    if name in ("image_size", "patch_size"):
        return _like(value, sizes.image if name == "image_size" else sizes.patch)
    return None


def _first_of_each(kinds: list[str], layers: int) -> list[str]:
    """Choose the kinds of layers: the family's first layers if they have all kinds, or else each in turn."""
    distinct = list(dict.fromkeys(kinds))
    first = list(kinds[:layers])
    return first if len(first) == layers and set(first) == set(distinct) else (distinct * layers)[:layers]


def _intermediate(value: Any, had: dict[str, Any], sizes: Sizes) -> Any:
    if sizes.intermediate is not None or not isinstance(value, int):
        return sizes.intermediate
    hidden = next((had[x] for x in _SPELLINGS["hidden"] if isinstance(had.get(x), int)), value)
    return max(64, round(value / hidden * sizes.hidden / 64) * 64)


def _like(value: Any, number: int) -> Any:
    return type(value)(number for _ in value) if isinstance(value, list | tuple) else number


def _token_ids(had: dict[str, Any]) -> dict[str, int]:
    """Choose distinct ids below 32 for special tokens. Batches draw tokens from 32 on."""
    first = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    ends, own = ("_token_id", "_token_index"), "decoder_start_token_id"
    names = [x for x, value in had.items() if x.endswith(ends) and x != own and value is not None]
    others = [name for name in names if name not in first]
    return {n: i for n, i in first.items() if n in had} | {n: 3 + i for i, n in enumerate(others)}


def _rope(default: PreTrainedConfig, given: dict[str, Any]) -> dict[str, Any]:
    """Scale the sections of rotary embeddings to the head dim, in the family's proportions."""
    rope = vars(default).get("rope_parameters")
    if not isinstance(rope, dict) or "mrope_section" not in rope:
        return {}
    dim = given.get("head_dim", TINY.head_dim if "head_dim" not in given else 0)
    half = int(dim * rope.get("partial_rotary_factor", 1.0)) // 2
    sections = rope["mrope_section"]
    small = [half * x // sum(sections) for x in sections]
    small[0] += half - sum(small)
    return {"rope_parameters": {**rope, "mrope_section": small}}
