import json
import math

import jax.numpy as jnp
import pytest

from brt.errors import NonFiniteError
from brt.training.meter import Meter
from brt.training.step import StepMetrics


def metrics(nats: float, tokens: float, norm: float) -> StepMetrics:
    found = jnp.float32(nats), jnp.float32(tokens), jnp.float32(norm)
    return StepMetrics(*found, {"probe/used": found[0] / 2})


STEPS = [metrics(8.0, 4.0, 1.0), metrics(10.0, 2.0, 2.0), metrics(6.0, 6.0, 6.0)]


def test_the_loss_is_a_mean_over_tokens_and_the_norm_over_steps() -> None:
    meter = Meter()
    for step, values in enumerate(STEPS):
        meter.add(step, values)
    meter.flush()
    assert meter.report() == {
        "train/loss": 2.0,
        "train/bits_per_token": pytest.approx(2 / math.log(2)),
        "train/gradient_norm": 3.0,
        "data/tokens": 12,
        "train/probe/used": 4.0,  # of what a task logs besides, a mean over steps
    }
    meter.add(3, STEPS[1])
    meter.flush()
    assert meter.report()["train/loss"] == 5.0 and meter.tokens_seen == 14


def test_a_meter_goes_on_from_its_saved_state() -> None:
    meter = Meter()
    meter.add(0, STEPS[0])
    meter.flush()
    again = Meter(json.loads(json.dumps(meter.state())))
    for m in (meter, again):
        m.add(1, STEPS[1])
        m.flush()
    assert again.state() == meter.state() and again.report() == meter.report()


def test_metrics_count_one_step_late() -> None:
    meter = Meter()
    meter.add(0, STEPS[0])
    assert meter.tokens_seen == 0
    meter.add(1, STEPS[1])
    assert meter.tokens_seen == 4


@pytest.mark.parametrize("bad", [metrics(math.nan, 4.0, 1.0), metrics(8.0, 4.0, math.inf)])
def test_what_is_not_finite_is_named_with_its_step(bad: StepMetrics) -> None:
    meter = Meter()
    meter.add(7, bad)
    with pytest.raises(NonFiniteError, match=r"^step 7: .*is not finite; lower Optimizer") as error:
        meter.flush()
    assert error.value.exit_code == 5
