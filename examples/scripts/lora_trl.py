"""Fine-tune with LoRA on packed documents, by TRL's SFTTrainer and PEFT.

    pip install ".[accelerate]" peft trl
    python examples/scripts/lora_trl.py

The script imports its base model and documents from lora_trainer.py. `packing=True` packs the documents.
docs/scripts.md shows the output.
"""

import argparse
import tempfile

from datasets import Dataset
from lora_trainer import LORA, base_model, documents
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, PrinterCallback
from trl import SFTConfig, SFTTrainer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """SFTTrainer asks for a tokenizer. The data are token ids already, so its words are never used."""
    words = Tokenizer(WordLevel({f"byte {i}": i for i in range(256)}, unk_token="byte 0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="byte 0", eos_token="byte 0")


def main(steps: int = 40) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            base_model(),
            SFTConfig(
                folder,
                packing=True,
                max_length=512,
                max_steps=steps,
                per_device_train_batch_size=4,  # rows of up to 512 tokens
                learning_rate=2e-2,
                logging_steps=max(1, steps // 4),
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(documents()),
            processing_class=byte_tokenizer(),
            peft_config=LORA,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    losses = [float(x["loss"]) for x in trainer.state.log_history if "loss" in x]
    print("losses:", ", ".join(f"{x:.2f}" for x in losses))
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    main(parser.parse_args().steps)
