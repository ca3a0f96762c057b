"""Microscale on Ray Serve: many replicas, each with an engine of its own, behind one address. See docs/parallel.md.

    serve run app.yaml     import_path: microscale.integrations.ray_serve:build, args: the options of `microscale serve`

Ray starts, scales, checks and replaces the processes. Only ``ray_serve``, ``ray_serve_front`` and ``ray_serve_router``
import it.
"""

from __future__ import annotations

from typing import Any

from ray.serve import Application

from microscale.integrations.ray_serve_front import Front
from microscale.integrations.ray_serve_options import RayOptions, read_options
from microscale.integrations.ray_serve_replica import Replica
from ray import serve

ROUTER = "microscale.integrations.ray_serve_router:PrefixRouter"
FRONT_REQUESTS = 10_000
"""Maximum open requests per front. They wait for the replicas, where ``max_queue`` limits them."""
DRAIN_CHECK_S = 0.5
LOAD_TRIES = 3


def build(args: dict[str, Any]) -> Application:
    """The application for ``serve run`` and ``serve deploy``: arguments in, deployments out."""
    options = read_options(args)
    return _front(options).bind(_replicas(options).bind(options), options)


def _replicas(options: RayOptions) -> serve.Deployment:
    given = options.deployed
    scaling: dict[str, Any] = {"num_replicas": given.min_replicas}
    if options.max_replicas > given.min_replicas:
        bounds = {"min_replicas": given.min_replicas, "max_replicas": options.max_replicas}
        scaling = {"autoscaling_config": bounds | {"target_ongoing_requests": options.target_ongoing_requests}}
    if given.routing == "prefix":
        kwargs = {"max_entries": given.routing_table_entries, "kib_per_request": given.routing_kib_per_request}
        scaling["request_router_config"] = {"request_router_class": ROUTER, "request_router_kwargs": kwargs}
    return serve.deployment(
        name="Replica",
        max_ongoing_requests=options.max_ongoing_requests,
        max_queued_requests=options.engine.max_queue,
        ray_actor_options={"num_cpus": given.num_cpus, "num_gpus": options.num_gpus},
        graceful_shutdown_timeout_s=given.drain_timeout,
        graceful_shutdown_wait_loop_s=DRAIN_CHECK_S,
        health_check_period_s=given.health_check_period_s,
        max_constructor_retry_count=LOAD_TRIES,
        **scaling,
    )(Replica)


def _front(options: RayOptions) -> serve.Deployment:
    given = options.deployed
    return serve.deployment(
        name="Front",
        num_replicas=given.front_replicas,
        max_ongoing_requests=FRONT_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        # A front must outlive the replicas whose answers it passes on.
        graceful_shutdown_timeout_s=given.drain_timeout + 2 * DRAIN_CHECK_S,
        graceful_shutdown_wait_loop_s=DRAIN_CHECK_S,
        health_check_period_s=given.health_check_period_s,
    )(Front)
