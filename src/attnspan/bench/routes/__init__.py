"""One kernel by many routes: what each way from Python to the kernel costs, phase by phase."""
