"""Text from a trained model: ``python examples/train/sample.py runs/long "def "``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

if __name__ == "__main__":
    # Python puts this folder first on the path, but ``import train`` needs its parent.
    sys.path[0] = str(Path(__file__).parents[1])

from attnspan import causal
from attnspan_lab.cli import run
from train.checkpoint import CheckpointStore, step_of
from train.config import CheckpointError, ConfigError, TrainConfig
from train.documents import Vocabulary, load_vocabulary
from train.model import Decoder
from train.parallelize import ALONE, Ranks

__all__ = ["continue_text", "generate"]


def generate(path: Path, prompt: str, *, tokens: int, temperature: float, seed: int) -> Iterator[str]:
    """Continue a text, piece by piece, until the model ends the document or has added ``tokens`` tokens.

    The path is the folder of a run, to use its latest checkpoint, or the folder of a checkpoint. Temperature
    0 takes the most likely token.
    """
    wanted, got = "--temperature and --tokens of 0 or more", f"{temperature} and {tokens}"
    ConfigError.unless(temperature >= 0 <= tokens, wanted, got, "Pass larger numbers")
    folder, step = path, None
    if step_of(path.name) is not None and path.is_dir():
        folder, step = path.resolve().parents[1], step_of(path.name)
    there, wanted = (folder / "config.json").is_file(), "a run's folder or a checkpoint"
    remedy = "Pass a folder like runs/NAME or runs/NAME/checkpoints/step-00000100"
    CheckpointError.unless(there, wanted, path, remedy)
    config = TrainConfig.load(folder / "config.json")
    vocabulary = load_vocabulary(config.tokenizer)
    model = Decoder(config, vocabulary.end + 1)
    CheckpointStore(folder / "checkpoints").load({"model": model.state_dict()}, step)
    yield from continue_text(model, vocabulary, prompt, tokens, temperature, seed, ALONE)


def continue_text(
    model: Decoder, vocab: Vocabulary, prompt: str, tokens: int, temperature: float, seed: int, ranks: Ranks
) -> Iterator[str]:
    """Continue a text with a model.

    Ranks that share the model all call this, and use the first rank's tokens.

    The model computes the whole context again for each token, which is simple and fast enough for a small
    model.
    """
    draw = torch.Generator().manual_seed(seed)
    context = [vocab.end, *vocab.encode(prompt.encode()).tolist()]
    added: list[int] = []
    text = ""
    for _ in range(tokens):
        window = torch.tensor([(context + added)[-model.config.seq_len :]], device=ranks.device)
        # The lengths grow, so compiled blocks would recompile for each length.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            logits = model(window, torch.arange(window.shape[1], device=ranks.device)[None], causal())
        # The tiny number makes the most likely token certain.
        weights = (logits[0, -1].float().cpu() / max(temperature, 1e-9)).softmax(-1)
        token = int(ranks.first(partial(torch.multinomial, weights, 1, generator=draw)))
        if token == vocab.end:
            return
        added.append(token)
        # A piece may end inside a character, which the next token may complete.
        longer = vocab.decode(added)
        if not longer.endswith("\N{REPLACEMENT CHARACTER}"):
            yield longer[len(text) :]
            text = longer


def _command(
    checkpoint: Annotated[Path, typer.Argument(help="a run's folder, or one of its checkpoints")],
    prompt: Annotated[str, typer.Argument(help="text to continue")] = "",
    tokens: Annotated[int, typer.Option(help="maximum number of tokens to add")] = 256,
    temperature: Annotated[float, typer.Option(help="temperature (0: the most likely token)")] = 0.8,
    seed: Annotated[int, typer.Option(help="random seed of the sampling")] = 0,
) -> None:
    """Continue a text with a trained model."""
    print(prompt, end="")
    for text in generate(checkpoint, prompt, tokens=tokens, temperature=temperature, seed=seed):
        print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(_command)
    run(lambda: app(prog_name="python examples/train/sample.py"))
