"""Autocast of torch: whether a kind of device has it, and its dtype."""

import torch

#: Devices with autocast in any torch. Dynamo of torch 2.11 and older cannot trace torch's own function.
AUTOCAST_DEVICES = ("cpu", "cuda", "xla")


def has_autocast(device: str) -> bool:
    """Whether torch has autocast for a kind of device."""
    return device in AUTOCAST_DEVICES or torch.amp.is_autocast_available(device)


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype of autocast on a kind of device, or None where autocast is off."""
    on = has_autocast(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else None
