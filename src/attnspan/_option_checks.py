"""Checks of the options that are plain numbers, for every front end."""

from typing import Any

from .errors import DtypeError, OptionError

_FLOAT32_MAX = (2 - 2**-23) * 2.0**127


def check_softcap(softcap: Any) -> None:
    """Raise unless ``softcap`` is None or a positive number that is finite in float32."""
    if softcap is None:
        return
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float)):
        raise DtypeError(
            "softcap",
            expected="a Python number",
            got=type(softcap).__name__,
            remedy="Call .item() if it is an array",
        )
    if not 1e-30 <= softcap <= _FLOAT32_MAX:
        raise OptionError(
            "softcap",
            expected="a positive, finite number (1e-30 or more)",
            got=str(softcap),
            remedy="Leave it out for no softcap",
        )


def check_dropout_p(dropout_p: Any) -> None:
    """Raise unless ``dropout_p`` is a number of [0, 1)."""
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)):
        raise DtypeError(
            "dropout_p",
            expected="a Python number",
            got=type(dropout_p).__name__,
            remedy="Call .item() if it is an array",
        )
    if not 0 <= dropout_p < 1:
        raise OptionError(
            "dropout_p",
            expected="at least 0 and below 1",
            got=str(dropout_p),
            remedy="It is the share of weights to drop; dropping all leaves nothing",
        )
