"""The options and shapes of the conformance suite."""

from dataclasses import replace

from samples.parts import Case

SMALL = Case(batch=2, kv_heads=1, q_len=17, k_len=17, head_dim=16, v_dim=16, stored="bshd")
RANDOM = replace(SMALL, runs=2, mask_heads=1)
SHAPES = {
    "one query": replace(RANDOM, heads=8, q_len=1, k_len=259, head_dim=64, v_dim=64),
    "few queries": replace(RANDOM, kv_heads=2, q_len=5, k_len=133, head_dim=32, v_dim=32),
    "sixteen queries": replace(RANDOM, heads=4, kv_heads=2, q_len=16, k_len=70, head_dim=32, v_dim=32),
    "beyond a tile": replace(RANDOM, batch=1, heads=1, q_len=200, k_len=330, head_dim=64, v_dim=64),
    "more queries than keys": replace(RANDOM, batch=1, kv_heads=2, q_len=70, k_len=20),
    "MLA": replace(RANDOM, batch=1, q_len=20, k_len=40, head_dim=192, v_dim=128),
    "small, Dv beyond D": replace(RANDOM, q_len=21, k_len=35, head_dim=8, v_dim=24),
    "odd head dims": replace(RANDOM, batch=1, heads=3, kv_heads=3, q_len=33, k_len=65, head_dim=37, v_dim=53),
}

#: Names of options in tests/samples/parts.py that go together in a call.
OPTIONS: dict[str, tuple[str, ...]] = {
    "none": (),
    **{
        name: (name,)
        for name in (
            *("softcap", "sinks", "alibi", "alibi, signed, per batch row", "T5", "distance table"),
            *("dense", "dense, per head, float32", "dense, all heads", "dense, one for all"),
            *("dense, per key", "dense, per key, one for all", "dropout", "dropout by seeds"),
        )
    },
    "everything": ("softcap", "T5", "sinks", "dropout"),
    "everything, dense": ("softcap", "dense", "sinks", "dropout"),
    "alibi, indices given": ("alibi", "queries given", "keys given"),
    "dropout, indices given": ("dropout", "queries given", "keys given"),
    "everything, indices given": ("softcap", "T5", "sinks", "dropout", "queries given", "keys given"),
}
