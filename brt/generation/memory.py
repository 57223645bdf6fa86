"""The memory of a session: the complete state of a text that is read and generated.

In shapes, B is the number of lanes (texts that are generated in parallel) and V the number of
tokens in the vocabulary.
"""

import codecs
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8

from brt import durable, untrusted
from brt.errors import DataError
from brt.layers.runs import StackBlock, StackState
from brt.layers.state import without_ready
from brt.models.decoder import Decoder, new_state
from brt.types import Variables


class Memory(NamedTuple):
    """The complete state of a session. Its size does not depend on the length of the text."""

    # Caches and recurrent states of the layers after the last full block, as in training.
    state: StackState
    # What layers remember of the tokens in the open block, such as keys and values.
    block: StackBlock
    position: Int[Array, ""]  # number of tokens in the open block, less than its length
    logits: Float[Array, "B V"]  # of the next token
    # Number of tokens read and written including BOS; folded into random keys, so that each token
    # has a random number of its own.
    count: Int[Array, ""]  # type: ignore[assignment]  # hides a method of tuple
    ended: Bool[Array, " B"]  # True for texts that end with a generated token of Model.end_ids
    # The bytes that the text has of an unfinished character, which the next tokens continue; zeros
    # follow them.
    unfinished: UInt8[Array, "B 3"]

    def unfinished_bytes(self) -> list[bytes]:
        """Returns the bytes that each text has of an unfinished character."""
        return [row.tobytes().rstrip(b"\0") for row in np.asarray(self.unfinished)]


def new_memory(decoder: Decoder, lanes: int, variables: Variables) -> Memory:
    """Returns the memory of texts without tokens."""
    state, params = new_state(decoder.model, lanes), {"params": variables.params}
    return Memory(
        state=state,
        block=decoder.apply(params, state, variables.model_state, method="begin_block"),
        position=jnp.zeros((), jnp.int32),
        logits=jnp.zeros((lanes, decoder.model.vocab_size), jnp.float32),
        count=jnp.zeros((), jnp.int32),
        ended=jnp.zeros((lanes,), bool),
        unfinished=jnp.zeros((lanes, 3), jnp.uint8),
    )


def unprepared(memory: Memory) -> Memory:
    """Returns the memory without what `brt.generation.steps.prepare` has added."""
    return memory._replace(block=without_ready(memory.block))


def map_lanes(memory: Memory, function: Callable[..., Array]) -> Memory:
    """Applies `function` to every array that has an axis of lanes, which it gets as `axis`."""
    own = memory._replace(block=(), position=(), count=())
    return jax.tree.map(partial(function, axis=0), own)._replace(
        block=jax.tree.map(partial(function, axis=1), memory.block),
        position=memory.position,
        count=memory.count,
    )


def unfinished_character(data: bytes) -> bytes:
    """Returns the bytes at the end of a UTF-8 text that begin a character without its end."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return decoder.getstate()[0]


# Files that store the memory of a generating session, so that a text can be continued later.


_IDENTITY = 1 << 20  # The description of the model in a file has at most this many bytes.


def _swap_lanes_and_layers(memory: Any) -> Any:
    """Swaps the axes of lanes and layers of the open block's arrays; files have lanes first."""
    return memory._replace(block=jax.tree.map(lambda x: x.swapaxes(0, 1), memory.block))


def save(memory: Any, path: Path, identity: Mapping[str, object]) -> None:
    """Writes a `brt.generation.memory.Memory` to an .npz file, with a description of its model."""
    arrays = {
        f"leaf{i}": np.asarray(leaf, _file_dtype(leaf.dtype))
        for i, leaf in enumerate(jax.tree.leaves(_swap_lanes_and_layers(memory)))
    }
    with durable.named_by_user(path) as file:
        np.savez_compressed(file, identity=np.array(json.dumps(identity)), **arrays)


def load(
    path: Path,
    old: Any,
    block_length: int,
    identity: Mapping[str, object],
) -> Any:
    """Returns the memory in a file that `save` wrote, with the shapes and dtypes of `old`.

    A file that is missing or damaged, or whose `identity` differs, raises DataError.
    """
    leaves, structure = jax.tree.flatten(_swap_lanes_and_layers(old))
    try:
        with untrusted.npz(path, growth=None) as arrays:
            stored = _described(arrays, len(leaves))
            saved_identity = untrusted.parse_json(str(arrays["identity"].read()))
            untrusted.check(saved_identity, {str: object})
            _check_identity(path, saved_identity, identity)
            if [array.shape for array in stored] != [leaf.shape for leaf in leaves]:
                raise DataError(f"{path} holds arrays of other shapes; load it with as many lanes")
            loaded = [_leaf(*pair) for pair in zip(stored, leaves, strict=True)]
        memory = jax.tree.unflatten(structure, loaded)
        if memory.count < 0 or not 0 <= memory.position < block_length:
            raise ValueError("its position or count is out of range")
        if any(data != unfinished_character(data) for data in memory.unfinished_bytes()):
            raise ValueError("its bytes do not begin a character")
    except FileNotFoundError as error:
        raise DataError(f"there is no state file {path}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{path} is no state that --save_state wrote, or it is damaged; name such a file "
            "with --load_state"
        ) from error
    return _swap_lanes_and_layers(memory)


def _described(arrays: Mapping[str, untrusted.LazyArray], leaves: int) -> list[Any]:
    """Returns the arrays of the memory, none of which is read."""
    # The file must not have other arrays, or a long description of the model.
    names = [f"leaf{i}" for i in range(leaves)]
    if {*arrays} - {*names, "identity"}:
        raise ValueError("it has other arrays")
    text = arrays["identity"]
    if text.dtype.kind != "U" or text.shape or text.dtype.itemsize > _IDENTITY:
        raise ValueError("it describes its model with another array than a short text")
    return [arrays[name] for name in names]


def _check_identity(
    path: Path, saved: Mapping[str, object], identity: Mapping[str, object]
) -> None:
    different = [k for k in {**identity, **saved} if saved.get(k) != identity.get(k)]
    if different:
        facts = [f"{k} was {saved.get(k)} and is {identity.get(k)}" for k in different[:4]]
        if len(different) > len(facts):
            facts.append(f"{len(different) - len(facts)} more")
        raise DataError(f"{path} belongs to another model: {', '.join(facts)}")


def _leaf(stored: untrusted.LazyArray, old: Array) -> Array:
    """Returns a saved array of the memory; raises ValueError if its dtype or values are invalid."""
    if stored.dtype != _file_dtype(old.dtype):
        raise ValueError(f"it has {stored.dtype} for {old.dtype}")
    array = stored.read()
    if not (array >= 0 if array.dtype.kind == "i" else np.isfinite(array)).all():
        raise ValueError("it has numbers that are not finite")
    return jnp.asarray(array, old.dtype)


def _file_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype in the file: float32 for bfloat16, which NumPy's file format lacks."""
    return np.dtype("float32") if dtype == jnp.bfloat16 else dtype
