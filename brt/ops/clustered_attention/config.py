"""The configuration of clustered attention."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusteredConfig:
    """How queries are clustered, and how the members of a cluster attend.

    Attributes:
      kind: "clustered" gives all members of a cluster the attention of their centroid;
        "improved_clustered" attends exactly to the keys that the centroid attends to most.
      clusters: the number of clusters of a head's queries; short sequences have fewer.
      iterations: the number of iterations of k-means.
      fit_queries: the number of random queries from which k-means learns; 0 stands for all.
      top_k: the number of exact keys of a cluster.
      mass_rule: how the exact keys are weighed against the others.
      mass_stop_gradient: if True, the weight of the exact keys is constant to differentiation.
    """

    kind: str
    clusters: int
    iterations: int
    fit_queries: int
    top_k: int
    mass_rule: Literal["paper", "lse_jensen"]
    mass_stop_gradient: bool
