"""Evidence: receipts that say what ran, at what cost, and that verify offline."""

from power_core.evidence.conformance import CONFORMANCE_SCHEMA, ConformanceBody
from power_core.evidence.receipts import artifact_record, build_receipt, generation_document, logprobs_json
from power_core.evidence.schema import SCHEMA, ArtifactRecord, CostsRecord, PolicyRecord, ReceiptBody, Timings
from power_core.evidence.verify import VerifiedReceipt, verify_document, verify_file, verify_generation

__all__ = [
    "CONFORMANCE_SCHEMA",
    "SCHEMA",
    "ArtifactRecord",
    "ConformanceBody",
    "CostsRecord",
    "PolicyRecord",
    "ReceiptBody",
    "Timings",
    "VerifiedReceipt",
    "artifact_record",
    "build_receipt",
    "generation_document",
    "logprobs_json",
    "verify_document",
    "verify_file",
    "verify_generation",
]
