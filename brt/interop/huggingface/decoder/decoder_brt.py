"""The decoder of modeling_brt.py: its layers, the state that it carries, and simple generation.

Letters in shapes: B texts, T tokens, X keys, D model width, H heads of queries, G heads of keys,
K head size, V vocabulary.
"""

import math
from typing import NamedTuple

import torch
from torch import nn

from .layers_brt import (
    DeltaMemory,
    LayerState,
    Memory,
    StateCell,
    attend,
    by_query_head,
    capped,
    l2_normalize,
    linear,
    mlp,
    model_norm,
    parameters,
    part,
    read,
    register_mlp,
    register_norm,
    rotate,
)


class State(NamedTuple):
    """The LayerState of each layer, and the number of tokens [B] that were read of each text. The
    number is negative for a text before which there is padding that was not read yet."""

    layers: tuple
    position: torch.Tensor


class Output(NamedTuple):
    """Float32 logits [B, T, V] of the next tokens, and the State after the last token."""

    logits: torch.Tensor
    state: State


class Layer(nn.Module):
    """A layer of any kind. Tokens attend to a window, or read a `DeltaMemory`, or both, before an
    MLP; `config.kinds[index]` is the kind of the layer."""

    def __init__(self, config, index):
        super().__init__()
        self.config, self.kind = config, config.kinds[index]
        self.window, self.sinks = config.windows[index], config.sinks[index]
        self.speeds = config.rotary_speeds[config.rotary[index]] if config.rotary else []
        self.rotary_factor = config.rotary_factors[index]
        self.attends = self.kind != "gated_delta_net"
        if config.norm_place != "after":
            register_norm(self, config, "norm")
        if self.attends:
            self._add_attention()
        register_mlp(self, config)
        self.cell = StateCell(config) if self.kind == "recurrent" else None
        self.memory = DeltaMemory(config) if self.kind.endswith("gated_delta_net") else None
        self.memory_size = 0
        if self.kind == "gated_dense_memory":
            self.memory_size = config.memory_size
            parameters(self, memory_gate=(config.num_attention_heads,))

    def _add_attention(self):
        config, size, width = self.config, self.config.head_dim, self.config.hidden_size
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        attends_twice = self.kind == "recurrent" or config.feedback
        biased, read = config.attention_bias != "none", (2 if attends_twice else 1) * heads * size
        groups = groups * size
        linear(
            self, biased, q_proj=(width, heads * size), k_proj=(width, groups),
            v_proj=(width, groups),
        )  # fmt: skip
        linear(self, config.attention_bias == "all", o_proj=(read, width))
        parameters(self, scale=(heads,))
        if config.learned_sink:
            parameters(self, sink_logits=(heads,))
        if (of := config.query_key_norms) != "none":
            for name, count in (("queries", heads), ("keys", config.num_key_value_heads)):
                shape = (count, size) if of == "heads" else (size,)
                register_norm(self, config, f"{name}_norm", *shape)
        if config.norm_place != "before":
            register_norm(self, config, "output_norm")
        if attends_twice:
            linear(self, cross_q_proj=(width, heads * size))
            parameters(self, cross_scale=(heads,))
        if config.position_bias:  # The position bias of the nearest key is bias[:, 0].
            parameters(self, bias=(heads, self.window))

    def new_state(self, batch):
        """Returns the LayerState before the first token of `batch` texts. The window has no keys
        or, if `config.null_keys` is true, keys of zeros."""
        delta = self.memory.new_state(batch) if self.memory else None
        if not self.attends:
            return LayerState(None, None, delta=delta)
        weight = self.k_proj.weight
        shape = self.config.num_key_value_heads, self.config.head_dim
        empty = weight.new_zeros(batch, self.window if self.config.null_keys else 0, *shape)
        state = LayerState(empty, empty, delta=delta)
        if self.sinks:
            none = weight.new_zeros(batch, self.sinks, *shape)
            state = state._replace(sinks=Memory(none, none))
        if self.cell is None:
            return state
        vectors = self.cell.initial.float().expand(batch, -1, -1)
        return state._replace(vectors=vectors, memory=self.cell.memory(vectors))

    def forward(self, x, state, feedback, places):
        """Returns outputs for the tokens x [B, T, D], and the LayerState after them.

        `state` is the LayerState before the tokens, and `feedback` a Memory of another layer to
        attend to, or None. `places` [B, T] has the number of tokens before each token in its text;
        it is negative for padding."""
        config = self.config
        h = x
        if config.norm_place != "after":
            h = model_norm(self, config, "norm", x)
        if self.memory is not None:
            remembered, delta = self.memory(h * (places >= 0)[..., None], state.delta)
            x, state = x + remembered, state._replace(delta=delta)
        inputs = x
        if self.attends:
            x, state = self._attend(x, h, state, feedback, places)
        return x + mlp(self, config, inputs if config.parallel else x), state

    def _project(self, h, name):
        y = getattr(self, f"{name}_proj")(h).unflatten(-1, (-1, self.config.head_dim))
        if name == "v":
            return y
        if self.config.query_key_norms != "none":
            y = model_norm(self, self.config, "keys_norm" if name == "k" else "queries_norm", y)
        if self.config.normalize_qk:
            y = l2_normalize(y)
        if name == "k":
            return y
        scale = self.cross_scale if name == "cross_q" else self.scale
        return y * scale[:, None].to(y)

    def _attend(self, x, h, state, feedback, places):
        own = Memory(self._project(h, "k"), self._project(h, "v"))
        if self.config.null_keys:  # Keys and values before a text and of padding are 0.
            own = Memory(*(z * (places >= 0)[..., None, None] for z in own))
        keys = torch.cat([state.keys, own.keys], dim=1)
        values = torch.cat([state.values, own.values], dim=1)
        state = state._replace(keys=keys, values=values)
        if self.sinks:
            at = ((places >= 0) & (places < self.sinks)).nonzero(as_tuple=True)
            sinks = zip(state.sinks, own, strict=True)
            sinks = (z.index_put((at[0], places[at]), new[at]) for z, new in sinks)
            state = state._replace(sinks=Memory(*sinks))
        attended = [self._attend_to_tokens(self._project(h, "q"), state, places)]
        memory = feedback if self.cell is None else state.memory
        if memory is not None:
            attended.append(attend(self._project(h, "cross_q"), *memory))
        y = self.o_proj(torch.stack(attended, dim=2).flatten(2))
        if self.config.norm_place != "before":
            y = model_norm(self, self.config, "output_norm", y)
        return x + y * self.config.residual_factor, state

    def _attend_to_tokens(self, queries, state, places):
        """Returns attention [B, T, H, K] to the window, the sinks and the memory of past tokens."""
        config, near, length = self.config, 0 if self.config.attend_to_self else 1, places.shape[1]
        count, farthest = state.keys.shape[1], self.window - 1 + near
        # The distance of a column of keys from the queries is the same in all texts, but the places
        # of the keys differ between texts.
        columns = torch.arange(count, device=queries.device)
        distances = columns[-length:, None] - columns
        of_keys = (places[:, -1:] - count + 1 + columns)[:, None]
        block_starts = (places - places % config.block)[..., None]
        known = of_keys >= (block_starts if not config.cache else -self.window)
        if not config.null_keys:
            known = known & (of_keys >= 0)
        seen, bias, far_bias = known & (distances >= near) & (distances <= farthest), 0.0, 0.0
        if config.position_bias:
            table = self.bias.float()
            bias = table[:, (distances - near).clamp(0, self.window - 1)]
            far_bias = table[:, -1:, None]
        turned, keys = self._rotated(queries, columns[-length:]), self._rotated(state.keys, columns)
        parts = [part(turned, keys, state.values, seen, bias, config.soft_cap)]
        if self.sinks:
            first_places = torch.arange(self.sinks, device=queries.device)
            left = places[..., None] - first_places > farthest
            turned = self._rotated(queries, places.clamp(max=farthest + self.sinks))
            keys = self._rotated(state.sinks.keys, first_places)
            cap = config.soft_cap
            parts.append(part(turned, keys, state.sinks.values, left, far_bias, cap))
        sink = self.sink_logits if config.learned_sink else None
        attended = read(parts, sink)
        if not self.memory_size:
            return attended
        seen = (distances > farthest) & (of_keys < block_starts) & (of_keys >= self.sinks)
        seen = seen & (of_keys >= block_starts - self.memory_size)
        turned = self._rotated(queries, torch.full_like(columns[-length:], farthest + 1))
        both = read([*parts, part(turned, state.keys, state.values, seen, far_bias)], sink)
        gate = torch.tanh(self.memory_gate.float())[:, None]
        return (attended.float() + gate * (both.float() - attended.float())).to(attended)

    def _rotated(self, x, places):
        return rotate(x, places, self.speeds, self.rotary_factor) if self.speeds else x

    def end(self, state, position):
        """Returns the LayerState after `position` [B] tokens of each text: keys and values that no
        later token sees are dropped from `state`, and the state vectors of a recurrent layer are
        updated in texts whose block has ended."""
        if not self.attends:
            return state
        config, in_block = self.config, position % self.config.block
        size = max(self.window, self.memory_size) if config.cache else 0
        first = max(state.keys.shape[1] - size - int(in_block.max()), 0)
        after = state._replace(keys=state.keys[:, first:], values=state.values[:, first:])
        ended = (in_block == 0) & (position > 0)
        if self.cell is None or not ended.any():
            return after
        count = state.keys.shape[1]
        ages = torch.arange(count, 0, -1, device=position.device)
        seen = (ages <= config.block + size) & (
            (ages <= position[:, None]) if not config.null_keys else (ages > 0)
        )
        tokens = (by_query_head(z, config.num_attention_heads) for z in (state.keys, state.values))
        vectors = self.cell(state.vectors, *tokens, seen.expand(len(position), -1))
        vectors = torch.where(ended[:, None, None], vectors, state.vectors)
        return after._replace(vectors=vectors, memory=self.cell.memory(vectors))


class Decoder(nn.Module):
    """The complete model; the docstring of modeling_brt.py shows its use."""

    def __init__(self, config):
        super().__init__()
        self.config, width = config, config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        if config.learned_positions:
            parameters(self, positions=(config.learned_positions, width))
        register_norm(self, config, "norm")
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids, state=None, last=0):
        """Returns the Output for ids [B, T]. `state` is the State that an earlier call returned,
        and the ids continue the texts of that call. If `state` is None, the ids begin new texts. If
        `last` is n, logits are computed only for the last n ids; 0 stands for all ids."""
        vectors, state = self.read(input_ids, state)
        return Output(self.logits(vectors[-1][:, -last:]), state)

    def logits(self, vectors):
        """Returns the logits [B, T, V] for the last entry of the list that `read` returns."""
        logits = self.lm_head(vectors).float() * self.config.logit_scale
        return capped(logits, self.config.logit_soft_cap)

    def read(self, input_ids, state=None, padding=None, all_layers=False):
        """Returns a list of vectors [B, T, D] for ids [B, T], and the State after them. The last
        entry of the list has the vectors after the last norm. With `all_layers`, the embeddings and
        the outputs of all layers but the last come before this entry; without it, the list has only
        this entry. If the texts begin here, `padding` [B] is the number of ids of padding before
        each text."""
        if input_ids.shape[1] == 0:
            raise ValueError("input_ids holds no token; a text begins with config.bos_token_id")
        if state is None:
            none = torch.zeros(len(input_ids), dtype=torch.long, device=input_ids.device)
            layers = tuple(layer.new_state(len(input_ids)) for layer in self.layers)
            state = State(layers, none if padding is None else none - padding)
        pieces = []
        while input_ids.shape[1]:
            # Reading in pieces saves memory. State vectors are updated at the end of a block, so in
            # a model with state vectors, no piece crosses the end of a text's block.
            left = self.config.block - state.position % self.config.block
            count = int(left.min() if "recurrent" in self.config.kinds else left.max())
            piece, input_ids = input_ids[:, :count], input_ids[:, count:]
            vectors, state = self._read(piece, state)
            pieces.append(vectors if all_layers else vectors[-1:])
        return [torch.cat(parts, dim=1) for parts in zip(*pieces, strict=True)], state

    def _read(self, input_ids, state):
        x, config, feedback, layers = self.embed_tokens(input_ids), self.config, None, []
        x = x * torch.tensor(config.embedding_factor, dtype=x.dtype)
        if config.feedback:  # Every layer attends to the memory of the last recurrent layer.
            last = max(i for i, kind in enumerate(config.kinds) if kind == "recurrent")
            feedback = state.layers[last].memory
        places = state.position[:, None] + torch.arange(x.shape[1], device=x.device)
        if config.learned_positions:  # Positions count from the start of the block.
            x = x + self.positions[places % config.block].to(x)
        vectors, position = [x], state.position + x.shape[1]
        for layer, layer_state in zip(self.layers, state.layers, strict=True):
            x, layer_state = layer(x, layer_state, feedback, places)
            layers.append(layer.end(layer_state, position))
            vectors.append(x)
        vectors[-1] = model_norm(self, config, "norm", x)
        return vectors, State(tuple(layers), position)

    @torch.no_grad()
    def stream(self, input_ids, state=None, do_sample=False, generator=None, **sampling):
        """Generates without end: yields pairs of the next tokens [B] and the State before them.

        forward(tokens[:, None], state) reads these tokens. `generate` explains the options."""
        logits, state = self(input_ids, state, last=1)
        while True:
            if do_sample:
                chances = torch.softmax(restrict(logits[:, -1], **sampling), dim=-1)
                token = torch.multinomial(chances, 1, generator=generator)[:, 0]
            else:
                token = logits[:, -1].argmax(dim=-1)
            yield token, state
            logits, state = self(token[:, None], state)

    def generate(self, input_ids, max_new_tokens=500, eos_token_id=None, **options):
        """Returns ids [B, T + new tokens]. The options are do_sample (default: greedy search);
        temperature, top_k and top_p as in transformers; generator, a torch.Generator; and state,
        the State before input_ids. Generation stops when each text has an id of eos_token_id
        (default: the ids in config.json). The rest of a text that ended earlier is filled with the
        first of these ids."""
        ends = self.config.eos_token_id if eos_token_id is None else eos_token_id
        ends = torch.tensor([ends] if isinstance(ends, int) else ends or [], dtype=input_ids.dtype)
        ends, stream = ends.to(input_ids.device), self.stream(input_ids, **options)
        tokens, ended = [input_ids], torch.zeros_like(input_ids[:, 0], dtype=torch.bool)
        for _ in range(max_new_tokens):
            token = next(stream)[0]
            token = torch.where(ended, ends[0], token) if len(ends) else token
            tokens.append(token[:, None])
            ended |= torch.isin(token, ends)
            if ended.all():
                break
        return torch.cat(tokens, dim=1)


def restrict(logits, temperature=1.0, top_k=0, top_p=1.0):
    """Returns logits [B, V] / temperature, with -inf for tokens that top_k or top_p exclude."""
    logits = logits / temperature
    if top_k:
        best = logits.topk(min(top_k, logits.shape[-1])).values
        logits = logits.masked_fill(logits < best[:, -1:], -math.inf)
    if top_p < 1.0:
        ordered = logits.sort(descending=True).values
        mass = torch.softmax(ordered, -1).cumsum(-1)
        last = (mass < top_p).sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
        logits = logits.masked_fill(logits < ordered.gather(-1, last), -math.inf)
    return logits


def select(state, texts):
    """Returns `state`, a State or a part of one, for only the texts of the indices `texts` [B]."""
    if state is None or isinstance(state, torch.Tensor):
        return None if state is None else state.index_select(0, texts.to(state.device))
    parts = [select(part, texts) for part in state]
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)
