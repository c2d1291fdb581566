"""One attention over the devices of a JAX mesh."""
