"""Finds the fastest configuration of a kernel on this machine, and keeps it for later processes."""

__all__: list[str] = []
