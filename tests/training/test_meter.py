import json
import math

import jax.numpy as jnp
import pytest

from brt.errors import NonFiniteError
from brt.training.step import MetricAccumulator, StepMetrics


def metrics(nats: float, tokens: float, norm: float) -> StepMetrics:
    found = jnp.float32(nats), jnp.float32(tokens), jnp.float32(norm)
    return StepMetrics(*found, {"probe/used": found[0] / 2})


STEPS = [metrics(8.0, 4.0, 1.0), metrics(10.0, 2.0, 2.0), metrics(6.0, 6.0, 6.0)]


def test_the_loss_is_a_mean_over_tokens_and_the_norm_over_steps() -> None:
    accumulator = MetricAccumulator()
    for step, values in enumerate(STEPS):
        accumulator.add(step, values)
    accumulator.flush()
    assert accumulator.report() == {
        "train/loss": 2.0,
        "train/bits_per_token": pytest.approx(2 / math.log(2)),
        "train/gradient_norm": 3.0,
        "data/tokens": 12,
        "train/probe/used": 4.0,  # an additional metric of the task, averaged over steps
    }
    accumulator.add(3, STEPS[1])
    accumulator.flush()
    assert accumulator.report()["train/loss"] == 5.0 and accumulator.tokens_seen == 14


def test_an_accumulator_continues_from_its_saved_state() -> None:
    accumulator = MetricAccumulator()
    accumulator.add(0, STEPS[0])
    accumulator.flush()
    again = MetricAccumulator(json.loads(json.dumps(accumulator.state())))
    for m in (accumulator, again):
        m.add(1, STEPS[1])
        m.flush()
    assert again.state() == accumulator.state() and again.report() == accumulator.report()


def test_metrics_count_one_step_late() -> None:
    accumulator = MetricAccumulator()
    accumulator.add(0, STEPS[0])
    assert accumulator.tokens_seen == 0
    accumulator.add(1, STEPS[1])
    assert accumulator.tokens_seen == 4


@pytest.mark.parametrize("bad", [metrics(math.nan, 4.0, 1.0), metrics(8.0, 4.0, math.inf)])
def test_a_step_that_is_not_finite_is_named(bad: StepMetrics) -> None:
    accumulator = MetricAccumulator()
    accumulator.add(7, bad)
    with pytest.raises(NonFiniteError, match=r"^step 7: .*is not finite; lower Optimizer") as error:
        accumulator.flush()
    assert error.value.exit_code == 5
