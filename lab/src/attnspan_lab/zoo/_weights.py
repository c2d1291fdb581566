"""Random weights with a scale that makes each layer's attention matter."""

import torch
from torch import nn

__all__ = ["draw_weights"]


def draw_weights(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw all parameters, equal for each implementation, and turn off dropout.

    Matrices have the variance 1 / inputs, so the scores of normalized activations have a standard deviation
    of about one. The libraries' own small initializations would make every softmax flat. Vectors keep their
    initial values (1 for most norms, 0 for some) plus a little noise, so that each value matters.
    """
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if not parameter.is_floating_point():
                continue
            if parameter.dim() < 2:
                parameter.nan_to_num_(0.0).clamp_(-10.0, 10.0).add_(noise, alpha=0.1)
            elif id(parameter) in embeddings:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)
            else:
                inputs = parameter[0].numel() if parameter.dim() != 3 else max(parameter.shape[1:])
                parameter.copy_(noise / max(inputs, 1) ** 0.5)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()
