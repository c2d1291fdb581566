"""What lives as long as a run: model, data, the place in them, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from attnspan.train.checkpoint import CheckpointStore
from attnspan.train.config import TrainConfig
from attnspan.train.documents import Data, load_data
from attnspan.train.errors import CheckpointError, DataError
from attnspan.train.packing import Batch, PackedStream, pack_once
from attnspan.train.ranks import ALONE, Ranks
from attnspan.train.step import Stepper
from attnspan.train.vocabulary import Vocabulary, load_vocabulary

__all__ = ["Run"]


class _State(Stateful):
    """Model and optimizer in the form that `torch.distributed.checkpoint` can also shard."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._stepper.model, self._stepper.optimizer)
        return {"model": model, "optimizer": optimizer, "rng": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self._stepper.model,
            self._stepper.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        torch.set_rng_state(state["rng"])


@dataclass
class Run:
    """Everything that lives as long as a run.

    Args:
        config: Options, with the dtype resolved.
        folder: The run's folder.
        data: Tokenized documents.
        stepper: Model and optimizer.
        stream: Training batches of this rank's replica.
        held_out: Batches of the held-out score, its replica's part of them.
        store: Checkpoints.
        ranks: Who runs it.
        done: Steps taken.
        doing: What the ranks are doing together, for messages.
        start_score: Held-out bits per byte of the untrained model.

    Example:
        >>> sorted(Run.__dataclass_fields__)[:3]
        ['config', 'data', 'doing']
    """

    config: TrainConfig
    folder: Path
    data: Data
    stepper: Stepper
    stream: PackedStream
    held_out: list[Batch]
    store: CheckpointStore
    ranks: Ranks = ALONE
    done: int = 0
    doing: str = "compiling"
    start_score: float = float("nan")

    @classmethod
    def open(cls, config: TrainConfig, folder: Path, ranks: Ranks = ALONE) -> Run:
        """Read the data and build the model; every rank does.

        Args:
            config: Options, with the dtype resolved.
            folder: The run's folder.
            ranks: Who runs it.

        Raises:
            DataError: The data cannot be read, on one of the ranks.
        """
        vocabulary, data = ranks.together(lambda: _read(config))
        digests = ranks.first(lambda: _digests(data))
        ranks.together(lambda: _refuse_other_ranks(data, digests))
        rows = {
            "seq_len": config.seq_len,
            "batch_size": config.batch_size,
            "replica": ranks.replica,
            "replicas": ranks.dp,
        }
        return cls(
            config,
            folder,
            data,
            Stepper(config, vocabulary.end + 1, ranks),
            PackedStream(data.train, **rows, seed=config.seed),
            pack_once(data.held_out, **rows),
            CheckpointStore(folder / "checkpoints", ranks),
            ranks,
        )

    def score(self) -> float:
        """Held-out bits per byte of the present weights."""
        return self.stepper.bits_per_byte(self.held_out, self.data.held_out.num_bytes)

    def save(self) -> None:
        """Write a checkpoint of the present state."""
        progress = {
            "data": self.stream.state_dict(),
            "digests": _digests(self.data),
            "start_score": self.start_score,
        }
        self.store.save(self.done, {"state": _State(self.stepper)}, progress)

    def load(self, step: int | None) -> None:
        """Return to a checkpoint.

        Args:
            step: Which one; None takes the latest.

        Raises:
            CheckpointError: There is none, it is damaged, or it was trained on other data.
        """
        self.done, progress = self.store.load({"state": _State(self.stepper)}, step)
        self.ranks.together(lambda: self._refuse_other_data(progress.get("digests", {})))
        if step is not None:
            self.store.point_at(step)
        self.stream.load_state_dict(progress["data"])
        self.start_score = progress["start_score"]

    def _refuse_other_data(self, stored: dict[str, str]) -> None:
        for part, digest in _digests(self.data).items():
            if stored.get(part) != digest:
                raise CheckpointError(
                    expected=f"the {part} documents that {self.folder} was trained with, sha256 "
                    f"{stored.get(part, 'not recorded')}",
                    got=f"{digest} from {self.data.source}",
                    remedy="restore the data and the tokenizer file as they were, "
                    "or start a new run under another --name",
                )


def _read(config: TrainConfig) -> tuple[Vocabulary, Data]:
    vocabulary = load_vocabulary(config.tokenizer)
    return vocabulary, load_data(config, vocabulary)


def _refuse_other_ranks(data: Data, digests: dict[str, str]) -> None:
    for part, digest in _digests(data).items():
        if digest != digests[part]:
            raise DataError(
                expected=f"the same {part} documents on all ranks, sha256 {digests[part]} as on the first",
                got=f"{digest} from {data.source}",
                remedy="give all of them the same files, with --data",
            )


def _digests(data: Data) -> dict[str, str]:
    return {"training": data.train.digest, "held-out": data.held_out.digest}
