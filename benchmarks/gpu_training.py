"""Compiled training step of a Llama with 12 layers on a GPU: python benchmarks/gpu_training.py

One row of 8,192 tokens in packed documents, bfloat16, with transformers. Compares attnspan with SDPA and, if
installed, FlashAttention 2: times of alternating steps, peak memory, and losses, which must agree.
`--device cpu` is a rehearsal.
"""

import argparse
import itertools
import json
import time
from statistics import quantiles
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import attnspan.integrations.transformers  # noqa: F401

ROUNDS, WIDTH, HEADS, KV_HEADS, VOCABULARY = 12, 1024, 16, 4, 32000


def positions(length: int) -> torch.Tensor:
    """Make the positions of packed documents with uneven lengths. Each document starts at 0."""
    ends = [0, *(int(length * x) for x in (0.02, 0.1, 0.15, 0.4, 0.55, 0.56, 0.9)), length]
    return torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(ends)])[None]


class Step:
    """Make a compiled model and its optimizer."""

    def __init__(self, attention: str, layers: int, batch: dict[str, torch.Tensor], device: str) -> None:
        torch.manual_seed(0)
        sizes = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": layers}
        heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": VOCABULARY}
        most = batch["input_ids"].shape[1]
        config = LlamaConfig(**sizes, **heads, max_position_embeddings=most, use_cache=False)
        config._attn_implementation = attention
        model = LlamaForCausalLM(config).to(device, torch.bfloat16)
        self.model, self.batch = torch.compile(model), batch
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")

    def __call__(self) -> float:
        loss = self.model(**self.batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", help="write raw samples to this file")
    asked = parser.parse_args()
    ids = torch.randint(VOCABULARY, (1, asked.length), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions(asked.length)}
    batch = {name: x.to(asked.device) for name, x in batch.items()}
    steps: dict[str, Any] = {}
    peaks: dict[str, float] = {}
    losses: dict[str, list[float]] = {}
    for name in ("attnspan", "sdpa", "flash_attention_2"):
        try:
            steps[name] = Step(name, asked.layers, batch, asked.device)
            losses[name] = [steps[name]() for _ in range(3)]
            if asked.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                steps[name]()
                peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
        except (ImportError, ValueError) as refusal:
            steps.pop(name, None)
            print(f"{name}: not here: {str(refusal).splitlines()[0][:200]}", flush=True)
            continue
        print(f"{name}: losses {losses[name]}, {peaks.get(name, 0):.0f} MiB above the weights", flush=True)
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(asked.rounds):
        for name in list(steps)[:: 1 if i % 2 else -1]:
            began = time.perf_counter()
            steps[name]()  # read the loss, to wait for the step
            samples[name].append(1e3 * (time.perf_counter() - began))
    for name, found in samples.items():
        low, middle, high = quantiles(found, n=4)
        print(f"{name:20} {middle:8.1f} ms a step ({low:.1f}-{high:.1f})", flush=True)
    if asked.json:
        with open(asked.json, "w", encoding="utf-8") as file:
            json.dump({"ms": samples, "mib": peaks, "losses": losses}, file)


if __name__ == "__main__":
    main()
