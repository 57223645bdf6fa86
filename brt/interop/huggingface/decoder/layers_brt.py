"""Parts of the layers of decoder_brt.py: attention, the update of recurrent states, the memory of
Gated DeltaNet, and the MLP.

Letters in shapes: B texts, T tokens, X keys, S states or sinks, D model width, H heads of queries,
G heads of keys (each serves H / G heads of queries), K head size.
"""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

CONVOLVED = 4  # The convolution of `DeltaMemory` reads this many tokens.
ACTIVATIONS = {
    "relu": F.relu, "silu": F.silu, "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}  # fmt: skip


class Memory(NamedTuple):
    """Keys and values [B, S, G, K] to which tokens attend: those of recurrent states, or those of
    sinks (the first tokens of a text, which stay visible)."""

    keys: torch.Tensor
    values: torch.Tensor


class DeltaState(NamedTuple):
    """The state of a `DeltaMemory` of h heads: the matrix of each head, [B, h, K, V], which maps
    keys of size K to values of size V; and the convolution's last inputs [B, 3, h, 2 K + V]."""

    matrices: torch.Tensor
    inputs: torch.Tensor


class LayerState(NamedTuple):
    """The state of a layer: keys and values [B, X, G, K] of the last tokens; the recurrent state
    vectors [B, S, D], and their keys and values (`memory`); the sinks, which are zeros until the
    first tokens are read; and the state of a `DeltaMemory`. Fields that a layer does not need are
    None."""

    keys: torch.Tensor | None
    values: torch.Tensor | None
    vectors: torch.Tensor | None = None
    memory: Memory | None = None
    sinks: Memory | None = None
    delta: DeltaState | None = None


def rms_norm(x, scale, epsilon=1e-6, offset=0.0):
    """Returns x normalised by its root mean square over the last axis, times (offset + scale).
    `epsilon` is added to the mean square, so that x is never divided by 0."""
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * inverse * (offset + scale.float())).to(x)


def register_norm(module, config, name, *shape):
    """Registers the scale of a norm, and the bias of a layer norm, in a module; `config` has the
    settings of the model."""
    parameters(module, **{name: shape or (config.hidden_size,)})
    if config.norm_kind == "layer":
        parameters(module, **{f"{name}_bias": shape or (config.hidden_size,)})


def model_norm(module, config, name, x):
    """Returns x after the norm that `register_norm` registered in the module as `name`."""
    scale, offset = getattr(module, name), float(config.norm_offset)
    if scale.dim() == 2:  # A norm of all heads together.
        flat = model_norm_of(module, config, name, x.flatten(-2), scale.flatten(), offset)
        return flat.unflatten(-1, scale.shape)
    return model_norm_of(module, config, name, x, scale, offset)


def model_norm_of(module, config, name, x, scale, offset):
    """Returns x after the norm `name`, which multiplies by `scale + offset` and, if it is a layer
    norm, adds the bias that `module` has for it."""
    if config.norm_kind == "rms":
        return rms_norm(x, scale, config.rms_norm_eps, offset)
    bias = getattr(module, f"{name}_bias").flatten().float()
    wide, size = x.float(), scale.shape
    return F.layer_norm(wide, size, offset + scale.float(), bias, config.rms_norm_eps).to(x)


def l2_normalize(x):
    """Returns x normalised to length 1 over the last axis."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x)


def rotate(x, places, speeds, factor=1.0):
    """Returns x [B, T, H, K] with rotary embeddings. `places` [T] or [B, T] has the place of each
    token, and R is the number of `speeds`. The pair of channels i and i + R is rotated by
    place * speeds[i] radians, and multiplied by `factor`. Channels from 2 R on are not changed."""
    x, rest = x[..., : 2 * len(speeds)], x[..., 2 * len(speeds) :]
    speeds = torch.tensor(speeds, dtype=torch.float64, device=x.device)
    angles = (places.to(torch.float64)[..., None] * speeds)[..., None, :]
    cosines, sines = (angles.cos() * factor).float(), (angles.sin() * factor).float()
    a, b = x.float().chunk(2, dim=-1)
    turned = torch.cat([a * cosines - b * sines, a * sines + b * cosines], dim=-1).to(x)
    return torch.cat([turned, rest], dim=-1)


def by_query_head(x, heads):
    """Returns keys or values x [B, X, G, K] repeated for all H = `heads` heads of queries."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], dim=2)


class Part(NamedTuple):
    """Attention of tokens to some of their keys: the logits [B, H, T, X], the mask `seen`
    [B, T, X], True for keys that a token sees, and the values [B, X, H, K]. `read` joins several
    parts."""

    logits: torch.Tensor
    seen: torch.Tensor
    values: torch.Tensor


def capped(logits, cap):
    """Returns cap * tanh(logits / cap), or the logits if the cap is 0."""
    return cap * torch.tanh(logits / cap) if cap else logits


def part(queries, keys, values, seen, bias=0.0, cap=0.0):
    """Returns the `Part` of queries [B, T, H, K] and of keys and values [B, X, G, K]. The mask
    `seen` [B, T, X] is True for keys that a token sees, and `bias` is added to the logits after
    they were `capped`."""
    heads = queries.shape[2]
    logits = torch.einsum("bqhk,bxhk->bhqx", queries, by_query_head(keys, heads)).float()
    return Part(capped(logits, cap) + bias, seen, by_query_head(values, heads))


def read(parts, sink=None):
    """Returns the attention output [B, T, H, K] of one softmax over the keys of all `Part`s in the
    list `parts`. If `sink` [H] is given, the softmax of head h includes one more key, whose logit
    is sink[h] and whose value is 0. The output is 0 for tokens that see no key."""
    seen = torch.cat([p.seen for p in parts], dim=-1)
    values = torch.cat([p.values for p in parts], dim=1)
    logits = torch.cat([p.logits for p in parts], dim=-1).masked_fill(~seen[:, None], -1e6)
    if sink is not None:
        sink = sink.float()[:, None, None].expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, sink], dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., : seen.shape[-1]] * seen[:, None]
    return torch.einsum("bhqx,bxhk->bqhk", weights.to(values), values)


def attend(queries, keys, values, seen=None):
    """Returns the attention output [B, Q, H, K] of Q queries [B, Q, H, K], given `keys` and
    `values` [B, X, G, K]. The mask `seen` [B, X] is True for the keys that are attended to; None
    stands for all keys."""
    if seen is None:
        seen = torch.ones(keys.shape[:2], dtype=torch.bool, device=keys.device)
    return read([part(queries, keys, values, seen[:, None].expand(-1, queries.shape[1], -1))])


def parameters(module, **shapes):
    """Registers parameters in a module, as zeros; `shapes` has their shapes by name."""
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.zeros(shape)))


def linear(module, bias=False, **sizes):
    """Adds linear maps to a module; `sizes` has the numbers of inputs and outputs by name."""
    for name, (inputs, outputs) in sizes.items():
        module.add_module(name, nn.Linear(inputs, outputs, bias=bias))


class Gate(nn.Module):
    """A gate that combines old state vectors with an update. `config.gate` is the kind of gate. The
    kind "fixed" gives the same weights to all inputs. The weights of other kinds depend on features
    [B, S, ...], whose last axes have the sizes `features`."""

    def __init__(self, config, features):
        super().__init__()
        self.kind, width = config.gate, config.hidden_size
        parameters(self, bias=(width,))
        if self.kind != "fixed":
            parameters(self, kernel=(*features, width))
        if self.kind == "lstm":
            parameters(self, input_bias=(width,), input_kernel=(*features, width))

    def forward(self, vectors, update, features):
        """Returns the new state vectors from the old ones, `vectors`, and their `update`, both
        [B, S, D]; `features` [B, S, ...] is not used by a gate of the kind "fixed"."""

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
    """Updates the state vectors of a recurrent layer after each block, in float32. The vectors
    attend to themselves and to the tokens of the block."""

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
        """Returns a `Memory` with the keys and values of the state vectors [B, S, D], to which the
        tokens of the next block attend."""
        return Memory(*(x.to(self.keys) for x in self._project(vectors, "keys", "values")))

    def forward(self, vectors, keys, values, seen):
        """Returns the state vectors after a block, from the vectors [B, S, D] before the block and
        the keys and values [B, X, H, K] of the tokens. The mask `seen` [B, X] is True for the
        tokens that are attended to."""
        state_keys, state_values, queries, cross_queries = self._project(
            vectors, "keys", "values", "queries", "cross_queries"
        )
        queries, cross_queries = (
            x * scale.float()[:, None]
            for x, scale in ((queries, self.scale), (cross_queries, self.cross_scale))
        )
        to_tokens = attend(cross_queries, keys.float(), values.float(), seen)
        attended = torch.stack([attend(queries, state_keys, state_values), to_tokens], dim=2)
        features = attended
        if self.projects:
            update = torch.tensordot(attended, self.output.float(), 3)
            vectors = self.output_gate(vectors, update, attended)
            if not self.has_mlp:
                return vectors
            features = rms_norm(vectors, self.mlp_norm)
        kernel = self.mlp_in.float()
        hidden = torch.relu(torch.tensordot(features, kernel, kernel.dim() - 1))
        update = hidden @ self.mlp_out.float()
        update = update if self.projects else torch.tanh(update)
        return self.mlp_gate(vectors, update, hidden)


class DeltaMemory(nn.Module):
    """The memory of Gated DeltaNet (Yang et al. 2024): for each head, a matrix that maps keys to
    values. Every token multiplies the matrix by a decay. Then it changes the matrix so that the
    value to which the matrix maps the token's key moves towards the token's value."""

    def __init__(self, config):
        super().__init__()
        self.config, width = config, config.hidden_size
        heads, key, value = self.sizes = tuple(config.delta_sizes)
        linear(
            self, q_proj=(width, heads * key), k_proj=(width, heads * key),
            v_proj=(width, heads * value), g_proj=(width, heads * value), b_proj=(width, heads),
            a_proj=(width, heads), o_proj=(heads * value, width),
        )  # fmt: skip
        parameters(
            self, convolution=(CONVOLVED, heads, 2 * key + value), step_bias=(heads,),
            rate=(heads,),
        )  # fmt: skip
        register_norm(self, config, "read_norm", value)

    def new_state(self, batch):
        """Returns the `DeltaState` before the first token of `batch` texts."""
        heads, key, value = self.sizes
        matrices = torch.zeros(batch, heads, key, value, device=self.rate.device)
        return DeltaState(
            matrices, self.rate.new_zeros(batch, CONVOLVED - 1, heads, 2 * key + value)
        )

    def forward(self, h, state):
        """Returns the outputs [B, T, D] for the normalised vectors h [B, T, D] of tokens, and the
        `DeltaState` after these tokens; `state` is the `DeltaState` before them."""
        heads = self.sizes[0]
        projected = [
            project(h).unflatten(-1, (heads, -1))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        ]
        inputs = torch.cat([state.inputs, torch.cat(projected, dim=-1)], dim=1)
        length, key = h.shape[1], self.sizes[1]
        convolved = sum(
            inputs[:, back : back + length] * self.convolution[back] for back in range(CONVOLVED)
        )
        queries, keys, values = F.silu(convolved).split([key, key, self.sizes[2]], dim=-1)
        queries, keys = l2_normalize(queries) * key**-0.5, l2_normalize(keys)
        step = self.a_proj(h).float() + self.step_bias.float()
        decay = torch.exp(-self.rate.float().exp() * F.softplus(step))
        strength = torch.sigmoid(self.b_proj(h).float())
        matrices, outputs = state.matrices, []
        for t in range(length):
            k, v, q = keys[:, t].float(), values[:, t].float(), queries[:, t].float()
            matrices = decay[:, t, :, None, None] * matrices
            wrong = v - torch.einsum("bhk,bhkv->bhv", k, matrices)
            matrices = matrices + k[..., None] * (strength[:, t, :, None] * wrong)[..., None, :]
            outputs.append(torch.einsum("bhk,bhkv->bhv", q, matrices))
        y = model_norm(self, self.config, "read_norm", torch.stack(outputs, dim=1)).to(h)
        y = self.o_proj(y.flatten(-2) * F.silu(self.g_proj(h)))
        return y, DeltaState(matrices, inputs[:, length:])


def register_mlp(module, config):
    """Adds parameters to the module of a layer: the linear maps of an MLP, or of a router and its
    experts, and the norms. `config` has the settings of the model."""
    width, hidden, experts = config.hidden_size, config.intermediate_size, config.num_experts
    sizes = {"up_proj": (width, hidden), "down_proj": (hidden, width)}
    if config.gated_mlp:
        sizes["gate_proj"] = (width, hidden)
    into = experts, width, hidden
    kernels = {"router": (width, experts), "experts_in": into, "experts_gate": into}
    kernels["experts_out"] = experts, hidden, width
    biases = {f"{name}_bias": (*shape[:-2], shape[-1]) for name, shape in kernels.items()}
    if experts:
        parameters(module, **kernels, **(biases if config.mlp_bias else {}))
    else:
        linear(module, config.mlp_bias, **sizes)
    if config.norm_place != "after":
        register_norm(module, config, "mlp_norm")
    if config.norm_place != "before":
        register_norm(module, config, "mlp_output_norm")


def mlp(module, config, x):
    """Returns the output of the MLP for x [B, T, D]; `module` has the parameters of the MLP, which
    `register_mlp` has registered, and `config` has the settings of the model."""
    h = x if config.norm_place == "after" else model_norm(module, config, "mlp_norm", x)
    if config.num_experts:
        y = apply_experts(module, config, h)
    elif config.gated_mlp:
        y = module.down_proj(gated_unit(config, module.up_proj(h), module.gate_proj(h)))
    else:
        y = module.down_proj(ACTIVATIONS[config.hidden_act](module.up_proj(h)))
    if config.norm_place != "before":
        y = model_norm(module, config, "mlp_output_norm", y)
    return y * config.residual_factor


def gated_unit(config, hidden, gate):
    """Returns the hidden units of a gated MLP from its two projections."""
    if not (limit := config.mlp_clamp):
        return hidden * ACTIVATIONS[config.hidden_act](gate)
    gate = gate.clamp(max=limit)
    return (hidden.clamp(-limit, limit) + 1) * gate * torch.sigmoid(1.702 * gate)


def apply_experts(module, config, h):
    """Returns, for each token of h [B, T, D], the sum of the outputs of the experts that the router
    chooses for the token. Each output is multiplied by the probability of its expert."""

    def project(x, name, expert=...):
        bias = getattr(module, f"{name}_bias")[expert] if config.mlp_bias else 0.0
        return x @ getattr(module, name)[expert] + bias

    shares = torch.softmax(project(h, "router").float(), dim=-1)
    shares, chosen = shares.topk(config.num_experts_per_tok, dim=-1)
    if config.norm_topk_prob:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    y = torch.zeros_like(h)
    for i in chosen.unique().tolist():
        *rows, place = (chosen == i).nonzero(as_tuple=True)
        x = h[rows]
        x = gated_unit(config, project(x, "experts_in", i), project(x, "experts_gate", i))
        x = project(x, "experts_out", i) * shares[(*rows, place)][:, None].to(h)
        y = y.index_put(tuple(rows), x, accumulate=True)
    return y
