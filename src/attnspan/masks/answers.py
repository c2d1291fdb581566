"""The answers that a class of masks inherits, which must not describe a lowering that it has changed."""

from __future__ import annotations

__all__ = ["forget_answers_of_others"]


def forget_answers_of_others(cls: type, base: type, names: tuple[str, ...]) -> None:
    """Give a class the answers of `base` in place of those that describe the lowering of another class.

    An answer describes the first class with a `_lower` that has it. If a class after that one overrides any
    of its members, the answer may be wrong: a kernel that knows the band of `window` would ignore the
    `_lower` of a subclass.

    Args:
        cls: The new class.
        base: The class without a lowering, from which all of them are derived.
        names: Attributes that say something about the lowering.
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
