"""A diffusion transformer on two ranks: three steps of sampling and one of training.

    torchrun --nproc-per-node 2 examples/diffusion_two_ranks.py

Each rank has half of the tokens between the first layer and the last. It prints how far latents and gradients
are from those of one rank. On GPUs: "cuda" in place of "cpu", and "nccl" in place of "gloo".
"""

import torch
import torch.distributed as dist
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from torch.distributed.device_mesh import init_device_mesh

from attnspan.integrations.diffusers import average_gradients, parallelize, unparallelize

TEXT, HEIGHT, WIDTH = 13, 9, 7  # Tokens: no number of ranks divides them.


def inputs_of(latents: torch.Tensor) -> dict[str, torch.Tensor]:
    """Inputs as a pipeline passes them; random, but the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    image = torch.cartesian_prod(torch.arange(1), torch.arange(HEIGHT), torch.arange(WIDTH)).float()
    return {
        "hidden_states": latents,
        "encoder_hidden_states": torch.randn(len(latents), TEXT, 64, generator=generator),
        "pooled_projections": torch.randn(len(latents), 32, generator=generator),
        "img_ids": image,
        "txt_ids": torch.zeros(TEXT, 3),
    }


@torch.no_grad()
def sample(model: FluxTransformer2DModel, latents: torch.Tensor) -> torch.Tensor:
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(3)
    for t in scheduler.timesteps:
        noise = model(**inputs_of(latents), timestep=(t / 1000).expand(len(latents))).sample
        latents = scheduler.step(noise, t, latents).prev_sample
    return latents


def train(model: FluxTransformer2DModel, latents: torch.Tensor) -> None:
    out = model(**inputs_of(latents), timestep=torch.full((len(latents),), 0.3)).sample
    (out - latents).square().mean().backward()


def main() -> None:
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "num_single_layers": 2, "num_attention_heads": 3, "attention_head_dim": 32}
    widths = {"in_channels": 16, "joint_attention_dim": 64, "pooled_projection_dim": 32}
    model = FluxTransformer2DModel(**sizes, **widths, axes_dims_rope=(8, 12, 12))
    latents = torch.randn(2, HEIGHT * WIDTH, 16)

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    parallelize(model, mesh, strategy="ulysses")
    found = sample(model, latents)
    train(model, latents)
    average_gradients(model)  # DDP and FSDP2 do it themselves.
    grads = [x.grad for x in model.parameters()]

    unparallelize(model).zero_grad()
    wanted = sample(model, latents)
    train(model, latents)
    apart = torch.stack([(a - b.grad).norm() for a, b in zip(grads, model.parameters(), strict=True)]).norm()
    whole = torch.stack([x.grad.norm() for x in model.parameters()]).norm()
    if dist.get_rank() == 0:
        print(f"latents differ by {(found - wanted).norm() / wanted.norm():.1e}")
        print(f"gradients differ by {apart / whole:.1e}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
