"""Classes derived from the library's masks: what is said of a parent's lowering is not believed of them."""

from __future__ import annotations

from dataclasses import fields
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

import attnspan
from attnspan import Mask, cache, causal, documents, from_dense, full, global_keys, prefix, window
from attnspan.library import per_row
from attnspan.masks import Interval, Rows
from attnspan.masks.expression import And, Or, Prepared
from attnspan.parallel import Layout
from attnspan.torch import attention
from attnspan.torch._lowered import lowered

STATE = {"n": 1}
CU = np.array([0, 2, 6])


def _first_keys(self: Any, low: Any) -> Rows:
    del self, low
    return Rows((Interval(None, STATE["n"]),))


def _derived(*parents: type) -> type:
    """A class whose rows see the first keys, as many as the state says."""
    return type("derived", parents, {"_lower": _first_keys, "__module__": __name__})


class _Mixed:
    _lower = _first_keys


MASKS = {
    "full": _derived(full)(),
    "causal": _derived(causal)(),
    "window": _derived(window)(3),
    "of a class of the user": _derived(_derived(window))(3),
    "by another parent": type("derived", (_Mixed, window), {"__module__": __name__})(3),
    "global_keys": _derived(global_keys)(4),
    "documents": _derived(documents)(CU),
    "cache": _derived(cache)(6),
    "prefix": _derived(prefix)(4),
    "from_dense": _derived(from_dense)(np.ones((6, 6), bool)),
    "and": _derived(And)((causal(), window(3))),
    "or": _derived(Or)((window(1), global_keys(3))),
    "per_row": _derived(per_row)([causal()]),
}


def _seen(mask: Mask) -> int:
    q = torch.zeros(1, 1, 6, 8)
    v = torch.eye(6)[None, None]
    (out,) = {tuple(row) for row in attention(q, q, v, mask=mask)[0, 0].tolist()}
    return sum(x > 0 for x in out)


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_follows_the_state_that_it_reads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = MASKS[name]
    wrapped = (mask, mask & full(), full() & mask, mask | global_keys(1), causal() & full() & mask | mask)
    layout = Layout.of(causal(), q_len=6, ranks=2)
    for n in (2, 5):
        monkeypatch.setitem(STATE, "n", n)
        for each in wrapped[:4]:
            assert _seen(each) == n
        assert each.spans(6, 6).lowered.cost().tolist() == [[[n] * 6]]
        assert layout.plan(mask, heads=(1, 1), strategy="exchange").mask.lowered.cost().sum() == 6 * n
    for each in wrapped:
        assert each.static_key() is each.band() is each._first_keys() is None
    assert mask.may_separate()
    assert mask.array_dims is None


def test_a_class_that_changes_nothing_has_the_answers_of_its_parent() -> None:
    mask = type("named", (window,), {"__module__": __name__})(3)
    assert mask.band() == window(3).band()
    assert mask.static_key() not in (None, window(3).static_key())
    assert not mask.may_separate()


def test_a_key_tells_apart_what_differs_in_one_field() -> None:
    masks = [full(), causal(), window(3), window(3, 1), window(2), global_keys(3), global_keys(2)]
    masks += [causal() & window(3), causal() | window(3), causal() | window(2)]
    assert len({mask.static_key() for mask in masks}) == len(masks)
    assert documents(CU).static_key() is None
    for mask in masks:  # A key is of the fields that a pattern of `match` would name.
        assert mask.__match_args__ == tuple(field.name for field in fields(mask))


class _Known(_derived(window)):  # type: ignore[misc]
    """A window that says what it depends on."""

    def static_key(self) -> tuple[Any, ...]:
        return type(self), self.left, STATE["n"]


def test_a_class_may_say_what_it_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    mask, q = _Known(3), torch.zeros(1, 1, 6, 8)
    assert _seen(mask) == 1
    assert lowered(mask, q, q) is lowered(_Known(3), q, q)
    monkeypatch.setitem(STATE, "n", 4)
    assert _seen(mask) == 4


class _Deriving(window):
    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(n=STATE["n"])

    def _lower(self, _: Any) -> Rows:
        return Rows((Interval(None, self.n),))


def test_masks_with_other_derived_attributes_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    first, same = _Deriving(3), _Deriving(3)
    monkeypatch.setitem(STATE, "n", 4)
    other = _Deriving(3)
    assert first == same
    assert hash(first) == hash(same)
    assert first != other
    assert (_seen(first), _seen(other)) == (1, 4)
    with pytest.raises(ValueError, match="default_collate"):
        default_collate([first, other])


def test_spans_that_are_lowered_have_no_subclasses() -> None:
    with pytest.raises(
        TypeError, match="class derived: expected a subclass of Mask, got a subclass of Prepared"
    ):
        _derived(Prepared)


def test_a_recipe_for_xla_knows_the_classes_of_the_library_alone() -> None:
    path = Path(attnspan.__file__).parent / "xla" / "recipe.py"  # The package needs torch_xla.
    recipe: Any = module_from_spec(spec := spec_from_file_location("recipe", path))  # type: ignore[arg-type]
    spec.loader.exec_module(recipe)  # type: ignore[union-attr]
    mine = type("window", (window,), {"_lower": _first_keys, "__module__": __name__})
    with pytest.raises(recipe.OpaqueError):
        recipe.encode(causal() & mine(3))
    assert type(recipe.decode(*recipe.encode(window(3))[:2])) is window
