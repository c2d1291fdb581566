"""Exceptions to the other modules' rules for single families, read from families.toml."""

import tomllib
from pathlib import Path
from typing import Any

__all__ = ["BENCHES", "CHANGES", "IMAGE_FORMS", "LEFT_OUT", "NOT_PACKED", "NOT_PADDED", "TOWERS"]

_TABLES = tomllib.loads((Path(__file__).parent / "families.toml").read_text(encoding="utf-8"))


def _families(table: str) -> dict[str, str]:
    """Read the texts of a table in families.toml by family."""
    return {name: said for said, names in _TABLES[table].items() for name in names.split()}


def _fields(table: str) -> dict[str, dict[str, Any]]:
    """Read the configuration fields of a list of tables by family."""
    return {name: fields for fields in _TABLES[table] for name in fields.pop("families").split()}


NOT_PACKED = _families("not_packed")
NOT_PADDED = _families("not_padded")
IMAGE_FORMS = _families("image_forms")
LEFT_OUT = _families("left_out")
#: Configuration fields that need other values than the rule gives.
CHANGES = _fields("changes")
#: Families with the size "bench", and changes for that size.
BENCHES = _fields("benches")
#: Families of each kind of encoder without its own head.
TOWERS: dict[str, str] = _TABLES["towers"]
