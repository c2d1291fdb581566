"""The recipe of docs/howto/packed-ranks.md gives one rank's losses, documents and samples on any ranks."""

import contextlib
import io
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from worlds import error, mesh, ranks, world

from attnspan import causal, segments
from attnspan.parallel import Layout
from attnspan.parallel.torch.loss import next_token_targets, sum_gradients

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "packed-ranks.md").read_text(encoding="utf-8")
*RECIPE, START = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def printed(text: str) -> dict[str, list[float]]:
    """The numbers of each kind of line."""
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        found.setdefault(line.split()[0], []).extend(float(x) for x in re.findall(r"\d+\.?\d*", line))
    return found


def recipe(script: Path, **options: Any) -> dict[str, list[float]]:
    """What the recipe prints on a rank."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(str(script))["main"](**options)
    return printed(said.getvalue())


@pytest.fixture
def script(tmp_path: Path) -> Path:
    found = tmp_path / "recipe.py"
    found.write_text("\n".join(RECIPE), encoding="utf-8")
    return found


@pytest.mark.slow
def test_the_recipe_gives_the_numbers_of_one_rank(script: Path) -> None:
    assert RECIPE[0].startswith("# recipe.py: torchrun --nproc-per-node 2 recipe.py\n")
    (one,), *others = (world(count).run(recipe, script) for count in (1, 2, 3))
    for results in others:
        for found in results:
            for kind, values in one.items():
                np.testing.assert_allclose(found[kind], values, atol=2e-4, err_msg=kind)
    assert one["loss"][-1] < one["loss"][0] / 20
    assert one["sample"] == [8, 9, 10, 11, 12, 13, 14, 15]


@torch.no_grad()
def sampled(script: Path) -> tuple[list[int], list[int]]:
    """Tokens of a random model: as the recipe samples them, and with whole sequences on one rank."""
    names = runpy.run_path(str(script))
    torch.manual_seed(0)
    model = names["Model"]()
    for layer in model.layers:
        layer.out.weight.mul_(10)  # so that the tokens depend on all keys
    prompt = torch.randint(32, (25,)).tolist()  # longer than the window
    found, tokens = names["sample"](model, prompt, 10, mesh(dist.get_world_size())), prompt
    for _ in range(10):
        index = torch.arange(len(tokens))[None]
        rows = {"tokens": torch.tensor([tokens]), "positions": index, "q_index": index}
        tokens = [*tokens, int(model(rows, names["MASKS"])[0, -1].argmax())]
    return found, tokens[25:]


def test_the_recipe_samples_the_tokens_of_whole_sequences(script: Path) -> None:
    for found, wanted in world(2).run(sampled, script):
        assert found == wanted
        assert len(set(wanted)) > 1


def test_padded_documents_of_megatron_become_the_entries_of_the_recipe(script: Path) -> None:
    recipe = runpy.run_path(str(script))
    lengths = torch.tensor([5, 8, 1, 13])
    wanted = recipe["pack"](lengths.tolist(), seed=3)
    # Each document padded to a multiple of four, and a tail.
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), (-(-lengths // 4) * 4).cumsum(0)])
    place = torch.cat([torch.arange(n) + start for n, start in zip(lengths, starts, strict=False)])
    batch = {name: torch.full((int(starts[-1]) + 3,), 9) for name in ("tokens", "labels")}
    batch["loss_mask"] = torch.zeros(len(batch["tokens"]))
    for name, x in (("tokens", "tokens"), ("labels", "targets")):
        batch[name][place] = wanted[x][0]
    batch["loss_mask"][place] = (wanted["targets"][0] >= 0).float()
    batch["labels"][batch["loss_mask"] == 0] = 7  # Only the mask says that they have no loss.
    batch["cu_seqlens_padded"] = starts.int()
    batch["cu_seqlens"] = torch.cat([starts[:1], lengths.cumsum(0)]).int()
    found = recipe["unpad"](batch)
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        assert torch.equal(found[name], x), name


@ranks(3)
def test_a_convolution_between_gather_and_shard_has_the_gradients_of_one_rank() -> None:
    torch.manual_seed(0)
    conv, linear, x = nn.Conv1d(8, 8, 4), nn.Linear(8, 8), torch.randn(2, 23, 8)
    ids, rank = torch.arange(23)[None] // torch.tensor([[5], [7]]), dist.get_rank()
    parameters = [*conv.parameters(), *linear.parameters()]

    def mix(x: Tensor) -> Tensor:
        return conv(functional.pad(x.transpose(1, 2), (3, 0))).transpose(1, 2)

    wanted = torch.autograd.grad((mix(linear(x)) ** 3).sum(), parameters)
    layout = Layout.of(causal() & segments(ids), q_len=23, ranks=3, batch=2)
    hidden = layout.gather(linear(layout.shard(x, rank)), mesh(3))
    valid = torch.from_numpy(layout.valid(rank))[..., None]
    ((layout.shard(mix(hidden), rank) * valid) ** 3).sum().backward()
    sum_gradients(parameters, mesh(3))
    assert max(error(p.grad, right) for p, right in zip(parameters, wanted, strict=True)) < 1e-6


def test_labels_are_shifted_once_more_for_each_further_head() -> None:
    ids = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    labels = torch.tensor([-100, 1, 2, 3, -100, 5, 6])  # not shifted, the first of each document is a prompt
    first = next_token_targets(labels, ids)
    assert first.tolist() == [1, 2, 3, -100, 5, 6, -100]
    assert next_token_targets(first, ids).tolist() == [2, 3, -100, -100, 6, -100, -100]
    assert torch.equal((torch.tensor([0, 1, 2, 3, 0, 1, 2]) == 0).cumsum(-1) - 1, ids)
