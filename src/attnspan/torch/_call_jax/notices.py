"""What the bridge warns of."""


class RetraceWarning(UserWarning):
    """A JAX function is traced anew at call after call.

    Example:
        >>> issubclass(RetraceWarning, UserWarning)
        True
    """


class SpecializedShapesWarning(UserWarning):
    """A JAX function cannot be traced for symbolic sizes, so it is compiled once for each.

    Example:
        >>> issubclass(SpecializedShapesWarning, UserWarning)
        True
    """
