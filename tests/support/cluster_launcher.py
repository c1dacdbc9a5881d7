"""A cluster-launcher file, read as `ray up` reads it, without a cloud, credentials or network.

The one place in the tests that names Ray's private launcher functions; they are Ray 2.60's.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from ray.autoscaler._private.node_provider_availability_tracker import NodeAvailabilitySummary
from ray.autoscaler._private.providers import _NODE_PROVIDERS
from ray.autoscaler._private.resource_demand_scheduler import _default_utilization_scorer, get_nodes_for
from ray.autoscaler._private.util import prepare_config, validate_config

# What may stand under `provider`: Ray's schema lets any key pass there, so a typo would be silent.
PROVIDER_KEYS = {
    "aws": {"type", "region", "availability_zone", "cache_stopped_nodes", "security_group", "use_internal_ips"},
    "local": {"type", "head_ip", "worker_ips"},
}


def load(path: Path) -> dict[str, Any]:
    """The file as it stands."""
    loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def check(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the provider's defaults filled in. Raises what `ray up` would, before it starts anything.

    Beyond Ray's own schema it asserts what that lets pass: provider keys, the order of min_workers and max_workers, and
    a head that knows its autoscaling configuration.
    """
    provider = config["provider"]
    assert provider["type"] in _NODE_PROVIDERS, f"Ray has no provider {provider['type']!r}"
    unknown = provider.keys() - PROVIDER_KEYS[provider["type"]]
    assert not unknown, f"provider {provider['type']} has no {sorted(unknown)}"
    prepared: dict[str, Any] = prepare_config(dict(config))
    validate_config(prepared)
    for name, kind in prepared["available_node_types"].items():
        assert 0 <= kind["min_workers"] <= kind["max_workers"], f"node type {name}: min_workers above max_workers"
    assert any("--autoscaling-config" in command for command in prepared["head_start_ray_commands"])
    return prepared


def nodes_launched_for(prepared: Mapping[str, Any], demands: list[dict[str, float]]) -> tuple[dict[str, int], int]:
    """What Ray's own scheduler would start for these demands on an empty cluster, and how many it cannot serve."""
    score = functools.partial(_default_utilization_scorer, node_availability_summary=NodeAvailabilitySummary({}))
    types, head = prepared["available_node_types"], prepared["head_node_type"]
    launched, unmet = get_nodes_for(types, {}, head, prepared["max_workers"], demands, score)
    return dict(launched), len(unmet)
