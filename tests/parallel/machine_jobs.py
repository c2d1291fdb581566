"""Jobs of test_rates.py."""

from attnspan_lab.machine import Machine


def measure(node_size: int | None) -> Machine:
    return Machine.calibrate(node_size=node_size, head_dim=32, seconds=0.2)
