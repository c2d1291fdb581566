"""Text from a trained model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from attnspan.train.attention import prepare_mask
from attnspan.train.checkpoint import CheckpointStore, step_of
from attnspan.train.config import TrainConfig
from attnspan.train.errors import CheckpointError, ConfigError
from attnspan.train.model import Decoder
from attnspan.train.vocabulary import Vocabulary, load_vocabulary

__all__ = ["generate"]


def generate(path: Path, prompt: str, *, tokens: int, temperature: float, seed: int) -> Iterator[str]:
    """Continue a text, piece by piece, until the model ends the document.

    The whole context is computed anew for each token: simple, and quick enough to look at a small model.

    Args:
        path: A run's folder (its latest checkpoint is taken) or the folder of one checkpoint.
        prompt: Text to continue.
        tokens: Most tokens to add, 0 or more.
        temperature: Divides the logits; 0 takes the likeliest token.
        seed: Seed of the draw.

    Yields:
        Pieces of text.

    Raises:
        CheckpointError: There is no checkpoint at the path, or it is damaged.
        ConfigError: The temperature or the number of tokens is negative.

    Example:
        >>> next(generate(Path("/none"), "def ", tokens=1, temperature=0.0, seed=0))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        attnspan.train.errors.CheckpointError: checkpoint: expected a run's folder or a checkpoint, got ...
    """
    if temperature < 0 or tokens < 0:
        raise ConfigError(
            expected="--temperature and --tokens of 0 or more",
            got=f"{temperature} and {tokens}",
            remedy="pass larger numbers",
        )
    config, vocabulary, model = _load(path)
    generator = torch.Generator().manual_seed(seed)
    context = [vocabulary.end, *vocabulary.encode(prompt.encode()).tolist()]
    added: list[int] = []
    text = ""
    for _ in range(tokens):
        window = (context + added)[-config.seq_len :]
        token = _draw(_logits(model, config, window), temperature, generator)
        if token == vocabulary.end:
            return
        added.append(token)
        # A piece may end inside a character: what is broken now may be whole with the next token.
        longer = vocabulary.decode(added)
        if not longer.endswith("\N{REPLACEMENT CHARACTER}"):
            yield longer[len(text) :]
            text = longer


def _load(path: Path) -> tuple[TrainConfig, Vocabulary, Decoder]:
    folder, step = path, None
    if step_of(path.name) is not None and path.is_dir():
        folder, step = path.resolve().parents[1], step_of(path.name)
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            expected="a run's folder or a checkpoint",
            got=str(path),
            remedy="give a folder like runs/NAME or runs/NAME/checkpoints/step-00000100",
        )
    config = TrainConfig.load(folder / "config.json")
    vocabulary = load_vocabulary(config.tokenizer)
    model = Decoder(config, vocabulary.end + 1)
    CheckpointStore(folder / "checkpoints").load({"state": {"model": model.state_dict()}}, step)
    return config, vocabulary, model.eval()


@torch.no_grad()
def _logits(model: Decoder, config: TrainConfig, window: list[int]) -> Tensor:
    """Logits of the token after the window, (V,) float32."""
    tokens = torch.tensor([window])
    mask = prepare_mask(torch.zeros_like(tokens, dtype=torch.int32), config.attention)
    logits: Tensor = model(tokens, torch.arange(len(window))[None], mask.mask)
    return logits[0, -1].float()


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
