"""A pipeline of two stages, each on two ranks that share the sequences. Every microbatch has its own mask.

    torchrun --nproc-per-node 4 examples/pipeline_four_ranks.py
    torchrun --nproc-per-node 4 examples/pipeline_four_ranks.py interleaved

It prints the loss of each step next to the loss of one rank, and how far apart the weights' updates are.
"""

import sys
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector
from torch.utils.checkpoint import checkpoint

from attnspan import Mask, causal, segments
from attnspan.parallel import Layout, PlanStack
from attnspan.parallel.torch.loss import global_token_count, next_token_targets, sum_gradients, sum_over
from attnspan.torch import attention

VOCABULARY, WIDTH, HEADS, KV_HEADS, LAYERS = 64, 64, 4, 2, 4
STEPS, MICROBATCHES, B, S = 3, 4, 2, 251


class Layer(nn.Module):
    """Attention with rotary positions. Norms and the MLP are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * 16), nn.Linear(HEADS * 16, WIDTH)

    def forward(self, x: Tensor, index: Tensor, mask) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 16)).split([HEADS, KV_HEADS, KV_HEADS], 2)
        q, k = rope(q, index), rope(k, index)
        return x + self.out(attention(q, k, v, mask=mask, q_index=index, layout="bshd").flatten(2))


def rope(x: Tensor, index: Tensor) -> Tensor:
    angles = index[..., None, None] * 100.0 ** -(torch.arange(8) / 8)  # (B, n, 1, 8)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


class Stage(nn.Module):
    """Stage `i` of `count`. The first one embeds tokens, the last one returns logits."""

    def __init__(self, i: int, count: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH) if i == 0 else nn.Identity()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS // count))
        self.head = nn.Linear(WIDTH, VOCABULARY) if i == count - 1 else nn.Identity()

    def forward(self, x: Tensor, index: Tensor, mask) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = checkpoint(layer, x, index, mask, use_reentrant=False)  # recomputes the whole layer
        return self.head(x)


def stages_of(count: int) -> list[Stage]:
    torch.manual_seed(0)  # the same weights on every rank, for any number of stages
    return [Stage(i, count) for i in range(count)]


def weights_of(stages: Iterable[Stage]) -> list[Tensor]:
    return [weight for stage in stages for weight in stage.parameters()]


def microbatches(step: int) -> list[dict[str, Tensor]]:
    """Packed random documents. All ranks read the same ones."""
    generator, found = torch.Generator().manual_seed(step), []
    for _ in range(MICROBATCHES):
        lengths = torch.randint(10, 80, (B, S), generator=generator)  # more than fit
        ids = torch.stack([torch.repeat_interleave(torch.arange(S), row)[:S] for row in lengths])
        tokens = torch.randint(VOCABULARY, (B, S), generator=generator)
        found.append({"tokens": tokens, "targets": next_token_targets(tokens, ids), "ids": ids})
    return found


def mask_of(batch: dict[str, Tensor]) -> Mask:
    return causal() & segments(batch["ids"])


def inputs_of(batches: list[dict[str, Tensor]], cp: DeviceMesh) -> tuple[dict[str, Tensor], PlanStack]:
    """This rank's rows of all microbatches, along dim 0, and the plans of all microbatches."""
    rows, plans = [], []
    for batch in batches:
        layout = Layout.of(mask_of(batch), q_len=S, ranks=cp.size(), batch=B)
        rows.append(layout.shard(batch, cp.get_local_rank()))
        plan = layout.plan(mask_of(batch), heads=(HEADS, KV_HEADS), batch=B, strategy="exchange")
        plans.append(plan.on(cp, rows=rows[-1]))
    return {name: torch.cat([x[name] for x in rows]) for name in rows[0]}, PlanStack.of(plans)


def loss_of(logits: Tensor, targets: Tensor, count: Tensor) -> Tensor:
    """This rank's part of the mean over the targets of all microbatches and ranks."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / count


def train(mesh: DeviceMesh, interleaved: bool) -> tuple[list[float], dict[int, Stage]]:
    """Losses of the steps, on ranks with the last stage, and this rank's stages after the steps."""
    pp, cp, count = mesh["pp"], mesh["cp"], 4 if interleaved else 2
    mine = dict(list(enumerate(stages_of(count)))[pp.get_local_rank() :: pp.size()])
    for stage in mine.values():
        stage.compile(fullgraph=True, backend="aot_eager")  # "inductor" compiles longer and runs faster
    parts = [PipelineStage(x, i, count, torch.device("cpu"), group=pp.get_group()) for i, x in mine.items()]
    options = {"loss_fn": loss_of, "scale_grads": False}  # the loss is already divided
    if interleaved:
        schedule = ScheduleInterleaved1F1B(parts, MICROBATCHES, **options)
    else:
        schedule = Schedule1F1B(parts[0], MICROBATCHES, **options)
    weights, found = weights_of(mine.values()), []
    optimizer = torch.optim.SGD(weights, lr=1.0)
    for step in range(STEPS):
        rows, plans = inputs_of(microbatches(step), cp)
        given = {"index": rows["q_index"], "mask": plans}
        if pp.get_local_rank() == 0:
            schedule.step(rows["tokens"], **given)
        else:
            losses, options = [], {"count": global_token_count(rows["targets"], cp)}
            schedule.step(**given, target=rows["targets"], losses=losses, loss_kwargs=options)
            found.append(sum_over(torch.stack(losses).sum(), cp).item())
        sum_gradients(weights, cp)
        optimizer.step()
        optimizer.zero_grad()
    return found, mine


def train_alone(count: int) -> tuple[list[float], list[Stage]]:
    """The same steps on one rank, without a pipeline."""
    stages, found = stages_of(count), []
    optimizer = torch.optim.SGD(weights_of(stages), lr=1.0)
    for step in range(STEPS):
        batches = microbatches(step)
        total, targets = 0.0, torch.cat([batch["targets"] for batch in batches])
        for batch in batches:
            x = batch["tokens"]
            for stage in stages:
                x = stage(x, torch.arange(S)[None], mask_of(batch))
            loss = loss_of(x, batch["targets"], global_token_count(targets, None))
            loss.backward()
            total += loss.item()
        found.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return found, stages


def main(interleaved: bool = False) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "cp"))
    losses, mine = train(mesh, interleaved)
    if losses and mesh["cp"].get_local_rank() == 0:
        wanted, stages = train_alone(4 if interleaved else 2)
        for step, pair in enumerate(zip(losses, wanted, strict=True)):
            print("step {}: loss {:.5f}, on one rank {:.5f}".format(step, *pair))
        models = mine, stages, stages_of(len(stages))  # the last one as before training
        got, alone, before = (parameters_to_vector(weights_of(model[i] for i in mine)) for model in models)
        print(f"updates differ by {(got - alone).norm() / (alone - before).norm():.0e}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")  # on GPUs: "nccl", and "cuda" in place of "cpu"
    main(interleaved="interleaved" in sys.argv[1:])
    dist.destroy_process_group()
