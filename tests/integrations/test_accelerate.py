"""Trainers whose ranks share batches compute what one rank computes, whatever the mask."""

from __future__ import annotations

import io
import json
import runpy
import sys
from contextlib import chdir, redirect_stdout
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from closeness import relative_error
from covering import everything
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh

transformers = pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("accelerate")

# The worlds of processes that tests over several ranks share.
sys.path.append(str(Path(__file__).parents[1] / "parallel"))

from trainers import OPTIONS, as_started_by_torchrun, documents, model_of  # noqa: E402
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments  # noqa: E402
from transformers_models import SIZES  # noqa: E402
from worlds import preload, ranks, torchrun, world  # noqa: E402

from attnspan import causal, segments  # noqa: E402
from attnspan.errors import DtypeError, OptionError  # noqa: E402
from attnspan.integrations._accelerate_rows import _split, examine  # noqa: E402
from attnspan.integrations.accelerate import context_parallel, disable  # noqa: E402
from attnspan.integrations.transformers import attend, plans_only  # noqa: E402
from attnspan.parallel import Layout  # noqa: E402
from attnspan.testing import probe  # noqa: E402

preload("transformers.trainer")

# Sums of the same float32 numbers in other orders, over some steps.
CLOSE = 20 * torch.finfo(torch.float32).eps


def padded(examples, size=0):
    """One document per row, with tokens of no meaning in front of it or behind it."""
    shape = len(examples), max(size, *(len(x["input_ids"]) for x in examples))
    tokens, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    for row, example in enumerate(examples):
        size = len(example["input_ids"])
        place = slice(0, size) if size % 2 else slice(shape[1] - size, None)
        tokens[row, place], mask[row, place] = torch.tensor(example["input_ids"]), 1
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


COLLATORS = {"packed": DataCollatorWithFlattening(), "padded": padded, "even": partial(padded, size=30)}


def own_loss(outputs, labels, num_items_in_batch=None):
    """A loss that compares neighbours: targets are shifted in here."""
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """The documents one after the other, as from a file that is too large."""

    def __iter__(self):
        yield from documents(70, 24)


def trainer_of(model, data, degree, folder, **given):
    """A trainer of uneven documents; gradients are not clipped, so that their size counts."""
    options = {**OPTIONS, "max_steps": 4, **given}
    sets = {"train_dataset": Stream() if options.pop("stream", False) else documents(70, 24)}
    sets |= {"eval_dataset": documents(7, 30), "data_collator": COLLATORS[data]}
    functions = {"compute_loss_func": own_loss} if options.pop("own_loss", False) else {}
    trainer = Trainer(model, TrainingArguments(output_dir=folder, **options), **sets, **functions)
    trainer.remove_callback(transformers.PrinterCallback)
    return context_parallel(trainer, degree) if degree > 1 else trainer


def results(trainer):
    """What training, evaluation and prediction give."""
    trainer.train()
    losses = [x["loss"] for x in trainer.state.log_history if "loss" in x]
    weights = torch.cat([x.detach().flatten() for x in trainer.model.parameters()])
    predicted = trainer.predict(trainer.eval_dataset)
    found = {"losses": losses, "weights": weights, "operations": trainer.state.total_flos}
    found |= {"logits": predicted.predictions, "labels": predicted.label_ids}
    return found | {"eval_loss": predicted.metrics["test_loss"]}


def run(name, data, degree, folder, given):
    """Train a model by name; for each rank of a world, or alone."""
    with as_started_by_torchrun():
        found = results(trainer_of(model_of(name), data, degree, folder, **given))
    if dist.is_initialized() and dist.get_rank() > 0:  # The rest is large, and compared by rank 0's.
        found = {key: found[key] for key in ("losses", "weights", "eval_loss")}
    return found


def assert_same(found, expected):
    """The results of ranks are those of one process; all ranks have the same weights."""
    first = found[0]
    assert len(first["losses"]) == len(expected["losses"]) > 0
    assert first["losses"] == pytest.approx(expected["losses"], rel=CLOSE)
    assert expected["losses"][-1] < expected["losses"][0], "else nothing was learned"
    assert relative_error(first["weights"], expected["weights"]) < CLOSE
    for rank in found:
        assert torch.equal(rank["weights"], first["weights"])
        assert rank["eval_loss"] == pytest.approx(expected["eval_loss"], rel=CLOSE)
    assert first["logits"].shape == expected["logits"].shape
    valid = expected["labels"] != -100  # Padding sees other things.
    assert relative_error(*(torch.from_numpy(x["logits"][valid]) for x in (first, expected))) < 10 * CLOSE
    assert np.array_equal(first["labels"], expected["labels"])
    assert first["operations"] == expected["operations"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "data", "count", "given"),
    [
        ("gemma3_text", "packed", 3, {}),  # layers with and without a window
        ("gemma3_text", "padded", 2, {"gradient_accumulation_steps": 2, "activation_checkpointing": True}),
        ("llama4_text", "padded", 2, {"own_loss": True}),  # chunks
        ("gpt2", "packed", 2, {"stream": True, "max_steps": 6}),  # learned positions, dropped weights
        ("llama", "padded", 2, {"own_loss": True, "average_tokens_across_devices": False}),
    ],
)
def test_ranks_train_and_evaluate_as_one_process_does(name, data, count, given, tmp_path):
    if count == 3 and data == "packed":
        lengths = [len(x["input_ids"]) for x in documents(70, 24)]
        assert any(sum(lengths[i : i + 3]) % count for i in range(0, 18, 3)), "some rows are odd"
    expected = run(name, data, 1, str(tmp_path), given)
    assert_same(world(count).run(run, name, data, count, str(tmp_path), given), expected)


@pytest.mark.long  # test_a_loop_of_ones_own compiles a model with a plan.
@pytest.mark.parametrize(("name", "data"), [("gemma3_text", "even"), ("gemma3_text", "padded")])
def test_compiled_models_train_as_others_do(name, data, tmp_path):
    given = {"max_steps": 2}
    expected = run(name, data, 1, str(tmp_path), given)
    compiled = {**given, "torch_compile": True, "torch_compile_backend": "aot_eager"}
    assert_same(world(2).run(run, name, data, 2, str(tmp_path), compiled), expected)


@pytest.mark.long
@pytest.mark.parametrize("data", ["packed", "padded"])
def test_groups_of_ranks_share_batches_and_read_different_ones(data, tmp_path):
    expected = world(2).run(run, "gemma3_text", data, 1, str(tmp_path), {})[0]
    assert_same(world(4).run(run, "gemma3_text", data, 2, str(tmp_path), {}), expected)


@pytest.mark.long
@ranks(2)
def test_what_was_saved_goes_on(tmp_path):
    folder = str(tmp_path)
    saved = {"save_strategy": "steps", "save_steps": 2}
    with as_started_by_torchrun():
        whole = trainer_of(model_of("llama"), "packed", 2, folder, **saved)
        whole.train()
        again = trainer_of(model_of("llama", seed=1), "packed", 2, folder)
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    pairs = zip(whole.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@ranks(2)
def test_packed_documents_do_not_see_each_other_on_two_ranks(name, tmp_path):
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3, 4, 5]])
    ids = (positions == 0).cumsum(1)

    def probed(positions):
        batch = {"input_ids": torch.arange(13)[None] + 3, "position_ids": positions}
        with as_started_by_torchrun():
            trainer = trainer_of(model_of(name), "packed", 2, str(tmp_path))
            call = lambda **inputs: trainer.prediction_step(trainer.model, inputs, False)[1]  # noqa: E731
            return probe(trainer.model, batch, ids, call=call)

    found = probed(positions)
    assert found.isolated, str(found)
    assert found.documents == 3
    assert not probed(torch.arange(13)[None]).isolated, "else this finds nothing"


@pytest.mark.slow
@ranks(2)
def test_a_loop_of_ones_own_takes_its_plan_from_a_mask_function_of_its_name():
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor([5, 2, 6]))[None]
    positions, tokens = torch.tensor([[*range(5), *range(2), *range(6)]]), torch.arange(13)[None] + 3
    model, plans = model_of("llama"), [None]
    model.model.layers = model.model.layers[:1]  # Each takes seconds to compile.
    wanted = model(tokens, position_ids=positions).logits
    transformers.AttentionInterface.register("attnspan_plan", attend)
    transformers.AttentionMaskInterface.register("attnspan_plan", lambda *_, **__: plans[-1])
    model.set_attn_implementation("attnspan_plan")
    mask, mesh = causal() & segments(ids), init_device_mesh("cpu", (2,))
    layout = Layout.of(mask, q_len=13, ranks=2)
    rows = layout.shard({"input_ids": tokens, "position_ids": positions}, dist.get_rank())
    heads = model.config.num_attention_heads, model.config.num_key_value_heads
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for _ in range(3):
        plans[:] = [layout.plan(mask, heads=heads).on(mesh, rows=rows)]
        inputs = {name: rows[name] for name in ("input_ids", "position_ids")}
        found = layout.gather(compiled(**inputs, use_cache=False).logits, mesh)
        assert relative_error(found, wanted) < 1e-5
    assert counter.frame_count == 1


@pytest.mark.slow
@ranks(2)
def test_ranks_that_bring_other_batches_are_told(tmp_path):
    text = "context_parallel: batches: expected the same on all ranks of a group"
    with as_started_by_torchrun():
        trainer = trainer_of(model_of("llama"), "packed", 2, str(tmp_path))
        trainer.train_dataset = trainer.train_dataset[dist.get_rank() :]
        with pytest.raises(OptionError, match=text):
            trainer.train()


LAYERS = {"num_hidden_layers": 4, "use_mamba_kernels": False}
ROUTED = {"num_local_experts": 2, "output_router_logits": True}
REFUSED = {
    "mamba": ({"num_hidden_layers": 1}, "expected a model that takes position_ids"),
    "jamba": (LAYERS, "attention in every layer, got layers of kind 'linear"),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "got layers of kind 'conv'"),
    "bert": ({}, "expected causal_mask_function, got bidirectional_mask_function"),
    "bloom": ({}, "expected attention \"attnspan\", got 'eager'"),
    "t5": ({}, "a decoder without cross attention"),
    "mixtral": (ROUTED, "output_router_logits = False"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_need_more_than_attention_are_refused(name):
    changes, words = REFUSED[name]
    config = transformers.AutoConfig.for_model(name, **{**SIZES, **changes})
    kind = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
    model = kind.from_config(config)
    model.set_attn_implementation("attnspan")
    with pytest.raises(OptionError, match=words):
        examine(model)


def test_a_loss_of_ones_own_a_layer_that_moves_tokens_and_inputs_that_no_plan_fits_are_named():
    model = model_of("llama")
    with plans_only(), pytest.raises(OptionError, match=r"attention_mask: expected the plan .* got Tensor"):
        model(torch.arange(1, 5)[None])
    loss, model.loss_function = model.loss_function, lambda logits, **_: logits[:, :-1].square().mean()
    with pytest.raises(OptionError, match="loss: expected the cross entropy of shift_labels"):
        examine(model)
    model.loss_function = loss
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x + x.roll(1, 1))
    with pytest.raises(OptionError, match=r"first in model\.layers\.1\.mlp"):
        examine(model)
    batch = {"input_ids": torch.zeros(1, 5), "pixel_values": torch.zeros(1, 3, 8, 8)}
    wanted = r"pixel_values with context parallelism: expected shape \(1, 5, ...\)"
    with pytest.raises(OptionError, match=wanted):
        _split(batch, 1, 5)


def test_trainers_that_are_refused(tmp_path):
    class Own(Trainer):
        def compute_loss(self, *_, **__): ...

    with as_started_by_torchrun():
        trainer = trainer_of(model_of("llama"), "packed", 1, str(tmp_path))
        smoothed = trainer_of(model_of("llama"), "packed", 1, str(tmp_path), label_smoothing_factor=0.1)
        own = Own(model_of("llama"), trainer.args, train_dataset=documents(3, 9))
    pass_one = r"expected a Trainer, got Accelerator\. Pass a trainer of transformers or TRL"
    refused = [
        *(((trainer, n), f"expected a divisor of 1 ranks, got {n}. Pass a divisor") for n in (2, 0, -1)),
        *(((trainer, n), f"degree: expected an int, got {type(n).__name__}") for n in (True, "2", 1.0)),
        ((smoothed,), r"label_smoothing_factor: expected 0, got 0\.1"),
        ((own,), "expected the loss of Trainer or SFTTrainer, got the compute_loss of Own"),
        ((trainer.accelerator,), pass_one),
    ]
    for given, text in refused:
        with pytest.raises((OptionError, DtypeError), match=text):
            context_parallel(*given)
    trainer.state.global_step = 1
    with pytest.raises(OptionError, match=r"expected a trainer before its first step, got .* after step 1"):
        context_parallel(trainer)
    trainer.state.global_step = 0
    assert context_parallel(context_parallel(trainer)) is trainer, "one rank shares nothing"


@pytest.mark.slow
@ranks(2)
def test_a_trainer_is_taken_once_and_disable_gives_it_its_own_class_and_functions_back(tmp_path):
    with as_started_by_torchrun():
        with pytest.raises(OptionError, match="expected a divisor of 2 ranks, got 3"):
            trainer_of(model_of("llama"), "packed", 3, str(tmp_path))
        trainer = trainer_of(model_of("llama"), "packed", 1, str(tmp_path))
        accelerator = trainer.accelerator
        changed = trainer, accelerator, accelerator.state, accelerator.dataloader_config
        before = [dict(vars(x)) for x in changed]
        for _ in range(2):
            assert type(context_parallel(trainer, 2)) is not Trainer
            assert accelerator.state.parallelism_config.cp_size == 2
            with pytest.raises(OptionError, match="expected a trainer on single ranks, got a trainer in gr"):
                context_parallel(trainer, 2)
            disable(trainer)
            assert type(trainer) is Trainer
            for x, own in zip(changed, before, strict=True):
                assert vars(x).keys() == own.keys()
                assert all(vars(x)[name] is own[name] for name in own)
        with pytest.raises(OptionError, match="expected a trainer in groups of ranks, got Trainer"):
            disable(trainer)
        context_parallel(trainer, 2).train()
        disable(trainer)
        assert type(trainer) is Trainer
        assert accelerator.gather.__self__ is accelerator


PROGRAM = Path(__file__).parents[2] / "examples" / "pretrain_packed.py"


def said(folder, *given):
    """What the example prints in this process."""
    printing, command = redirect_stdout(io.StringIO()), patch.object(sys, "argv", [str(PROGRAM), *given])
    with as_started_by_torchrun(), chdir(folder), command, printing as text:
        runpy.run_path(str(PROGRAM), run_name="__main__")
    return text.getvalue()


@pytest.mark.slow
def test_the_example_prints_the_same_losses_on_one_rank_and_on_two(tmp_path):
    given = ["--cpu", "--steps", "10"]
    if everything():
        found = torchrun(None, PROGRAM, *given, cwd=tmp_path)
        shared = torchrun(2, PROGRAM, *given, "--context-parallel", "2", cwd=tmp_path)
    else:
        found = said(tmp_path, *given)
        shared, silence = world(2).run(said, tmp_path, *given, "--context-parallel", "2")
        assert not silence
    printed = [json.loads(text.splitlines()[-1]) for text in (found, shared)]
    assert len(printed[0]) == 2
    assert printed[0] == pytest.approx(printed[1], abs=2e-4)
    assert printed[0][1] < printed[0][0] - 0.3
