"""Masks, problems and calls that several rooms of tests share, each written once."""
