"""A reader and writer with a memory of constant size, which can be put on disk.

It reads text in segments and writes token by token. Caches and recurrent states advance at
block borders, exactly as in training, so its logits are those of one long segment.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer, PyTree

from brt import durable, untrusted
from brt.config import Config, Decoding, Sampling
from brt.distributed import rules
from brt.errors import DataError
from brt.generation.decoder import TextDecoder
from brt.generation.hypotheses import Hypotheses
from brt.generation.sampling import choose
from brt.generation.search import search
from brt.layers.stack import ModelState, StackBlock, StackState
from brt.models.decoder import Decoder, logits, new_state
from brt.models.targets import SpecialTokens

CHUNK = 16  # tokens read or written by one call of the program that goes token by token
_NEVER = -1  # an id that no token has
_NO_KEY = partial(jax.random.key, 0)  # of reading, which draws nothing


class Memory(NamedTuple):
    """All that a session knows. Its size depends on neither what was read nor written.

    Attributes:
      state: as training carries it, after the last full block.
      block: the open block.
      position: int32, tokens in the open block, below the window.
      logits: float32 [B, V], of the next token.
      count: int32, tokens read and written, BOS included; randomness is folded with it.
    """

    state: StackState
    block: StackBlock
    position: Int[Array, ""]
    logits: Float[Array, "B V"]
    count: Int[Array, ""]  # type: ignore[assignment]  # hides tuple's


class Learnt(NamedTuple):
    """What training has made: parameters, and what layers learn without gradients."""

    params: PyTree[Array]
    model_state: ModelState


def _advance(decoder: Decoder, learnt: Learnt, memory: Memory, tokens: Int[Array, " B"]) -> Memory:
    """Reads one token of every lane; ends the block where it is full."""
    variables, model_state = {"params": learnt.params}, learnt.model_state
    next_logits, block = decoder.apply(
        variables, tokens, memory.state, memory.block, memory.position, model_state,
        method="decode_step",
    )  # fmt: skip

    def end(memory: Memory) -> Memory:
        state = decoder.apply(
            variables, memory.state, memory.block, model_state, method="end_block"
        )
        block = decoder.apply(variables, state, model_state, method="begin_block")
        return memory._replace(state=state, block=block, position=jnp.zeros_like(memory.position))

    memory = Memory(memory.state, block, memory.position + 1, next_logits, memory.count + 1)
    return jax.lax.cond(memory.position == decoder.model.window, end, lambda memory: memory, memory)


def _read_segment(
    decoder: Decoder, learnt: Learnt, memory: Memory, tokens: Int[Array, "B T"]
) -> Memory:
    """Reads whole blocks at once; only at a block border."""
    variables, model_state = {"params": learnt.params}, learnt.model_state
    start = jnp.zeros((tokens.shape[0], tokens.shape[1] // decoder.model.window), bool)
    hidden, state, *_ = decoder.apply(variables, tokens, memory.state, start, model_state)
    return memory._replace(
        state=state,
        block=decoder.apply(variables, state, model_state, method="begin_block"),
        logits=logits(decoder.model, learnt.params["embedding"], hidden[:, -1:])[:, 0],
        count=memory.count + tokens.shape[1],
    )


def _new_memory(decoder: Decoder, lanes: int, learnt: Learnt) -> Memory:
    state, variables = new_state(decoder.model, lanes), {"params": learnt.params}
    return Memory(
        state=state,
        block=decoder.apply(variables, state, learnt.model_state, method="begin_block"),
        position=jnp.zeros((), jnp.int32),
        logits=jnp.zeros((lanes, decoder.model.vocab_size), jnp.float32),
        count=jnp.zeros((), jnp.int32),
    )


def _walk(
    decoder: Decoder,
    learnt: Learnt,
    memory: Memory,
    tokens: Int[Array, "B C"],
    given: Int[Array, ""],
    count: Int[Array, ""],
    key: Array,
    *,
    sampling: Sampling,
) -> tuple[Memory, Int[Array, "B C"]]:
    """Reads the first `given` of `tokens`, then chooses and reads others, `count` of them in all.

    Both numbers are arguments of the program, so that reading a prompt and writing any number of
    tokens take one program, compiled once.

    Returns:
      The memory, and the `count` tokens that were read; behind them the array is undefined.
    """

    def body(i: Int[Array, ""], so_far: tuple) -> tuple[Memory, Int[Array, "B C"]]:
        memory, tokens = so_far

        def read() -> Int[Array, " B"]:
            return jax.lax.dynamic_index_in_dim(tokens, i, axis=1, keepdims=False)

        def write() -> Int[Array, " B"]:
            return choose(memory.logits, jax.random.fold_in(key, memory.count), sampling)

        next_tokens = jax.lax.cond(i < given, read, write)
        tokens = jax.lax.dynamic_update_index_in_dim(tokens, next_tokens, i, axis=1)
        return _advance(decoder, learnt, memory, next_tokens), tokens

    return jax.lax.fori_loop(0, count, body, (memory, tokens))


class _Beams(NamedTuple):
    """Beams that go on from one memory.

    Attributes:
      begun: bool, False before the first token, whose logits the memory has already.
    """

    memory: Memory
    begun: Bool[Array, ""]


def _search(decoder: Decoder, learnt: Learnt, memory: Memory, *, decoding: Decoding) -> Hypotheses:
    """The texts that beams of one lane come to; a language model ends none by itself."""

    def lanes(memory: Memory, take: Callable[[Array], Array]) -> Memory:
        after = jax.tree.map(take, (memory.state, memory.block, memory.logits))
        return memory._replace(state=after[0], block=after[1], logits=after[2])

    def step(tokens: Int[Array, "1 N"], beams: _Beams) -> tuple[Float[Array, "1 N V"], _Beams]:
        def advance() -> Memory:
            return _advance(decoder, learnt, beams.memory, tokens[0])

        memory = jax.lax.cond(beams.begun, advance, lambda: beams.memory)
        return memory.logits[None], _Beams(memory, jnp.ones((), bool))

    def reorder(beams: _Beams, chosen: Int[Array, "1 N"]) -> _Beams:
        taken = lanes(beams.memory, lambda x: jnp.take(x, chosen[0], axis=0))
        return beams._replace(memory=taken)

    wide = lanes(memory, lambda x: jnp.repeat(x, decoding.beams, axis=0))
    ids = SpecialTokens(pad=0, start=0, eos=_NEVER)
    return search(
        TextDecoder(step, reorder, ids), _Beams(wide, jnp.zeros((), bool)), batch=1,
        decoding=decoding,
    )  # fmt: skip


class Session:
    """Reads and writes with one set of parameters.

    Args:
      config: with the vocabulary size set.
      params, model_state: as trained.
      bos_id: read before anything else.
      lanes: texts written side by side, all after what was read.
    """

    def __init__(
        self,
        config: Config,
        params: PyTree[Array],
        model_state: ModelState | None = None,
        *,
        bos_id: int,
        lanes: int = 1,
    ) -> None:
        decoder = Decoder(config.model, kernels=config.kernels)
        self._config, self._bos_id, self._lanes = config, bos_id, lanes
        self._read_segment = rules.jit(partial(_read_segment, decoder), donate_argnums=1)
        self._walk = rules.jit(
            partial(_walk, decoder), static_argnames="sampling", donate_argnums=1
        )
        self._search = rules.jit(partial(_search, decoder), static_argnames="decoding")
        self._new_memory = rules.jit(partial(_new_memory, decoder, lanes))
        self.restart(params, model_state)

    def restart(self, params: PyTree[Array], model_state: ModelState | None = None) -> None:
        """Forgets everything; goes on with these parameters."""
        self._learnt = Learnt(params, model_state or {})
        self.forget()

    def forget(self) -> None:
        """Forgets everything that was read and written."""
        self.memory: Memory = self._new_memory(self._learnt)

    def read(self, tokens: Sequence[int] | Integer[np.ndarray, " T"]) -> None:
        """Reads a text, the same in all lanes: in segments where it can, else by tokens."""
        window, length = self._config.model.window, self._config.evaluation_segment_length
        tokens = np.asarray(tokens, np.int32)
        if self.memory.count == 0:
            tokens = np.concatenate([np.array([self._bos_id], np.int32), tokens])
        place, position = 0, int(self.memory.position)
        while place < len(tokens):
            left = len(tokens) - place
            if position == 0 and left >= window:
                size = length if left >= length else window
                piece = np.tile(tokens[place : place + size], (self._lanes, 1))
                self.memory = self._read_segment(self._learnt, self.memory, piece)
            else:
                size = min(left, window - position, CHUNK)
                self._step(tokens[place : place + size], size, self._config.sampling, _NO_KEY())
                position = (position + size) % window
            place += size

    def write(self, count: int, sampling: Sampling, key: Array) -> Iterator[Int[np.ndarray, "B T"]]:
        """Yields `count` new tokens of every lane, a few at a time, int32 [B, T].

        What is written depends on the key and on the place, not on how it was cut into calls.
        """
        if self.memory.count == 0:
            self.read([])
        while count > 0:
            size = min(count, CHUNK)
            yield self._step(np.zeros(0, np.int32), size, sampling, key)
            count -= size

    def _step(
        self, given: Int[np.ndarray, " T"], count: int, sampling: Sampling, key: Array
    ) -> Int[np.ndarray, "B count"]:
        """Reads the given tokens in all lanes and chooses as many more as make `count`."""
        tokens = np.zeros((self._lanes, CHUNK), np.int32)
        tokens[:, : len(given)] = given
        self.memory, read = self._walk(
            self._learnt, self.memory, tokens, np.int32(len(given)), np.int32(count), key,
            sampling=sampling,
        )  # fmt: skip
        return np.asarray(read)[:, :count]

    def search(self, decoding: Decoding) -> Int[np.ndarray, " T"]:
        """Writes the text that a search finds, `decoding.max_length` - 1 tokens, and reads it."""
        if self.memory.count == 0:
            self.read([])
        best = self._search(self._learnt, self.memory, decoding=decoding)
        tokens = np.asarray(best.sequences[0, 0, 1:])
        self.read(tokens)
        return tokens

    def snapshot(self) -> Memory:
        """A copy of the memory, in NumPy arrays, which nothing that follows changes."""
        return jax.tree.map(np.array, self.memory)

    def resume(self, memory: Memory) -> None:
        """Goes on from a snapshot, of which it takes a copy."""
        self.memory = jax.tree.map(jnp.array, memory)

    def save(self, path: Path, identity: Mapping[str, object]) -> None:
        """Writes the memory as .npz; `identity` says what model it belongs to, as JSON.

        Raises:
          OSError: it cannot be written; see `durable.named_by_user`.
        """
        save(self.memory, path, identity)

    def load(self, path: Path, identity: Mapping[str, object]) -> None:
        """Takes up a saved memory.

        Raises:
          DataError: the file is missing, damaged, or of another model.
        """
        old, structure = jax.tree.flatten(self.memory)
        try:
            with untrusted.npz(path) as arrays:
                found = untrusted.parse_json(str(arrays["identity"].read()))
                untrusted.check(found, {str: object})
                _check_identity(path, found, identity)
                stored = [arrays[f"leaf{i}"] for i in range(len(old))]
                if [array.shape for array in stored] != [leaf.shape for leaf in old]:
                    raise DataError(
                        f"{path} holds arrays of other shapes; load it with as many lanes"
                    )
                leaves = [_leaf(*both) for both in zip(stored, old, strict=True)]
            memory = jax.tree.unflatten(structure, leaves)
            if memory.count < 0 or not 0 <= memory.position < self._config.model.window:
                raise ValueError("its place is none")
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
        self.memory = memory


def _check_identity(
    path: Path, found: Mapping[str, object], identity: Mapping[str, object]
) -> None:
    different = [k for k in identity if found.get(k) != identity[k]]
    if different:
        raise DataError(
            f"{path} belongs to another model: "
            + ", ".join(f"{k} was {found.get(k)} and is {identity[k]}" for k in different)
        )


def _leaf(stored: untrusted.LazyArray, old: Array) -> Array:
    """What was saved for an array of the memory; ValueError where it cannot have been."""
    array = stored.read()
    counts = array.dtype.kind == "i"
    if (
        array.dtype != _stored(old.dtype)
        or not (array >= 0 if counts else np.isfinite(array)).all()
    ):
        raise ValueError(f"it has {array.dtype} for {old.dtype}, or what is no finite number")
    return jnp.asarray(array, old.dtype)


def save(memory: Memory, path: Path, identity: Mapping[str, object]) -> None:
    """See `Session.save`."""
    arrays = {
        f"leaf{i}": np.asarray(leaf, _stored(leaf.dtype))
        for i, leaf in enumerate(jax.tree.leaves(memory))
    }
    with durable.named_by_user(path) as file:
        np.savez_compressed(file, identity=np.array(json.dumps(identity)), **arrays)


def _stored(dtype: np.dtype) -> np.dtype:
    """NumPy's own file format has no bfloat16; float32 holds it exactly."""
    return np.dtype("float32") if dtype == jnp.bfloat16 else dtype
