"""Errors of work that is spread over ranks."""

from attnspan.errors import _Explained

__all__ = ["CommunicationError", "PlanMismatchError"]


class PlanMismatchError(_Explained, ValueError):
    """Ranks that are to work together have different plans."""


class CommunicationError(_Explained, RuntimeError):
    """An exchange between ranks failed: one of them is gone, or runs another program."""
