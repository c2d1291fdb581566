"""A training script that compiles its model; for ``attnspan doctor -- python train_script.py --steps 3``."""

import argparse

import targets
import torch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--in-place", action="store_true")
    options = parser.parse_args()
    steps = options.steps
    model, batches, _ = targets.copies()
    step = model
    if options.in_place:
        model.compile()
    else:
        step = torch.compile(model)
        step._orig_mod.state_dict()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        step(**batches[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
