"""The public modules. The reference, and tests of docstrings, names and layers, read them here."""

#: Modules that users import. Everything that their `__all__` names has an anchor in the reference.
MODULES = (
    "attnspan",
    "attnspan.backends",
    "attnspan.errors",
    "attnspan.integrations.accelerate",
    "attnspan.integrations.diffusers",
    "attnspan.integrations.torchtitan",
    "attnspan.integrations.transformers",
    "attnspan.interchange",
    "attnspan.jax",
    "attnspan.library",
    "attnspan.masks",
    "attnspan.parallel",
    "attnspan.parallel.jax",
    "attnspan.parallel.torch.loss",
    "attnspan.reference",
    "attnspan.testing",
    "attnspan.torch",
    "attnspan.xla",
)
#: Public modules that need packages which `make setup` does not install.
ELSEWHERE = ("attnspan.integrations.torchtitan", "attnspan.xla")
