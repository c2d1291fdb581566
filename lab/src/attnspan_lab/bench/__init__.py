"""Measurement: what attention costs here, compared with every peer that this machine has."""

__all__: list[str] = []
