"""Which policy the configuration means."""

import pytest

from power_core.errors import ConfigError
from power_core.scheduler.costs import CostModel
from power_core.scheduler.policy import DraftShape
from power_core.scheduler.widths import POLICIES, make_policy, policy_name
from power_core.shapes import ShapeIdentity, WidthClass


def test_auto_is_cost_aware_and_the_older_key_is_adaptive():
    assert policy_name() == "cost-aware"
    assert policy_name("adaptive", spec_mtp_adaptive=True) == policy_name(spec_mtp_adaptive=True) == "adaptive"
    assert policy_name("fixed") == "fixed"


@pytest.mark.parametrize(
    "keys", [{"spec_width_policy": "best"}, {"spec_width_policy": "fixed", "spec_mtp_adaptive": True}]
)
def test_unknown_and_contradicting_keys_are_refused(keys):
    with pytest.raises(ConfigError):
        policy_name(**keys)


@pytest.mark.parametrize("name", POLICIES[1:])
def test_every_policy_drives_a_request(name):
    costs = CostModel(WidthClass(ShapeIdentity("x"), (1, 2, 3, 4)))
    for _ in range(3):  # plain steps, beside which costs can be told
        costs.observe_forward(1, 0.01)
    policy = make_policy(name, costs)
    assert policy.name == name
    assert policy.begin(DraftShape(3, strategy="s")).limit(3) == 3


@pytest.mark.parametrize("name", POLICIES[1:])
def test_a_policy_is_known_by_its_name(name):
    """However the text came about: from a file, a command line, a caller."""
    read = "".join(name)
    assert policy_name(read) == name
    assert policy_name("".join(["au", "to"])) == "cost-aware"
    assert make_policy("".join([*name]), CostModel(WidthClass(ShapeIdentity("x"), (1, 2)))).name == name
