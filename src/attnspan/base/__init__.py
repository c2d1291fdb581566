"""What every room stands on: arrays of any framework, checks, what users mistake, what is installed."""

__all__: list[str] = []
