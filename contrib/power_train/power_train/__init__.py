"""Training of drafters on a target's own text."""
