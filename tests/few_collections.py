"""Collections of garbage that cost little, in each process that imports this module.

With Python's thresholds, collections took 7% of the processor time in a sample of all tests. They walk
through torch, JAX and their compilers, which stay. A test that needs a collection calls `gc.collect()`.
"""

import gc

gc.set_threshold(50_000, 20, 50)
# In a forked process: all that was loaded before the fork.
gc.freeze()
