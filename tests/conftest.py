"""Settings that all tests share."""

import os

import hypothesis

# Examples are the same on every run, and a slow machine is no failure.
hypothesis.settings.register_profile("attnspan", derandomize=True, deadline=None, max_examples=60)
hypothesis.settings.register_profile("thorough", derandomize=False, deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "attnspan"))
