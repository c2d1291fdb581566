"""Programs that tests run in processes of their own."""

import os
import subprocess
import sys


def run_program(*arguments: str, timeout: float = 300, **environment: str) -> str:
    """What a Python process prints; it has to end well."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    said = done.stdout[-3000:] + done.stderr[-3000:]
    assert done.returncode == 0, f"exit status {done.returncode}: {said}"
    return done.stdout
