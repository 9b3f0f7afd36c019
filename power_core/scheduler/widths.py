"""From configuration to a width policy."""

from __future__ import annotations

from power_core.errors import ConfigError
from power_core.scheduler.cost_aware import CostAwarePolicy
from power_core.scheduler.costs import CostModel
from power_core.scheduler.policy import AdaptivePolicy, FixedPolicy, WidthPolicy

__all__ = ["AUTO", "POLICIES", "make_policy", "policy_name"]

AUTO = "auto"
POLICIES = (AUTO, CostAwarePolicy.name, AdaptivePolicy.name, FixedPolicy.name)


def policy_name(spec_width_policy: str = AUTO, *, spec_mtp_adaptive: bool = False) -> str:
    """
    The policy that the configuration keys stand for. `spec_mtp_adaptive` is the older key for `adaptive`.

    >>> policy_name(), policy_name(spec_mtp_adaptive=True)
    ('cost-aware', 'adaptive')

    Raises:
        ConfigError: No such policy, or the two keys disagree.
    """
    if spec_width_policy not in POLICIES:
        raise ConfigError(
            f"spec_width_policy is {spec_width_policy!r}", who="config", got=spec_width_policy,
            expected="one of " + ", ".join(POLICIES),
        )  # fmt: skip
    if spec_mtp_adaptive and spec_width_policy not in (AUTO, AdaptivePolicy.name):
        raise ConfigError(
            f"spec_mtp_adaptive is set and spec_width_policy is {spec_width_policy!r}", who="config",
            got=spec_width_policy, expected=AdaptivePolicy.name, fix="unset one of the two",
        )  # fmt: skip
    if spec_mtp_adaptive:
        return AdaptivePolicy.name
    return CostAwarePolicy.name if spec_width_policy == AUTO else spec_width_policy


def make_policy(name: str, costs: CostModel) -> WidthPolicy:
    """The policy *name*, as `policy_name` gives it, for a session whose costs are *costs*."""
    if name == CostAwarePolicy.name:
        return CostAwarePolicy(costs, rows=costs.widths)
    return AdaptivePolicy() if name == AdaptivePolicy.name else FixedPolicy()
