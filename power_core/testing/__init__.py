"""
Scripted targets, drafters and tokenizers for tests of Power and of plugins for it.

Plain Python and numpy, importable without pytest. The sessions check every rule of the protocols and
keep what they saw; `plain_decode` is the answer that whatever is tested must give.
"""

from power_core.testing.drafters import (
    AdversarialDrafter,
    LiarDrafter,
    OracleDrafter,
    PatternDrafter,
    RandomDrafter,
    ScriptedDrafter,
    ZeroDrafter,
    lies_about,
    recorded,
)
from power_core.testing.drafting import DraftRecord, EndedSequence, ScriptedDraftSession
from power_core.testing.faults import Call, Faults, ProtocolViolation
from power_core.testing.numerics import next_table
from power_core.testing.plugins import inline_plugin, scripted_plugins
from power_core.testing.profiles import one_class, padded_class, two_classes
from power_core.testing.reference import PlainText, plain_choice, plain_decode
from power_core.testing.rows import Chain, ForwardRecord, ScriptedRows
from power_core.testing.sessions import ScriptedSession
from power_core.testing.targets import ScriptedBackend, ScriptedTarget
from power_core.testing.tokenizers import ScriptedTokenizer, small_vocabulary

__all__ = [
    "AdversarialDrafter",
    "Call",
    "Chain",
    "DraftRecord",
    "EndedSequence",
    "Faults",
    "ForwardRecord",
    "LiarDrafter",
    "OracleDrafter",
    "PatternDrafter",
    "PlainText",
    "ProtocolViolation",
    "RandomDrafter",
    "ScriptedBackend",
    "ScriptedDraftSession",
    "ScriptedDrafter",
    "ScriptedRows",
    "ScriptedSession",
    "ScriptedTarget",
    "ScriptedTokenizer",
    "ZeroDrafter",
    "inline_plugin",
    "lies_about",
    "next_table",
    "one_class",
    "padded_class",
    "plain_choice",
    "plain_decode",
    "recorded",
    "scripted_plugins",
    "small_vocabulary",
    "two_classes",
]
