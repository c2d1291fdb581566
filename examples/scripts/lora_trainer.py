"""Fine-tune with LoRA on packed documents, by transformers' Trainer and PEFT.

    python examples/scripts/lora_trainer.py

The base model is tiny and random, so that the script downloads nothing. For a pretrained one, call
`AutoModelForCausalLM.from_pretrained(name, attn_implementation="attnspan")`.
docs/scripts.md shows the output.
"""

import argparse
import sysconfig
import tempfile
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    LlamaConfig,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

import attnspan.integrations.transformers  # noqa: F401 (registers "attnspan")

# The output layer of this base model is random, so it is trained as a whole.
LORA = LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], modules_to_save=["lm_head"])


def base_model() -> PreTrainedModel:
    """The same random weights at each call. They are frozen later."""
    transformers.set_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="attnspan")


def documents() -> list[dict[str, list[int]]]:
    """The beginnings of 64 modules of Python's standard library, as bytes after a 0."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:64]
    return [{"input_ids": [0, *path.read_bytes()[: 64 + 37 * i % 400]]} for i, path in enumerate(files)]


def main(steps: int = 40) -> list[float]:
    model = get_peft_model(base_model(), LORA)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"trained: {trained} of {sum(p.numel() for p in model.parameters())} parameters")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=8,  # documents, packed into one row
            learning_rate=2e-2,
            logging_steps=max(1, steps // 4),
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        collator = DataCollatorWithFlattening()
        trainer = Trainer(model, arguments, train_dataset=documents(), data_collator=collator)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        model.save_pretrained(folder)  # the adapter alone
        loaded = PeftModel.from_pretrained(base_model(), folder)
    batch = collator(documents()[:4])
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch).loss, model(**batch).loss)
    losses = [float(x["loss"]) for x in trainer.state.log_history if "loss" in x]
    print("losses:", ", ".join(f"{x:.2f}" for x in losses))
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    main(parser.parse_args().steps)
