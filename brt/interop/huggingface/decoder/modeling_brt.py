"""A decoder of sliding-window and block-recurrent layers in PyTorch; this file needs no other.

Block-Recurrent Transformers (Hutchins et al. 2022): a token attends to its own block and the one
before it. Recurrent layers also carry state vectors, which attend to every block at its end and to
which all tokens of the next block attend. The carried state has a constant size:

    model = load("DIRECTORY")  # needs torch and safetensors; with transformers instead:
    model = AutoModelForCausalLM.from_pretrained("DIRECTORY", trust_remote_code=True)
    logits, state = model(ids)  # ids [B, T], any T; begin a text with config.bos_token_id
    logits, state = model(more, state)  # continues the text
    ids = model.generate(ids, max_new_tokens=200, do_sample=True, temperature=0.8)

Letters in shapes: B texts, T tokens, W window, S states, H heads, K head size, D model width.
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import nn

try:
    from transformers import PretrainedConfig, PreTrainedModel
except ImportError:  # Without transformers, models are loaded by the function `load`.
    PretrainedConfig = PreTrainedModel = None


class Memory(NamedTuple):
    """Keys and values [B, S, H, K] of the recurrent states, to which tokens attend."""

    keys: torch.Tensor
    values: torch.Tensor


class LayerState(NamedTuple):
    """Keys and values of the last tokens; also state vectors [B, S, D] and memory if recurrent."""

    keys: torch.Tensor
    values: torch.Tensor
    vectors: torch.Tensor | None = None
    memory: Memory | None = None


class State(NamedTuple):
    """State of a model: the state of each layer, and the number of tokens in the open block."""

    layers: tuple
    position: int


class Output(NamedTuple):
    """Float32 logits [B, T, V] of the next tokens, and the state after the last token."""

    logits: torch.Tensor
    state: State


def rms_norm(x, scale):
    """Returns x normalised by its root mean square over the last axis, times `scale`."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * scale.float()).to(x)


def l2_normalize(x):
    """Returns x normalised to length 1 over the last axis."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x)


def rotate(x, first):
    """Returns x [B, T, H, K] with rotary embeddings for the positions first, first + 1, ..."""
    half = x.shape[-1] // 2
    speeds = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    places = torch.arange(first, first + x.shape[1], dtype=torch.float64)
    angles = math.pi * torch.outer(places, speeds)[:, None]
    cosines, sines = (f(angles).float().to(x.device) for f in (torch.cos, torch.sin))
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cosines - b * sines, a * sines + b * cosines], dim=-1).to(x)


def attend(queries, keys, values, bias=None, seen=None):
    """Returns the output [B, Q, H, K] for keys [B, X, H, K]; 0 if the mask `seen` hides all."""
    logits = torch.einsum("bqhk,bxhk->bhqx", queries, keys).float()
    if bias is not None:
        logits = logits + bias.float()
    if seen is not None:
        logits = logits.masked_fill(~seen, -1e6)
    weights = torch.softmax(logits, dim=-1)
    if seen is not None:
        weights = weights * seen
    return torch.einsum("bhqx,bxhk->bqhk", weights.to(values), values)


def parameters(module, **shapes):
    """Registers zero parameters of these names and shapes in a module; `load` fills them."""
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.zeros(shape)))


class Gate(nn.Module):
    """A gate that combines old state vectors with their update. Some gates depend on features."""

    def __init__(self, config, features):
        super().__init__()
        self.kind, width = config.gate, config.hidden_size
        parameters(self, bias=(width,))
        if self.kind != "fixed":
            parameters(self, kernel=(*features, width))
        if self.kind == "lstm":
            parameters(self, input_bias=(width,), input_kernel=(*features, width))

    def forward(self, vectors, update, features):
        """Returns new vectors [B, S, D]; a gate that is not constant reads features [B, S, ...]."""

        def _opened(kernel, bias, shift):
            logits = torch.tensordot(features, kernel.float(), kernel.dim() - 1)
            return torch.sigmoid(logits + bias.float() + shift)

        if self.kind == "fixed":
            keep = torch.sigmoid(self.bias.float())
        else:
            keep = _opened(self.kernel, self.bias, 1.0)
        if self.kind == "lstm":
            return keep * vectors + _opened(self.input_kernel, self.input_bias, -1.0) * update
        return keep * vectors + (1 - keep) * update


class StateCell(nn.Module):
    """Updates the state vectors of a recurrent layer after each block, in float32."""

    def __init__(self, config):
        super().__init__()
        self.config, width, heads = config, config.hidden_size, config.num_attention_heads
        kernel, attended = (width, heads, config.head_dim), (2, heads, config.head_dim)
        parameters(
            self, initial=(config.states, width), norm=(width,), ids=(config.states, width),
            keys=kernel, values=kernel, queries=kernel, cross_queries=kernel, scale=(heads,),
            cross_scale=(heads,),
        )  # fmt: skip
        self.projects = config.gate_layout != "single"
        self.has_mlp = config.gate_layout != "skip"
        if self.projects:
            parameters(self, output=(*attended, width))
            self.output_gate = Gate(config, attended)
        if self.projects and self.has_mlp:
            parameters(self, mlp_norm=(width,))
        if self.has_mlp:
            inputs = (width,) if self.projects else attended
            hidden = config.intermediate_size
            parameters(self, mlp_in=(*inputs, hidden), mlp_out=(hidden, width))
            self.mlp_gate = Gate(config, (hidden,))

    def _project(self, vectors, *names):
        h = rms_norm(vectors, self.norm) + self.ids.float()
        for name in names:
            y = torch.einsum("bsd,dhk->bshk", h, getattr(self, name).float())
            yield l2_normalize(y) if self.config.normalize_qk and name != "values" else y

    def memory(self, vectors):
        """Returns keys and values of the state vectors, for the tokens of the next block."""
        return Memory(*(x.to(self.keys) for x in self._project(vectors, "keys", "values")))

    def forward(self, vectors, keys, values):
        """Returns the state vectors after a block whose keys and values are [B, X, H, K]."""
        state_keys, state_values, queries, cross_queries = self._project(
            vectors, "keys", "values", "queries", "cross_queries"
        )
        queries, cross_queries = (
            x * scale.float()[:, None]
            for x, scale in ((queries, self.scale), (cross_queries, self.cross_scale))
        )
        to_tokens = attend(cross_queries, keys.float(), values.float())
        attended = torch.stack([attend(queries, state_keys, state_values), to_tokens], dim=2)
        bound = torch.tanh if self.config.bounded_updates else lambda update: update
        features = attended
        if self.projects:
            update = bound(torch.tensordot(attended, self.output.float(), 3))
            vectors = self.output_gate(vectors, update, attended)
            if not self.has_mlp:
                return vectors
            features = rms_norm(vectors, self.mlp_norm)
        kernel = self.mlp_in.float()
        hidden = torch.relu(torch.tensordot(features, kernel, kernel.dim() - 1))
        return self.mlp_gate(vectors, bound(hidden @ self.mlp_out.float()), hidden)


class Layer(nn.Module):
    """A sliding-window layer, or a recurrent layer with state vectors; see `forward`."""

    def __init__(self, config, recurs):
        super().__init__()
        self.config, width, heads = config, config.hidden_size, config.num_attention_heads
        kernel, attends_twice = (width, heads, config.head_dim), recurs or config.feedback
        parameters(
            self, norm=(width,), queries=kernel, keys=kernel, values=kernel, scale=(heads,),
            output=(2 if attends_twice else 1, heads, config.head_dim, width),
            mlp_norm=(width,), mlp_in=(width, config.intermediate_size),
            mlp_out=(config.intermediate_size, width),
        )  # fmt: skip
        if attends_twice:
            parameters(self, cross_queries=kernel, cross_scale=(heads,))
        if config.position_bias:  # bias[:, 0] is added for the nearest key.
            parameters(self, bias=(heads, config.window))
        self.cell = StateCell(config) if recurs else None

    def new_state(self, batch):
        """Returns the LayerState before the first token; its window is empty or has zero keys."""
        length = self.config.window if self.config.null_keys else 0
        empty = self.keys.new_zeros(batch, length, *self.keys.shape[1:])
        if self.cell is None:
            return LayerState(empty, empty)
        vectors = self.cell.initial.float().expand(batch, -1, -1)
        return LayerState(empty, empty, vectors, self.cell.memory(vectors))

    def _project(self, h, name, scale=None):
        y = torch.einsum("btd,dhk->bthk", h, getattr(self, name))
        if self.config.normalize_qk and name != "values":
            y = l2_normalize(y)
        return y if scale is None else y * scale[:, None]

    def forward(self, x, state, feedback):
        """Returns outputs for x [B, T, D], and the LayerState; `feedback` is a Memory or None."""
        h = rms_norm(x, self.norm)
        queries = self._project(h, "queries", self.scale)
        keys = torch.cat([state.keys, self._project(h, "keys")], dim=1)
        values = torch.cat([state.values, self._project(h, "values")], dim=1)
        attended = [self._attend_to_window(queries, keys, values)]
        memory = feedback if self.cell is None else state.memory
        if memory is not None:
            queries = self._project(h, "cross_queries", self.cross_scale)
            attended.append(attend(queries, *memory))
        x = x + torch.tensordot(torch.stack(attended, dim=2), self.output, 3)
        hidden = torch.relu(rms_norm(x, self.mlp_norm) @ self.mlp_in)
        return x + hidden @ self.mlp_out, state._replace(keys=keys, values=values)

    def _attend_to_window(self, queries, keys, values):
        config, before = self.config, keys.shape[1] - queries.shape[1]
        places = torch.arange(keys.shape[1], device=keys.device)
        distances = places[before:, None] - places - (0 if config.attend_to_self else 1)
        seen = (distances >= 0) & (distances < config.window)
        if config.rotary:
            queries, keys = rotate(queries, before), rotate(keys, 0)
        bias = self.bias[:, distances.clamp(0, config.window - 1)] if config.position_bias else None
        return attend(queries, keys, values, bias, seen)

    def end_block(self, state):
        """Returns the LayerState after a full block, with updated state vectors if it has any."""
        first = state.keys.shape[1] - (self.config.window if self.config.cache else 0)
        after = state._replace(keys=state.keys[:, first:], values=state.values[:, first:])
        if self.cell is None:
            return after
        vectors = self.cell(state.vectors, state.keys, state.values)
        return after._replace(vectors=vectors, memory=self.cell.memory(vectors))


class Decoder(nn.Module):
    """The complete model; see the docstring of this file."""

    def __init__(self, config):
        super().__init__()
        self.config, width = config, config.hidden_size
        parameters(self, embedding=(config.vocab_size, width), norm=(width,))
        recurrent = set(config.recurrent_layers)
        self.layers = nn.ModuleList(
            Layer(config, i in recurrent) for i in range(config.num_hidden_layers)
        )

    def forward(self, input_ids, state=None):
        """Returns the Output for ids [B, T] that follow `state`, or begin a text if it is None."""
        if input_ids.shape[1] == 0:
            raise ValueError("input_ids holds no token; a text begins with config.bos_token_id")
        if state is None:
            state = State(tuple(layer.new_state(len(input_ids)) for layer in self.layers), 0)
        logits, window = [], self.config.window
        while input_ids.shape[1]:
            count = window - state.position
            piece, input_ids = input_ids[:, :count], input_ids[:, count:]
            x, state = self._read(self.embedding[piece], state)
            product = rms_norm(x, self.norm) @ self.embedding.T
            logits.append(product.float() * self.config.logit_scale)
        return Output(torch.cat(logits, dim=1), state)

    def _read(self, x, state):
        """Reads tokens up to the end of the open block."""
        feedback = None
        if self.config.feedback:  # Every layer attends to the memory of the last recurrent layer.
            feedback = state.layers[max(self.config.recurrent_layers)].memory
        layers = []
        for layer, layer_state in zip(self.layers, state.layers, strict=True):
            x, layer_state = layer(x, layer_state, feedback)
            layers.append(layer_state)
        position = state.position + x.shape[1]
        if position == self.config.window:
            layers = [layer.end_block(s) for layer, s in zip(self.layers, layers, strict=True)]
            position = 0
        return x, State(tuple(layers), position)

    @torch.no_grad()
    def stream(self, input_ids, state=None, do_sample=False, generator=None, **sampling):
        """Yields new tokens [B] without end, each with the state before it, so that
        forward(token[:, None], state) continues the text. See `generate` for the options."""
        for piece in input_ids.split(self.config.window, dim=1):  # This bounds the logits' size.
            logits, state = self(piece, state)
        while True:
            if do_sample:
                chances = torch.softmax(restrict(logits[:, -1], **sampling), dim=-1)
                token = torch.multinomial(chances, 1, generator=generator)[:, 0]
            else:
                token = logits[:, -1].argmax(dim=-1)
            yield token, state
            logits, state = self(token[:, None], state)

    def generate(self, input_ids, max_new_tokens=500, **options):
        """Returns ids [B, T + max_new_tokens]. Options: do_sample (default: greedy), temperature,
        top_k and top_p as in transformers, a torch.Generator, the state before input_ids."""
        tokens, stream = [input_ids], self.stream(input_ids, **options)
        for _ in range(max_new_tokens):
            tokens.append(next(stream)[0][:, None])
        return torch.cat(tokens, dim=1)


def restrict(logits, temperature=1.0, top_k=0, top_p=1.0):
    """Returns logits / temperature, with -inf for tokens that top_k or top_p exclude."""
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
    """Returns the model of a directory that contains this file; transformers is not needed."""
    from safetensors.torch import load_file

    directory = Path(directory)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    model, tensors = Decoder(SimpleNamespace(**config)), {}
    for file in sorted(directory.glob("model*.safetensors")):
        tensors |= {k.removeprefix("decoder."): v for k, v in load_file(file).items()}
    model.load_state_dict(tensors)
    return model.to(dtype).eval()


OPTIONS = "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "generator", "state"
IGNORED = "max_length", "pad_token_id", "eos_token_id", "bos_token_id", "use_cache", "tokenizer"


def refuse_padding(attention_mask):
    """Raises ValueError if the mask excludes a token, because padding would be read as text."""
    if attention_mask is not None and not attention_mask.all():
        raise ValueError("padding would be read as text; texts of a batch must be equally long")


if PreTrainedModel is not None:

    class BrtConfig(PretrainedConfig):
        model_type = "brt"

    class BrtForCausalLM(PreTrainedModel):
        """The model for `from_pretrained` and pipelines; generates in constant memory."""

        config_class, base_model_prefix, _no_split_modules = BrtConfig, "decoder", ["Layer"]
        can_generate = classmethod(lambda cls: True)

        def __init__(self, config):
            super().__init__(config)
            self.decoder = Decoder(config)
            self.post_init()

        def forward(self, input_ids, state=None, attention_mask=None):
            refuse_padding(attention_mask)
            return self.decoder(input_ids, state)

        def stream(self, input_ids, attention_mask=None, **options):
            refuse_padding(attention_mask)
            return self.decoder.stream(input_ids, **options)

        def generate(self, input_ids=None, attention_mask=None, generation_config=None, **options):
            """Returns ids [B, T + new tokens]; takes transformers' options; no ids begin a text."""
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
