"""Context parallelism with the mask, in transformers' `Trainer` and TRL's `SFTTrainer`.

    trainer = context_parallel(Trainer(model, args, ...), 2)
    trainer.train()

Ranks that share a batch each take rows of it. Attention alone needs the rows of others, and gets them by a
plan that is made of the whole batch's mask: packed documents, windows and padding stay what they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnspan.base.checks import number
from attnspan.base.installed import require
from attnspan.errors import expect
from attnspan.parallel.lowered import digest
from attnspan.parallel.strategy import Strategy
from attnspan.parallel.torch.loss import sum_over

from .transformers import plans_only

require("accelerate", "attnspan.integrations.accelerate", "accelerate", ("1.12", "2"))
# Older trainers count the tokens of padded batches otherwise.
require("transformers", "attnspan.integrations.accelerate", "accelerate", ("5.23", "6"))

from accelerate import ParallelismConfig  # noqa: E402
from accelerate.utils import recursively_apply  # noqa: E402
from transformers import Trainer  # noqa: E402

from ._accelerate_rows import Sharding, base_of, examine  # noqa: E402

__all__ = ["context_parallel"]

_Trainer = TypeVar("_Trainer", bound=Trainer)

# Names that configurations use for the dropout of attention weights.
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def context_parallel(trainer: _Trainer, degree: int | None = None, *, strategy: str = "auto") -> _Trainer:
    """Let groups of `degree` neighbouring ranks share each batch of a trainer.

    Call it once, before training. All ranks of a group read the same batches; groups read different ones.
    Losses, gradients, metrics and predictions are those of one rank per group.

    Args:
        trainer: A `Trainer` or TRL's `SFTTrainer`, of a causal language model that runs on "attnspan".
        degree: Ranks per group, a divisor of all ranks. None: ``cp_size`` of the trainer's
            ``ParallelismConfig``, or all ranks where it has none. With 1 the trainer stays as it is.
        strategy: How a group works together, as of `attnspan.parallel.Layout.plan`. "auto" is settled for
            each kind of layer by the first batch.

    Returns:
        The trainer, whose class is now one that is derived from its own.

    Raises:
        OptionError: The number of ranks, the model, the trainer or an option of it does not fit.

    ``examples/pretrain_packed.py`` is a whole program, for one process or several::

        trainer = context_parallel(Trainer(model, args, train_dataset=packed), 2)
        trainer.train()
    """
    _check_trainer(trainer)
    degree = _degree(trainer, degree)
    if strategy != "auto":
        Strategy.parse(strategy, degree)
    if degree == 1:
        return trainer
    mesh = _on_mesh(trainer.accelerator, degree)
    kinds = _examined(trainer.model)
    _share(trainer, Sharding(base_of(trainer.model), kinds, mesh, strategy))
    return trainer


def _check_trainer(trainer: Any) -> None:
    what, got = "context_parallel: trainer", type(trainer).__name__
    remedy = "Pass the trainer itself, of transformers or TRL. A loop of your own shards rows by a Layout"
    expect(isinstance(trainer, Trainer), what, "a Trainer", got, remedy)
    if isinstance(trainer, _ContextParallel):
        got, remedy = f"one in groups of {trainer._sharding.mesh.size()} ranks", "Call context_parallel once"
        expect(False, what, "a trainer on single ranks", got, f"{remedy}, or make the trainer anew")
    step, remedy = trainer.state.global_step, "Call context_parallel before trainer.train()"
    started = bool(step) or trainer.is_in_train
    expect(not started, what, "a trainer before its first step", f"one after step {step}", remedy)
    owner = next(kind for kind in type(trainer).__mro__ if "compute_loss" in vars(kind))
    fits = owner is Trainer or (owner.__name__ == "SFTTrainer" and owner.__module__.startswith("trl."))
    remedy = "Pass compute_loss_func=... to Trainer, which gets the logits of whole rows"
    got = f"the compute_loss of {owner.__name__}"
    expect(fits, what, "the loss of Trainer or SFTTrainer", got, remedy)
    args, what = trainer.args, "context_parallel: TrainingArguments"
    remedy = "Pass the smoothed loss as compute_loss_func"
    smoothed = args.label_smoothing_factor
    expect(smoothed == 0, f"{what}.label_smoothing_factor", "0", smoothed, remedy)
    objects = args.eval_use_gather_object
    expect(not objects, f"{what}.eval_use_gather_object", "False", objects, "Let predictions be tensors")
    expect(args.n_gpu <= 1, f"{what}.n_gpu", "a process for each device", args.n_gpu, "Start it by torchrun")
    expect(not args.deepspeed, f"{what}.deepspeed", "None", "a configuration", "Use DDP or FSDP2")


def _degree(trainer: Any, degree: int | None) -> int:
    config, ranks = trainer.accelerator.parallelism_config, trainer.accelerator.num_processes
    asked = config.cp_size if config is not None and config.cp_enabled else None
    degree = (asked or ranks) if degree is None else degree
    degree = number("context_parallel: degree", degree)
    remedy = "Pass a divisor, or start as many processes as groups need"
    fits = degree > 0 and ranks % degree == 0
    expect(fits, "context_parallel: degree", f"a divisor of {ranks} ranks", degree, remedy)
    remedy = "Leave one of the two out"
    expect(asked in (None, degree), "context_parallel: degree", f"cp_size={asked}", degree, remedy)
    return degree


def _on_mesh(accelerator: Any, degree: int) -> DeviceMesh:
    """The ranks of this group; accelerate hears of groups, and reads data and counts tokens by them."""
    state, config = accelerator.state, accelerator.parallelism_config
    if config is None or not config.cp_enabled:
        others = config is not None and (
            config.tp_enabled or config.sp_enabled or config.dp_replicate_enabled
        )
        remedy = "Name the degree there, as cp_size"
        expect(
            not others,
            "context_parallel: ParallelismConfig",
            "one with cp_size, or none",
            repr(config),
            remedy,
        )
        config = ParallelismConfig(dp_shard_size=accelerator.num_processes // degree, cp_size=degree)
        state.parallelism_config = config
        state.device_mesh = config.get_device_mesh(accelerator.device.type)
    expect(
        not config.tp_enabled, "context_parallel: tp_size", "1", config.tp_size, "Use data and context ranks"
    )
    # The hooks of accelerate's own context parallelism take masks away.
    accelerator._prepare_cp = lambda *prepared: prepared
    loading, remedy = accelerator.dataloader_config, "Leave it out: each rank reads its own batches"
    expect(not loading.dispatch_batches, "context_parallel: dispatch_batches", "False", "True", remedy)
    loading.dispatch_batches = False
    mesh: DeviceMesh = state.device_mesh["cp"]
    return mesh


def _examined(model: Any) -> Any:
    """Run `examine`. Ranks that were left without weights take the first one's word."""
    empty = any(x.is_meta for x in model.parameters())
    found = [None if empty else examine(model)]
    if empty or any(_of_all_ranks(empty)):
        dist.broadcast_object_list(found, src=0)
    return found[0]


def _of_all_ranks(x: Any, group: Any = None) -> list[Any]:
    every = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, x, group=group)
    return every


def _share(trainer: Any, sharding: Sharding) -> None:
    kind = type(trainer)
    trainer.__class__ = type(kind.__name__, (_ContextParallel, kind), {"__module__": kind.__module__})
    trainer._sharding, trainer._compared, trainer._wants_logits = sharding, False, False
    trainer._gather = trainer.__dict__.pop("gather_function")
    if hasattr(trainer, "_tp_size"):  # By this number of ranks with equal batches TRL divides counted tokens.
        trainer._tp_size *= sharding.mesh.size()


class _OnRows:
    """A model that is called with whole inputs and runs on this rank's rows of them."""

    def __init__(self, trainer: Any, model: Any) -> None:
        self.trainer, self.model = trainer, model

    def __call__(self, **inputs: Any) -> Any:
        trainer, sharding = self.trainer, self.trainer._sharding
        if not trainer._compared:
            _compare(trainer, inputs)
            trainer._compared = True
        mine = sharding(inputs)
        with plans_only():
            outputs = self.model(**mine.inputs)
        asked = trainer._wants_logits or trainer.compute_loss_func is not None
        return mine.whole(outputs, sharding.mesh) if asked and "logits" in outputs else outputs


def _compare(trainer: Any, inputs: Mapping[str, Any]) -> None:
    """Let the ranks of a group compare their first batches, and the generators that drop weights."""
    tensors = [x for x in inputs.values() if isinstance(x, Tensor)]
    config = base_of(trainer.model).config.get_text_config()
    drops = any(getattr(config, name, 0) for name in _DROPOUTS)
    facts = {
        "batches": digest(*(x.detach().float().cpu().numpy() for x in tensors)),
        "random states": digest(_random_state(tensors[0].device).numpy()) if drops else 0,
    }
    every = _of_all_ranks(facts, trainer._sharding.mesh.get_group())
    for name in facts:
        same = len({of_rank[name] for of_rank in every}) == 1
        remedy = (
            "Let data and seeds depend on nothing that differs between ranks; accelerate distributes the data"
        )
        expect(same, f"context_parallel: {name}", "the same on all ranks of a group", "others", remedy)


def _random_state(device: torch.device) -> Tensor:
    """That of the generator that the attention's seeds come from."""
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)  # type: ignore[no-any-return]


class _ContextParallel(Trainer):  # type: ignore[misc]
    """Part of a trainer that differs if ranks share batches."""

    _sharding: Sharding

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """This rank's part of the loss; parts are averaged over all ranks, as gradients are."""
        degree, average = self._sharding.mesh.size(), self.args.average_tokens_across_devices
        if num_items_in_batch is None and "labels" in inputs:  # As TRL evaluates: a mean of each group.
            num_items_in_batch = (inputs["labels"][..., 1:] != -100).sum() / degree
            num_items_in_batch = num_items_in_batch * (self.accelerator.num_processes if average else 1)
        own = self.compute_loss_func is not None  # It sees whole rows, on every rank of a group.
        if own and not average:
            num_items_in_batch = num_items_in_batch * degree
        model = model if isinstance(model, _OnRows) else _OnRows(self, model)
        with self._gathering(lambda of_ranks: of_ranks.sum(1)):  # TRL's counts of tokens.
            found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss = found[0] if return_outputs else found
        if own and average:
            loss = loss / degree
        if not own and not torch.is_grad_enabled():
            loss = sum_over(loss, self._sharding.mesh) / degree
        return (loss, found[1]) if return_outputs else loss

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """The loss of whole rows, their logits and labels, on every rank of a group. See `Trainer`."""
        self._wants_logits = not prediction_loss_only
        try:
            return super().prediction_step(_OnRows(self, model), inputs, prediction_loss_only, ignore_keys)
        finally:
            self._wants_logits = False

    @property
    def gather_function(self) -> Callable[[Any], Any]:
        """Gather results of evaluation: once from each group."""
        return self._gather_groups

    @gather_function.setter
    def gather_function(self, gather: Callable[[Any], Any]) -> None:
        self._gather = gather

    def _gather_groups(self, data: Any) -> Any:
        # `gather_for_metrics` cuts off what a last batch repeats, and must count each group once.
        with self._gathering(lambda of_ranks: of_ranks[:, 0]):
            return self._gather(data)

    @contextlib.contextmanager
    def _gathering(self, reduce: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Let accelerate gather one result per group, of those of its ranks (groups, ranks, rows, ...)."""
        accelerator, degree = self.accelerator, self._sharding.mesh.size()
        sizes, everyones = (accelerator.num_processes // degree, degree, -1), accelerator.gather
        accelerator.gather = lambda x: recursively_apply(
            lambda part: reduce(part.unflatten(0, sizes)).flatten(0, 1), everyones(x)
        )
        try:
            yield
        finally:
            del accelerator.gather

    def _prepare_context_parallel_inputs(self, model: Any, inputs: Any) -> Any:
        del model
        return contextlib.nullcontext, inputs

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        counted = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + counted // self._sharding.mesh.size()

    def floating_point_ops(self, inputs: Any) -> int:
        """This rank's share of the batch's operations. See `Trainer`."""
        return int(super().floating_point_ops(inputs)) // self._sharding.mesh.size()
