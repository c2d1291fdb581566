"""The loss of ranks that hold unequally many targets is the loss of one process that holds all of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from loss_jobs import model_of
from torch.nn import functional
from worlds import JobError, world

from attnspan.errors import DtypeError, OptionError
from attnspan.parallel.torch.loss import next_token_targets, sum_gradients, token_mean


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(0, size, (23,), generator=generator) for size in (7, 5))
    targets[torch.tensor([0, 1, 2, 3, 9])] = -100  # mostly in one half: ranks have unequally many
    return tokens, targets


@pytest.mark.parametrize("sizes", [(2,), (1, 2), (2, 1)])
@pytest.mark.parametrize("bucket_bytes", [1, 300, 2**20])
def test_parts_and_summed_gradients_are_those_of_one_process(
    sizes: tuple[int, ...], bucket_bytes: int
) -> None:
    tokens, targets = batch()
    model = model_of()
    loss = functional.cross_entropy(model(tokens), targets)
    loss.backward()
    expected = [parameter.grad for parameter in model.parameters()]
    results = world(2).run("loss_jobs:gradients", tokens, targets, sizes, bucket_bytes)
    for found, count, grads in results:
        assert count == 18
        assert found == pytest.approx(loss.item(), rel=1e-6)
        for mine, whole in zip(grads, expected, strict=True):
            # The same float32 sum in another order.
            assert (mine - whole).norm() <= 10 * torch.finfo(torch.float32).eps * whole.norm()
    assert all(torch.equal(a, b) for a, b in zip(results[0][2], results[1][2], strict=True)), "bit by bit"


def test_a_mean_of_local_means_would_be_another_number() -> None:
    tokens, targets = batch()
    logits = model_of()(tokens)
    local = [functional.cross_entropy(logits[half], targets[half]) for half in (slice(13), slice(13, None))]
    whole = functional.cross_entropy(logits, targets).item()
    assert abs(sum(each.item() for each in local) / 2 - whole) > 1e-3 * whole, "else this file tests nothing"


def test_a_parameter_that_one_rank_does_not_use_has_the_gradient_of_the_others() -> None:
    assert world(2).run("loss_jobs:unused_on_one_rank") == [[3.0, 3.0]] * 2


def test_each_dtype_is_summed_in_itself() -> None:
    for answer in world(2).run("loss_jobs:two_dtypes"):
        assert [dtype for dtype, _ in answer] == [torch.float32] * 3 + [torch.float64] * 2
        assert [values for _, values in answer] == [[3.0]] * 5


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("sharded", r"expected replicated parameters, got a DTensor(.|\n)*divide_factor"),
        ("sparse", r"expected dense gradients, got torch.sparse_coo. Make the layer without sparse"),
    ],
)
def test_what_cannot_be_summed_is_refused_with_what_to_do(how: str, words: str) -> None:
    with pytest.raises(JobError, match=words):
        world(2).run("loss_jobs:refused", how)


def test_no_target_at_all_is_no_loss_and_no_nan() -> None:
    total = torch.zeros((), requires_grad=True)
    token_mean(total, torch.tensor(0)).backward()
    assert float(total.grad) == 1.0  # type: ignore[arg-type]


def test_weights_may_add_up_to_less_than_one() -> None:
    assert float(token_mean(torch.tensor(1.0), torch.tensor(0.25))) == 4.0
    assert float(token_mean(torch.tensor(1.0), 0)) == 1.0


def test_one_process_has_nothing_to_add() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    sum_gradients([parameter], None)
    assert parameter.grad is None


@pytest.mark.parametrize("as_array", [True, False])
def test_targets_stay_within_their_segment(as_array: bool) -> None:
    tokens = np.arange(12).reshape(2, 6)
    ids = np.array([[0, 0, 0, 1, 1, -1], [5, 5, 5, 5, -1, -1]])
    expected = [[1, 2, -100, 4, -100, -100], [7, 8, 9, -100, -100, -100]]
    if as_array:
        assert next_token_targets(tokens, ids).tolist() == expected
        assert tokens.tolist() == np.arange(12).reshape(2, 6).tolist(), "left as they are"
    else:
        assert next_token_targets(torch.from_numpy(tokens), torch.from_numpy(ids)).tolist() == expected
    assert next_token_targets(tokens, ignore_index=-1)[0].tolist() == [1, 2, 3, 4, 5, -1]


def test_ids_of_other_tokens_are_refused() -> None:
    with pytest.raises(OptionError, match=r"one for each token, \(4,\), got \(3,\)"):
        next_token_targets(np.arange(4), np.zeros(3))


@pytest.mark.parametrize("tokens", [torch.arange(4, dtype=torch.uint8), np.arange(4, dtype=np.uint16)])
def test_tokens_that_cannot_hold_the_mark_of_no_loss_are_refused(tokens: object) -> None:
    with pytest.raises(DtypeError, match=r"tokens: expected signed integers, got .*uint"):
        next_token_targets(tokens)
