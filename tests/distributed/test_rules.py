import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from brt import tasks
from brt.config import Config, Training
from brt.config.training import Mesh
from brt.distributed import rules
from brt.distributed.mesh import build
from brt.errors import ConfigError
from brt.tasks import TASKS
from brt.training.state import parameter_axes


def mesh(**axes: int) -> AbstractMesh:
    """Returns a mesh without devices, whose axes have size 1 unless a size is given."""
    shape = {"data": 1, "fsdp": 1, "tensor": 1, "sequence": 1} | axes
    return AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * 4)


def test_the_table_says_how_arrays_are_cut() -> None:
    all_axes = mesh(data=2, fsdp=4, tensor=2, sequence=2)
    cases = {
        (("lanes", "tokens", None), (8, 16, 32)): P(("data", "fsdp"), "sequence", None),
        (("embed", "heads", "head_dim"), (32, 4, 8)): P("fsdp", "tensor", None),
        (("vocab", "embed"), (259, 32)): P(None, "fsdp"),  # 259 is not divisible by 2.
    }
    for (names, shape), expected in cases.items():
        assert rules.spec(names, shape, all_axes) == expected
    assert rules.spec(("lanes",), (8,), mesh()) == P(None)


def test_vectors_are_replicated_and_matrices_sharded() -> None:
    assert rules.parameter_spec(("layers", "embed"), (2, 32), mesh(fsdp=4)) == P()
    assert rules.parameter_spec(("embed", "mlp"), (32, 8), mesh(fsdp=4)) == P("fsdp", None)


def test_names_that_collide_or_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="'heads', 'mlp'.* collide"):
        rules.spec(("heads", "mlp"), (4, 4), mesh(tensor=2))
    with pytest.raises(
        ConfigError, match="has an axis named 'width'; the names of axes are 'lanes'"
    ):
        rules.spec(("width",), (4,), mesh(data=2))
    with pytest.raises(ValueError, match="does not name the axes"):
        rules.spec(("lanes",), (4, 4), mesh())


@pytest.mark.slow_cases("summarization")
@pytest.mark.parametrize("task", TASKS)
def test_no_parameter_of_any_task_collides(task: str) -> None:
    config = Config(training=Training(task=task))
    section = getattr(config, tasks.from_config(config).model)
    sized = {"vocab_size": 512} if section.vocab_size == 0 else {}
    changed = type(section)(**{**vars(section), **sized})
    config = Config(**{**vars(config), tasks.from_config(config).model: changed})
    for names in parameter_axes(config).values():
        rules.spec(names, (16,) * len(names), mesh(data=2, fsdp=2, tensor=2, sequence=2))


def test_activations_are_cut_only_where_a_mesh_is_set() -> None:
    x = jnp.zeros((8, 4))
    assert rules.constrain(x, "lanes", None) is x and not rules.partitioned()
    with jax.set_mesh(build(Mesh(data=4, tensor=2), {})):
        cut = jax.jit(lambda x: rules.constrain(x, "lanes", "heads"))(x)
        assert cut.sharding.spec == P("data", "tensor") and rules.partitioned()
        for name, size, count in (("lanes", 8, 4), ("lanes", 9, 1), ("heads", 2, 2)):
            assert rules.shard_count(name, size) == count


def test_a_gathered_parameter_is_rounded_but_its_gradient_is_not() -> None:
    x = jax.random.normal(jax.random.key(0), (8, 4))
    weights = jax.random.normal(jax.random.key(1), (8, 4))

    def gathered(x: jax.Array) -> jax.Array:
        return rules.gathered(x, jnp.dtype("bfloat16"), ("embed", "mlp"))

    @jax.jit
    def value_and_gradient(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the gathered parameter, and the gradient of its sum, weighted by `weights`."""
        y, pull = jax.vjp(gathered, x)
        return y, pull(weights)[0]

    np.testing.assert_array_equal(gathered(x), x)  # Nothing is sharded without a mesh.
    with jax.set_mesh(build(Mesh(data=1, fsdp=2), {})):
        y, gradient = value_and_gradient(x)
    np.testing.assert_array_equal(y, x.astype(jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_array_equal(gradient, weights)
