"""The reference job: train a language model on packed documents, through attnspan's public API alone.

`attnspan.train.config` and `attnspan.train.errors` load no framework; everything else needs torch.
"""

__all__: list[str] = []
