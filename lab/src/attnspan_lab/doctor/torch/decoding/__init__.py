"""Checks of decode steps: caches, state between calls, and one prefill as the reference."""
