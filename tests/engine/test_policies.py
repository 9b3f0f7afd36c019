"""Width policies in the engine: they change what a step costs, never its tokens, and learn from what was committed."""

import pytest
from attrs import evolve
from structlog.testing import capture_logs

from power_core.drafter import Proposal
from power_core.errors import BackendError, ConfigError
from power_core.request import GenerationRequest, SamplingSpec
from power_core.scheduler.cost_aware import CostAwarePolicy
from power_core.scheduler.costs import fixed_curve
from power_core.scheduler.policy import AdaptivePolicy, FixedPolicy
from power_core.scheduler.traces import RecordingPolicy
from power_core.testing import (
    Faults,
    OracleDrafter,
    PatternDrafter,
    RandomDrafter,
    ScriptedDrafter,
    ScriptedTarget,
    ZeroDrafter,
    one_class,
    padded_class,
    two_classes,
)

VOCAB = 24
PROMPT = (3, 1, 4, 1, 5)
CPU = fixed_curve([1 + 0.3 * n for n in range(16)])
FREE = fixed_curve([1 + 0.003 * n for n in range(16)])
POLICIES = {
    "fixed": lambda _costs: FixedPolicy(),
    "adaptive": lambda _costs: AdaptivePolicy(),
    "cost-aware": CostAwarePolicy,
    "cost-aware-free": lambda _costs: CostAwarePolicy(lambda: FREE),
    "recording": lambda _costs: RecordingPolicy(),
}
PROFILES = {"one": one_class(), "padded": padded_class(), "two": two_classes(8), "narrow": one_class(4)}


def drafters(target):
    return {
        "oracle": OracleDrafter(target.greedy, VOCAB),
        "zero": ZeroDrafter(target.greedy, VOCAB),
        "mixed": PatternDrafter(target.greedy, VOCAB, ["RRRW", "", "RRRRRRRR", "WWWW", "R"]),
        "random": RandomDrafter(VOCAB),
    }


def lab_of(make_lab, policy, target=None, **options):
    target = target or ScriptedTarget(VOCAB)
    return make_lab(target, drafters(target), make_policy=policy, **options)


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
@pytest.mark.parametrize("capacity", [None, 1])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_no_policy_changes_a_token(make_lab, policy, profile, capacity):
    """Seven requests on three sequences, greedy and seeded, of every drafter: each result is plain decoding's."""
    target = ScriptedTarget(VOCAB, profile=profile, rollback_capacity=capacity)
    lab = lab_of(make_lab, policy, target, parallel=3, draft_max=8)
    requests = [
        GenerationRequest(
            (n, 7, 2 * n), max_tokens=25, spec=spec, draft_max=draft_max,
            sampling=SamplingSpec(temperature=0.8 * (n % 2), seed=n),
        )
        for n, (spec, draft_max) in enumerate(
            [("oracle", None), ("zero", 3), ("mixed", None), ("off", None), ("random", 5), ("mixed", 0), ("oracle", 20)]
        )
    ]  # fmt: skip
    for request, result in zip(requests, lab.run(*requests), strict=True):
        lab.check_same(request, result)


def test_a_requests_own_draft_max_bounds_every_policy(make_lab):
    """K of the request, not of the engine, is the most that is ever asked for."""
    for policy in POLICIES.values():
        lab = lab_of(make_lab, policy, draft_max=8)
        lab.run(GenerationRequest(PROMPT, max_tokens=60, spec="oracle", draft_max=2))
        assert max(len(record.proposal.token_ids) for record in lab.strategies["oracle"].history) <= 2


def test_a_drafter_that_is_never_right_is_left_alone(make_lab):
    """Case 25a: far fewer than a quarter of a proposal is checked for each token, where `fixed` checks eight."""
    counts = {}
    for name, policy in (("cost-aware", lambda _costs: CostAwarePolicy(lambda: CPU)), ("fixed", POLICIES["fixed"])):
        lab = lab_of(make_lab, policy, draft_max=8)
        [result] = lab.run(GenerationRequest(PROMPT, max_tokens=100, spec="zero"))
        counts[name] = result.counts
    assert counts["cost-aware"].drafted < 25
    assert counts["fixed"].drafted > 700
    assert counts["cost-aware"].dropped > counts["cost-aware"].drafted


def test_a_drafter_that_is_right_is_used_in_full(make_lab):
    """An oracle costs one forward for nine tokens, after the first rounds."""
    lab = lab_of(make_lab, lambda _costs: CostAwarePolicy(lambda: CPU), draft_max=8)
    [result] = lab.run(GenerationRequest(PROMPT, max_tokens=90, spec="oracle"))
    assert result.counts.target_passes <= 14
    assert result.counts.widths[9] >= 7


@pytest.fixture
def logs():
    """Every event."""
    with capture_logs() as captured:
        yield captured


def test_adaptive_gives_a_request_up_for_good(make_lab, logs):
    """Four low rounds, then the target alone; the switch is logged once."""
    lab = lab_of(make_lab, POLICIES["adaptive"], draft_max=4)
    [result] = lab.run(GenerationRequest(PROMPT, max_tokens=40, spec="zero"))
    assert (result.counts.proposals, result.counts.drafted) == (4, 16)
    switches = [entry for entry in logs if entry["event"] == "width policy switched"]
    assert [(entry["log_level"], entry["before"], entry["after"]) for entry in switches] == [
        ("debug", "wide", "target-only")
    ]


def test_the_guard_wraps_every_policy(make_lab):
    """The first round is deep and wrong: one replay, and from then on no policy gets more than S tokens."""
    target = ScriptedTarget(VOCAB, rollback_capacity=1)
    drafter = PatternDrafter(target.greedy, VOCAB, ["WWWWWWWW", *["RRRRRRRR"] * 9])
    for policy in (POLICIES["fixed"], lambda _costs: CostAwarePolicy(lambda: FREE)):
        lab = make_lab(target, {"pattern": drafter}, make_policy=policy, draft_max=8)
        [result] = lab.run(GenerationRequest(PROMPT, max_tokens=20, spec="pattern"))
        assert (result.counts.replays, result.counts.guard) == (1, 1)
        # The prompt, the first proposal, the two rows it left pending beside a token; then a token at a time.
        assert sorted(width for width, n in result.counts.widths.items() for _ in range(n) if width > 2) == [3, 5, 9]


class Witness(FixedPolicy):
    """A fixed policy that notes its requests' calls."""

    def __init__(self):
        super().__init__()
        object.__setattr__(self, "calls", [])

    def begin(self, shape):
        width, calls = super().begin(shape), self.calls

        class Noting:
            chances = ()
            stop_below = 0.0
            mode = "fixed"

            def limit(self, room, beside=0, backlog=0):
                calls.append(("limit", room, beside))
                return width.limit(room, beside, backlog)

            def trim(self, token_ids, confidences, beside=0):
                calls.append(("trim", list(token_ids), confidences))
                return width.trim(token_ids, confidences, beside)

            def feedback(self, outcome):
                calls.append(("feedback", outcome.drafted, outcome.accepted, list(outcome.chosen), outcome.replayed))

        return Noting()


def test_a_step_that_is_undone_teaches_nothing(make_lab):
    """A failed forward is asked about again, and only the committed round is fed back."""
    target = ScriptedTarget(VOCAB, faults=Faults({"forward": 3}))
    witness = Witness()
    lab = make_lab(target, drafters(target), make_policy=lambda _costs: witness, draft_max=2)
    number = lab.submit(GenerationRequest(PROMPT, max_tokens=7, spec="oracle"))
    while number not in lab.results:
        try:
            lab.step()
        except BackendError:
            assert [call[0] for call in witness.calls[-2:]] == ["limit", "trim"]
    names = [call[0] for call in witness.calls]
    assert names == ["feedback", *["limit", "trim", "feedback"], *["limit", "trim"], *["limit", "trim", "feedback"]]
    fed = [token for call in witness.calls if call[0] == "feedback" for token in call[3]]
    assert tuple(fed) == lab.results[number].token_ids


@pytest.mark.parametrize(
    "confidences", [[0.5], ["sure", "sure"], [float("nan"), 0.5], 7, [None, None], [0.9, 10**400]], ids=repr
)
def test_confidences_that_are_none_are_not_passed_on(make_lab, confidences):
    """A drafter that miscounts its confidences, or gives no numbers, has none; the request goes on."""
    target, witness = ScriptedTarget(VOCAB), Witness()
    drafter = ScriptedDrafter(lambda tokens, wanted, round_: Proposal([1, 2], confidences))
    lab = make_lab(target, {"odd": drafter}, make_policy=lambda _costs: witness, draft_max=2)
    request = GenerationRequest(PROMPT, max_tokens=9, spec="odd")
    [result] = lab.run(request)
    lab.check_same(request, result)
    trims = [call for call in witness.calls if call[0] == "trim" and len(call[1]) == 2]
    assert trims
    assert [confidences for *_, confidences in trims] == [None] * len(trims)


def test_rows_go_where_they_are_likeliest_used(make_lab):
    """Two requests compete for twelve rows: the one whose drafter is always right gets nearly all of them."""
    target = ScriptedTarget(VOCAB)
    lab = make_lab(
        target, drafters(target), make_policy=lambda _costs: CostAwarePolicy(lambda: FREE), parallel=2, max_rows=12,
        draft_max=10,
    )  # fmt: skip
    requests = [GenerationRequest(PROMPT, max_tokens=99, spec=spec) for spec in ("oracle", "mixed")]
    right, mixed = lab.run(*requests)
    assert max(right.counts.widths) <= 12
    assert right.counts.rounds <= 18  # of 99 tokens; an equal share would take 17 at the very best
    for request, result in zip(requests, (right, mixed), strict=True):
        lab.check_same(request, result)


def test_without_estimates_rows_are_shared_alike(make_lab):
    """Three oracles on ten rows under `fixed`: seven rows for proposals, two or three for each."""
    lab = lab_of(make_lab, POLICIES["fixed"], parallel=3, max_rows=10, draft_max=8)
    results = lab.run(*[GenerationRequest(PROMPT, max_tokens=40, spec="oracle") for _ in range(3)])
    assert max(result.counts.rounds for result in results) <= min(result.counts.rounds for result in results) + 3


@pytest.mark.parametrize("apart", [False, True])
def test_a_step_of_several_passes_is_no_timing_of_a_wide_one(make_lab, monkeypatch, apart):
    """Where rows beyond one for each request run apart, such a step says nothing of a step of as many rows of one."""

    def profile(options):
        made = one_class()(options)
        return evolve(made, decode=evolve(made.decode, apart=apart), prefill=evolve(made.prefill, apart=apart))

    lab = lab_of(make_lab, POLICIES["fixed"], target=ScriptedTarget(VOCAB, profile=profile), parallel=2, draft_max=3)
    timed = []
    monkeypatch.setattr(lab.loop.costs, "observe_forward", lambda width, _seconds: timed.append(width))
    lab.run(*[GenerationRequest(PROMPT, max_tokens=20, spec=spec) for spec in ("oracle", "off")])
    assert (5 in timed, 1 in timed) == (not apart, True)


def test_a_fixed_shape_refuses_adaptive_when_it_is_submitted(make_lab):
    """The submitter is told, not a step that others share."""
    target = ScriptedTarget(VOCAB)
    strategies = {"block": OracleDrafter(target.greedy, VOCAB, fixed_shape=True)}
    lab = make_lab(target, strategies, make_policy=POLICIES["adaptive"])
    with pytest.raises(ConfigError, match="draft shape is fixed"):
        lab.submit(GenerationRequest(PROMPT, spec="block"))
    assert lab.loop.active == 0


def test_prompt_rows_are_no_timings_of_a_round(make_lab):
    """Only forwards whose rows are all read back are compared with rounds; the last of a prompt is none."""
    lab = lab_of(make_lab, POLICIES["fixed"])
    lab.run(GenerationRequest(PROMPT * 3, max_tokens=1))
    assert lab.loop.costs.single_row_s is None
    lab.run(GenerationRequest(PROMPT, max_tokens=2))
    assert lab.loop.costs.single_row_s > 0


def test_a_recorded_trace_says_what_an_oracle_and_a_zero_would_have_got(make_lab):
    """Recording changes no token and checks none, but knows in the end what would have been accepted."""
    recorder = RecordingPolicy()
    lab = lab_of(make_lab, lambda _costs: recorder, draft_max=4)
    results = lab.run(*[GenerationRequest(PROMPT, max_tokens=12, spec=spec) for spec in ("oracle", "zero")])
    assert [result.counts.drafted for result in results] == [0, 0]
    right, wrong = recorder.traces()
    assert [point.accepted for point in right.points] == [0, 4, 4, 4, 4, 4, 4, 4, 3, 2, 1, 0]
    assert {point.accepted for point in wrong.points} == {0}
    assert max(point.proposed for point in wrong.points) == 4
