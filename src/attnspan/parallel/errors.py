"""Errors of context parallelism."""

from attnspan.errors import _Explained


class PlanMismatchError(_Explained, ValueError):
    """Ranks have different plans, calls or options, or rows belong to another layout or rank.

    Example:
        >>> issubclass(PlanMismatchError, ValueError)
        True
    """


class CommunicationError(_Explained, RuntimeError):
    """An exchange between ranks failed, because a rank died, hangs or runs another program.

    Example:
        >>> issubclass(CommunicationError, RuntimeError)
        True
    """
