"""What tests of the doctor share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Threads that wait for each other take most of the time of such small models."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # for processes
    many = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(many)
