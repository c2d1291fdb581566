"""The reference job: train a language model on packed documents, through attnspan's public API alone.

Read it in this order: `config`, `model`, `documents`, `data`, `parallelize`, `checkpoint`, `train`. The rest
is the command line (`command`), Ctrl-C (`stop`), what is printed and logged (`progress`), and text from a
model (`sample`).
"""

__all__: list[str] = []
