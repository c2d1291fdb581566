"""Checks of what reaches what: documents, padding, samples, axes, inputs. Tokens are changed to prove it."""
