"""Fixture that provides JAX's interpreter of Pallas Mosaic GPU kernels, which is private in jax
0.10.

The interpreter reports barriers that a kernel arrives at too often or does not wait for. It does
not support layouts, products (wgmma) of operands that are transposed or in registers, or stores
into accumulators. This file adds them.
"""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback


@pytest.fixture(scope="session")
def mosaic_gpu_interpreter() -> Any:
    """Returns the value of `interpret`, and skips the test if this jax has no such interpreter."""
    try:
        from jax._src.interpreters import mlir
        from jax._src.pallas.mosaic_gpu import core
        from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

        if "device_id" not in inspect.signature(gpu_callbacks.wgmma).parameters:
            pytest.skip(
                "the interpreter of this jax has no stores into accumulators, and the one that "
                "these tests add does not receive the token by which it orders effects"
            )
        mlir.register_lowering(core.layout_cast_p, lambda context, x, new_layout: [x])
        gpu_callbacks.wgmma = functools.partial(_wgmma, gpu_callbacks)
        interpreter = jaxpr_interpret.JaxprInterpreter
        interpreter._interpret_arithmetic_primitive = functools.partialmethod(
            _arithmetic, interpreter._interpret_arithmetic_primitive, gpu_callbacks
        )
    except (ImportError, AttributeError) as error:
        pytest.skip(f"this jax interprets no kernels of Mosaic GPU: {error}")
    return InterpretGPUParams(uninitialized_memory="nan")


def _arithmetic(
    interpreter: Any, otherwise: Any, callbacks: Any, equation: Any, values: Any
) -> Any:
    """Interprets a store into an accumulator, and passes every other operation to `otherwise`."""
    if equation.primitive.name.removesuffix("_p") != "wgmma_accumulator_store":
        return otherwise(interpreter, equation, values)

    def store(key: Any, value: Any, device_id: Any, thread_id: Any) -> np.ndarray:
        memory = callbacks._get_shared_memory()
        thread = memory.get_global_thread_id(int(device_id), int(thread_id))
        key = callbacks.HostAllocationKey.from_array(key)
        memory.store_buffer_content(key, (), np.array(value), thread)
        return np.zeros(value.shape, value.dtype)  # The result is not used.

    key, value = values()
    result = jax.ShapeDtypeStruct(value.shape, value.dtype)
    device, thread = jnp.int32(interpreter.device_info.device_id), interpreter.thread_id
    return io_callback(store, result, key, value, device, thread, ordered=True)


def _wgmma(
    callbacks: Any, *, token: Any, device_id: Any, grid_point_coords: Any, thread_id: Any,
    acc_allocation_key_as_array: Any, acc_transforms: tuple, acc_dtype: Any,
    a_allocation_key_as_array: Any, a_transforms: tuple,
    b_allocation_key_as_array: Any, b_transforms: tuple, source_info: Any = None,
) -> Any:  # fmt: skip
    """Replaces the interpreter's wgmma: adds a @ b to the accumulator, in float32."""
    del grid_point_coords, acc_transforms, acc_dtype, source_info
    memory = callbacks._get_shared_memory()
    thread = memory.get_global_thread_id(int(device_id), int(thread_id))

    def contents(key: Any, transforms: tuple = ()) -> np.ndarray:
        if np.ndim(key) == 2:  # `key` is itself the operand, which is in registers.
            return np.asarray(key, np.float32)
        transforms = callbacks._remove_noop_transforms(transforms)
        turned = bool(transforms) and not hasattr(transforms[-1], "indices")
        indices = jax.tree.map(int, transforms[: len(transforms) - turned])
        place = callbacks.interpret_utils.to_range(indices)
        key = callbacks.HostAllocationKey.from_array(key)
        found, _, _ = memory.get_buffer_content(key, place, thread)
        return np.asarray(found.T if turned else found, np.float32)

    a = contents(a_allocation_key_as_array, a_transforms)
    b = contents(b_allocation_key_as_array, b_transforms)
    total = contents(acc_allocation_key_as_array) + a @ b
    key = callbacks.HostAllocationKey.from_array(acc_allocation_key_as_array)
    memory.store_buffer_content(key, (), total, thread)
    return token
