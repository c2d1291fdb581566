"""The loss of ranks that hold unequally many targets is the loss of one process that holds all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from worlds import mesh, ranks

from attnspan.errors import DtypeError, OptionError
from attnspan.parallel import Layout
from attnspan.parallel.torch.loss import (
    document_weights,
    global_token_count,
    next_token_targets,
    sum_gradients,
    sum_over,
    token_mean,
)


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    head = nn.Linear(8, 5)
    return nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 8), nn.ReLU(), head)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(0, size, (23,), generator=generator) for size in (7, 5))
    targets[torch.tensor([0, 1, 2, 3, 9])] = -100  # mostly in one half: ranks have unequally many
    return tokens, targets


@pytest.mark.parametrize("sizes", [(2,), (1, 2), (2, 1)])
@pytest.mark.parametrize("bucket_bytes", [1, 300, 2**20])
@ranks(2)
def test_parts_and_summed_gradients_are_those_of_one_process(
    sizes: tuple[int, ...], bucket_bytes: int
) -> None:
    (tokens, targets), both, model, whole = batch(), mesh(*sizes), model_of(), model_of()
    loss = functional.cross_entropy(whole(tokens), targets)
    loss.backward()
    mine = slice(13) if dist.get_rank() == 0 else slice(13, None)
    count = global_token_count(targets[mine], both)
    assert int(count) == 18
    part = token_mean(functional.cross_entropy(model(tokens[mine]), targets[mine], reduction="sum"), count)
    part.backward()
    sum_gradients(model.parameters(), both, bucket_bytes=bucket_bytes)
    assert float(sum_over(part, both)) == pytest.approx(loss.item(), rel=1e-6)
    for got, wanted in zip(model.parameters(), whole.parameters(), strict=True):
        # The same float32 sum in another order.
        assert (got.grad - wanted.grad).norm() <= 10 * torch.finfo(torch.float32).eps * wanted.grad.norm()
        of_rank_0 = got.grad.clone()
        dist.broadcast(of_rank_0, 0)
        assert torch.equal(got.grad, of_rank_0), "bit by bit"


@ranks(2)
def test_a_parameter_that_one_rank_does_not_use_has_the_gradient_of_the_others() -> None:
    used, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    if dist.get_rank() == 1:
        (3 * used).sum().backward()
    sum_gradients([frozen, used], dist.group.WORLD)
    assert frozen.grad is None
    assert used.grad.tolist() == [3.0, 3.0]


@ranks(2)
def test_each_dtype_is_summed_in_itself() -> None:
    model = model_of()
    model[3].to(torch.float64)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1.0 + dist.get_rank())
    sum_gradients(model.parameters(), mesh(2))
    found = [parameter.grad for parameter in model.parameters()]
    assert [x.dtype for x in found] == [torch.float32] * 3 + [torch.float64] * 2
    assert all((x == 3.0).all() for x in found)


@ranks(4)
def test_gradients_in_low_precision_are_added_in_float32_and_rounded_once() -> None:
    # bfloat16 has no 257: ones that are added to 256 one by one would vanish, whichever rank has it.
    parameter = torch.zeros(16, dtype=torch.bfloat16, requires_grad=True)
    large = torch.arange(16) % 4 == dist.get_rank()
    parameter.grad = torch.where(large, 256.0, 1.0).bfloat16()
    sum_gradients([parameter], mesh(4))
    assert parameter.grad.dtype == torch.bfloat16
    assert parameter.grad.tolist() == [float(torch.tensor(259.0).bfloat16())] * 16


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("sharded", r"expected replicated parameters, got a DTensor(.|\n)*divide_factor"),
        ("sparse", r"expected dense gradients, got torch.sparse_coo. Make the layer without sparse"),
    ],
)
@ranks(2)
def test_what_cannot_be_summed_is_refused_with_what_to_do(how: str, words: str) -> None:
    model = nn.Embedding(4, 4, sparse=how == "sparse")
    if how == "sharded":
        fully_shard(model, mesh=mesh(2))
    else:
        model(torch.tensor([1])).sum().backward()
    with pytest.raises(OptionError, match=words):
        sum_gradients(model.parameters(), mesh(2))


def test_few_or_no_targets_and_one_process() -> None:
    total = torch.zeros((), requires_grad=True)
    token_mean(total, torch.tensor(0)).backward()
    assert float(total.grad) == 1.0  # type: ignore[arg-type]
    # Weights may add up to less than one.
    assert float(token_mean(torch.tensor(1.0), torch.tensor(0.25))) == 4.0
    assert float(token_mean(torch.tensor(1.0), 0)) == 1.0
    parameter = torch.nn.Parameter(torch.ones(1))
    sum_gradients([parameter], None)
    assert parameter.grad is None


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy])
def test_targets_stay_within_their_segment(convert: Any) -> None:
    tokens = np.arange(12).reshape(2, 6)
    ids = np.array([[0, 0, 0, 1, 1, -1], [5, 5, 5, 5, -1, -1]])
    expected = [[1, 2, -100, 4, -100, -100], [7, 8, 9, -100, -100, -100]]
    assert next_token_targets(convert(tokens), convert(ids)).tolist() == expected
    assert tokens.tolist() == np.arange(12).reshape(2, 6).tolist(), "left as they are"
    assert next_token_targets(convert(tokens), ignore_index=-1)[0].tolist() == [1, 2, 3, 4, 5, -1]


@pytest.mark.parametrize("ids", [None, "packed"])
@pytest.mark.parametrize("method", ["balanced", "contiguous"])
@ranks(3)
def test_each_document_counts_the_same_wherever_its_tokens_are(method: Any, ids: str | None) -> None:
    generator = torch.Generator().manual_seed(4)
    tokens, targets = (torch.randint(size, (2, 23), generator=generator) for size in (7, 5))
    targets[:, ::4] = -100
    # The same ids in both sequences. Document 2 has no target, and document 5 is in two pieces.
    names = torch.tensor([[5] * 3 + [2] * 2 + [7] * 9 + [5] * 8 + [-1], [5] * 19 + [-1] * 4])
    targets[names == 2] = -100
    documents = names if ids else torch.zeros_like(names)
    model, whole = model_of(), model_of()
    losses = functional.cross_entropy(whole(tokens).flatten(0, 1), targets.flatten(), reduction="none")
    known = (targets >= 0) & (documents >= 0)
    groups = [(b, i) for b in range(2) for i in set(documents[b][known[b]].tolist())]
    means = [losses.view(2, 23)[b][known[b] & (documents[b] == i)].mean() for b, i in groups]
    wanted = sum(means) / len(means)
    wanted.backward()

    layout = Layout.of(q_len=23, ranks=3, method=method, rows_per_chunk=2)
    weights = document_weights(targets, documents if ids else None)
    rows = layout.shard({"tokens": tokens, "targets": targets, "weights": weights}, dist.get_rank())
    count = sum_over(rows["weights"].sum(), mesh(3))
    assert float(count) == pytest.approx(2 if ids is None else 3)
    logits = model(rows["tokens"]).flatten(0, 1)
    mine = functional.cross_entropy(logits, rows["targets"].flatten(), reduction="none")
    part = token_mean((rows["weights"].flatten() * mine).sum(), count)
    part.backward()
    sum_gradients(model.parameters(), mesh(3))
    assert float(sum_over(part, mesh(3))) == pytest.approx(wanted.item(), rel=1e-6)
    for got, right in zip(model.parameters(), whole.parameters(), strict=True):
        assert (got.grad - right.grad).norm() <= 1e-6 * right.grad.norm()


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy])
def test_weights_of_documents(convert: Any) -> None:
    targets = convert(np.array([[1, 2, 3, 4, -100, 6], [-100, 1, 7, 7, 7, 7]]))
    ids = convert(np.array([[0, 0, 0, 0, 1, 1], [0, 0, -1, -1, -1, -1]], np.int32))
    found = document_weights(targets, ids)
    assert type(found) is type(targets)
    assert str(found.dtype).endswith("float32")
    assert found.tolist() == [[0.25] * 4 + [0, 1], [0, 1, 0, 0, 0, 0]]
    assert document_weights(targets[0], ids[0], power=0.5).tolist() == [0.5] * 4 + [0, 1]
    assert document_weights(targets, power=0).tolist() == [[1] * 4 + [0, 1], [0] + [1] * 5]
    np.testing.assert_allclose(document_weights(targets), [[0.2] * 4 + [0, 0.2], [0] + [0.2] * 5])
    assert document_weights(targets[:, :0], ids[:, :0]).shape == (2, 0)
    with pytest.raises(OptionError, match=r"ids: expected one for each token, \(2, 6\), got \(6,\)"):
        document_weights(targets, ids[0])
    for power in (-1, float("nan"), "1"):
        with pytest.raises(OptionError, match="power: expected a number of at least 0, got "):
            document_weights(targets, ids, power=power)


def test_ids_and_tokens_that_do_not_fit_are_refused() -> None:
    three, wanted = torch.arange(3), r"expected integers \(..., S\), .*, got "
    for function, name in ((next_token_targets, "tokens"), (document_weights, "targets")):
        for bad, got in (
            (torch.tensor(1), r".*shape \(\)"),
            ([1, 2, 3], "list"),
            (three.float(), ".*float32"),
        ):
            with pytest.raises(DtypeError, match=f"^{name}: {wanted}{got}"):
                function(bad)
            with pytest.raises(DtypeError, match=f"^ids: {wanted}{got}"):
                function(three, bad)
    with pytest.raises(OptionError, match="ignore_index: expected a value of int8, got -300"):
        next_token_targets(three.to(torch.int8), ignore_index=-300)
    with pytest.raises(OptionError, match=r"one for each token, \(4,\), got \(3,\)"):
        next_token_targets(np.arange(4), np.zeros(3, int))
    for tokens in (torch.arange(4, dtype=torch.uint8), np.arange(4, dtype=np.uint16)):
        with pytest.raises(DtypeError, match=r"tokens: expected signed integers, got .*uint"):
            next_token_targets(tokens)
