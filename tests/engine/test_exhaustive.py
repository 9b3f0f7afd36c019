"""Every target and every proposal at a vocabulary of four: nothing is left to luck."""

from itertools import product

import pytest

from power_core.request import GenerationRequest
from power_core.testing import ScriptedDrafter, ScriptedTarget, next_table

VOCAB = 4
PROPOSALS = [ids for length in range(4) for ids in product(range(VOCAB), repeat=length)]
# Successor tables up to renaming of the tokens that the prompt 0 does not reach: every path into a cycle.
TABLES = ["0000", "1000", "1100", "1200", "1210", "1220", "1230", "1231", "1232", "1233"]


@pytest.mark.parametrize("capacity", [None, 1, 0])
@pytest.mark.parametrize("table", TABLES)
def test_every_proposal_up_to_three_tokens(make_lab, table, capacity):
    """For each table, each proposal in each round gives the text of plain decoding."""
    target = ScriptedTarget(VOCAB, logits=next_table([int(digit) for digit in table]), rollback_capacity=capacity)
    drafters = {str(ids): ScriptedDrafter([ids] * 8) for ids in PROPOSALS}
    lab = make_lab(target, drafters, draft_max=3)
    for spec in drafters:
        request = GenerationRequest((0,), max_tokens=7, spec=spec)
        [result] = lab.run(request)
        lab.check_same(request, result)


@pytest.mark.parametrize("limit", [None, 1, 2, 3, 4])
@pytest.mark.parametrize("stop_ids", [frozenset(), frozenset({1}), frozenset({2, 3})], ids=str)
def test_every_proposal_with_every_end(make_lab, limit, stop_ids):
    """Each proposal against each limit and end id, on a target that is no cycle, in a context of eight."""
    target = ScriptedTarget(VOCAB, seed=5, context_size=8)
    drafters = {str(ids): ScriptedDrafter([ids] * 8) for ids in PROPOSALS}
    lab = make_lab(target, drafters, draft_max=3)
    for spec in drafters:
        request = GenerationRequest((0, 3), max_tokens=limit, stop_ids=stop_ids, spec=spec)
        [result] = lab.run(request)
        lab.check_same(request, result)


def test_ties_go_to_the_lowest_id(make_lab):
    """Equal logits give the lowest id in plain decoding and under every proposal."""
    rows = [[1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 1, 1], [1, 0, 0, 1]]
    target = ScriptedTarget(VOCAB, logits=lambda tokens: rows[tokens[-1]])
    lab = make_lab(target, {str(ids): ScriptedDrafter([ids] * 4) for ids in PROPOSALS}, draft_max=3)
    for first in range(VOCAB):
        for spec in lab.strategies:
            request = GenerationRequest((first,), max_tokens=5, spec=spec)
            [result] = lab.run(request)
            lab.check_same(request, result)
