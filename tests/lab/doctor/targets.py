"""Factories that processes of the doctor import.

The first ones are no subjects: they raise, hang, crash or fork. The line to name ends in ``# here``.
"""

import os
import signal
import time

import torch
from sick_compiler import extension, printing, written_and_printed
from sick_padding import ours, unmasked
from sick_steps import zero_by_zero
from small_models import CAUSAL, INDEX, SDPA, VALID, Model, fused, model_of, tokens


def raises():
    raise KeyError("weights.bin")


def returns_junk():
    return "a model"


def has_no_batch():
    return torch.nn.Linear(2, 2), []


def hangs():
    time.sleep(1000)  # here


def crashes():
    os.abort()  # here


def is_killed():
    """End as if the system had no memory left and killed the process: no traceback is written."""
    end = time.monotonic() + 0.5
    while True:
        os.kill(os.getpid(), signal.SIGKILL) if time.monotonic() > end else time.sleep(0.01)  # here


def exits():
    raise SystemExit("no licence")


def forks():
    os.fork()
    return healthy()


def wants_a_gpu():
    return torch.nn.Linear(2, 2).to("cuda"), [torch.ones(1, 2)]


class Raising(torch.nn.Module):
    def forward(self, x):
        return x @ x  # here


def raises_in_forward():
    return Raising(), [torch.ones(2, 3)]


def healthy():
    return Model(fused), tokens((24, 40, 33)), CAUSAL


def copied(q, k, v):
    q, k, v = (x.contiguous() for x in (q, k, v))
    return SDPA(q, k, v, is_causal=True)


def documents_unseen(q, k, v, position_ids):
    return SDPA(q, k, v, is_causal=True)


copies = model_of(copied)
leaks = model_of(documents_unseen, batch={"position_ids": (INDEX % 9).expand(2, -1)})
returns_nan = model_of(zero_by_zero)
sees_padding = model_of(unmasked, expected={}, batch={"attention_mask": VALID})
hides_padding = model_of(ours, expected={}, batch={"attention_mask": VALID})
prints = model_of(printing)
prints_and_writes = model_of(written_and_printed, expected={})
calls_an_extension = model_of(extension)
