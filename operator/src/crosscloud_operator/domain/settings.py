"""What the operator's administrator sets about jobs; `crosscloud_operator.settings` reads it from the environment."""

from __future__ import annotations

from dataclasses import dataclass

from crosscloud_operator.domain.inventory import GPU_PRODUCT, GPU_RESOURCE


@dataclass(frozen=True)
class JobSettings:
    """Times are in seconds.

    `hub` tells this hub's objects apart from those of another hub that shares a member. `operator_namespace` (on the
    hub) keeps the keys of the jobs' certificate authorities. `trainer_image` is used where the podTemplate names none.
    """

    hub: str
    operator_namespace: str
    trainer_image: str
    gateway_image: str
    trainer_pull_policy: str = "IfNotPresent"
    gateway_pull_policy: str = "IfNotPresent"
    gpu_resource: str = GPU_RESOURCE
    gpu_product_label: str = GPU_PRODUCT
    cluster_domain: str = "cluster.local"
    gateway_port: int = 7443
    admit_timeout: float = 60.0  # from the plan until every member has accepted every pod
    bind_timeout: float = 60.0  # from lifting the gates until every pod has its node
    start_timeout: float = 900.0  # from the last binding until every trainer container runs (image pulls)
    backoff_base: float = 5.0  # the pause after a first attempt; doubled after each further one
    backoff_limit: float = 300.0
    waiting_interval: float = 10.0  # how often a waiting job looks for room, beside being woken
    progress_interval: float = 10.0  # progress alone is not written to the status more often
    cause_grace: float = 5.0  # a pod that ended because of another one waits so long for that one's exit code
