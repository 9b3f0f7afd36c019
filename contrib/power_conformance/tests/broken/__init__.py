"""Plugins that are wrong on purpose, one for each rule: each breaks its own rule and no other."""
