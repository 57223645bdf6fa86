"""A decoder of sliding-window, recurrent and memory layers in PyTorch.

The model is one that brt trained, or a pretrained decoder with a bounded window. A token attends to
a window of the last tokens and, as far as the model has them, to the first tokens of the text
(sinks), to recurrent state vectors (Block-Recurrent Transformers, Hutchins et al. 2022), which are
updated after each block of tokens, and to other memories. The carried state has a constant size:

    model = load("DIRECTORY")  # needs torch and safetensors; with transformers instead:
    model = AutoModelForCausalLM.from_pretrained("DIRECTORY", trust_remote_code=True)
    logits, state = model(ids)  # ids [B, T], any T; begin a text with config.bos_token_id
    logits, state = model(more, state)  # continues the text
    ids = model.generate(ids, max_new_tokens=200, do_sample=True, temperature=0.8)

The file needs layers_brt.py in its directory. Letters in shapes: B texts, T tokens, V vocabulary.
"""

import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import torch
from torch import nn

try:
    from transformers import PretrainedConfig, PreTrainedModel
except ImportError:  # Without transformers, models are loaded by the function `load`.
    PretrainedConfig = PreTrainedModel = None

# A file that was imported by its path belongs to no package. Its directory is then made a package,
# so that the relative import below works.
if not __package__:
    __package__ = "brt_" + str(Path(__file__).parent.resolve()).encode().hex()
    sys.modules[__package__] = ModuleType(__package__)
    sys.modules[__package__].__path__ = [str(Path(__file__).parent)]

from .layers_brt import (  # noqa: E402 (the package has to exist)
    DeltaMemory,
    LayerState,
    Memory,
    StateCell,
    attend,
    by_query_head,
    l2_normalize,
    mlp,
    model_norm,
    parameters,
    part,
    read,
    register_mlp,
    rotate,
)


class State(NamedTuple):
    """The LayerState of each layer, and the number of tokens that were read."""

    layers: tuple
    position: int


class Output(NamedTuple):
    """Float32 logits [B, T, V] of the next tokens, and the State after the last token."""

    logits: torch.Tensor
    state: State


class Layer(nn.Module):
    """A layer of any kind. Tokens attend to a window, or read a `DeltaMemory`, or both, before an
    MLP; `config.kinds[index]` is the kind of the layer."""

    def __init__(self, config, index):
        super().__init__()
        self.config, self.kind, width = config, config.kinds[index], config.hidden_size
        self.window, self.sinks = config.windows[index], config.sinks[index]
        self.speeds = config.rotary_speeds[config.rotary[index]] if config.rotary else None
        self.attends = self.kind != "gated_delta_net"
        parameters(self, norm=(width,))
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
        parameters(
            self, queries=(width, heads, size), keys=(width, groups, size),
            values=(width, groups, size), scale=(heads,),
            output=(2 if attends_twice else 1, heads, size, width),
        )  # fmt: skip
        if config.attention_bias in ("qkv", "all"):
            key_bias = (groups, size)
            parameters(self, queries_bias=(heads, size), keys_bias=key_bias, values_bias=key_bias)
        if config.attention_bias == "all":
            parameters(self, output_bias=(width,))
        if config.query_key_norms:
            parameters(self, queries_norm=(size,), keys_norm=(size,))
        if config.output_norms:
            parameters(self, output_norm=(width,))
        if attends_twice:
            parameters(self, cross_queries=(width, heads, size), cross_scale=(heads,))
        if config.position_bias:  # The position bias of the nearest key is bias[:, 0].
            parameters(self, bias=(heads, self.window))

    def new_state(self, batch):
        """Returns the LayerState before the first token of `batch` texts. The window has no keys
        or, if `config.null_keys` is true, keys of zeros."""
        delta = self.memory.new_state(batch) if self.memory else None
        if not self.attends:
            return LayerState(None, None, delta=delta)
        shape = self.keys.shape[1:]
        empty = self.keys.new_zeros(batch, self.window if self.config.null_keys else 0, *shape)
        state = LayerState(empty, empty, delta=delta)
        if self.sinks:
            none = self.keys.new_zeros(batch, 0, *shape)
            state = state._replace(sinks=Memory(none, none))
        if self.cell is None:
            return state
        vectors = self.cell.initial.float().expand(batch, -1, -1)
        return state._replace(vectors=vectors, memory=self.cell.memory(vectors))

    def forward(self, x, state, feedback, position):
        """Returns outputs for the tokens x [B, T, D] of a block, and the LayerState after them.

        `state` is the LayerState before the tokens, `feedback` a Memory of another layer to attend
        to, or None, and `position` the number of tokens of the text before x."""
        config = self.config
        h = model_norm(config, x, self.norm)
        if self.memory is not None:
            remembered, delta = self.memory(h, state.delta)
            x, state = x + remembered, state._replace(delta=delta)
        if self.attends:
            x, state = self._attend(x, h, state, feedback, position)
        return x + mlp(self, config, x), state

    def _project(self, h, name):
        y = torch.einsum("btd,dhk->bthk", h, getattr(self, name))
        if self.config.attention_bias != "none" and name != "cross_queries":
            y = y + getattr(self, f"{name}_bias")
        if name == "values":
            return y
        if self.config.query_key_norms:
            y = model_norm(self.config, y, self.keys_norm if name == "keys" else self.queries_norm)
        if self.config.normalize_qk:
            y = l2_normalize(y)
        if name == "keys":
            return y
        scale = self.cross_scale if name == "cross_queries" else self.scale
        return y * scale[:, None].to(y)

    def _attend(self, x, h, state, feedback, position):
        own = Memory(self._project(h, "keys"), self._project(h, "values"))
        keys = torch.cat([state.keys, own.keys], dim=1)
        values = torch.cat([state.values, own.values], dim=1)
        state = state._replace(keys=keys, values=values)
        if self.sinks and position < self.sinks:
            sinks = zip(state.sinks, own, strict=True)
            sinks = (torch.cat(pair, dim=1)[:, : self.sinks] for pair in sinks)
            state = state._replace(sinks=Memory(*sinks))
        attended = [self._attend_to_tokens(self._project(h, "queries"), state, position)]
        memory = feedback if self.cell is None else state.memory
        if memory is not None:
            attended.append(attend(self._project(h, "cross_queries"), *memory))
        y = torch.tensordot(torch.stack(attended, dim=2), self.output, 3)
        if self.config.attention_bias == "all":
            y = y + self.output_bias
        if self.config.output_norms:
            y = model_norm(self.config, y, self.output_norm)
        return x + y, state

    def _attend_to_tokens(self, queries, state, position):
        """Returns attention [B, T, H, K] to the window, the sinks and the memory of past tokens."""
        nearest, count = (0 if self.config.attend_to_self else 1), state.keys.shape[1]
        farthest = self.window - 1 + nearest
        places = torch.arange(position, position + queries.shape[1], device=queries.device)
        first = position + queries.shape[1] - count
        of_keys = torch.arange(first, first + count, device=queries.device)
        distances = places[:, None] - of_keys
        seen, bias, far_bias = (distances >= nearest) & (distances <= farthest), 0.0, 0.0
        if self.config.position_bias:
            table = self.bias.float()
            bias, far_bias = (
                table[:, (distances - nearest).clamp(0, self.window - 1)],
                table[:, -1:],
            )
            far_bias = far_bias[..., None]
        turned = self._rotated(queries, places - first)
        parts = [part(turned, self._rotated(state.keys, of_keys - first), state.values, seen, bias)]
        if self.sinks:
            first_places = torch.arange(state.sinks.keys.shape[1], device=queries.device)
            left = places[:, None] - first_places > farthest
            turned = self._rotated(queries, places.clamp(max=farthest + self.sinks))
            keys = self._rotated(state.sinks.keys, first_places)
            parts.append(part(turned, keys, state.sinks.values, left, far_bias))
        near = read(parts)
        if not self.memory_size:
            return near
        block_start = position - position % self.config.block
        seen = (distances > farthest) & (of_keys < block_start) & (of_keys >= self.sinks)
        seen = seen & (of_keys >= block_start - self.memory_size)
        turned = self._rotated(queries, torch.full_like(places, farthest + 1))
        both = read([*parts, part(turned, state.keys, state.values, seen, far_bias)])
        gate = torch.tanh(self.memory_gate.float())[:, None]
        return (near.float() + gate * (both.float() - near.float())).to(near)

    def _rotated(self, x, places):
        return x if self.speeds is None else rotate(x, places, self.speeds)

    def end_block(self, state):
        """Returns the LayerState after a full block: keys and values outside the window and the
        memory are dropped, and the state vectors of a recurrent layer are updated."""
        if not self.attends:
            return state
        size = max(self.window, self.memory_size) if self.config.cache else 0
        first = max(state.keys.shape[1] - size, 0)
        after = state._replace(keys=state.keys[:, first:], values=state.values[:, first:])
        if self.cell is None:
            return after
        heads = self.config.num_attention_heads
        tokens = (by_query_head(z, heads) for z in (state.keys, state.values))
        vectors = self.cell(state.vectors, *tokens)
        return after._replace(vectors=vectors, memory=self.cell.memory(vectors))


class Decoder(nn.Module):
    """The complete model; the docstring of this file shows its use."""

    def __init__(self, config):
        super().__init__()
        self.config, shape = config, (config.vocab_size, config.hidden_size)
        parameters(self, embedding=shape, norm=shape[1:])
        if not config.tied_output:
            parameters(self, output=shape)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))

    def forward(self, input_ids, state=None):
        """Returns the Output for ids [B, T]. The ids continue the texts after which the State was
        `state`; without a state, they begin texts."""
        if input_ids.shape[1] == 0:
            raise ValueError("input_ids holds no token; a text begins with config.bos_token_id")
        if state is None:
            state = State(tuple(layer.new_state(len(input_ids)) for layer in self.layers), 0)
        logits, config = [], self.config
        weights = self.embedding if config.tied_output else self.output
        while input_ids.shape[1]:
            count = config.block - state.position % config.block
            piece, input_ids = input_ids[:, :count], input_ids[:, count:]
            x = self.embedding[piece]
            if config.embedding_scaled:
                x = x * torch.tensor(config.hidden_size**0.5, dtype=x.dtype)
            x, state = self._read(x, state)
            logits.append((model_norm(config, x, self.norm) @ weights.T).float())
        return Output(torch.cat(logits, dim=1) * config.logit_scale, state)

    def _read(self, x, state):
        """Reads tokens, at most to the end of the present block; returns vectors and the State."""
        feedback, layers = None, []
        if self.config.feedback:  # Every layer attends to the memory of the last recurrent layer.
            last = max(i for i, kind in enumerate(self.config.kinds) if kind == "recurrent")
            feedback = state.layers[last].memory
        for layer, layer_state in zip(self.layers, state.layers, strict=True):
            x, layer_state = layer(x, layer_state, feedback, state.position)
            layers.append(layer_state)
        position = state.position + x.shape[1]
        if position % self.config.block == 0:
            layers = [layer.end_block(s) for layer, s in zip(self.layers, layers, strict=True)]
        return x, State(tuple(layers), position)

    @torch.no_grad()
    def stream(self, input_ids, state=None, do_sample=False, generator=None, **sampling):
        """Generates without end: yields pairs of the next tokens [B] and the State before them.

        forward(tokens[:, None], state) reads these tokens. `generate` explains the options."""
        # Reading in pieces keeps the array of logits small; only the last logits are needed.
        for piece in input_ids.split(self.config.block, dim=1):
            logits, state = self(piece, state)
        while True:
            if do_sample:
                chances = torch.softmax(restrict(logits[:, -1], **sampling), dim=-1)
                token = torch.multinomial(chances, 1, generator=generator)[:, 0]
            else:
                token = logits[:, -1].argmax(dim=-1)
            yield token, state
            logits, state = self(token[:, None], state)

    def generate(self, input_ids, max_new_tokens=500, eos_token_id=None, **options):
        """Returns ids [B, T + new tokens]. Options: do_sample (default: greedy), temperature, top_k
        and top_p as in transformers, generator (a torch.Generator), state (before input_ids). The
        texts end when each has an id of eos_token_id (default: those of config.json); the rest of a
        text that ended earlier is filled with the first of these ids."""
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


def load(directory, dtype=torch.float32):
    """Returns the model in `directory` with weights of `dtype`; transformers is not needed."""
    from safetensors.torch import load_file

    directory = Path(directory)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    model, tensors = Decoder(SimpleNamespace(**config)), {}
    for file in sorted(directory.glob("model*.safetensors")):
        tensors |= {k.removeprefix("decoder."): v for k, v in load_file(file).items()}
    model.load_state_dict(tensors)
    return model.to(dtype).eval()


OPTIONS = (
    "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "generator", "state",
    "eos_token_id",
)  # fmt: skip
IGNORED = "max_length", "pad_token_id", "bos_token_id", "use_cache", "tokenizer"


def refuse_padding(attention_mask):
    """Raises ValueError if `attention_mask` is 0 for a token: padding would be read as text."""
    if attention_mask is not None and not attention_mask.all():
        raise ValueError("padding would be read as text; texts of a batch must be equally long")


if PreTrainedModel is not None:

    class BrtConfig(PretrainedConfig):
        """The settings in config.json, in the form that transformers' `from_pretrained` needs."""

        model_type = "brt"

    class BrtForCausalLM(PreTrainedModel):
        """The model for transformers' `from_pretrained` and pipelines; generates in constant
        memory."""

        config_class, base_model_prefix, _no_split_modules = BrtConfig, "decoder", ["Layer"]
        can_generate = classmethod(lambda cls: True)

        def __init__(self, config):
            super().__init__(config)
            self.decoder = Decoder(config)
            self.post_init()

        def forward(self, input_ids, state=None, attention_mask=None):
            """Returns the Output of `Decoder.forward`; refuses an attention_mask that has a 0."""
            refuse_padding(attention_mask)
            return self.decoder(input_ids, state)

        def stream(self, input_ids, attention_mask=None, **options):
            """Yields what `Decoder.stream` yields; refuses an attention_mask that has a 0."""
            refuse_padding(attention_mask)
            return self.decoder.stream(input_ids, **options)

        def generate(self, input_ids=None, attention_mask=None, generation_config=None, **options):
            """Returns ids [B, T + new tokens] as `Decoder.generate` does. `OPTIONS` lists the
            options of transformers that have an effect. Without input_ids, BOS begins the text."""
            refuse_padding(attention_mask)
            if input_ids is None:
                input_ids = torch.full((1, 1), self.config.bos_token_id, device=self.device)
            config = generation_config or self.generation_config
            options = {k: getattr(config, k, None) for k in (*OPTIONS, "max_length")} | options
            for name, value in options.items():
                if name not in (*OPTIONS, *IGNORED) and value not in (None, False, 1):
                    raise ValueError(f"{name} = {value!r} is not supported; remove it")
            if options["max_new_tokens"] is None and options["max_length"]:
                options["max_new_tokens"] = max(options["max_length"] - input_ids.shape[1], 0)
            options = {k: options[k] for k in OPTIONS if options[k] is not None}
            return self.decoder.generate(input_ids, **options)
