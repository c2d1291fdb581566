"""One kernel by many routes: what each way from Python to the kernel costs, phase by phase."""

__all__: list[str] = []
