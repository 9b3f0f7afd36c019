"""MTP drafting: the prediction layers of a target's own file, and attached heads for targets without."""
