"""Nothing accumulates over many requests (case 26a)."""

import gc
import tracemalloc

from power_core.request import GenerationRequest
from power_core.testing import AdversarialDrafter, ScriptedTarget

VOCAB = 24


def serve(lab, numbers):
    """One request after another, 24 tokens each, every fifth cancelled on its way."""
    for number in numbers:
        prompt = [(number >> shift) % VOCAB for shift in range(12)]
        request_id = lab.submit(GenerationRequest(prompt, max_tokens=24, spec="drafting"))
        for _ in range(3):
            lab.step()
        if number % 5 == 0:
            lab.loop.cancel(request_id)
        lab.drain()
        lab.results.clear()
        lab.events.clear()
        lab.by_request.clear()
    # What the scripted parts keep for tests is not the engine's.
    lab.session.history.clear()
    for session in lab.strategies["drafting"].sessions:
        session.history.clear()
        session.ended.clear()
    lab.target.numerics.forget()
    gc.collect()


def test_memory_after_many_requests_is_memory_after_few(make_lab):
    """The engine holds no more after 250 requests, every fifth cancelled, than after 50; no sequence is leaked."""
    target = ScriptedTarget(VOCAB)
    lab = make_lab(target, {"drafting": AdversarialDrafter(target.greedy, VOCAB, wrong_at=2)}, parallel=2)
    serve(lab, range(50))
    tracemalloc.start()
    try:
        serve(lab, range(50, 100))
        before, _ = tracemalloc.get_traced_memory()
        serve(lab, range(100, 250))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 64 * 1024
    assert lab.loop.active == 0
    lab.session.assert_all_closed()
