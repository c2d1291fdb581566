"""Checks of numbers: scales, positions, overflow, rounding, and softmax weights."""
