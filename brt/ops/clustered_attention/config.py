"""The configuration of clustered attention."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusteredConfig:
    """Settings of clustered attention: how queries are clustered, and what the members attend to.

    Attributes:
      kind: "clustered" gives all members of a cluster the attention output of their centroid. With
        "improved_clustered", a member also computes its own logits for the `top_k` keys that the
        centroid attends to most.
      clusters: the number of clusters of a head's queries; short sequences have fewer.
      iterations: the number of iterations of k-means.
      fit_queries: the number of random queries that k-means is fitted to; 0 stands for all.
      top_k: the number of keys for which the members of a cluster compute their own logits.
      mass_rule: the rule for the total weight of these keys relative to all others. "paper" takes
        the centroid's weights; "lse_jensen" compares log-sum-exps, of which that of the other keys
        is corrected by the variance of the cluster's queries.
      mass_stop_gradient: True gives the total weight of these keys no gradient.
    """

    kind: str
    clusters: int
    iterations: int
    fit_queries: int
    top_k: int
    mass_rule: Literal["paper", "lse_jensen"]
    mass_stop_gradient: bool
