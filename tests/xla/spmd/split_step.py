"""One step whose tensors are split, for a look at what its program sends: forward, backward, segment ids."""

import sys

import torch
import torch_xla
import torch_xla.distributed.spmd as xs
from xla_meshes import SPLITS, mesh

import attnspan as a
from attnspan.xla import attention


def main(split: str) -> None:
    spec = SPLITS[split]
    inputs = [torch.randn(4, 4, 32, 8).to("xla").requires_grad_() for _ in range(3)]
    ids = torch.arange(32).div(8, rounding_mode="floor").repeat(4, 1).to("xla")
    for x in inputs:
        xs.mark_sharding(x, mesh(), spec)
    xs.mark_sharding(ids, mesh(), (spec[0], None))
    torch_xla.sync(wait=True)
    out = attention(*inputs, mask=a.causal() & a.segments(ids), mesh=mesh(), partition_spec=spec)
    (out * out).sum().backward()
    torch_xla.sync(wait=True)


if __name__ == "__main__":
    main(sys.argv[1])
