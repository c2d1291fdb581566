"""A rank of a run whose last rank gets a signal in the middle of a step: ``dying_rank.py CONFIG FOLDER HOW``.

HOW is {number of the restart: {"step": ..., "signal": ...}} as JSON.
"""

import json
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from attnspan.train import run
from attnspan.train.config import TrainConfig
from attnspan.train.errors import JobError
from attnspan.train.hooks import Unobserved


class Dying(Unobserved):
    """Sends itself a signal when backward of a step begins."""

    def __init__(self, step: int, signal: int) -> None:
        self.at, self.signal, self.now = step, signal, 0

    def step(self, *, number: int | None = None, tokens: int = 0) -> AbstractContextManager[object]:
        del tokens
        self.now = number or 0
        return nullcontext()

    def phase(self, name: str) -> AbstractContextManager[object]:
        if name == "backward" and self.now == self.at:
            os.kill(os.getpid(), self.signal)
        return nullcontext()


def main() -> None:
    run.matmul_ceiling = lambda _: 1e10  # Else 0.3 s of products.
    config, folder = TrainConfig(**json.loads(sys.argv[1])), Path(sys.argv[2])
    how = json.loads(sys.argv[3]).get(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    dies = how and int(os.environ["RANK"]) == config.world - 1
    observe = (lambda _: nullcontext(Dying(**how))) if dies else None
    try:
        run.train(config, folder, against_sdpa=False, against_one_rank=False, observe=observe)
    except JobError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(2)


if __name__ == "__main__":
    main()
