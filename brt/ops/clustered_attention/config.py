"""The configuration and the inputs of clustered attention; see `api` for the axes of arrays."""

import dataclasses
from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusteredConfig:
    """How queries are clustered, and how the queries of a cluster (its members) attend."""

    # "clustered" gives all members of a cluster the attention output of their centroid. With
    # "improved_clustered", a member also computes its own logits for the `top_k` keys that the
    # centroid attends to most.
    kind: str
    clusters: int  # the number of clusters of a head's queries; short sequences have fewer
    top_k: int  # the number of keys for which the members of a cluster compute their own logits
    # A member gives the `top_k` keys together the weight that its centroid gives them. True stops
    # the gradient of this weight.
    mass_stop_gradient: bool

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
