"""Foundation of every room: arrays of any framework, checks, users' mistakes, installed packages."""

__all__: list[str] = []
