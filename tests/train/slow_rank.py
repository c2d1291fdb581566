"""``slow_rank.py CONFIG FOLDER``: a rank of a run whose first rank works alone for longer than ranks wait."""

import json
import sys
import time
from pathlib import Path
from typing import Any

from attnspan.train import run
from attnspan.train.config import TrainConfig

check_parity = run.check_parity


def slowly(*args: Any) -> Any:
    time.sleep(TrainConfig(**json.loads(sys.argv[1])).timeout + 1)
    return check_parity(*args)


if __name__ == "__main__":
    run.check_parity = slowly  # type: ignore[assignment]
    run.train(TrainConfig(**json.loads(sys.argv[1])), Path(sys.argv[2]), against_sdpa=False)
