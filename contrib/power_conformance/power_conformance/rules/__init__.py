"""The rules by subject. `power_conformance.registry.all_rules` imports them."""
