"""Imported first: without torch, the error says what to install."""

from .._installed import require

require("torch", "attnspan.torch", "torch")
