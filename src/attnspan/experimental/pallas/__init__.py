"""Pallas kernels for TPUs. `backend` has the functions of the backend."""
