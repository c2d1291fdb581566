"""torchtitan's own trainer on CPUs, with attnspan, random documents and no download.

    torchrun --nproc-per-node 2 examples/torchtitan_debug.py --module llama3 --config llama3_debugmodel \
        --parallelism.context_parallel_degree 2 \
        --override.imports attnspan.integrations.torchtitan.attention

On GPUs, and with data, none of this file is needed: ``torchrun -m torchtitan.train`` takes the same flags.
"""

import json
import random
import shlex
import sys
import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
import torch.distributed
from torch.distributed.fsdp import FSDPModule

#: For any of torchtitan's debug models: short, and without what wants a GPU.
SHORT = shlex.split("""
  --dump_folder {out} --hf_assets_path {out} --dataloader.dataset random --debug.seed 0
  --training.steps 10 --training.seq_len 256 --training.local_batch_size 2
  --training.mixed_precision_param float32 --training.disable_cuda_graphs
""")
WORDS = 2000


def cpu_as_device() -> None:
    """Tell torchtitan that this machine's device is its CPU; must come before its other modules.

    torch.cpu lacks what is asked of a device to report its memory.
    """
    from torchtitan.tools import utils

    asked = {
        "current_device": lambda: 0,
        "get_device_name": lambda *_: "CPU",
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=1),
        "memory_stats": lambda *_: {},
        "reset_peak_memory_stats": lambda: None,
        "empty_cache": lambda: None,
    }
    utils.device_type, utils.device_module = "cpu", SimpleNamespace(**{**vars(torch.cpu), **asked})


def older_torch() -> None:
    """Supply what torchtitan 0.3 asks of a torch after 2.13: a timeout, FSDP with SPMD types."""
    if hasattr(torch.distributed, "set_timeout"):
        return
    torch.distributed.set_timeout = torch.distributed.distributed_c10d._set_pg_timeout
    from torchtitan.distributed import full_dtensor

    resolve = full_dtensor.resolve_fsdp_mesh

    def plain_parameters(dims):  # They are whole on each rank, so all ranks of the mesh can share them.
        mesh, dp_axes = resolve(dims)
        return mesh, None if dims.spmd_backend == "spmd_types" else dp_axes

    full_dtensor.resolve_fsdp_mesh = plain_parameters


def gloo_for_nccl() -> None:
    """Let FSDP divide gradients itself; NCCL does it while it adds them, gloo cannot."""
    set_factor = FSDPModule.set_gradient_divide_factor

    def set_and_sum(module: FSDPModule, factor: float) -> None:
        set_factor(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = set_and_sum


def without_triton() -> None:
    """Import torchtitan's Triton kernels, which CPUs never run, where there is no Triton."""
    if find_spec("triton"):
        return
    sys.modules.update({"triton": MagicMock(), "triton.language": MagicMock()})
    import_module("torchtitan.distributed.minimal_async_ep.kernels")
    del sys.modules["triton"], sys.modules["triton.language"]


def random_documents(out: Path) -> None:
    """Make a tokenizer of words, and datasets "random" (20 to 200 words) and "whole" (255) of documents."""
    import datasets
    from tokenizers import Tokenizer, models, pre_tokenizers
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS

    special = ["<bos>", "<eos>", "<unk>"]
    words = special + [f"w{i}" for i in range(WORDS)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    draw = random.Random(0)
    lengths = {"random": [draw.randint(20, 200) for _ in range(400)], "whole": [255] * 400}
    for name, sizes in lengths.items():
        texts = [document(draw.randrange(WORDS), n) for n in sizes]
        DATASETS[name] = DatasetConfig(
            path=name,
            loader=lambda _, texts=texts: datasets.Dataset.from_dict({"text": texts}),
            sample_processor=lambda sample: sample["text"],
        )


def document(start: int, length: int) -> str:
    """Words that follow each other, so that there is something to learn."""
    return " ".join(f"w{(start + 7 * i) % WORDS}" for i in range(length))


if __name__ == "__main__":
    cpu_as_device()
    without_triton()
    older_torch()
    gloo_for_nccl()
    with tempfile.TemporaryDirectory() as out:
        random_documents(Path(out))
        sys.argv[1:1] = [part.format(out=out) for part in SHORT]
        from torchtitan.train import main

        main()
