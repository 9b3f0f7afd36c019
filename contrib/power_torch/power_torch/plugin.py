"""Hook implementations. Importing this loads neither torch nor numpy."""

from __future__ import annotations

__all__: list[str] = []
