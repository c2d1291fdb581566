"""Pretrain a tiny Llama on packed documents with transformers' Trainer; several ranks may share each batch.

    python examples/pretrain_packed.py
    torchrun --nproc-per-node 2 examples/pretrain_packed.py --context-parallel 2

Both print the same losses. The text is what comes with Python: modules of its standard library, as bytes.
"""

import argparse
import json
import sysconfig
from pathlib import Path

import transformers
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from attnspan.integrations.accelerate import context_parallel

parser = argparse.ArgumentParser()
parser.add_argument("--context-parallel", type=int, default=1, help="ranks that share each batch")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--cpu", action="store_true", help="even where there is a GPU")
options = parser.parse_args()


def documents(count: int = 64, longest: int = 700) -> list[dict[str, list[int]]]:
    """The beginnings of modules, of uneven lengths; token 0 begins each."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:count]
    return [
        {"input_ids": [0, *path.read_bytes()[: longest * (1 + i % 5) // 5]]} for i, path in enumerate(files)
    ]


transformers.set_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    bos_token_id=0,
)
model = LlamaForCausalLM._from_config(config, attn_implementation="attnspan")
arguments = TrainingArguments(
    output_dir="runs/pretrain_packed",
    max_steps=options.steps,
    per_device_train_batch_size=4,  # documents, packed into one row of any length
    learning_rate=3e-3,
    logging_steps=5,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    use_cpu=options.cpu,
    ddp_find_unused_parameters=False,
)
trainer = Trainer(model, arguments, data_collator=DataCollatorWithFlattening(), train_dataset=documents())
trainer = context_parallel(trainer, options.context_parallel)  # all that is new
trainer.remove_callback(transformers.PrinterCallback)
trainer.train()
if trainer.is_world_process_zero():
    print(json.dumps([round(x["loss"], 4) for x in trainer.state.log_history if "loss" in x]))
