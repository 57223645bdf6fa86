"""Sessions: generation with a language model that keeps its memory of the text so far.

A session reads text in segments and generates token by token. Its memory has a constant size and
can be saved to a file. Caches and recurrent states are updated at the end of each block, as in
training, so the logits are the same as if the text were read as one long segment. The open block is
the last block as long as it is not full.

In shapes, B is the number of lanes (texts that are generated in parallel), T the number of tokens
of a text or segment, C = `CHUNK`, N the number of beams, and V the number of tokens in the
vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer

from brt.config import Config, Decoding, Sampling
from brt.distributed import rules
from brt.generation import state_files
from brt.generation.decoder import TextDecoder
from brt.generation.hypotheses import Hypotheses
from brt.generation.sampling import choose
from brt.generation.search import search
from brt.layers.runs import StackBlock, StackState
from brt.models.decoder import Decoder, logits, new_state, output_weights
from brt.models.targets import SpecialTokens
from brt.types import Variables

# One call of the compiled program that reads or writes token by token handles at most this many
# tokens.
CHUNK = 16
# Language models lack an end token. The search gets this id, which no token has, as the id of the
# end token.
_NEVER = -1
# The program that reads and samples needs a random key even if it only reads, and then ignores it.
_NO_KEY = partial(jax.random.key, 0)


class Memory(NamedTuple):
    """The complete state of a session. Its size does not depend on the length of the text.

    Attributes:
      state: caches and recurrent states of the layers after the last full block, as in training.
      block: what layers remember of the tokens in the open block, such as keys and values.
      position: int32, number of tokens in the open block, less than the length of a block.
      logits: float32 [B, V], logits of the next token.
      count: int32, number of tokens read and written including BOS; folded into random keys, so
        that each token has a random number of its own.
    """

    state: StackState
    block: StackBlock
    position: Int[Array, ""]
    logits: Float[Array, "B V"]
    count: Int[Array, ""]  # type: ignore[assignment]  # hides a method of tuple


def _advance(
    decoder: Decoder, variables: Variables, memory: Memory, tokens: Int[Array, " B"]
) -> Memory:
    """Reads one token of every lane, and ends the block if it is full."""
    params, model_state = {"params": variables.params}, variables.model_state
    next_logits, block = decoder.apply(
        params, tokens, memory.state, memory.block, memory.position, model_state,
        method="decode_step",
    )  # fmt: skip

    def end_block(memory: Memory) -> Memory:
        """Returns the memory after its full block has been processed, with an empty open block."""
        state = decoder.apply(params, memory.state, memory.block, model_state, method="end_block")
        block = decoder.apply(params, state, model_state, method="begin_block")
        return memory._replace(state=state, block=block, position=jnp.zeros_like(memory.position))

    memory = Memory(memory.state, block, memory.position + 1, next_logits, memory.count + 1)
    is_full = memory.position == decoder.model.block_length
    return jax.lax.cond(is_full, end_block, lambda memory: memory, memory)


def _read_segment(
    decoder: Decoder, variables: Variables, memory: Memory, tokens: Int[Array, "B T"]
) -> Memory:
    """Reads whole blocks at once; the memory must be at a block boundary."""
    params, model_state = {"params": variables.params}, variables.model_state
    start = jnp.zeros((tokens.shape[0], tokens.shape[1] // decoder.model.block_length), bool)
    hidden, state, *_ = decoder.apply(params, tokens, memory.state, start, model_state)
    weights = output_weights(decoder.model, variables.params)
    return memory._replace(
        state=state,
        block=decoder.apply(params, state, model_state, method="begin_block"),
        logits=logits(decoder.model, weights, hidden[:, -1:])[:, 0],
        count=memory.count + tokens.shape[1],
    )


def _new_memory(decoder: Decoder, lanes: int, variables: Variables) -> Memory:
    state, params = new_state(decoder.model, lanes), {"params": variables.params}
    return Memory(
        state=state,
        block=decoder.apply(params, state, variables.model_state, method="begin_block"),
        position=jnp.zeros((), jnp.int32),
        logits=jnp.zeros((lanes, decoder.model.vocab_size), jnp.float32),
        count=jnp.zeros((), jnp.int32),
    )


def _read_and_write(
    decoder: Decoder, known_ids: int, variables: Variables, memory: Memory,
    tokens: Int[Array, "B C"],
    prompt_length: Int[Array, ""],
    count: Int[Array, ""],
    key: Array,
    *,
    sampling: Sampling,
) -> tuple[Memory, Int[Array, "B C"], Int[Array, ""]]:  # fmt: skip
    """Reads a prompt, and continues it with sampled tokens.

    One compiled program reads prompts of any length and samples any number of tokens, because
    `prompt_length` and `count` are arrays.

    Args:
      tokens: the prompt, padded.
      prompt_length: number of tokens of the prompt.
      count: number of tokens of the prompt and of sampled tokens together.

    Returns:
      The new memory; an array that begins with the prompt and the sampled tokens; and their number,
      which is smaller than `count` if the text has ended (see `Session.write`).
    """
    end_ids = decoder.model.end_ids

    def is_unfinished(so_far: tuple) -> Bool[Array, ""]:
        """Returns True until there are `count` tokens, or every lane has just sampled an end token.

        Args:
          so_far: the number of tokens read or sampled so far, the memory after them, and the array
            of all tokens; the same triple as in `add_token`.
        """
        i, _, tokens = so_far
        if not end_ids:
            return i < count
        last = jax.lax.dynamic_index_in_dim(tokens, i - 1, axis=1)
        return (i < count) & ~((i > prompt_length) & jnp.isin(last, jnp.asarray(end_ids)).all())

    def add_token(so_far: tuple) -> tuple[Int[Array, ""], Memory, Int[Array, "B C"]]:
        """Returns the triple `so_far` (see `is_unfinished`) with one more token, which is read from
        the prompt or, after its end, sampled.
        """
        i, memory, tokens = so_far

        def read() -> Int[Array, " B"]:
            """Returns the token of each lane at index i of the prompt."""
            return jax.lax.dynamic_index_in_dim(tokens, i, axis=1, keepdims=False)

        def write() -> Int[Array, " B"]:
            """Returns a token of each lane, sampled from the logits in the memory."""
            logits, own_key = memory.logits[:, :known_ids], jax.random.fold_in(key, memory.count)
            return choose(logits, own_key, sampling)

        next_tokens = jax.lax.cond(i < prompt_length, read, write)
        tokens = jax.lax.dynamic_update_index_in_dim(tokens, next_tokens, i, axis=1)
        return i + 1, _advance(decoder, variables, memory, next_tokens), tokens

    start = jnp.zeros((), jnp.int32), memory, tokens
    length, memory, tokens = jax.lax.while_loop(is_unfinished, add_token, start)
    return memory, tokens, length


class _Beams(NamedTuple):
    """Beams that continue one memory.

    Attributes:
      memory: the memory of all beams, whose axis of lanes has an entry for each beam.
      begun: bool, False before the first step. The logits of the first token are already in the
        memory, so the first step reads no token.
    """

    memory: Memory
    begun: Bool[Array, ""]


def _search(
    decoder: Decoder, known_ids: int, variables: Variables, memory: Memory, *, decoding: Decoding
) -> Hypotheses:
    """Runs a beam search in a single lane. Without an end token, texts have the maximum length."""

    def map_lanes(memory: Memory, function: Callable[[Array], Array]) -> Memory:
        """Returns the memory with `function` applied to all arrays that have an axis of lanes."""
        arrays = jax.tree.map(function, (memory.state, memory.block, memory.logits))
        return memory._replace(state=arrays[0], block=arrays[1], logits=arrays[2])

    def step(tokens: Int[Array, "1 N"], beams: _Beams) -> tuple[Float[Array, "1 N V"], _Beams]:
        """Reads one token of each of N beams; returns the logits of the next tokens and the beams.

        The first step reads no token, because the logits of the first token are already known.
        """

        def advance() -> Memory:
            """Returns the memory of the beams after reading `tokens`, one token for each beam."""
            return _advance(decoder, variables, beams.memory, tokens[0])

        memory = jax.lax.cond(beams.begun, advance, lambda: beams.memory)
        return memory.logits[None, :, :known_ids], _Beams(memory, jnp.ones((), bool))

    def reorder(beams: _Beams, chosen: Int[Array, "1 N"]) -> _Beams:
        """Returns N beams, where beam n continues beam `chosen[0, n]` of the given `beams`."""
        memory = map_lanes(beams.memory, lambda x: jnp.take(x, chosen[0], axis=0))
        return beams._replace(memory=memory)

    wide = map_lanes(memory, lambda x: jnp.repeat(x, decoding.beams, axis=0))
    ids = SpecialTokens(pad=0, start=0, eos=_NEVER)
    return search(
        TextDecoder(step, reorder, ids), _Beams(wide, jnp.zeros((), bool)), batch=1,
        decoding=decoding,
    )  # fmt: skip


class Session:
    """Reads and generates text with a language model, and keeps the memory of the text in between.

    Args:
      config: config of the run, in which the size of the vocabulary is set.
      variables: the learned arrays of the model.
      bos_id: id of BOS, which is read before the first text.
      lanes: number of texts that are generated in parallel after the same prompt.
      known_ids: number of ids that the tokenizer knows; other ids are never generated. 0 stands for
        the complete vocabulary of the model.
    """

    def __init__(
        self, config: Config, variables: Variables, *, bos_id: int, lanes: int = 1,
        known_ids: int = 0,
    ) -> None:  # fmt: skip
        decoder = Decoder(config.model, kernels=config.kernels)
        self._config, self._bos_id, self._lanes = config, bos_id, lanes
        known = known_ids or config.model.vocab_size
        self._read_segment = rules.jit(partial(_read_segment, decoder), donate_argnums=1)
        self._read_and_write = rules.jit(
            partial(_read_and_write, decoder, known), static_argnames="sampling", donate_argnums=1
        )
        self._search = rules.jit(partial(_search, decoder, known), static_argnames="decoding")
        self._new_memory = rules.jit(partial(_new_memory, decoder, lanes))
        self.restart(variables)

    def restart(self, variables: Variables) -> None:
        """Clears the memory, and uses `variables` as the learned arrays of the model from
        now on.
        """
        self._variables = variables
        self.forget()

    def forget(self) -> None:
        """Clears the memory, as if no text had been read."""
        self.memory: Memory = self._new_memory(self._variables)

    def read(self, tokens: Sequence[int] | Integer[np.ndarray, " T"]) -> None:
        """Reads the same text in all lanes.

        Whole segments or blocks are read at once if possible, other tokens one by one.

        Args:
          tokens: ids of the text. BOS is read before the first text.
        """
        window, length = self._config.model.block_length, self._config.evaluation_segment_length
        tokens = np.asarray(tokens, np.int32)
        if self.memory.count == 0:
            tokens = np.concatenate([np.array([self._bos_id], np.int32), tokens])
        start, position = 0, int(self.memory.position)
        while start < len(tokens):
            left = len(tokens) - start
            if position == 0 and left >= window:
                size = length if left >= length else window
                piece = np.tile(tokens[start : start + size], (self._lanes, 1))
                self.memory = self._read_segment(self._variables, self.memory, piece)
            else:
                size = min(left, window - position, CHUNK)
                self._step(tokens[start : start + size], size, self._config.sampling, _NO_KEY())
                position = (position + size) % window
            start += size

    def write(self, count: int, sampling: Sampling, key: Array) -> Iterator[Int[np.ndarray, "B T"]]:
        """Generates tokens in all lanes, and yields them in pieces of T tokens, each int32 [B, T].

        The random number of a token depends only on `key` and on the token's position in the text.
        Two calls for 10 tokens with the same key therefore generate the same text as one call for
        20 tokens. A text ends early after a token of Model.end_ids, or with several lanes if all of
        them sample such a token at the same time.

        Args:
          count: largest number of tokens.
          sampling: temperature, top-k and top-p.
          key: random key.
        """
        if self.memory.count == 0:
            self.read([])
        while count > 0:
            size = min(count, CHUNK)
            piece = self._step(np.zeros(0, np.int32), size, sampling, key)
            yield piece
            ended = bool(np.isin(piece[:, -1], self._config.model.end_ids).all())
            count = 0 if ended else count - size

    def _step(
        self, prompt: Int[np.ndarray, " T"], count: int, sampling: Sampling, key: Array
    ) -> Int[np.ndarray, "B C"]:
        """Reads a prompt in all lanes, and samples tokens until there are `count` tokens or the
        text ends.
        """
        tokens = np.zeros((self._lanes, CHUNK), np.int32)
        tokens[:, : len(prompt)] = prompt
        self.memory, read, length = self._read_and_write(
            self._variables, self.memory, tokens, np.int32(len(prompt)), np.int32(count), key,
            sampling=sampling,
        )  # fmt: skip
        return np.asarray(read)[:, : int(length)]

    def search(self, decoding: Decoding) -> Int[np.ndarray, " T"]:
        """Continues the text by beam search, and reads the new tokens.

        The session must have a single lane.

        Args:
          decoding: settings of the search, such as the number of beams and the maximum length.

        Returns:
          The `decoding.max_length` - 1 new tokens, int32 [T].
        """
        if self.memory.count == 0:
            self.read([])
        best = self._search(self._variables, self.memory, decoding=decoding)
        tokens = np.asarray(best.sequences[0, 0, 1:])
        self.read(tokens)
        return tokens

    def snapshot(self) -> Memory:
        """Returns a copy of the memory as NumPy arrays."""
        return jax.tree.map(np.array, self.memory)

    def resume(self, memory: Memory) -> None:
        """Continues from a memory that `snapshot` returned; the arrays are copied."""
        self.memory = jax.tree.map(jnp.array, memory)

    def save(self, path: Path, identity: Mapping[str, object]) -> None:
        """Writes the memory to a file, which `load` reads.

        Args:
          path: the file.
          identity: a description of the model. `load` compares it with the description of the model
            that is to continue.
        """
        state_files.save(self.memory, path, identity)

    def load(
        self,
        path: Path,
        identity: Mapping[str, object],
        translate: Callable[[Mapping[str, Any]], Mapping[str, object]] = dict,
    ) -> None:
        """Continues from a memory that `save` wrote.

        Args:
          path: the file.
          identity: the description of the present model, which must equal the one in the file.
          translate: function that is applied to the saved description before the comparison. It
            converts the settings that an earlier version of brt has written to their present names.

        Raises:
          DataError: the file is missing, damaged, or belongs to another model.
        """
        self.memory = state_files.load(
            path, self.memory, self._config.model.block_length, identity, translate
        )
