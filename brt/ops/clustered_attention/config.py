"""The configuration and the inputs of clustered attention; see `api` for the axes of arrays."""

import dataclasses
from typing import Literal, NamedTuple

from jaxtyping import Array, Bool, Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusteredConfig:
    """How queries are clustered, and how the queries of a cluster (its members) attend."""

    # "clustered" gives all members of a cluster the attention output of their centroid. With
    # "improved_clustered", a member also computes its own logits for the `top_k` keys that the
    # centroid attends to most.
    kind: str
    clusters: int  # the number of clusters of a head's queries; short sequences have fewer
    iterations: int  # the number of iterations of k-means
    fit_queries: int  # the number of random queries that k-means is fitted to; 0 stands for all
    top_k: int  # the number of keys for which the members of a cluster compute their own logits
    # How much of a member's attention goes to these `top_k` keys, and how much to all other keys.
    # "paper" takes the sum of the centroid's weights of the `top_k` keys. "lse_jensen" compares two
    # log-sum-exps: the member's own for the `top_k` keys, and the centroid's for the other keys,
    # corrected by the variance of the cluster's queries.
    mass_rule: Literal["paper", "lse_jensen"]
    mass_stop_gradient: bool  # True gives the total weight of the `top_k` keys no gradient

    def cluster_count(self, labels: Int[Array, "B H T"]) -> int:
        return min(self.clusters, labels.shape[-1])


class Codes(NamedTuple):
    """The arrays of `clustering.kmeans`: hash codes of P bits, and C centroids."""

    codes: Float[Array, "B H T P"]
    valid: Bool[Array, "B T"]
    centroids: Float[Array, "B H C P"]
    active: Bool[Array, "B C"]


class ClusterInputs(NamedTuple):
    """The arrays that `api.attend_by_label` takes, with heads before tokens and scaled queries."""

    queries: Float[Array, "B H T K"]
    keys: Float[Array, "B H X K"]
    values: Float[Array, "B H X E"]
    valid: Bool[Array, "B X"]
    labels: Int[Array, "B H T"]
    bias: Float[Array, "H O"] | None = None
