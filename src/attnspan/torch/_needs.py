"""Check for torch, imported first. Without torch, the error tells you what to install."""

from attnspan.base.installed import require

require("torch", "attnspan.torch", "torch")
