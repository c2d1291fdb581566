"""A training script that compiles its model; for ``attnspan doctor -- python train_script.py --steps 3``."""

import argparse

import patients
import torch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    steps = parser.parse_args().steps
    model, batches, _ = patients.sick_contiguous()
    step = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        step(**batches[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
