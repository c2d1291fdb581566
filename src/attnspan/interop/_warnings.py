"""Warnings of `call_jax`. A module without JAX defines them, so that users can filter them."""


class RetraceWarning(UserWarning):
    """`call_jax` traces one function of your source again and again for the same shapes.

    Create the function once instead of in each call.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", RetraceWarning)
    """


class SpecializedShapesWarning(UserWarning):
    """JAX cannot trace a function for symbolic sizes, so `call_jax` recompiles it for each size.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", SpecializedShapesWarning)
    """
