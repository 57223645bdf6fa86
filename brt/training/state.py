"""What a run carries from step to step, and what it starts from."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree

from brt.config import Config
from brt.layers.stack import StackState
from brt.models.decoder import Decoder, new_state


class TrainState(NamedTuple):
    """Everything that changes in training, but for the data position, which is the step.

    Attributes:
      step: int32, finished steps.
      params: float32, as `Decoder` names them.
      optimizer: of `params`.
      carried: caches and recurrent states of the lanes.
    """

    step: Int[Array, ""]
    params: PyTree[Array]
    optimizer: PyTree[Array]
    carried: StackState


def initial_params(config: Config, key: Array | None = None) -> PyTree[Array]:
    """Parameters, each boxed with the names of its axes; `key` is that of the run's seed."""
    model = config.model
    tokens = jnp.zeros((1, model.window), jnp.int32)
    start = jnp.ones((1, 1), bool)
    key = jax.random.key(config.training.seed) if key is None else key
    return Decoder(model).init(key, tokens, new_state(model, 1), start)["params"]


def initial_state(
    config: Config, optimizer: optax.GradientTransformation, key: Array | None = None
) -> TrainState:
    """Step 0. Traceable: `eval_shape` gives the shapes, `jit` the sharded arrays."""
    params = nn.meta.unbox(initial_params(config, key))
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        optimizer=optimizer.init(params),
        carried=new_state(config.model, config.training.batch_size),
    )


def parameter_counts(params: PyTree) -> tuple[int, int]:
    """All parameters, and those that are not the embedding; of arrays or of their shapes."""
    total = sum(leaf.size for leaf in jax.tree.leaves(params))
    return total, total - params["embedding"].size
