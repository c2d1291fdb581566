"""Names that go away warn, name their successor, and are gone in the version that the warning gives."""

import types

import pytest

from attnspan.base import deprecated
from attnspan.base.deprecated import Renamed, renamed

NAMES = {"old": Renamed("attnspan.new", "the object", "0.4")}
PACKAGE = types.ModuleType("pretended")
PACKAGE.__getattr__ = lambda name: renamed("pretended", NAMES, name)  # type: ignore[method-assign]


def test_an_old_name_warns_where_it_is_used() -> None:
    with pytest.warns(
        DeprecationWarning, match=r"pretended.old is now attnspan.new. Version 0.4 rem"
    ) as found:
        assert PACKAGE.old == "the object"
    assert found[0].filename == __file__


@pytest.mark.parametrize("version", ["0.4.0", "0.5.1", "1.0"])
def test_it_is_gone_in_its_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(deprecated, "_own_version", lambda: version)
    with pytest.raises(AttributeError, match=r"no attribute 'old'. Use attnspan.new"):
        _ = PACKAGE.old
    with pytest.raises(AttributeError, match=r"module 'pretended' has no attribute 'other'$"):
        _ = PACKAGE.other
