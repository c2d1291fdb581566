"""The copy task of the context-parallel tests under SPMD: its loss reaches 0 where masks lie as rows do."""

import copying
import pytest
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
from torch.nn import functional
from xla_cells import on_xla
from xla_meshes import mesh

from attnspan import causal, segments
from attnspan.xla import attention

#: Below it, nothing is left to learn; above the other, tokens are still being guessed.
LEARNED, STALLED = 1e-3, 0.05
#: Two batches of the task side by side, so that batch rows and heads can be split 2 x 2.
SPEC = ("data", None, "model", None)


def losses(ids_of, steps: int = 160) -> list[float]:
    """The loss of each step; `ids_of(ids)` are those that the mask is made of."""
    torch.manual_seed(0)
    model = copying.Decoder().to("xla")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    curve = []
    for step in range(steps):
        batch = copying.make_batch(step)
        tokens, ids, positions, targets = on_xla(
            (batch.tokens, ids_of(batch.ids), batch.positions, batch.targets)
        )
        for x in (tokens, ids, positions, targets):
            xs.mark_sharding(x, mesh(), ("data", None))
        mask = causal() & segments(ids, max_runs=copying.RUNS)

        def attend(q, k, v, mask=mask):
            return attention(q, k, v, mask=mask, layout="bshd", mesh=mesh(), partition_spec=SPEC)

        logits = model(tokens, positions, attend)
        total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss = total / (targets >= 0).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        torch_xla.sync()
        curve.append(loss.detach())
    return torch.stack(curve).cpu().tolist()


def end(curve: list[float]) -> float:
    """What the loss has come to: the mean of the last steps."""
    return sum(curve[-10:]) / 10


def test_the_loss_reaches_zero() -> None:
    curve = losses(lambda ids: ids)
    assert end(curve) < LEARNED
    alone = copying.train(copying.Run(steps=10))
    assert curve[:10] == pytest.approx(alone, rel=1e-4)


def test_ids_that_lie_elsewhere_stall() -> None:
    assert end(losses(lambda ids: copying.misplace(ids, 2))) > STALLED
