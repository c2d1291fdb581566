"""Rows that several plans share, meshes of several kinds, loops played wrongly; errors are norm-wise."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from parity_jobs import attend, place
from samples.parallel import Case
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils import _pytree as pytree
from worlds import error, mesh

import attnspan
from attnspan.parallel import Layout, MeshPlan, ShardedCache
from attnspan.parallel.torch.loss import global_token_count, next_token_targets, sum_gradients
from attnspan.testing import assert_same_as_one_rank
from attnspan.torch import SlowPathWarning, attention

B, S, HEADS = 2, 192, (4, 2)
CAUSAL, WINDOW = attnspan.causal(), attnspan.causal() & attnspan.window(9)


def here() -> Any:
    return mesh(dist.get_world_size())["cp"]


def _on(layout: Layout, plan: Any) -> MeshPlan:
    return plan.on(here(), rows=layout.shard({}, dist.get_rank()))  # type: ignore[no-any-return]


def documents(salt: int = 3) -> attnspan.Mask:
    lengths = torch.randint(5, 60, (B, S), generator=torch.Generator().manual_seed(salt))
    ids = torch.stack([torch.repeat_interleave(torch.arange(S), row)[:S] for row in lengths])
    return CAUSAL & attnspan.segments(ids)


def inputs(keys: int = S) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = ((B, HEADS[0], S, 16), (B, HEADS[1], keys, 16), (B, HEADS[1], keys, 16))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def layout_of(mask: attnspan.Mask, **options: Any) -> Layout:
    return Layout.of(mask, **{"q_len": S, "ranks": dist.get_world_size(), "batch": B, **options})


SHAPES = [(37,), (2, 37), (2, 37, 3), (37, 2, 3), (2, 3, 37)]


def gather(method: str) -> list[str]:
    """Take the whole apart and put it together, with gradients, along each dimension; what went wrong."""
    layout, wrong = (
        Layout.of(CAUSAL, q_len=37, ranks=dist.get_world_size(), method=method, rows_per_chunk=3),
        [],
    )  # type: ignore[arg-type]
    packed = layout_of(documents())
    for one, shape in [(layout, shape) for shape in SHAPES] + [(packed, (B, S, 3)), (packed, (B, 3, S))]:
        for dim in (shape.index(one.q_len), shape.index(one.q_len) - len(shape)):
            whole = torch.arange(float(torch.tensor(shape).prod())).reshape(shape)
            x = one.shard(whole, dist.get_rank(), dim=dim, fill=torch.nan).requires_grad_()
            found = one.gather(x, here(), dim=dim)
            if not torch.equal(found, whole):
                wrong.append(f"{shape} along {dim}: rows")
            # Each rank weighs the whole in another way: the gradient is the sum of what all of them find.
            (found * _weights(shape, dist.get_rank())).sum().backward()
            total = torch.stack([_weights(shape, rank) for rank in range(dist.get_world_size())]).sum(0)
            if x.grad is None or not torch.equal(x.grad, one.shard(total, dist.get_rank(), dim=dim)):
                wrong.append(f"{shape} along {dim}: gradient")
    return wrong


def _weights(shape: tuple[int, ...], rank: int) -> Tensor:
    # Whole numbers, whose sums are exact in any order.
    return torch.randint(100, shape, generator=torch.Generator().manual_seed(rank)).float()


def two_levels(case: Case, strategy: str) -> tuple[str, dict[str, Any]]:
    """A mesh of two nodes of two ranks each: the strategy that came of it, and its results."""
    placed = place(case, mesh(2, 2), strategy=strategy, node_size=2)
    return placed.plan.strategy.name, attend(placed, case)


def part_of_a_mesh(case: Case) -> dict[str, Any]:
    """Two pairs of ranks, each with the whole problem to itself; results of this rank's pair."""
    return {**attend(place(case, mesh(2, 2)["intra"]), case), "pair": dist.get_rank() // 2}


def layers(strategies: tuple[str, str]) -> float:
    """Two kinds of layers with masks and strategies of their own, on rows that were sharded once."""
    masks = [documents(), WINDOW]
    layout, rank = layout_of(masks[0]), dist.get_rank()
    rows = layout.shard({"x": inputs()[0].transpose(1, 2)}, rank)
    x, whole = rows["x"].transpose(1, 2), inputs()[0]
    for mask, strategy in zip(masks, strategies, strict=True):
        plan = layout.plan(mask, heads=HEADS, strategy=strategy).on(here(), rows=rows)
        x = attention(x, x[:, ::2], x[:, 1::2], mask=plan, q_index=rows["q_index"])
        whole = attention(whole, whole[:, ::2], whole[:, 1::2], mask=mask)
    return error(layout.gather(x, here(), dim=2), whole)


def encoder_and_decoder() -> float:
    """Cross attention from the decoder's rows to the encoder's, both balanced by masks of their own."""
    (q, k, v), rank = inputs(keys=150), dist.get_rank()
    encoder = layout_of(attnspan.window(20, 20), q_len=150)
    decoder = layout_of(documents())
    sees = attnspan.key_padding(torch.tensor([150, 77]))
    plan = decoder.plan(sees, heads=HEADS, keys=encoder, strategy="exchange")
    rows, keys = decoder.shard({"q": q}, rank, dim=2), (encoder.shard(x, rank, dim=2) for x in (k, v))
    out = attention(rows["q"], *keys, mask=plan.on(here(), rows=rows))
    return error(decoder.gather(out, here(), dim=2), attention(q, k, v, mask=sees))


def on_some_ranks(ranks: tuple[int, ...]) -> str:
    """Attention on the mesh of some ranks, in any order; what those not among them meet."""
    some = DeviceMesh("cpu", ranks, mesh_dim_names=("cp",))
    layout = Layout.of(CAUSAL, q_len=S, ranks=len(ranks))

    def call() -> Any:
        rank = some.get_local_rank() if dist.get_rank() in ranks else 0
        plan = layout.plan(heads=HEADS, strategy="ulysses").local(rank).on(some, rows=layout.shard({}, rank))
        whole = inputs()
        out = layout.gather(attention(*(layout.shard(x, rank, dim=2) for x in whole), mask=plan), some, dim=2)
        return out if error(out, attention(*whole, mask=CAUSAL)) < 2e-6 else out * torch.nan

    return _met(call)


def strided(strategy: str) -> float:
    """q, k, v and dout without a unit last stride, as plain attention takes them."""
    layout, results = layout_of(CAUSAL), []
    plan = _on(layout, layout.plan(heads=HEADS, strategy=strategy, batch=B))
    for mask, shard in ((plan, True), (CAUSAL, False)):
        made = []
        for x in (*inputs(), inputs()[0] + 1):
            x = layout.shard(x, dist.get_rank(), dim=2) if shard else x
            made.append(x.transpose(2, 3).contiguous().transpose(2, 3).requires_grad_())
        *leaves, dout = made
        out = attention(*leaves, mask=mask)
        results.append([out, *torch.autograd.grad(out, leaves, dout.detach())])
    return max(error(layout.gather(got, here(), dim=2), wanted) for got, wanted in zip(*results, strict=True))


def made_while_evaluating() -> float:
    """A plan that was made in inference mode serves training."""
    layout = layout_of(CAUSAL)
    with torch.inference_mode():
        plan = _on(layout, layout.plan(heads=HEADS, strategy="exchange"))
    leaves = [layout.shard(x, dist.get_rank(), dim=2).requires_grad_() for x in inputs()]
    attention(*leaves, mask=plan).sum().backward()
    wanted = [x.requires_grad_() for x in inputs()]
    attention(*wanted, mask=CAUSAL).sum().backward()
    found = [(layout.gather(x.grad, here(), dim=2), y.grad) for x, y in zip(leaves, wanted, strict=True)]
    return max(error(*pair) for pair in found)  # type: ignore[arg-type]


def sinks_of_nothing(strategy: str) -> bool:
    """A sink of -inf next to rows that see nothing: gradients stay finite, as on one process."""
    layout = layout_of(CAUSAL, q_len=S - 1)
    plan = _on(layout, layout.plan(heads=HEADS, strategy=strategy, batch=B))
    sinks = torch.tensor([-torch.inf, 0.0, 1.0, -torch.inf], requires_grad=True)
    rows = (layout.shard(x[:, :, 1:], dist.get_rank(), dim=2) for x in inputs())
    attention(*rows, mask=plan, sinks=sinks).sum().backward()
    assert sinks.grad is not None
    return bool(sinks.grad.isfinite().all())


def float64_sums(strategy: str) -> float:
    """Gradients of parameters and inputs in float64 against one process: all sums are float64."""
    generator = torch.Generator().manual_seed(6)
    given = [torch.randn(B, heads, 60, 8, generator=generator).double() for heads in (4, 2, 2, 4)]
    parameters = [torch.randn(4, generator=generator).double() for _ in range(2)]
    layout = Layout.of(CAUSAL, q_len=60, ranks=dist.get_world_size())
    plan = _on(layout, layout.plan(heads=HEADS, strategy=strategy, batch=B))

    def gradients(mask: Any, *inputs: Tensor) -> list[Tensor]:
        *leaves, dout = (x.clone().requires_grad_() for x in inputs)
        slopes, sinks = (x.clone().requires_grad_() for x in parameters)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SlowPathWarning)
            out, lse = attention(
                *leaves, mask=mask, bias=attnspan.alibi(slopes), sinks=sinks, softcap=2.0, return_lse=True
            )
        seen = lse.masked_fill(lse == -torch.inf, 0.0)
        return list(
            torch.autograd.grad((out * dout).sum() + seen.sum(), [*leaves, slopes, sinks], allow_unused=True)
        )

    mine = gradients(plan, *(layout.shard(x, dist.get_rank(), dim=2) for x in given))
    for x in mine[3:]:
        dist.all_reduce(x)
    whole = [*(layout.gather(x, here(), dim=2) for x in mine[:3]), *mine[3:]]
    return max(error(*pair) for pair in zip(whole, gradients(CAUSAL, *given), strict=True))


def natural_order() -> dict[str, Any]:
    """DTensors as `distribute_tensor` makes them: refused, unless the layout keeps the order of rows."""
    whole, found = inputs(), dict[str, Any]()
    spread = [distribute_tensor(x, here(), [Shard(2)]) for x in whole]
    for method in ("zigzag", "contiguous"):
        layout = layout_of(CAUSAL, method=method)
        plan = _on(layout, layout.plan(heads=HEADS, strategy="exchange", batch=B))
        try:
            out = attention(*spread, mask=plan)
            assert isinstance(out, DTensor)
            found[method] = error(out.full_tensor(), attention(*whole, mask=CAUSAL))
        except Exception as problem:
            found[method] = str(problem)
    return found


def _met(action: Any) -> str:
    try:
        found = action()
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return f"nan: {bool(found.isnan().all())}" if isinstance(found, Tensor) else "taken"


def play(way: str) -> str:
    """The ordinary loop, two steps of it, played wrongly in one way: the error of the second step."""
    rank = dist.get_rank()
    steps = [
        (layout, layout.shard({"x": inputs()[0]}, rank, dim=2))
        for layout in map(layout_of, map(documents, (3, 4)))
    ]
    (_, before), (layout, rows) = steps

    def plan(mask: Any = None, rows: Any = rows) -> MeshPlan:
        return layout.plan(mask, heads=HEADS, strategy="exchange").on(here(), rows=rows)  # type: ignore[no-any-return]

    def call(rows: Any, plan: MeshPlan, **options: Any) -> Any:
        x = rows["x"]
        return attention(x, x[:, ::2], x[:, 1::2], mask=plan, **options)

    def another_mask() -> Any:
        odd = documents(5) if rank == 0 else documents(4)
        call(rows, plan(odd))
        return plan(documents(4))

    def compiled() -> Any:
        run = torch.compile(
            lambda rows, plan, index: call(rows, plan, q_index=index), backend="aot_eager", fullgraph=True
        )
        return run(dict(rows), plan(), before["q_index"])

    ways: dict[str, Any] = {
        "the batch of the step before": lambda: call(before, plan(rows=before)),
        "its rows in the model": lambda: call(before, plan(), q_index=before["q_index"]),
        "its rows in a compiled model": compiled,
        "a plan of a layout of its own": lambda: call(
            rows, layout_of(WINDOW).plan(heads=HEADS, batch=B).on(here(), rows=rows)
        ),
        "the rows of another rank": lambda: plan(rows=layout.shard({"x": inputs()[0]}, 1 - rank, dim=2)),
        "rows that are not sharded": lambda: call({"x": inputs()[0]}, plan()),
        "another mask on one rank": another_mask,
        "DTensors in their own order": lambda: call(
            {"x": distribute_tensor(inputs()[0], here(), [Shard(2)])}, plan()
        ),
        "rightly": lambda: call(rows, plan(rows=rows), q_index=rows["q_index"]) is None,
    }
    return _met(ways[way])


def same_as_one_rank(way: str) -> str:
    """A step whose sharded half is wrong in one way: what `assert_same_as_one_rank` says."""
    generator, rank = torch.Generator().manual_seed(9), dist.get_rank()
    tokens = torch.randint(50, (2, 40), generator=generator)
    ids, later = (torch.arange(40).expand(2, -1) // size for size in (9, 13))
    table, out = (torch.randn(50, 32, generator=generator) for _ in range(2))

    def step(batch: Any, on: Any) -> dict[str, Tensor]:
        weights = [x.clone().requires_grad_() for x in (table, out)]
        targets, mask = next_token_targets(*batch), CAUSAL & attnspan.segments(batch[1])
        rows: Any = {"tokens": batch[0], "targets": targets}
        if on is not None:
            sees = CAUSAL & attnspan.segments(later) if way == "ids of another batch" else mask
            layout = Layout.of(mask, q_len=40, ranks=on.size(), batch=2)
            rows, mask = layout.shard(rows, rank), layout.plan(sees, heads=(2, 2), strategy="ring")
            if way == "labels shifted after sharding":
                rows["targets"] = next_token_targets(rows["tokens"], layout.shard(batch[1], rank))
            if way == "old tensors under new marks":
                rows["tokens"] = Layout.contiguous(40, on.size()).shard(batch[0], rank)
            mask = mask.on(on, rows=rows)
        x = weights[0][rows["tokens"]]
        y = attention(*[x.unflatten(2, (2, 16))] * 3, mask=mask, layout="bshd").flatten(2)
        logits = (x + y) @ weights[1].T
        losses = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), rows["targets"], reduction="none", ignore_index=-100
        )
        local = None if way == "a mean of local means" else on
        loss = losses.sum() / global_token_count(rows["targets"], local)
        loss.backward()
        if on is not None and way != "gradients of one rank":
            sum_gradients(weights, on)
        grads = {"table": weights[0].grad, "out": weights[1].grad}
        index = {} if on is None else {"q_index": rows["q_index"]}
        return {"x": x, "logits": logits, "losses": losses, "loss": loss, **grads, **index}  # type: ignore[dict-item]

    try:
        assert_same_as_one_rank(step, (tokens, ids), here())
    except AssertionError as problem:
        return str(problem)
    return "the same"


def decode(prefill: int, steps: int, split: bool) -> float:
    """Prefill with a plan, then decode with keys that stay where they are; against one process."""
    ranks, rank, total = dist.get_world_size(), dist.get_rank(), prefill + steps
    batch = 2 * ranks if split else 2
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(batch, heads, total, 16, generator=generator) for heads in (4, 2, 2))
    sinks = torch.randn(4, generator=generator)
    mask = CAUSAL & attnspan.window(total // 2)
    cache = ShardedCache(here(), batch=batch, kv_heads=2, max_len=total, head_dim=16)
    if prefill:
        layout = Layout.of(mask, q_len=prefill, ranks=ranks)
        rows = layout.shard({name: x[:, :, :prefill] for name, x in (("k", k), ("v", v))}, rank, dim=2)
        cache.fill(rows["k"], rows["v"], rows["q_index"], prefill)
    at = slice(rank * 2, rank * 2 + 2) if split else slice(None)
    held, outs = [cache.keys.data_ptr()], []
    half, sources = (prefill + total) // 2, [batch - 1, *range(batch - 1)]
    mixed = [torch.cat([x[sources, :, :half], x[:, :, half:]], 2) for x in (q, k, v)]
    for token in range(prefill, total):
        if token == half:
            cache.reorder(sources)
        new = (x[at, :, token : token + 1] for x in (q, k, v))
        outs.append(cache.attend(*new, mask=attnspan.window(total // 2), sinks=sinks, split_batch=split))
        held.append(cache.keys.data_ptr())
    assert len(set(held)) == 1, "keys stay where they are"
    before, after = (attention(*x, mask=mask, sinks=sinks)[at] for x in ((q, k, v), mixed))
    cache.reset()
    alone = cache.attend(*(x[at, :, :1] for x in (q, k, v)), split_batch=split)
    assert error(alone, v[at, :, :1].repeat_interleave(2, 1)) < 1e-6, "nothing is left"
    return error(torch.cat(outs, 2), torch.cat([before[:, :, prefill:half], after[:, :, half:]], 2))


def misuse_cache() -> dict[str, tuple[str, int]]:
    """What a cache of six tokens refuses, and its length afterwards; then it still works."""
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(2, heads, 7, 8, generator=generator) for heads in (4, 2, 2))
    ids, index = torch.arange(6)[None] // 2, 3 * dist.get_rank() + torch.arange(3)[None]

    def fill(cache: ShardedCache, heads: int = 2, rows: int = 3, length: int = 6) -> None:
        cache.fill(k[:, :heads, :rows], v[:, :, :rows], index, length)

    def attend(cache: ShardedCache, new: slice, **changes: Any) -> Tensor:
        given = {"q": q[:, :, new], "k": k[:, :, new], "v": v[:, :, new], **changes}
        return cache.attend(**given, mask=attnspan.segments(ids))

    first, second = slice(0, 1), slice(0, 2)
    ways: dict[str, Any] = {
        "too long": lambda x: attend(x, slice(0, 7)),
        "heads": lambda x: attend(x, first, k=k[:, :1, first]),
        "tokens": lambda x: attend(x, second, k=k[:, :, first], v=v[:, :, first]),
        "values": lambda x: attend(x, first, v=v[:, :, first, :1]),
        "dtype": lambda x: attend(x, first, k=k[:, :, first].double()),
        "sinks": lambda x: attend(x, first, sinks=torch.zeros(1)),
        "softcap": lambda x: attend(x, first, softcap=-3.0),
        "filled heads": lambda x: fill(x, heads=1),
        "filled rows": lambda x: fill(x, rows=2),
        "filled length": lambda x: fill(x, length=3),
        "rightly": lambda x: attend(x, first),
    }
    found = {}
    for name, way in ways.items():
        cache = ShardedCache(here(), batch=2, kv_heads=2, max_len=6, head_dim=8)
        met, length = _met(lambda: way(cache)), cache.length  # noqa: B023
        outs = torch.cat([attend(cache, slice(i, i + 1)) for i in range(length, 6)], 2)
        wanted = attention(q[:, :, :6], k[:, :, :6], v[:, :, :6], mask=CAUSAL & attnspan.segments(ids))
        assert error(outs, wanted[:, :, length:]) < 2e-6, name
        found[name] = met, length
    return found


class Stage(torch.nn.Module):
    """One layer of a pipeline; the plan comes as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(32, 128)
        self.out = torch.nn.Linear(64, 32)

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (8, 16)).split([4, 2, 2], 2)
        mixed: Tensor = self.out(attention(q, k, v, mask=mask, layout="bshd").flatten(2))
        return x + mixed


def _stages() -> list[Stage]:
    torch.manual_seed(5)
    return [Stage(), Stage()]


def pipeline() -> float:
    """Two pipeline stages of two ranks each, which share rows; plans are arguments of the stages."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

    both = mesh(2, 2)  # stages, and the ranks that share a sequence
    stage, rank = both.get_coordinate()
    mask = CAUSAL & attnspan.segments(torch.arange(S) // 50)
    layout = Layout.of(mask, q_len=S, ranks=2)
    x = torch.randn(4, S, 32, generator=torch.Generator().manual_seed(8))
    rows = layout.shard({"x": x}, rank)
    plan = layout.plan(heads=HEADS, strategy="exchange").on(both["intra"], rows=rows)
    model = _stages()[stage]
    part = PipelineStage(model, stage, 2, torch.device("cpu"), group=both["inter"].get_group())
    loss = lambda out, target: (out.square() * target).sum()  # noqa: E731
    whole = pytree.tree_map(lambda _: _Replicate(), plan)  # every microbatch has the whole plan
    chunked = {"args_chunk_spec": (TensorChunkSpec(0),)} if stage == 0 else {}
    schedule = ScheduleGPipe(
        part, 2, loss_fn=loss, kwargs_chunk_spec={"mask": whole}, scale_grads=False, **chunked
    )
    valid = torch.from_numpy(layout.valid(rank)).float()[:, :, None].expand(4, -1, 32)
    if stage == 0:
        schedule.step(rows["x"], mask=plan)
    else:
        schedule.step(mask=plan, target=valid)
    grads = [p.grad for p in model.parameters()]
    for grad in grads:
        dist.all_reduce(grad, group=both["intra"].get_group())
    alone = _stages()
    out = alone[1](alone[0](x, mask), mask)
    out.square().sum().backward()
    return max(error(a, p.grad) for a, p in zip(grads, alone[stage].parameters(), strict=True))  # type: ignore[arg-type]
