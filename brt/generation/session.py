"""Sessions: generation with a language model that keeps its memory of the text so far.

A session reads text in segments and generates token by token. Its memory has a constant size and
can be saved to a file. Caches and recurrent states are updated at the end of each block, as in
training, so the logits are the same as if the text were read as one long segment. The open block is
the last block as long as it is not full.

In shapes, B is the number of lanes (texts that are generated in parallel), T the number of tokens
of a text or segment, C = `CHUNK`, N the number of beams, and V the number of tokens in the
vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer

from brt.config import Config, Decoding, Model, Sampling
from brt.distributed import rules
from brt.generation import memory as memories
from brt.generation.memory import CHUNK, NO_TOKEN, Memory, advance, end_block, map_lanes
from brt.generation.search import Hypotheses, TextDecoder, search
from brt.layers.runs import runs
from brt.models.decoder import Decoder
from brt.models.seq2seq import SpecialTokens
from brt.ops import dispatch
from brt.ops.compiler_options import of_inference
from brt.ops.dense import SeparateKernels
from brt.types import Variables

# The search gets this number as the end token of a model that has none. No token has this id.
_NEVER = -1


class _Beams(NamedTuple):
    """The decoding state of a beam search; `memory` has a lane for each beam of each text."""

    memory: Memory
    # False before the first step. This step reads no token, because the logits of the first token
    # are already in the memory.
    begun: Bool[Array, ""]


def search_memory(
    decoder: Decoder, known_ids: int, variables: Variables, memory: Memory, *, decoding: Decoding
) -> Hypotheses:
    """Returns continuations of the text of each lane, found by beam search. They consist of ids
    below `known_ids`, and end with an end id or at the maximum length.
    """
    lanes = len(memory.logits)

    def step(tokens: Int[Array, "B N"], beams: _Beams) -> tuple[Float[Array, "B N V"], _Beams]:
        def read_tokens() -> Memory:
            return _advance_beams(decoder, variables, beams.memory, tokens.ravel())

        memory = jax.lax.cond(beams.begun, read_tokens, lambda: beams.memory)
        logits = memory.logits[:, :known_ids].reshape(*tokens.shape, -1)
        return logits, _Beams(memory, jnp.ones((), bool))

    def reorder(beams: _Beams, chosen: Int[Array, "B N"]) -> _Beams:
        rows = (jnp.arange(lanes)[:, None] * decoding.beams + chosen).ravel()
        memory = map_lanes(lambda x, axis: jnp.take(x, rows, axis=axis), beams.memory)
        return beams._replace(memory=memory)

    memory = memories.prepare(decoder, variables, memory)
    wide = map_lanes(partial(jnp.repeat, repeats=decoding.beams), memory)
    first, *others = decoder.model.end_ids or (_NEVER,)
    ids = SpecialTokens(pad=0, start=0, eos=first, ends=tuple(others))
    return search(
        TextDecoder(step, reorder, ids), _Beams(wide, jnp.zeros((), bool)), batch=lanes,
        decoding=decoding,
    )  # fmt: skip


def _advance_beams(
    decoder: Decoder, variables: Variables, memory: Memory, tokens: Int[Array, " B"]
) -> Memory:
    """Returns the memory after every lane has read one token. Blocks that become full are ended."""
    memory = advance(decoder, variables, memory, tokens)
    full = memory.position == decoder.model.block_length

    def ended() -> Memory:
        new = end_block(decoder, variables, memories.unprepared(memory))
        new = memories.prepare(decoder, variables, new)
        return map_lanes(partial(_chosen, full), new, memory)

    return jax.lax.cond(full.any(), ended, lambda: memory)


def _chosen(lanes: Bool[Array, " B"], new: Array, old: Array, axis: int) -> Array:
    """Returns an array that is `new` where `lanes` is True, else `old`. Lanes are on `axis`."""
    return jnp.where(lanes.reshape(-1, *(1,) * (new.ndim - axis - 1)), new, old)


# The separate kernels of a model, that is, an array for each layer instead of a stack of all
# layers. The outer keys are names of runs (neighbouring layers of one kind, `brt.layers.runs`), and
# the inner keys are names of parameters.
Kernels: TypeAlias = dict[str, dict[str, SeparateKernels]]

# The names of the kernels of a layer that are used for nothing but matrix products (see
# `brt.layers.basic.product_kernel`). Products with kernels of _FROM_WIDTH sum over the first axis
# of the kernel. Products with kernels of _TO_WIDTH sum over all axes of the kernel but the last.
_FROM_WIDTH = frozenset({"queries", "keys", "values", "cross_queries", "mlp_in", "mlp_gate"})
_TO_WIDTH = frozenset({"output", "mlp_out"})
# A run of layers whose kernels have fewer bytes than this keeps its stacks. Small stacks stay in
# the processor's caches from token to token, and separate kernels take longer to compile.
_SMALLEST = 1 << 25
# Separate kernels are transposed copies only under two conditions. There must be at least
# _FEWEST_TEXTS texts, because products of fewer texts gain little. The copies must have at most
# _MOST_COPIED bytes, because a small machine has little memory.
_FEWEST_TEXTS, _MOST_COPIED = 8, 1 << 30


def separate_kernels(model: Model, variables: Variables, lanes: int) -> Kernels:
    """Returns `SeparateKernels` for every large stack of kernels in the layers of a decoder.

    The result is {} unless the programs that read and write token by token (`decode_step` and
    `prepare_block` of a decoder) are faster with separate kernels, as on CPUs (`brt.ops.dense`).
    For at least eight texts (`lanes`), the kernels are transposed copies, with which products are
    faster (`brt.ops.products`), unless the copies are too large. Otherwise they are views of the
    stacks, which need no further memory. While views exist, a program cannot reuse the memory of
    the stacks, as a train step would do.
    """
    leaves = jax.tree.leaves(variables.params)
    whole = all(isinstance(leaf, jax.Array) and len(leaf.devices()) == 1 for leaf in leaves)
    if not dispatch.policy().copies_layers or not whole:
        return {}
    stacks = {run.name: _kernels(variables.params["stack"][run.name]) for run in runs(model)}
    sizes = {run: sum(stack.nbytes for stack in own.values()) for run, own in stacks.items()}
    large = {run: own for run, own in stacks.items() if sizes[run] >= _SMALLEST}
    copies = lanes >= _FEWEST_TEXTS and sum(sizes[run] for run in large) <= _MOST_COPIED
    return {
        run: {name: _separated(name, stack, copies) for name, stack in own.items()}
        for run, own in large.items()
    }


def _kernels(params: dict[str, Any]) -> dict[str, Array]:
    """Returns the stacks of kernels in the parameters of neighbouring layers; {} for one layer."""
    tokens = params.get("tokens", {})
    names = _FROM_WIDTH | _TO_WIDTH
    return {name: leaf for name, leaf in tokens.items() if name in names and len(leaf) > 1}


def _separated(name: str, stack: Array, copies: bool) -> SeparateKernels:
    """Returns the layers of a stack [layers, *inputs, *outputs]. They are views, which share the
    memory of the stack on CPUs, or transposed copies, which are matrices.
    """
    layers, kernel = np.asarray(stack), stack.shape[1:]
    if not copies:
        return SeparateKernels(tuple(jax.device_put(layer) for layer in layers), kernel)
    # The axes that the product with a kernel sums over come first.
    inputs = len(kernel) - 1 if name in _TO_WIDTH else 1
    matrices = layers.reshape(len(layers), math.prod(kernel[:inputs]), -1)
    arrays = tuple(jax.device_put(np.ascontiguousarray(matrix.T)) for matrix in matrices)
    return SeparateKernels(arrays, kernel, transposed=inputs)


def with_kernels(variables: Variables, kernels: Kernels) -> Variables:
    """Returns variables in which `kernels` replace the stacks that they were separated from."""
    stack = dict(variables.params["stack"])
    for run, own in kernels.items():
        stack[run] = {**stack[run], "tokens": {**stack[run]["tokens"], **own}}
    return variables._replace(params={**variables.params, "stack": stack})


# The program that reads chunks of a block is compiled only if at least this many chunks are unread.
_MIN_CHUNKS = 3
# The program that reads and samples needs a random key even if it only reads, and then ignores it.
_NO_KEY = partial(jax.random.key, 0)


class Session:
    """Reads and generates text with a language model, and keeps the memory of the text in between.

    Args:
      config: config of the run, in which the size of the vocabulary is set.
      bos_id: id of BOS, which is read before the first text.
      lanes: number of texts that are generated in parallel, after the same prompt (`write`) or
        each after its own (`write_each`). With eight lanes or more, a session on a CPU has
        transposed copies of large kernels, unless these copies exceed 1 GiB.
      known_ids: number of ids that the tokenizer knows; other ids are never generated. 0 stands for
        the complete vocabulary of the model.
      decode_bytes: function from ids to the UTF-8 bytes of their text. The session uses it to keep
        the bytes of unfinished characters. If it is None, these bytes are not kept.
    """

    def __init__(
        self, config: Config, variables: Variables, *, bos_id: int, lanes: int = 1,
        known_ids: int = 0, decode_bytes: Callable[[np.ndarray], bytes] | None = None,
    ) -> None:  # fmt: skip
        decoder = Decoder(config.model, kernels=config.kernels)
        self._config, self._bos_id, self._lanes = config, bos_id, lanes
        self._decode_bytes, self._known_ids = decode_bytes, known_ids
        known = known_ids or config.model.vocab_size
        self._chunk = memories.chunk_size(config.model)
        compiled = partial(rules.jit, compiler_options=of_inference())
        self._read_segment = compiled(partial(memories.read_segment, decoder), donate_argnums=1)
        self._read_chunk = compiled(partial(memories.advance, decoder), donate_argnums=1)
        self._prepare = compiled(partial(memories.prepare, decoder), donate_argnums=1)
        self._end_block = compiled(partial(memories.end_block, decoder), donate_argnums=1)
        self._end_lane = compiled(partial(memories.end_lane, decoder), donate_argnums=1)
        self._read_and_write = compiled(
            partial(memories.read_and_write, decoder, known),
            static_argnames="sampling",
            donate_argnums=1,
        )
        self._search = compiled(partial(search_memory, decoder, known), static_argnames="decoding")
        self._new_memory = rules.jit(partial(memories.new_memory, decoder, 1))
        repeat = partial(jnp.repeat, repeats=lanes)
        self._repeat = rules.jit(partial(map_lanes, repeat))
        self._join = rules.jit(memories.joined)
        self._chunk_is_compiled = False
        self.restart(variables)

    def with_lanes(self, lanes: int) -> "Session":
        """Returns a new session of the same model, without `decode_bytes`, for `write_each`."""
        own = {"bos_id": self._bos_id, "known_ids": self._known_ids}
        return Session(self._config, self._variables, lanes=lanes, **own)

    def restart(self, variables: Variables) -> None:
        """Clears the memory, and uses `variables` as the model's learned arrays from now on."""
        self._variables = variables
        self._copies: Kernels = {}
        self.forget()

    def forget(self) -> None:
        """Clears the memory, as if no text had been read."""
        # Until the session writes, all lanes have the same memory. Therefore a memory of a single
        # lane is kept for all of them.
        self.memory = self._new_memory(self._variables)

    @property
    def memory(self) -> Memory:
        """What the session remembers of the text so far."""
        return memories.unprepared(self._memory)

    @memory.setter
    def memory(self, memory: Memory) -> None:
        # While single tokens are read or written, `_memory` also has arrays that `prepare` adds.
        self._memory, self._is_prepared = memory, False

    def read(self, tokens: Sequence[int] | Integer[np.ndarray, " T"]) -> None:
        """Reads the same text in all lanes, after BOS if the session has read nothing."""
        self._read(tokens, whole=True)

    def read_most(
        self, tokens: Sequence[int] | Integer[np.ndarray, " T"]
    ) -> Integer[np.ndarray, " _"]:
        """Reads a text like `read`, but not those tokens at its end that would be read one by one.
        Returns these tokens, which `write_each` can read.
        """
        return self._read(tokens, whole=False)

    def _read(
        self, tokens: Sequence[int] | Integer[np.ndarray, " T"], *, whole: bool
    ) -> Integer[np.ndarray, " _"]:
        # Whole segments, blocks or chunks of a block are read at once if possible, other tokens one
        # by one.
        window, length = self._config.model.block_length, self._config.evaluation_segment_length
        tokens = np.asarray(tokens, np.int32)
        if len(tokens):
            self._memory = self._memory._replace(ended=np.zeros(self._memory_lanes, bool))
            self._keep_unfinished(tokens[None])
        if self._is_new and tokens[:1].tolist() != [self._bos_id]:
            tokens = np.concatenate([np.array([self._bos_id], np.int32), tokens])
        start, position, separate = 0, int(self.memory.position[0]), self._separate
        while start < len(tokens):
            unread = len(tokens) - start
            if position == 0 and unread >= window:
                size = length if unread >= length else window
                piece = np.tile(tokens[start : start + size], (self._memory_lanes, 1))
                self.memory = self._read_segment(self._variables, self.memory, piece)
            elif self._reads_chunk(position, unread):
                size = self._chunk
                piece = np.tile(tokens[start : start + size], (self._memory_lanes, 1))
                self.memory = self._read_chunk(separate, self.memory, piece)
                self._chunk_is_compiled = True
                position = (position + size) % window
                if position == 0:
                    self._end_full_blocks()
            elif whole or position % self._chunk:
                size = min(unread, CHUNK - position % CHUNK, window - position)
                prompts = [tokens[start : start + size]] * self._memory_lanes
                self._step(separate, prompts, size, self._config.sampling, _NO_KEY())
                position = (position + size) % window
            else:
                break
            start += size
        return tokens[start:]

    @property
    def _is_new(self) -> bool:
        return int(self._memory.count[0]) == 0

    @property
    def _separate(self) -> Variables:
        """The learned arrays in the form that programs for single tokens read."""
        # Copies of kernels are stored, but not views, because a train step could not reuse the
        # memory of parameters that have views.
        kernels = self._copies
        if not kernels:
            kernels = separate_kernels(self._config.model, self._variables, self._lanes)
        own = [kernel for stacks in kernels.values() for kernel in stacks.values()]
        self._copies = kernels if any(kernel.transposed for kernel in own) else {}
        return with_kernels(self._variables, kernels)

    @property
    def _memory_lanes(self) -> int:
        return len(self.memory.logits)

    def _spread(self) -> None:
        """Gives each lane a memory of its own."""
        if self._memory_lanes < self._lanes:
            self.memory = self._repeat(self.memory)

    def _reads_chunk(self, position: int, unread: int) -> bool:
        """Returns True if the next tokens are read as a chunk, and not one by one."""
        # `position` tokens are in the open block, and `unread` tokens have not been read.
        starts = self._chunk > 1 and position % self._chunk == 0
        return starts and unread >= self._chunk * (1 if self._chunk_is_compiled else _MIN_CHUNKS)

    def write(self, count: int, sampling: Sampling, key: Array) -> Iterator[Int[np.ndarray, "B T"]]:
        """Generates at most `count` tokens in all lanes, and yields them in pieces.

        The random number of a token depends only on `key` and on the token's position in the text,
        so two calls for 10 tokens with the same key generate the same text as one call for 20
        tokens. All lanes draw with the same key, unless `key` is an array of keys, one for each
        lane. A text ends early after a token of Model.end_ids, and later calls of `write` do not
        continue it until `read` has been called. While texts of other lanes go on, `NO_TOKEN`
        stands after the end of such a text.
        """
        if self._is_new:
            self.read([])
        self._spread()
        separate, prompts = self._separate, [np.zeros(0, np.int32)] * self._lanes
        while count > 0 and not self.has_ended:
            size = min(count, self._room)
            piece = self._step(separate, prompts, size, sampling, key)
            self._keep_unfinished(piece)
            yield piece
            count -= size

    def write_each(
        self, texts: Sequence[tuple[Memory, Integer[np.ndarray, " _"]]], count: int,
        sampling: Sampling, key: Array,
    ) -> Iterator[list[Int[np.ndarray, " _"]]]:  # fmt: skip
        """Continues texts, each in a lane of its own, and yields the new tokens of each in pieces.

        A text is given as a memory of one lane and the tokens that follow this memory. These tokens
        are read first. There may be fewer texts than lanes. Tokens are sampled as by `write`, and
        each text gets the random numbers that it would get alone. Between pieces, the caller may
        call `end` to end texts.
        """
        empty = [(texts[-1][0], np.zeros(0, np.int32))] * (self._lanes - len(texts))
        joined, prompts = zip(*texts, *empty, strict=True)
        self.memory, unread, separate = self._join(*joined), list(prompts), self._separate
        left = np.where(np.arange(self._lanes) < len(texts), count, 0)
        while not self.end(left <= 0):
            ended = np.asarray(self._memory.ended)
            needed = left + np.array(list(map(len, unread)))
            size = min(int(needed[~ended].max()), self._room)
            rows = self._step(separate, [ids[:size] for ids in unread], size, sampling, key)
            pieces = [row[len(ids) :] for row, ids in zip(rows, unread, strict=True)]
            unread = [ids[size:] for ids in unread]
            pieces = [
                piece[piece != NO_TOKEN][: 0 if over else most]
                for piece, over, most in zip(pieces, ended, left, strict=True)
            ]
            left -= np.array(list(map(len, pieces)))
            yield pieces[: len(texts)]

    def end(self, lanes: Bool[np.ndarray, " B"]) -> bool:
        """Ends the texts of `lanes`; returns True if all texts have ended."""
        self._memory = self._memory._replace(ended=np.asarray(self._memory.ended) | lanes)
        return self.has_ended

    @property
    def _room(self) -> int:
        """The most tokens that all lanes can read or write in one call."""
        used = int(np.asarray(self._memory.position).max())
        return min(CHUNK, self._config.model.block_length - used)

    @property
    def has_ended(self) -> bool:
        """True if the texts of all lanes have ended."""
        return bool(np.asarray(self._memory.ended).all())

    def _keep_unfinished(self, tokens: Int[np.ndarray, "B T"]) -> None:
        """Updates the bytes of unfinished characters. `tokens` are the next tokens of each lane."""
        # Bytes at the end of a text that has ended are not kept, because no token completes them.
        if self._decode_bytes is None:
            return
        kept = np.zeros((self._memory_lanes, 3), np.uint8)
        rows = np.broadcast_to(tokens, (len(kept), tokens.shape[1]))
        before, ended = self._memory.unfinished_bytes(), np.asarray(self._memory.ended)
        for lane in np.flatnonzero(~ended):
            data = before[lane] + self._decode_bytes(rows[lane])
            begun = memories.unfinished_character(data)
            kept[lane, : len(begun)] = list(begun)
        self._memory = self._memory._replace(unfinished=kept)

    def _step(
        self, separate: Variables, prompts: Sequence[Integer[np.ndarray, " _"]], count: int,
        sampling: Sampling, key: Array,
    ) -> Int[np.ndarray, "B C"]:  # fmt: skip
        """Returns the prompt of each lane and sampled tokens after it. Each lane has `count` tokens
        in all, or fewer if all texts end. The tokens must fit into the open blocks.
        """
        tokens = np.zeros((len(prompts), CHUNK), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        counts = np.array(list(map(len, prompts)), np.int32), np.int32(count)
        if not self._is_prepared:
            self._memory = self._prepare(self._variables, self._memory)
            self._is_prepared = True
        self._memory, read, length = self._read_and_write(
            separate, self._memory, tokens, *counts, key, sampling=sampling
        )
        self._end_full_blocks()
        return np.asarray(read)[:, : int(length)]

    def _end_full_blocks(self) -> None:
        """Ends the open blocks that are full. If only some are full, `_memory` must be prepared."""
        full = np.asarray(self._memory.position) == self._config.model.block_length
        if full.all():
            self.memory = self._end_block(self._variables, self.memory)
            return
        for lane in np.flatnonzero(full):
            self._memory = self._end_lane(self._variables, self._memory, np.int32(lane))

    def search(self, decoding: Decoding) -> Int[np.ndarray, " T"]:
        """Continues the text of a single lane by beam search, and reads and returns the new tokens.

        There are at most `decoding.max_length` - 1 new tokens, and none if the text has ended (see
        `write`).
        """
        if self.has_ended:
            return np.zeros(0, np.int32)
        if self._is_new:
            self.read([])
        (tokens,) = self.search_each([self.memory], decoding)
        self.read(tokens)
        if np.isin(tokens[-1:], self._config.model.end_ids).any():
            self._memory = self._memory._replace(ended=np.ones(1, bool))
            self._keep_unfinished(tokens[None])
        return tokens

    def search_each(
        self, texts: Sequence[Memory], decoding: Decoding
    ) -> list[Int[np.ndarray, " T"]]:
        """Returns the tokens with which `search` would continue each of several texts, which are
        memories of one lane. The tokens are not read.
        """
        best = self._search(self._separate, self._join(*texts), decoding=decoding)
        found, lengths = np.asarray(best.sequences[:, 0]), np.asarray(best.lengths[:, 0])
        return [row[1:length] for row, length in zip(found, lengths, strict=True)]

    def snapshot(self) -> Memory:
        """Returns a copy of the memory as NumPy arrays."""
        self._spread()
        return jax.tree.map(np.array, self.memory)

    def resume(self, memory: Memory) -> None:
        """Continues from a memory that `snapshot` returned; the arrays are copied."""
        self.memory = jax.tree.map(jnp.array, memory)

    def save(self, path: Path, identity: Mapping[str, object]) -> None:
        """Writes the memory to a file, with `identity`, which describes the model.

        `load` refuses a file whose description is not that of its own model.
        """
        self._spread()
        memories.save(self.memory, path, identity)

    def load(self, path: Path, identity: Mapping[str, object]) -> None:
        """Continues from a memory that `save` wrote; see `brt.generation.memory.load`."""
        self._spread()
        length = self._config.model.block_length
        self.memory = memories.load(path, self.memory, length, identity)
