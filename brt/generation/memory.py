"""The memory of a session, and the compiled programs of a session as pure functions of its memory.

The memory is the complete state of a text that is read and generated. It can be stored in a file,
so that the text can be continued later. The last block of a text is called the open block as long
as it is not full. When it is full, layers update their caches and recurrent states.

In shapes, B is the number of lanes (texts that are generated in parallel), T the number of tokens
that are read, C the length of the rows that hold a prompt and its continuation, and V the number of
tokens in the vocabulary.
"""

import codecs
import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.random import fold_in
from jaxtyping import Array, Bool, Float, Int, UInt8

from brt import durable, untrusted
from brt.config import Model, Sampling
from brt.errors import DataError
from brt.generation.search import choose
from brt.layers.runs import StackBlock, StackState
from brt.layers.state import without_ready
from brt.models.decoder import Decoder, logits, new_state, output_weights
from brt.types import Variables

# One call of the compiled program that reads or writes token by token handles at most this many
# tokens.
CHUNK = 16
# Lanes whose text has ended go on until the texts of all lanes have ended. After the end of its
# text, a lane returns this number in place of tokens, and the model reads end tokens there.
NO_TOKEN = -1
_FORMAT = 2  # of the files that `save` writes
_IDENTITY = 1 << 20  # The description of the model in a file has at most this many bytes.


class Memory(NamedTuple):
    """The complete state of a session. Its size does not depend on the length of the text."""

    # Caches and recurrent states of the layers after the last full block, as in training.
    state: StackState
    # What layers remember of the tokens in the open block, such as keys and values.
    block: StackBlock
    position: Int[Array, " B"]  # number of tokens in the open block: below the length of a block
    logits: Float[Array, "B V"]  # of the next token
    # Number of tokens that were read and written, including BOS. It is folded into random keys, so
    # that each token has a random number of its own.
    count: Int[Array, " B"]  # type: ignore[assignment]  # hides a method of tuple
    ended: Bool[Array, " B"]  # True for texts that end with a generated token of Model.end_ids
    # The first bytes of the UTF-8 character within which a text ends, followed by zeros. The next
    # tokens have the rest of the character. If a text ends with a whole character, all are zero.
    unfinished: UInt8[Array, "B 3"]

    def unfinished_bytes(self) -> list[bytes]:
        """Returns, for each text, the bytes of an unfinished character at its end."""
        return [row.tobytes().rstrip(b"\0") for row in np.asarray(self.unfinished)]


def _call(decoder: Decoder, variables: Variables, method: str, *inputs: Any) -> Any:
    # All methods get the model state as their last argument.
    inputs = *inputs, variables.model_state
    return decoder.apply({"params": variables.params}, *inputs, method=method)


def new_memory(decoder: Decoder, lanes: int, variables: Variables) -> Memory:
    """Returns the memory of `lanes` texts without tokens."""
    state = new_state(decoder.model, lanes)
    return Memory(
        state=state,
        block=_call(decoder, variables, "begin_block", state),
        position=jnp.zeros((lanes,), jnp.int32),
        logits=jnp.zeros((lanes, decoder.model.vocab_size), jnp.float32),
        count=jnp.zeros((lanes,), jnp.int32),
        ended=jnp.zeros((lanes,), bool),
        unfinished=jnp.zeros((lanes, 3), jnp.uint8),
    )


def unprepared(memory: Memory) -> Memory:
    """Returns the memory without the arrays that `prepare` adds for decode steps."""
    return memory._replace(block=without_ready(memory.block))


def map_lanes(function: Callable[..., Array], memory: Memory, *others: Memory) -> Memory:
    """Calls `function(*arrays, axis=axis)` for each array of `memory` together with the same array
    of each of the `others`, and returns the results as a memory. `axis` is the axis of lanes: 1 in
    `Memory.block`, where axis 0 is the axis of layers, and 0 elsewhere.
    """
    rest = (memory._replace(block=()) for memory in (memory, *others))
    blocks = (memory.block for memory in (memory, *others))
    return jax.tree.map(partial(function, axis=0), *rest)._replace(
        block=jax.tree.map(partial(function, axis=1), *blocks)
    )


def joined(*memories: Memory) -> Memory:
    """Returns a memory that has the lanes of all `memories`."""
    return map_lanes(lambda *arrays, axis: jnp.concatenate(arrays, axis), *memories)


def unfinished_character(data: bytes) -> bytes:
    """Returns the bytes of an unfinished character at the end of a UTF-8 text; b"" for none."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return decoder.getstate()[0]


def _as_in_file(memory: Memory) -> Memory:
    # In files, all lanes share one position and one count, because they continue the same text.
    return memory._replace(position=memory.position[0], count=memory.count[0])


def save(memory: Memory, path: Path, identity: Mapping[str, object]) -> None:
    """Writes the memory of a text to an .npz file, with `identity`, a description of the model."""
    arrays = {
        f"leaf{i}": np.asarray(leaf, _file_dtype(leaf.dtype))
        for i, leaf in enumerate(jax.tree.leaves(_as_in_file(memory)))
    }
    with durable.named_by_user(path) as file:
        described = json.dumps({**identity, "format": _FORMAT})
        np.savez_compressed(file, identity=np.array(described), **arrays)


def load(path: Path, old: Memory, block_length: int, identity: Mapping[str, object]) -> Memory:
    """Returns the memory in a file that `save` wrote, with the shapes and dtypes of `old`.

    DataError is raised if the file is missing or damaged, or was saved with another `identity`.
    """
    leaves, structure = jax.tree.flatten(_as_in_file(old))
    try:
        with untrusted.npz(path, growth=None) as arrays:
            stored = _described(arrays, len(leaves))
            saved_identity = untrusted.parse_json(str(arrays["identity"].read()))
            untrusted.check(saved_identity, {str: object})
            if (saved_format := saved_identity.pop("format", 1)) != _FORMAT:
                raise DataError(
                    f"{path} has format {saved_format}; this version of brt reads {_FORMAT}, so "
                    "read the text again"
                )
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
    position, count = (jnp.full_like(old.count, x) for x in (memory.position, memory.count))
    return memory._replace(position=position, count=count)


def _described(arrays: Mapping[str, untrusted.LazyArray], leaves: int) -> list[Any]:
    """Returns the arrays of a memory in a file without reading them; `leaves` is their number.
    Raises ValueError if the file has other arrays.
    """
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


def chunk_size(model: Model) -> int:
    """Returns how many tokens are read at once where a text does not fill a block."""
    # This is the largest number that divides `CHUNK`, the length of a block and every window.
    windows = (model.for_layer(layer).window for layer in range(model.layers))
    return math.gcd(CHUNK, model.block_length, *windows)


def advance(
    decoder: Decoder,
    variables: Variables,
    memory: Memory,
    tokens: Int[Array, " B"] | Int[Array, "B T"],
) -> Memory:
    """Returns the memory after every lane has read one token, or T tokens (`chunk_size`)."""
    # If the open block is full afterwards, the caller ends it.
    inputs = tokens, memory.state, memory.block, memory.position
    next_logits, block = _call(decoder, variables, "decode_step", *inputs)
    count = tokens.size // len(tokens)
    return memory._replace(
        block=block, position=memory.position + count, logits=next_logits,
        count=memory.count + count,
    )  # fmt: skip


def end_block(decoder: Decoder, variables: Variables, memory: Memory) -> Memory:
    """Returns the memory after its full block has been processed, with an empty open block."""
    state = _call(decoder, variables, "end_block", memory.state, memory.block)
    block = _call(decoder, variables, "begin_block", state)
    return memory._replace(state=state, block=block, position=jnp.zeros_like(memory.position))


def end_lane(
    decoder: Decoder, variables: Variables, memory: Memory, lane: Int[Array, ""]
) -> Memory:
    """Returns the memory after the full block of one lane has ended. Both `memory` and the result
    have the arrays that `prepare` adds.
    """
    own = map_lanes(partial(jax.lax.dynamic_slice_in_dim, start_index=lane, slice_size=1), memory)
    own = prepare(decoder, variables, end_block(decoder, variables, unprepared(own)))
    return map_lanes(
        lambda array, new, axis: jax.lax.dynamic_update_slice_in_dim(array, new, lane, axis),
        memory, own,
    )  # fmt: skip


def prepare(decoder: Decoder, variables: Variables, memory: Memory) -> Memory:
    """Returns the memory, with a copy of the open block in the form that decode steps read."""
    # `read_and_write` needs this copy of the keys and values, and keeps it up to date.
    block = _call(decoder, variables, "prepare_block", memory.block, memory.position)
    return memory._replace(block=block)


def read_segment(
    decoder: Decoder, variables: Variables, memory: Memory, tokens: Int[Array, "B T"]
) -> Memory:
    """Returns the memory after `tokens`, which are whole blocks, were read. The open block of
    `memory` must be empty.
    """
    start = jnp.zeros((tokens.shape[0], tokens.shape[1] // decoder.model.block_length), bool)
    hidden, state, *_ = _call(decoder, variables, "__call__", tokens, memory.state, start)
    weights = output_weights(decoder.model, variables.params)
    return memory._replace(
        state=state,
        block=_call(decoder, variables, "begin_block", state),
        logits=logits(decoder.model, weights, hidden[:, -1:])[:, 0],
        count=memory.count + tokens.shape[1],
    )


def read_and_write(
    decoder: Decoder, known_ids: int, variables: Variables, memory: Memory,
    tokens: Int[Array, "B C"],
    prompt_length: Int[Array, " B"],
    count: Int[Array, ""],
    key: Array,
    *,
    sampling: Sampling,
) -> tuple[Memory, Int[Array, "B C"], Int[Array, ""]]:  # fmt: skip
    """Reads a prompt in each lane, and continues it with sampled tokens, without going beyond the
    open block of any lane.

    One compiled program reads prompts of any length and samples any number of tokens, because
    `prompt_length` and `count` are arrays.

    Args:
      known_ids: only ids below this number are sampled.
      memory: a memory that `prepare` has returned.
      tokens: the prompts, padded.
      count: number of tokens of each lane, prompt and sampled tokens together.
      key: the random key of all lanes, or an array [B] of keys.

    Returns:
      The new memory; an array whose first columns are the prompts and the sampled tokens; and the
        number of these columns. The number is less than `count` if all texts have ended (see
        `Session.write`).
    """
    end_ids, keys = decoder.model.end_ids, jnp.broadcast_to(key, memory.count.shape)

    # `so_far` is a tuple: the number of columns done, the memory after them, and all tokens.
    def is_unfinished(so_far: tuple) -> Bool[Array, ""]:
        i, memory, _ = so_far
        return (i < count) & ~memory.ended.all() if end_ids else i < count

    def add_token(so_far: tuple) -> tuple[Int[Array, ""], Memory, Int[Array, "B C"]]:
        i, memory, tokens = so_far
        reads = i < prompt_length

        def read() -> Int[Array, " B"]:
            return jax.lax.dynamic_index_in_dim(tokens, i, axis=1, keepdims=False)

        def write() -> Int[Array, " B"]:
            logits, own_keys = memory.logits[:, :known_ids], jax.vmap(fold_in)(keys, memory.count)
            return jnp.where(reads, read(), choose(logits, own_keys, sampling))

        next_tokens = shown = jax.lax.cond(reads.all(), read, write)
        ended = memory.ended
        if end_ids:
            next_tokens = jnp.where(ended, end_ids[0], next_tokens)
            shown = jnp.where(ended, NO_TOKEN, next_tokens)
            ended |= ~reads & jnp.isin(next_tokens, jnp.asarray(end_ids))
        tokens = jax.lax.dynamic_update_index_in_dim(tokens, shown, i, axis=1)
        memory = advance(decoder, variables, memory, next_tokens)
        return i + 1, memory._replace(ended=ended), tokens

    start = jnp.zeros((), jnp.int32), memory, tokens
    length, memory, tokens = jax.lax.while_loop(is_unfinished, add_token, start)
    return memory, tokens, length
