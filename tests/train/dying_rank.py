"""A rank of a run whose last rank gets a signal in the middle of a step: ``dying_rank.py CONFIG FOLDER HOW``.

HOW is {number of the restart: {"step": ..., "signal": ...}} as JSON.
"""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

from runs import Dying

from train.config import JobError, TrainConfig
from train.train import train


def main() -> None:
    config, folder = TrainConfig(**json.loads(sys.argv[1])), Path(sys.argv[2])
    how = json.loads(sys.argv[3]).get(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    dies = how and int(os.environ["RANK"]) == config.world - 1
    try:
        train(config, folder, sample=0, observe=(lambda _: nullcontext(Dying(**how))) if dies else None)
    except JobError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(2)


if __name__ == "__main__":
    main()
