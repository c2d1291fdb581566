"""Runs of torchtitan's trainer, one after the other in each rank's process: torchrun titan_runs.py OUT CASES.

Reads a list of `Case` as JSON, and writes for each what `run` returns.
"""

import json
import math
import re
import sys
import tempfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

sys.path.append(str(Path(__file__).parents[2] / "examples"))

import torch

import torchtitan_debug
from attnspan.kernels import cpu

OURS, DENSE = "attnspan.integrations.torchtitan.attention", "titan_dense.dense"
BFLOAT16 = torch.Tensor.bfloat16


@dataclass(frozen=True)
class Case:
    """One run."""

    model: str = "llama3"
    config: str = ""
    attention: str = OURS  # An override, or "sdpa".
    ac: str = ""
    backend: str = ""  # Of torch.compile.
    dataset: str = "random"
    dtype: str = "float32"
    flags: tuple[str, ...] = field(default=())


def same_weights(model) -> None:
    """Weights that depend on their names alone, not on ranks or on wrappers."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    for name, p in model.named_parameters():
        if p.dim() < 2 and not name.endswith("sinks"):
            continue
        plain = re.sub(r"_checkpoint_wrapped_module\.|_orig_mod\.", "", name)
        generator = torch.Generator().manual_seed(zlib.crc32(plain.encode()))
        whole = torch.randn(p.shape, generator=generator) / math.sqrt(p.shape[-1])
        if isinstance(p, DTensor):
            whole = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None).to_local()
        (p.to_local() if isinstance(p, DTensor) else p).detach().copy_(whole)


def prepare() -> None:
    """Make torchtitan run on CPUs, in float32, from the same weights on any number of ranks."""
    torchtitan_debug.cpu_as_device()
    torchtitan_debug.without_triton()
    torchtitan_debug.older_torch()
    torchtitan_debug.gloo_for_nccl()
    from torch.nn.attention.flex_attention import create_block_mask
    from torchtitan import trainer
    from torchtitan.models.common import attention
    from torchtitan.protocols.model import BaseModel

    attention._compiled_create_block_mask = create_block_mask  # Compiling it takes longer than the oracle.
    trainer.time = SimpleNamespace(sleep=lambda _: None, perf_counter=trainer.time.perf_counter)
    init = BaseModel.init_weights

    def init_weights(model, **given):
        init(model, **given)
        same_weights(model)

    BaseModel.init_weights = init_weights


def configured(case: Case, out: str):
    """The trainer's config."""
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import activation_checkpoint as ac
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

    short = [part.format(out=out) for part in torchtitan_debug.SHORT]
    name = ["--module", case.model, "--config", case.config or f"{case.model}_debugmodel"]
    flags = [*short, *name, "--dataloader.dataset", case.dataset, *case.flags]
    flags += ["--training.mixed_precision_param", case.dtype]
    flags += ["--compile.enable", "--compile.backend", case.backend] if case.backend else []
    flags += [] if case.attention == "sdpa" else ["--override.imports", case.attention]
    config = ConfigManager().parse_args(flags)
    kinds = {"": None, "selective": ac.SelectiveAC.Config(), "full": ac.FullAC.Config()}
    config.activation_checkpoint = kinds[case.ac]
    if case.attention == "sdpa":
        for _, _, parent, name in list(config.traverse(FlexAttention.Config)):
            setattr(parent, name, ScaledDotProductAttention.Config())
    return config


def run(case: Case, out: str) -> dict:
    """Losses and norms of gradients of each step; how often the kernel ran; what compilers did."""
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.trainer import Trainer

    # Experts cast to bfloat16, whatever the dtype of training.
    torch.Tensor.bfloat16 = torch.Tensor.float if case.dtype == "float32" else BFLOAT16
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    steps = []

    class Losses(MetricsProcessor):
        def log(self, *given, **_):
            steps.append((float(given[1]), float(given[3])))  # After the step and before the largest loss.

    config = configured(case, out)
    owner = type(config.metrics)._owner
    type(config.metrics)._owner = Losses
    try:
        trainer = Trainer(config)
    finally:
        type(config.metrics)._owner = owner
    before = cpu.counters()
    trainer.train()
    trainer.close()
    ran = {name: int(after["calls"] - before[name]["calls"]) for name, after in cpu.counters().items()}
    counters = torch._dynamo.utils.counters
    return {
        "losses": [loss for loss, _ in steps],
        "norms": [norm for _, norm in steps],
        "layers": len(trainer.model_parts[0].layers),
        "ran": ran,
        "breaks": sum(counters["graph_break"].values()),
        "graphs": counters["stats"]["unique_graphs"],
    }


def main() -> None:
    """Run all cases; rank 0 writes."""
    prepare()
    with tempfile.TemporaryDirectory() as out:
        torchtitan_debug.random_documents(Path(out))
        found = [run(Case(**given), out) for given in json.loads(sys.argv[2])]
        if torch.distributed.get_rank() == 0:
            Path(sys.argv[1]).write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
