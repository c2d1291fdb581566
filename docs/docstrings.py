"""What the reference reads in our sources that griffe alone does not."""

from __future__ import annotations

import re
from typing import Any

import griffe

KIND = griffe.ParameterKind.positional_or_keyword
EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)
COMMENT = "#:"


class Docstrings(griffe.Extension):
    """Gives masks their parameters, constants the `#:` comments above them, and examples their heading."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Add `__init__` to a class of masks: it is a frozen dataclass without the decorator."""
        bases = {str(base).rpartition(".")[2] for base in cls.bases}
        if "Mask" not in bases or "__init__" in cls.members:
            return
        fields = [x for x in cls.members.values() if x.is_attribute and x.annotation is not None]
        fields = [x for x in fields if "ClassVar" not in str(x.annotation) and not x.name.startswith("_")]
        given = [
            griffe.Parameter(x.name, annotation=x.annotation, kind=KIND, default=x.value) for x in fields
        ]
        parameters = griffe.Parameters(griffe.Parameter("self", kind=KIND), *given)
        cls.set_member("__init__", griffe.Function("__init__", parameters=parameters))
        for field in fields:
            cls.del_member(field.name)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Take the comment above a constant as its docstring."""
        if attr.docstring is not None or attr.lineno is None:
            return
        above = []
        for line in reversed(attr.lines_collection[attr.filepath][: attr.lineno - 1]):
            if not line.lstrip().startswith(COMMENT):
                break
            above.insert(0, line.lstrip().removeprefix(COMMENT).strip())
        if above:
            attr.docstring = griffe.Docstring("\n".join(above), lineno=attr.lineno - len(above), parent=attr)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Make `Example:` a section of examples, as `Examples:` is."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub("Examples:", obj.docstring.value)
