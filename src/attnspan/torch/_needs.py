"""Imported first: without torch, the error says what to install."""

from attnspan.base.installed import require

require("torch", "attnspan.torch", "torch")
