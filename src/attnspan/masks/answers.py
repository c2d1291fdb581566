"""Members that a mask class inherits and that describe its lowering, such as `band`.

A subclass that changes the lowering must not inherit them.
"""

from __future__ import annotations


def forget_answers_of_others(cls: type, base: type, names: tuple[str, ...]) -> None:
    """Reset inherited members that describe the lowering of another class to the members of `base`.

    Such a member describes the first class with a `_lower` that has it. If a later class overrides anything,
    the member may be wrong. For example, a kernel that knows the band of `window` would ignore the `_lower`
    of a subclass.

    Args:
        cls: The new class.
        base: The class without a lowering, from which all mask classes are derived.
        names: Members that describe the lowering.
    """
    for name in names:
        order = cls.__mro__
        owner = next(at for at, each in enumerate(order) if name in vars(each))
        lowering = (at for at in range(owner, -1, -1) if _lowers(order[at], base))
        described = next(lowering, 0)
        later = [member for each in order[:described] for member in vars(each) if not member.startswith("__")]
        if any(hasattr(order[described], member) for member in later):
            setattr(cls, name, vars(base)[name])


def _lowers(cls: type, base: type) -> bool:
    return getattr(cls, "_lower", None) not in (None, vars(base)["_lower"])
