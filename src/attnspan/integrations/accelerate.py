"""Context parallelism with the mask, in transformers' `Trainer` and TRL's `SFTTrainer`.

    trainer = context_parallel(Trainer(model, args, ...), 2)
    trainer.train()

Ranks that share a batch each take some of its tokens. Only attention needs other ranks' tokens. It gets them
by a plan that is made from the whole batch's mask, so packed documents, windows and padding keep their
meaning.
"""

from __future__ import annotations

import contextlib
import functools
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
# Older trainers count the tokens of padded batches differently.
require("transformers", "attnspan.integrations.accelerate", "accelerate", ("5.23", "6"))

from accelerate import ParallelismConfig  # noqa: E402
from accelerate.utils import recursively_apply  # noqa: E402
from transformers import Trainer  # noqa: E402

from ._accelerate_rows import Sharding, base_of, examine  # noqa: E402
from ._patches import Patches  # noqa: E402

__all__ = ["context_parallel", "disable"]

_Trainer = TypeVar("_Trainer", bound=Trainer)

# Names of attention dropout in configurations.
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def context_parallel(trainer: _Trainer, degree: int | None = None, *, strategy: str = "auto") -> _Trainer:
    """Let groups of `degree` neighbouring ranks share each batch of a trainer.

    Call it once, before training. All ranks of a group read the same batches, and groups read different
    batches. Losses, gradients, metrics and predictions equal a run with one rank per group.

    Args:
        trainer: A `Trainer` or TRL's `SFTTrainer` with a causal language model that uses "attnspan"
            attention.
        degree: Ranks per group, a divisor of the number of ranks. Default: ``cp_size`` of the trainer's
            ``ParallelismConfig``, or all ranks without one. With 1 the trainer does not change.
        strategy: How a group works together, as in `attnspan.parallel.Layout.plan`. With "auto", the first
            batch decides for each kind of layer.

    Returns:
        The trainer. Its class is now a subclass of its previous class.

    Raises:
        OptionError: The number of ranks, the model, the trainer or one of its options does not fit.

    Example, of which ``examples/pretrain_packed.py`` is the complete program for one process or several::

        trainer = context_parallel(Trainer(model, args, train_dataset=packed), 2)
        trainer.train()
    """
    _check_trainer(trainer)
    degree = _degree(trainer, degree)
    if strategy != "auto":
        Strategy.parse(strategy, degree)
    if degree == 1:
        return trainer
    patches = Patches("the trainer")
    patches.apply(lambda: _apply(patches, trainer, degree, strategy))
    trainer._attnspan_patches = patches
    return trainer


def disable(trainer: Trainer) -> None:
    """Undo `context_parallel`: the trainer and its accelerator have their own class and functions again.

    Args:
        trainer: The result of `context_parallel`.

    Raises:
        OptionError: The trainer is not in groups of ranks, or it trains now.
        UsageError: Another package has patched the same function since.

    Example, of a trainer that continues with one rank for each batch::

        disable(trainer)
        trainer.train()
    """
    what, got = "disable: trainer", type(trainer).__name__
    remedy = "Pass the result of context_parallel"
    expect(isinstance(trainer, _ContextParallel), what, "a trainer in groups of ranks", got, remedy)
    remedy = "Call disable after train() has returned"
    expect(not trainer.is_in_train, what, "a trainer that is not training", "one that is", remedy)
    trainer._attnspan_patches.undo()
    del trainer._attnspan_patches


def _apply(patches: Patches, trainer: Any, degree: int, strategy: str) -> None:
    mesh = _on_mesh(patches, trainer.accelerator, degree)
    kinds = _examined(trainer.model)
    _share(patches, trainer, Sharding(base_of(trainer.model), kinds, mesh, strategy))


def _check_trainer(trainer: Any) -> None:
    what, got = "context_parallel: trainer", type(trainer).__name__
    remedy = "Pass a trainer of transformers or TRL. In your own loop, shard tokens with a Layout"
    expect(isinstance(trainer, Trainer), what, "a Trainer", got, remedy)
    if isinstance(trainer, _ContextParallel):
        got = f"a trainer in groups of {trainer._sharding.mesh.size()} ranks"
        remedy = "Call context_parallel once, or make a new trainer"
        expect(False, what, "a trainer on single ranks", got, remedy)
    step, remedy = trainer.state.global_step, "Call context_parallel before trainer.train()"
    started = bool(step) or trainer.is_in_train
    expect(not started, what, "a trainer before its first step", f"a trainer after step {step}", remedy)
    owner = next(kind for kind in type(trainer).__mro__ if "compute_loss" in vars(kind))
    fits = owner is Trainer or (owner.__name__ == "SFTTrainer" and owner.__module__.startswith("trl."))
    remedy = "Pass compute_loss_func=... to Trainer. It gets the logits of whole sequences"
    got = f"the compute_loss of {owner.__name__}"
    expect(fits, what, "the loss of Trainer or SFTTrainer", got, remedy)
    args, what = trainer.args, "context_parallel: TrainingArguments"
    remedy = "Pass the smoothed loss as compute_loss_func"
    smoothed = args.label_smoothing_factor
    expect(smoothed == 0, f"{what}.label_smoothing_factor", "0", smoothed, remedy)
    objects = args.eval_use_gather_object
    expect(not objects, f"{what}.eval_use_gather_object", "False", objects, "Return predictions as tensors")
    expect(args.n_gpu <= 1, f"{what}.n_gpu", "one process per device", args.n_gpu, "Start it with torchrun")
    expect(not args.deepspeed, f"{what}.deepspeed", "None", "a configuration", "Use DDP or FSDP2")


def _degree(trainer: Any, degree: int | None) -> int:
    config, ranks = trainer.accelerator.parallelism_config, trainer.accelerator.num_processes
    asked = config.cp_size if config is not None and config.cp_enabled else None
    degree = (asked or ranks) if degree is None else degree
    degree = number("context_parallel: degree", degree)
    remedy = "Pass a divisor, or change the number of processes"
    fits = degree > 0 and ranks % degree == 0
    expect(fits, "context_parallel: degree", f"a divisor of {ranks} ranks", degree, remedy)
    remedy = "Set only one of the two"
    expect(asked in (None, degree), "context_parallel: degree", f"cp_size={asked}", degree, remedy)
    return degree


def _on_mesh(patches: Patches, accelerator: Any, degree: int) -> DeviceMesh:
    """Return the ranks of this group. accelerate loads and counts data by groups instead of ranks."""
    state, config = accelerator.state, accelerator.parallelism_config
    if config is None or not config.cp_enabled:
        kinds = ("tp_enabled", "sp_enabled", "dp_replicate_enabled")
        others = config is not None and any(getattr(config, kind) for kind in kinds)
        what, remedy = "context_parallel: ParallelismConfig", "Set the degree as its cp_size"
        expect(not others, what, "a configuration with cp_size, or none", repr(config), remedy)
        config = ParallelismConfig(dp_shard_size=accelerator.num_processes // degree, cp_size=degree)
        _share_by(patches, state, config, config.get_device_mesh(accelerator.device.type))
    what, remedy = "context_parallel: tp_size", "Use data and context ranks"
    expect(not config.tp_enabled, what, "1", config.tp_size, remedy)
    # The hooks of accelerate's own context parallelism remove masks.
    patches.set(accelerator, "_prepare_cp", lambda *prepared: prepared)
    loading, remedy = accelerator.dataloader_config, "Leave it out, because each rank reads its own batches"
    expect(not loading.dispatch_batches, "context_parallel: dispatch_batches", "False", "True", remedy)
    patches.set(loading, "dispatch_batches", False)
    mesh: DeviceMesh = state.device_mesh["cp"]
    return mesh


def _share_by(patches: Patches, state: Any, config: Any, mesh: DeviceMesh) -> None:
    before = state.parallelism_config, state.device_mesh
    state.parallelism_config, state.device_mesh = config, mesh

    def restore() -> None:
        # All trainers share the state, and each new trainer sets it anew.
        if state.parallelism_config is config:
            state.parallelism_config, state.device_mesh = before

    patches.later(restore)


def _examined(model: Any) -> Any:
    """Run `examine`. Ranks without weights take the first rank's result."""
    empty = any(x.is_meta for x in model.parameters())
    found = [None if empty else examine(model)]
    if empty or any(_of_all_ranks(empty)):
        dist.broadcast_object_list(found, src=0)
    return found[0]


def _of_all_ranks(x: Any, group: Any = None) -> list[Any]:
    every = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, x, group=group)
    return every


def _share(patches: Patches, trainer: Any, sharding: Sharding) -> None:
    """Give a trainer the class that shares each batch among the ranks of its group."""
    kind = type(trainer)
    patches.set(trainer, "_sharding", sharding)
    if hasattr(trainer, "_tp_size"):  # TRL divides token counts by the ranks with equal batches.
        patches.set(trainer, "_tp_size", trainer._tp_size * sharding.mesh.size())
    trainer.__class__ = type(kind.__name__, (_ContextParallel, kind), {"__module__": kind.__module__})
    patches.later(functools.partial(setattr, trainer, "__class__", kind))


class _OnRows:
    """A model that is called with whole inputs and runs on this rank's tokens."""

    def __init__(self, trainer: Any, model: Any, logits: bool = False) -> None:
        self.trainer, self.model = trainer, model
        self.logits = logits or trainer.compute_loss_func is not None

    def __call__(self, **inputs: Any) -> Any:
        trainer, sharding = self.trainer, self.trainer._sharding
        if not sharding.compared:
            _compare(trainer, inputs)
            sharding.compared = True
        mine = sharding(inputs)
        with plans_only():
            outputs = self.model(**mine.inputs)
        return mine.whole(outputs, sharding.mesh) if self.logits and "logits" in outputs else outputs


def _compare(trainer: Any, inputs: Mapping[str, Any]) -> None:
    """Let the ranks of a group compare their first batches and their dropout generators."""
    tensors = [x for x in inputs.values() if isinstance(x, Tensor)]
    config = base_of(trainer.model).config.get_text_config()
    drops = any(getattr(config, name, 0) for name in _DROPOUTS)
    facts = {
        "batches": digest(*(x.detach().float().cpu().numpy() for x in tensors)),
        "random states": digest(_random_state(tensors[0].device).numpy()) if drops else 0,
    }
    every = _of_all_ranks(facts, trainer._sharding.mesh.get_group())
    for name in facts:
        same, wanted = len({of_rank[name] for of_rank in every}) == 1, "the same on all ranks of a group"
        remedy = "Use the same data and seeds on all ranks. accelerate distributes the data"
        expect(same, f"context_parallel: {name}", wanted, "different ones", remedy)


def _random_state(device: torch.device) -> Tensor:
    """Return the state of the generator that attention's seeds come from."""
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)  # type: ignore[no-any-return]


class _ContextParallel(Trainer):  # type: ignore[misc]
    """Methods of a trainer that differ if ranks share batches."""

    _sharding: Sharding

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return this rank's part of the loss. Parts are averaged over all ranks, as gradients are."""
        degree, average = self._sharding.mesh.size(), self.args.average_tokens_across_devices
        if num_items_in_batch is None and "labels" in inputs:  # TRL evaluates this way: one mean per group.
            num_items_in_batch = (inputs["labels"][..., 1:] != -100).sum() / degree
            num_items_in_batch = num_items_in_batch * (self.accelerator.num_processes if average else 1)
        own = self.compute_loss_func is not None  # It gets whole sequences on every rank.
        if own and not average:
            num_items_in_batch = num_items_in_batch * degree
        model = model if isinstance(model, _OnRows) else _OnRows(self, model)
        with self._gathering(lambda of_ranks: of_ranks.sum(1)):  # for TRL's token counts
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
        """Return the loss, logits and labels of whole sequences on every rank of a group. See `Trainer`."""
        model = _OnRows(self, model, logits=not prediction_loss_only)
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    @property
    def gather_function(self) -> Callable[[Any], Any]:
        """Gather results of evaluation, once from each group."""
        return self._gather_groups

    @gather_function.setter
    def gather_function(self, gather: Callable[[Any], Any]) -> None:
        self.__dict__["gather_function"] = gather  # the trainer's own, again after `disable`

    def _gather_groups(self, data: Any) -> Any:
        # `gather_for_metrics` cuts off repeated samples of a last batch, so it must count each group once.
        with self._gathering(lambda of_ranks: of_ranks[:, 0]):
            return self.__dict__["gather_function"](data)

    @contextlib.contextmanager
    def _gathering(self, reduce: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Let accelerate gather one result per group from its ranks' results (groups, ranks, batch, ...)."""
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
        """Return this rank's share of the batch's operations. See `Trainer`."""
        return int(super().floating_point_ops(inputs)) // self._sharding.mesh.size()
