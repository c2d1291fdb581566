"""Checks of avoidable cost: loops, repeated products, kept graphs, gradients and recompilations."""
