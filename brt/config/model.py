"""The decoder of a language model."""

import dataclasses
from typing import Literal

from brt.config.checks import check, check_finite, check_layers, check_not_negative, check_positive
from brt.config.fields import RematPolicy, adaptable, fixed, free, inherited


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """The decoder. XL, sliding and block-recurrent models differ in data, not in code."""

    layers: int = inherited(12)  # how many
    # which of them recur, from 0; -3 is the third last
    recurrent_layers: tuple[int, ...] = adaptable(())
    model_dim: int = inherited(1024)
    heads: int = inherited(8)
    head_dim: int = inherited(128)
    mlp_dim: int = inherited(4096)
    window: int = adaptable(512)  # tokens a token attends to, itself included; also block length
    states: int = adaptable(512)  # recurrent state vectors of a recurrent layer
    # deviation, at first, of states' identities, which are added to states of size 1
    id_init: float = adaptable(1.0)
    gate: Literal["fixed", "lstm", "gru"] = adaptable("fixed")
    gate_layout: Literal["dual", "single", "skip"] = adaptable("skip")
    gate_bias: float = adaptable(0.0)  # mean of the gate's initial bias; above 0 states last longer
    # in its place: channels keep a state for 1 to so many blocks at first (chrono); 0: all alike
    gate_horizon: float = adaptable(0.0)
    # original: single layout; paper: lstm
    gate_tanh: Literal["original", "paper"] = adaptable("original")
    feedback: bool = adaptable(False)  # every layer reads the (last) recurrent layer's states
    memorizing_layers: tuple[int, ...] = adaptable(())  # which layers look up a memory of the past
    # which layers read all of a memory instead, together with the block, by one softmax
    dense_memory_layers: tuple[int, ...] = adaptable(())
    memory_size: int = adaptable(32768)  # tokens that layers of these two kinds remember
    memory_neighbors: int = adaptable(128)  # tokens that a query finds in the memory
    # bucketed: the original's, approximate
    memory_search: Literal["exact", "bucketed"] = adaptable("exact")
    clustered_layers: tuple[int, ...] = adaptable(())  # which layers read all the past, by clusters
    # centroids of a head that a clustered layer's queries are shared out to
    clusters: int = adaptable(64)
    cluster_top_k: int = adaptable(16)  # keys of the past that a centroid keeps; others it sums up
    cluster_jensen: bool = adaptable(True)  # count in how far queries lie from their centroid
    # which layers keep the past compressed (Compressive Transformer)
    compressive_layers: tuple[int, ...] = adaptable(())
    compressed_memory: int = adaptable(512)  # slots that a compressive layer keeps
    compression_rate: int = adaptable(2)  # tokens that become one slot
    # conv: learned, by a loss of its own
    compression: Literal["mean", "max", "conv"] = adaptable("conv")
    # that attention to slots reads what attention to their block does, or that slots give it back
    compression_loss: Literal["attention", "autoencoding"] = adaptable("attention")
    compression_weight: float = free(1.0)  # of that loss beside the model's own; 0: it learns none
    summary_layers: tuple[int, ...] = adaptable(())  # which layers sum up every block (MELODI)
    # which do, and remember the sums of many blocks
    long_summary_layers: tuple[int, ...] = adaptable(())
    summaries: int = adaptable(128)  # vectors in which a layer sums up a block for the one above
    short_memory: int = adaptable(128)  # vectors in which it does for its own next block
    long_memory: int = adaptable(8192)  # vectors that a long_summary layer remembers
    long_increment: int = adaptable(64)  # of them, how many are of one block
    # which layers have heads that read their token's cluster (Routing Transformer, made causal)
    routing_layers: tuple[int, ...] = inherited(())
    routing_heads: int = inherited(2)  # how many of their heads; the others read a window
    routing_clusters: int = inherited(16)  # of such a head
    routing_keep: int = adaptable(512)  # tokens of its cluster that a token reads, itself included
    routing_decay: float = free(0.999)  # of what clusters' centres are averages of, a step
    routing_commitment: float = free(1e-4)  # weight of the distance of queries to these
    cache: bool = adaptable(True)  # False: a block reads only itself (a vanilla transformer)
    # of all layers, where kinds have no field X_layers above
    layer_kinds: tuple[str, ...] = adaptable(())
    vocab_size: int = inherited(0)  # 0: the tokenizer's
    positions: Literal["t5", "rotary", "alibi", "none"] = inherited("t5")
    relative_buckets: int = inherited(32)  # T5 relative position bias
    relative_max_distance: int = inherited(128)
    normalize_qk: bool = inherited(True)  # L2-normalised queries and keys, learned scale per head
    mlp_bias: bool = inherited(False)
    scale_init: float = adaptable(1.0)  # that scale's initial value
    # after the pre-attention norm, on attention, after the MLP, before logits
    dropout: float = free(0.0)
    # logits are divided by its root
    logit_scale: Literal["model_dim", "vocab"] = inherited("model_dim")
    attend_to_self: bool = inherited(True)  # False: exactly `window` tokens before it (original)
    # False: zero keys take part at a document's start (original)
    mask_empty_cache: bool = adaptable(True)
    bias_before_scale: bool = inherited(False)  # True: (q.k + bias) * scale (original)
    dtype: Literal["auto", "float32", "bfloat16"] = fixed("auto")  # auto: bfloat16 except on CPUs
    remat: bool = free(False)  # recompute a layer's activations in the backward pass
    remat_keep: RematPolicy = free("nothing")  # what remat keeps of a layer nevertheless
    # layers per iteration of the scan over equal neighbours; 0: one, but without remat all on TPUs
    # and, of up to six, on CPUs, which compile longer so
    layer_unroll: int = free(0)
    # blocks, of that over the recurrence; 0: one, on TPUs and with large states on CPUs eight
    block_unroll: int = free(0)

    def __post_init__(self) -> None:
        check_finite(self)
        check_layers(self, "layers")
        check_positive(
            self, "model_dim", "heads", "head_dim", "mlp_dim", "window", "states",
            "relative_max_distance",
            "scale_init", "id_init",
        )  # fmt: skip
        check_not_negative(self, "vocab_size", "layer_unroll", "block_unroll")
        check(0 <= self.dropout < 1, f"Model.dropout = {self.dropout} must be in [0, 1)")
        check(
            self.gate_horizon == 0 or self.gate_horizon > 1,
            f"Model.gate_horizon = {self.gate_horizon} must be above 1 block, or 0",
        )
        check(
            self.gate_horizon == 0 or self.gate_bias == 0,
            f"Model.gate_horizon = {self.gate_horizon} stands in place of Model.gate_bias = "
            f"{self.gate_bias}; set one of them to 0",
        )
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
        self._check_compression()
        self._check_summaries()
        self._check_routing()

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
        searched = bool(self.memorizing_layers) or not self.dense_memory_layers
        check(
            not searched or self.memory_neighbors <= self.memory_size,
            f"Model.memory_neighbors = {self.memory_neighbors} must not be above "
            f"Model.memory_size = {self.memory_size}",
        )
        check(
            not searched
            or self.memory_search == "exact"
            or self.memory_size % self.memory_neighbors == 0,
            f"Model.memory_size = {self.memory_size} must be a multiple of Model.memory_neighbors "
            f"= {self.memory_neighbors} where Model.memory_search = 'bucketed'",
        )
        layers = self.dense_memory_layers
        check(
            not layers or not self.feedback,
            f"Model.feedback = True has every layer read recurrent states, which "
            f"Model.dense_memory_layers = {layers} do not; set it to False",
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

    def _check_compression(self) -> None:
        check_positive(self, "compressed_memory", "compression_rate")
        check_not_negative(self, "compression_weight")
        layers = self.compressive_layers
        check(
            not layers or self.window % self.compression_rate == 0,
            f"Model.window = {self.window} must be a multiple of Model.compression_rate = "
            f"{self.compression_rate}",
        )
        check(
            not layers or self.positions != "rotary",
            f"Model.positions = 'rotary' has no place for the slots of Model.compressive_layers = "
            f"{layers}; take 't5', 'alibi' or 'none'",
        )
        check(
            not layers or self.cache,
            f"Model.compressive_layers = {layers} read the block before and what it becomes, which "
            "needs Model.cache = True",
        )

    def _check_summaries(self) -> None:
        check_positive(self, "summaries", "short_memory", "long_memory", "long_increment")
        check(
            self.long_memory % self.long_increment == 0,
            f"Model.long_memory = {self.long_memory} must be a multiple of Model.long_increment = "
            f"{self.long_increment}",
        )
        for name in ("summary_layers", "long_summary_layers"):
            layers = getattr(self, name)
            check(
                not layers or self.positions != "rotary",
                f"Model.positions = 'rotary' has no place for the vectors that Model.{name} = "
                f"{layers} remember; take 't5', 'alibi' or 'none'",
            )
            check(
                not layers or not self.feedback,
                f"Model.feedback = True has every layer read recurrent states, which Model.{name} "
                f"= {layers} do not; set it to False",
            )

    def _check_routing(self) -> None:
        check_positive(self, "routing_heads", "routing_clusters", "routing_keep")
        check_not_negative(self, "routing_commitment")
        check(
            0 < self.routing_decay < 1,
            f"Model.routing_decay = {self.routing_decay} must be in (0, 1)",
        )
        layers = self.routing_layers
        check(
            not layers or self.routing_heads < self.heads,
            f"Model.routing_heads = {self.routing_heads} leave none of Model.heads = {self.heads} "
            f"for a window; set it to {self.heads - 1} at most",
        )
        check(
            not layers or self.positions != "rotary",
            f"Model.positions = 'rotary' turns apart the queries that Model.routing_layers = "
            f"{layers} share out to clusters; take 't5', 'alibi' or 'none'",
        )
        check(
            not layers or self.cache,
            f"Model.routing_layers = {layers} read what leaves the window, which needs "
            "Model.cache = True",
        )
        check(
            not layers or not self.feedback,
            f"Model.feedback = True has every layer read recurrent states, which "
            f"Model.routing_layers = {layers} do not; set it to False",
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
