"""`make fuzz`: every test that draws its cases, over and over with new seeds until the minutes are used.

A failing case is shrunk and printed as Python. Paste it into CORPUS of samples/random_calls.py, or as an
`@example` above its test: `make test` replays both.
"""

import argparse
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("minutes", type=float)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    given, more = parser.parse_known_args()
    files = [str(x) for x in sorted(Path(__file__).parent.rglob("test_*.py")) if "@given(" in x.read_text()]
    named = any(not x.startswith("-") for x in more)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "hypothesis", "-p", "no:xdist", "--durations=0"]
    command += ["--hypothesis-show-statistics", *([] if named else files), *more]
    os.environ["HYPOTHESIS_PROFILE"], end = "fuzz", time.monotonic() + 60 * given.minutes
    code, seed = 0, given.seed
    while not code:
        print(f"seed {seed}", flush=True)
        with subprocess.Popen([*command, f"--hypothesis-seed={seed}"]) as run:
            try:
                code = run.wait(max(end - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                run.send_signal(signal.SIGINT)  # It prints the cases so far, and failures.
                return int(run.wait() == 1)
        seed += 1
    return code


if __name__ == "__main__":
    sys.exit(main())
