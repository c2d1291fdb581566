"""Checks of masks: dense masks, cheaper forms, refused kernels, and attention that is written out."""
