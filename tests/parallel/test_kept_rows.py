"""Rows that several plans share, and plans in the places where models have them; values on real ranks."""

import pytest
from worlds import world

TOLERANCE = 2e-6


@pytest.mark.parametrize("strategy", ["exchange", "ring", "auto"])
def test_layers_of_different_masks_share_rows(strategy: str) -> None:
    assert max(world(2).run("kept_jobs:layers", True, strategy)) < TOLERANCE


def test_rows_of_another_plan_are_other_rows() -> None:
    # What keep_rows is for: shapes are equal, and results are not.
    assert min(world(2).run("kept_jobs:layers", False, "exchange")) > 0.1


@pytest.mark.parametrize("balanced", [True, False])
def test_a_partition_of_the_data_loader(balanced: bool) -> None:
    assert max(world(3).run("kept_jobs:loader", balanced)) < TOLERANCE


def test_keys_lie_as_the_rows_of_the_encoder() -> None:
    assert max(world(2).run("kept_jobs:encoder_and_decoder")) < TOLERANCE


def test_a_last_batch_of_another_size() -> None:
    for errors in world(2).run("kept_jobs:other_batches"):
        assert max(errors) < TOLERANCE


@pytest.mark.parametrize("strategy", ["exchange", "ring", "ulysses"])
def test_any_strides(strategy: str) -> None:
    assert max(world(2).run("kept_jobs:strided", strategy)) < TOLERANCE


def test_models_with_a_plan_are_copied_and_plans_are_not_sent() -> None:
    for found in world(2).run("kept_jobs:copies"):
        assert "Send its `partition`" in found["pickle"]


def test_a_plan_made_in_inference_mode_serves_training() -> None:
    assert max(world(2).run("kept_jobs:made_while_evaluating")) < TOLERANCE


def test_dtensors_in_natural_order_need_a_plan_that_keeps_it() -> None:
    for found in world(2).run("kept_jobs:natural_order"):
        assert "expected rows in the plan's order" in found["zigzag"]
        assert 'pass dtensor_rows="plan"' in found["zigzag"]
        assert found["contiguous"] < TOLERANCE


@pytest.mark.parametrize("strategy", ["exchange", "ring", "ulysses"])
def test_a_sink_of_nothing_beside_padding(strategy: str) -> None:
    assert all(world(2).run("kept_jobs:sinks_of_nothing", strategy))


def test_agreements_are_bounded_for_each_group() -> None:
    assert set(world(2).run("kept_jobs:many_agreements")) <= {1, 2, 3}
