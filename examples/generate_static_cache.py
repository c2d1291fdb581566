"""Generate text with attnspan and a static cache, from prompts of several lengths.

    python examples/generate_static_cache.py                                  # a tiny random model, offline
    python examples/generate_static_cache.py --model google/gemma-3-1b-it     # a pretrained one

The cache has one size from the first token on, so a compiled step fits all of them. Layers with a sliding
window keep only the window. attnspan makes the masks as spans: two numbers for each query, not a row of keys.
"""

import argparse

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import attnspan.integrations.transformers  # noqa: F401  (registers the name "attnspan")

PROMPTS = ["The capital of France is", "Attention is"]


def tiny():
    """A random model with windows of 8 tokens in every other layer, and two prompts of random tokens."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gemma3_text",
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        pad_token_id=0,
        eos_token_id=None,
    )
    tokens = torch.randint(1, 128, (2, 12))
    valid = torch.ones_like(tokens)
    valid[0, :5] = 0  # the first prompt is shorter: padding on the left
    return AutoModelForCausalLM.from_config(config), {"input_ids": tokens, "attention_mask": valid}


def main():
    """Generate with each attention, and say whether the tokens are equal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", help="a pretrained model, by its name on the Hugging Face hub or its folder"
    )
    parser.add_argument("--tokens", type=int, default=32, help="how many tokens to generate")
    parser.add_argument("--compare", action="store_true", help="generate with the eager implementation too")
    args = parser.parse_args()
    if args.model:
        tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        model = AutoModelForCausalLM.from_pretrained(args.model)
        inputs = tokenizer(PROMPTS, padding=True, return_tensors="pt")
    else:
        tokenizer, (model, inputs) = None, tiny()
    model.eval()
    found = []
    for implementation in ["attnspan", "eager"] if args.compare else ["attnspan"]:
        model.set_attn_implementation(implementation)
        options = {"max_new_tokens": args.tokens, "do_sample": False, "cache_implementation": "static"}
        found.append(model.generate(**inputs, **options))
    new = found[0][:, inputs["input_ids"].shape[1] :]
    for row in tokenizer.batch_decode(new, skip_special_tokens=True) if tokenizer else new.tolist():
        print(row)
    if args.compare:
        print("equal to eager:", torch.equal(*found))


if __name__ == "__main__":
    main()
