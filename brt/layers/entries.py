"""New entries of arrays in an open block, which a layer returns instead of the whole arrays.

A token changes one entry of an array such as a ring buffer of keys. If a layer returned the whole
array, the scan over the layers would copy it for every token. A layer therefore may return the new
entries, which are written into the arrays of all layers at once, in place.
"""

from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Int, PyTree


class NewEntries(NamedTuple):
    """Consecutive entries of an array of an open block.

    Attributes:
      entries: an array with the shape and dtype of the array of the open block, except for one
        axis, on which it has only the new entries.
      index: the index of the first entry on this axis; the entries must end within the array.
    """

    entries: Array
    index: Int[Array, "..."]  # type: ignore[assignment]  # hides a method of tuple


def _is_new_entries(x: Any) -> bool:
    return isinstance(x, NewEntries)


def written(block: PyTree[Array], update: PyTree[Array]) -> PyTree[Array]:
    """Returns the open block after a layer's update, in which new entries replace old ones.

    Both arguments may have an axis of layers; the indices of all layers are then equal.
    """

    def write(new: Any, array: Array) -> Array:
        if not _is_new_entries(new):
            return new
        sizes = zip(new.entries.shape, array.shape, strict=True)
        axis = next((i for i, (own, whole) in enumerate(sizes) if own != whole), None)
        if axis is None:
            return new.entries
        index = new.index.reshape(-1)[0]
        return jax.lax.dynamic_update_slice_in_dim(array, new.entries, index, axis=axis)

    leaves, structure = jax.tree.flatten(update, is_leaf=_is_new_entries)
    return jax.tree.unflatten(structure, map(write, leaves, jax.tree.leaves(block)))


def with_whole_arrays(block: PyTree[Array], update: PyTree[Array]) -> PyTree[Any]:
    """Returns an update with the shapes of whole arrays in place of the shapes of new entries.

    If the update has another number of arrays than the block, it is returned as it is.
    """

    def whole(new: Any, array: Array) -> Any:
        return jax.ShapeDtypeStruct(array.shape, new.entries.dtype) if _is_new_entries(new) else new

    leaves, structure = jax.tree.flatten(update, is_leaf=_is_new_entries)
    old = jax.tree.leaves(block)
    if len(old) != len(leaves):
        return update
    return jax.tree.unflatten(structure, map(whole, leaves, old))
