"""The reference job: train a language model on packed documents, only with attnspan's public API.

Read the modules in this order: `config`, `model`, `sources`, `documents`, `data`, `parallelize`, `step`,
`checkpoint`, `run`, `train`. The other modules are the command line (`command`), Ctrl-C (`stop`), output and
logs (`progress`), and text from a model (`sample`).
"""

__all__: list[str] = []
