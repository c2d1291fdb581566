"""Measurement: what attention costs here, beside every peer that this machine has."""

__all__: list[str] = []
