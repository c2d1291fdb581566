"""One attention over many ranks: who owns which rows, what crosses the network, and how it gets there."""
