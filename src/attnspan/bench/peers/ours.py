"""attnspan itself, through its public function, by whatever back end `explain` names."""

from __future__ import annotations

from attnspan.bench.devices import device_named
from attnspan.bench.peers.job import Job, Ready, differentiated, enough_memory
from attnspan.errors import BackendError
from attnspan.torch import attention, explain

__all__ = ["Attnspan"]


class Attnspan:
    """attnspan under a mask that was prepared once.

    Example:
        >>> from attnspan.bench.cells import Workload
        >>> work = Workload("four", "causal", 1, 2, 2, 4, 4, 8, 8, "float32", "causal")
        >>> Attnspan().prepare(Job.make(work, "forward", "cpu")).call().shape
        torch.Size([1, 2, 4, 8])
    """

    name = "attnspan"

    def refuses(self, job: Job) -> str | None:
        """None, or why no back end can do it.

        Args:
            job: What to compute.
        """
        try:
            backend = explain(job.q, job.k, job.v, mask=job.prepared).backend
        except BackendError as error:
            return str(error)
        if backend != "math":
            return None
        # Scores, probabilities and their gradients are all stored.
        copies = 6 if job.backward else 3
        return enough_memory(job, copies * job.square_bytes, "the scores of its back end 'math'")

    def prepare(self, job: Job) -> Ready:
        """Lower the mask.

        Args:
            job: What to compute.
        """
        mask = job.prepared
        found = explain(job.q, job.k, job.v, mask=mask)
        # Named only where it would warn: otherwise the choice is a part of what a call costs.
        backend = "math" if found.backend == "math" else None
        call = differentiated(lambda q, k, v: attention(q, k, v, mask=mask, backend=backend), job)
        note = f"back end {found.backend}" + (f", {found.isa}" if found.isa else "")
        return Ready(call, device_named(job.device), note=note)
