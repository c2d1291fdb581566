"""Programs that tests run in processes of their own."""

import os
import subprocess
import sys


def run_program(*arguments: str, timeout: float = 300, errors: bool = False, **environment: str) -> str:
    """What a Python process prints, and what it says as errors if asked for; it has to end well."""
    command, env = [sys.executable, *arguments], os.environ | environment
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    said = done.stdout[-3000:] + done.stderr[-3000:]
    assert done.returncode == 0, f"exit status {done.returncode}: {said}"
    return done.stderr + done.stdout if errors else done.stdout
