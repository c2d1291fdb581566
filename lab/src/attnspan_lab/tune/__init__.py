"""The tuner: finds the fastest configuration of a kernel on this machine, and caches it."""

__all__: list[str] = []
