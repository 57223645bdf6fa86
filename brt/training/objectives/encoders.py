"""What all objectives of encoders share: the model, and that nothing is carried."""

from jaxtyping import Array, PyTree

from brt.config import Config
from brt.models import encoder


def network(config: Config, *, training: bool = False) -> encoder.EncoderWithHead:
    """The encoder that a config describes, with the head of its objective."""
    return encoder.EncoderWithHead(
        config.encoder, config.attention, config.training.objective, training
    )


def initial_params(config: Config, key: Array) -> PyTree[Array]:
    """Of the encoder and its head."""
    return encoder.init(network(config), key)


def initial_carried(config: Config, lanes: int) -> tuple[()]:
    """Nothing: each step reads whole inputs."""
    return ()
