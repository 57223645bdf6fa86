"""The decoder of a language model."""

import dataclasses
from typing import Literal

from brt.config.checks import check, check_not_negative, check_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """The decoder. XL, sliding and block-recurrent models differ in data, not in code."""

    layers: int = 12  # how many
    recurrent_layers: tuple[int, ...] = ()  # which of them recur, from 0; -3 is the third last
    model_dim: int = 1024
    heads: int = 8
    head_dim: int = 128
    mlp_dim: int = 4096
    window: int = 512  # tokens a token attends to, itself included; also the block length
    states: int = 512  # recurrent state vectors of a recurrent layer
    gate: Literal["fixed", "lstm", "gru"] = "fixed"
    gate_layout: Literal["dual", "single", "skip"] = "skip"
    gate_bias: float = 0.0  # mean of the gate's initial bias; above 0 a state lasts longer
    gate_tanh: Literal["original", "paper"] = "original"  # original: single layout; paper: lstm
    feedback: bool = False  # every layer reads the (last) recurrent layer's states
    memorizing_layers: tuple[int, ...] = ()  # which layers look up a memory of past tokens
    memory_size: int = 32768  # tokens that a memorizing layer remembers
    memory_neighbors: int = 128  # tokens that a query finds in the memory
    memory_search: Literal["exact", "bucketed"] = "exact"  # bucketed: the original's, approximate
    clustered_layers: tuple[int, ...] = ()  # which layers read all of the past, by clusters
    clusters: int = 64  # centroids of a head that a clustered layer's queries are shared out to
    cluster_top_k: int = 16  # keys of the past that a centroid keeps; the others it sums up
    cluster_jensen: bool = True  # count in how far queries lie from their centroid
    cache: bool = True  # False: a block reads only itself (a vanilla transformer)
    layer_kinds: tuple[str, ...] = ()  # of all layers, where kinds have no field X_layers above
    vocab_size: int = 0  # 0: the tokenizer's
    positions: Literal["t5", "rotary", "alibi", "none"] = "t5"
    relative_buckets: int = 32  # T5 relative position bias
    relative_max_distance: int = 128
    normalize_qk: bool = True  # L2-normalised queries and keys with a learned scale per head
    scale_init: float = 1.0  # that scale's initial value
    dropout: float = 0.0  # after the pre-attention norm, on attention, after the MLP, before logits
    logit_scale: Literal["model_dim", "vocab"] = "model_dim"  # logits are divided by its root
    attend_to_self: bool = True  # False: exactly `window` tokens strictly before (original)
    mask_empty_cache: bool = True  # False: zero keys take part at a document's start (original)
    bias_before_scale: bool = False  # True: (q.k + bias) * scale (original)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 except on CPUs
    remat: bool = False  # recompute a layer's activations in the backward pass
    layer_unroll: int = 1  # layers per iteration of the scan over equal neighbours
    block_unroll: int = 1  # blocks per iteration of the scan over the recurrence

    def __post_init__(self) -> None:
        check_positive(
            self, "layers", "model_dim", "heads", "head_dim", "mlp_dim", "window", "states",
            "scale_init", "layer_unroll", "block_unroll",
        )  # fmt: skip
        check_not_negative(self, "vocab_size")
        check(0 <= self.dropout < 1, f"Model.dropout = {self.dropout} must be in [0, 1)")
        half = self.relative_buckets // 2
        check(
            half >= 1 and self.relative_max_distance > half,
            f"Model.relative_max_distance = {self.relative_max_distance} must be above half of "
            f"Model.relative_buckets = {self.relative_buckets}",
        )
        check(
            self.positions != "rotary" or self.head_dim % 2 == 0,
            f"Model.head_dim = {self.head_dim} must be even where Model.positions = 'rotary'",
        )
        self._check_places()
        self._check_memory()
        self._check_clusters()

    def _check_places(self) -> None:
        """Every layer has one kind."""
        check(
            len(self.layer_kinds) in (0, self.layers),
            f"Model.layer_kinds = {self.layer_kinds} must name the kinds of all Model.layers = "
            f"{self.layers} layers, 'window' where another field places a layer",
        )
        for kind in self._places().keys() & set(self.layer_kinds):
            check(False, f"Model.layer_kinds names {kind!r}; place it by Model.{kind}_layers")
        taken = {i: "layer_kinds" for i, k in enumerate(self.layer_kinds) if k != "window"}
        for kind, indices in self._places().items():
            name = f"{kind}_layers"
            for index in indices:
                check(
                    -self.layers <= index < self.layers,
                    f"Model.{name} = {indices} names layer {index}, but "
                    f"Model.layers = {self.layers} has layers 0 to {self.layers - 1}",
                )
                place = index % self.layers
                check(taken.get(place) != name, f"Model.{name} = {indices} names a layer twice")
                other = taken.get(place, name)
                check(
                    place not in taken,
                    f"Model.{name} = {indices} and Model.{other} = {getattr(self, other)} both "
                    f"name layer {place}",
                )
                taken[place] = name
        check(
            not self.feedback or bool(self.recurrent_layers or self.layer_kinds),
            "Model.feedback = True needs a recurrent layer; name one in Model.recurrent_layers",
        )

    def _check_memory(self) -> None:
        check_positive(self, "memory_size", "memory_neighbors")
        check(
            self.memory_neighbors <= self.memory_size,
            f"Model.memory_neighbors = {self.memory_neighbors} must not be above "
            f"Model.memory_size = {self.memory_size}",
        )
        check(
            self.memory_search == "exact" or self.memory_size % self.memory_neighbors == 0,
            f"Model.memory_size = {self.memory_size} must be a multiple of Model.memory_neighbors "
            f"= {self.memory_neighbors} where Model.memory_search = 'bucketed'",
        )

    def _check_clusters(self) -> None:
        check_positive(self, "clusters", "cluster_top_k")
        check(
            not self.clustered_layers or self.positions != "rotary",
            f"Model.positions = 'rotary' turns apart the queries that Model.clustered_layers = "
            f"{self.clustered_layers} share out to clusters; take 't5', 'alibi' or 'none'",
        )
        check(
            not self.clustered_layers or self.cache,
            f"Model.clustered_layers = {self.clustered_layers} read what leaves the window, which "
            "needs Model.cache = True",
        )

    def _places(self) -> dict[str, tuple[int, ...]]:
        """The layers that a field <kind>_layers names, by kind."""
        names = (field.name for field in dataclasses.fields(self))
        return {n.removesuffix("_layers"): getattr(self, n) for n in names if n.endswith("_layers")}

    @property
    def layer_types(self) -> tuple[str, ...]:
        """The kind of every layer, lowest first."""
        kinds = list(self.layer_kinds) or ["window"] * self.layers
        for kind, indices in self._places().items():
            for index in indices:
                kinds[index] = kind
        return tuple(kinds)

    def parity(self) -> "Model":
        """The same model with the original code's arithmetic (google-research/meliad)."""
        return dataclasses.replace(
            self,
            attend_to_self=False,
            mask_empty_cache=False,
            bias_before_scale=True,
            gate_tanh="original",
            logit_scale="model_dim",
            scale_init=1.0,
        )
