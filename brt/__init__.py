"""Language models on long documents, in JAX and Flax."""

__version__ = "0.1.0"
