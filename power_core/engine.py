"""A loaded model that decodes: requests in, events out, from any number of threads."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import TracebackType
from typing import Any

from power_core.capabilities import OFF
from power_core.drafter import Drafter
from power_core.errors import CapabilityError, DeadlineError, DrafterError, PowerError, QueueFullError, RequestError
from power_core.evidence import ArtifactRecord, CostsRecord, PolicyRecord, artifact_record, build_receipt
from power_core.generation import Generation
from power_core.request import Counts, Event, GenerationRequest, Result, SamplingSpec, Usage
from power_core.scheduler.backlog import BacklogDrafter
from power_core.scheduler.chains import ChainDrafter, chain_names
from power_core.scheduler.costs import CostModel
from power_core.scheduler.drafting import OpenDraft
from power_core.scheduler.loop import StepLoop
from power_core.scheduler.policy import WidthPolicy
from power_core.scheduler.sequence import Sequence as RunningSequence
from power_core.scheduler.serving import Serving, make_cache, make_loop, make_queue, make_reuse, num_replicas
from power_core.scheduler.stats import EngineStats, collect
from power_core.scheduler.widths import make_policy
from power_core.shapes import ExactnessLevel, ShapeProfile
from power_core.strategies import ResolvedStrategy
from power_core.target import ChatMessage, SessionOptions, TargetModel, TargetSession, encode_raw
from power_core.types import JSON, FinishReason, Origin, TokenId

__all__ = ["Engine", "Generation"]

# Where this many rows cost more than that, even the trained drafters at hand (1.8 tokens a pass at three proposals)
# earn less than their own rounds take; `auto` then stays with lookup, which costs nothing.
_FEW_ROWS, _DEAR = 4, 1.5
Prompt = str | Sequence[TokenId] | Sequence[ChatMessage]
_PAUSE_S = 0.001
_SAMPLING_FIELDS = frozenset(field.name for field in SamplingSpec.__attrs_attrs__)


class _Turns(threading.local):
    """What the steps hold that run in this thread, by `id`: devices, or engines without one."""

    def __init__(self) -> None:
        self.held: set[int] = set()


_TURNS = _Turns()


class Engine:
    """
    A loaded model with its session and step loop. Made by `Runtime.open`.

    Any number of threads may use one engine: requests are decoded together, each with exactly the
    tokens it would have had alone.

    Attributes:
        name: The model's name.
        model: The target model.
        session: Its session.
        strategy: Default strategy of requests.
        cache: Prompts that are kept, or None where none are.
        host: How the process runs: threads, cores, priority.
    """

    def __init__(
        self,
        name: str,
        model: TargetModel,
        options: SessionOptions,
        *,
        resolve: Callable[[str], ResolvedStrategy],
        allow_unverified: bool,
        strategy: str,
        draft_max: int,
        width_policy: str,
        is_auto: bool = False,
        must_pay: bool = False,
        serving: Serving | None = None,
        host: Mapping[str, JSON] | None = None,
    ) -> None:
        self._serving = serving = serving or Serving()
        self.host = dict(host or {})
        self._options = options
        self._width_policy = width_policy
        self._resolve = resolve
        self._hidden_layers = frozenset(options.hidden_layers)
        self._allow_unverified = allow_unverified
        self.name = name
        self.model = model
        self.draft_max = draft_max
        self._owners: dict[str, str] = {}
        self._artifacts: dict[str, list[ArtifactRecord]] = {}
        self._lock = threading.Lock()  # held by the thread that steps
        self._queues: dict[int, deque[Event] | None] = {}  # None: nobody listens any more
        self._unclaimed: list[Event] = []  # of requests that were given to submit()
        self._closed = False
        self.session = model.open_session(self._options)
        # `auto` never picks what is not lossless.
        self.strategy = OFF if is_auto and not self._is_promised else strategy
        try:
            self._check_level(self.strategy)
            if must_pay:
                self._check_rows_are_cheap(self.strategy)
            replicas = num_replicas(serving, self.session, options.max_sequences)
            self.cache = make_cache(serving, self.session, allow_unverified=allow_unverified)
            self._queue = make_queue(serving, replicas or self.session.max_sequences)
            self.loop = make_loop(self._make_loop(self.session), replicas, serving, self._open_session, self._make_loop)
            self.loop.prepare(self.strategy, draft_max)
        except BaseException:
            self.session.shutdown()
            raise

    def _open_session(self) -> TargetSession:
        return self.model.open_session(self._options)

    def _make_loop(
        self, session: TargetSession, costs: CostModel | None = None, policy: WidthPolicy | None = None
    ) -> StepLoop:
        """A step loop over *session*; those of replicas share costs and policy with the first."""
        costs = CostModel(session.profile.decode, self.draft_max) if costs is None else costs
        return StepLoop(
            session,
            self.model.tokenizer,
            open_strategy=partial(self._open_strategy, session, costs),
            default_strategy=self.strategy,
            draft_max=self.draft_max,
            receipt=self._receipt,
            make_policy=partial(make_policy, self._width_policy) if policy is None else lambda _costs: policy,
            queue=self._queue,
            reuse=make_reuse(self.cache, session, self.model.identity.file_sha256, self.model.identity.adapter_digests),
            costs=costs,
        )

    @property
    def profile(self) -> ShapeProfile:
        """What the session measured about itself."""
        return self.session.profile

    @property
    def has_chat_template(self) -> bool:
        """Whether the model file says how a conversation is written."""
        return self.model.tokenizer.has_chat_template

    # -- prompts ----------------------------------------------------------------------------------

    def encode(self, text: str) -> list[TokenId]:
        """
        Ids of *text* as a raw prompt; special-token spellings in it stay text.

        An empty text is the begin-of-sequence id alone, where the model has one.

        Raises:
            RequestError: Not a text, or one without a UTF-8 form; or the engine is closed.
        """
        if not isinstance(text, str):
            raise RequestError(f"the prompt is {text!r:.80}", who="request", got=text, expected="text")
        self._refuse_closed()
        return encode_raw(self.model.tokenizer, text)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[TokenId]:
        """
        Ids of a conversation under the model's chat template, up to where the assistant speaks.

        Raises:
            RequestError: Not messages, or the template refuses them; or the engine is closed.
        """
        if not isinstance(messages, Sequence) or not all(isinstance(message, ChatMessage) for message in messages):
            raise RequestError(
                f"the messages are {messages!r:.80}", who="chat", got=messages, expected="a sequence of ChatMessage",
                fix='write a turn as power_core.ChatMessage("user", "...")',
            )  # fmt: skip
        self._refuse_closed()
        return self.model.tokenizer.encode_chat(messages)

    def request(self, prompt: Prompt, **fields: Any) -> GenerationRequest:
        """
        A request from *prompt* (text, ids or chat messages) and fields of `GenerationRequest` and `SamplingSpec`.

        Raises:
            RequestError: An unknown field, or a value out of range.
        """
        sampling = {key: fields.pop(key) for key in _SAMPLING_FIELDS & fields.keys()}
        if sampling and "sampling" in fields:
            raise RequestError(f"sampling and {min(sampling)} were both given", who="request", fix="give one of them")
        unknown = fields.keys() - {field.name for field in GenerationRequest.__attrs_attrs__}
        if unknown:
            raise RequestError(f"unknown field {min(unknown)!r}", who="request", got=min(unknown))
        if sampling:
            fields["sampling"] = SamplingSpec(**sampling)
        if isinstance(fields.get("stop"), str):
            fields["stop"] = (fields["stop"],)
        return GenerationRequest(self._prompt_ids(prompt), **fields)

    def _prompt_ids(self, prompt: Prompt) -> Sequence[TokenId]:
        if isinstance(prompt, str):
            return self.encode(prompt)
        first = prompt[0] if isinstance(prompt, Sequence) and prompt else prompt
        if isinstance(first, ChatMessage | Mapping):  # a table is a turn as servers have it: told what one is here
            return self.encode_chat(prompt)  # type: ignore[arg-type]  # a sequence of one kind, or refused
        return prompt  # type: ignore[return-value]  # token ids, or what the request refuses

    # -- decoding ---------------------------------------------------------------------------------

    def generate(self, prompt: Prompt | GenerationRequest, **fields: Any) -> Generation:
        """
        Start a request; iterate over its events.

        Args:
            prompt: A request, or a prompt with *fields* as in `request`.

        Raises:
            PowerError: The request cannot be served.
        """
        if isinstance(prompt, GenerationRequest):
            if fields:
                raise RequestError(
                    f"a request and {min(fields)} were given", who="request", fix="change the request with `with_`"
                )
            request = prompt
        else:
            request = self.request(prompt, **fields)
        self._refuse_within_step()
        with self._lock:
            self._refuse_closed()
            request_id = self.loop.submit(request)
            queue = self._queues[request_id] = deque()
        return Generation(self, request_id, queue)

    def complete(self, prompt: Prompt | GenerationRequest, **fields: Any) -> Result:
        """`generate` run to its end."""
        return self.generate(prompt, **fields).finish()

    def generate_many(self, requests: Iterable[GenerationRequest]) -> list[Result]:
        """
        Run *requests* together; results in their order. One that fails has its error in its result.

        Where the queue is full the next request is handed in when there is room. One that comes too late, for its
        deadline or because others fill the queue, fails alone; as it never ran, its result has no receipt.

        Raises:
            PowerError: A request cannot be served at all; those handed in before it are cancelled.
        """
        if not isinstance(requests, Iterable):
            raise RequestError(
                f"requests is {requests!r:.80}", who="request", got=requests, expected="requests, in a list"
            )
        generations: list[Generation] = []
        for request in requests:
            while True:
                try:
                    generations.append(self.generate(request))
                    break
                except (QueueFullError, DeadlineError) as exc:
                    waiting = next((each for each in generations if not each.is_finished), None)
                    if waiting is None or isinstance(exc, DeadlineError):  # or others fill the queue
                        generations.append(self._refused(request, exc))
                        break
                    waiting.drain()
        return [generation.drain() for generation in generations]

    def _refused(self, request: GenerationRequest, error: PowerError) -> Generation:
        """What has already ended with *error*, without a turn."""
        number, usage = self._queue.number(), Usage(len(request.prompt), 0)
        result = Result(
            number, "", (), tuple(request.prompt), FinishReason.ERROR, usage, (),
            None if request.sampling.logprobs is None else (), Counts(), error=error, client_id=request.client_id,
        )  # fmt: skip
        return Generation(self, number, deque([Event(number, "", None, Origin.END, 0, result=result)]))

    def submit(self, request: GenerationRequest) -> int:
        """Queue a request for callers that `step` themselves; returns its number."""
        self._refuse_within_step()
        with self._lock:
            self._refuse_closed()
            return self.loop.submit(request)

    def step(self) -> list[Event]:
        """One step over all requests; returns the events of those that were given to `submit`."""
        self._refuse_within_step()
        with self._lock:
            self._advance()
            events, self._unclaimed = self._unclaimed, []
            return events

    def cancel(self, request_id: int) -> None:
        """Ask for the end of a request, from any thread."""
        self.loop.cancel(_number(request_id))

    def progress(self, request_id: int) -> tuple[int, int]:
        """Prompt tokens evaluated, and prompt tokens in all."""
        return self.loop.progress(_number(request_id))

    def stats(self) -> EngineStats:
        """What the engine did since it was opened: queue, steps, requests, cache, replicas."""
        return collect(self.loop, self.strategy, self.cache)

    def close(self) -> None:
        """Free the session and the model; requests that have not ended are forgotten. Idempotent."""
        self._refuse_within_step()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                self.loop.close()
                self._queue.clear()
                if self.cache is not None:
                    self.cache.clear()
            finally:
                self.session.shutdown()
                self.model.close()
                self._serving.release()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _advance(self) -> None:
        """Step once and sort the events to those who wait for them; needs the lock."""
        self._refuse_closed()
        device = self._serving.device
        with nullcontext() if device is None else device.acquire(self.name):
            _TURNS.held.add(self._turn)
            try:
                events = self.loop.step()
            finally:
                _TURNS.held.discard(self._turn)
        if not events:
            self._pause()
        for event in events:
            queue = self._queues.get(event.request_id, self._unclaimed)
            if queue is not None:
                queue.append(event)
            if event.origin is Origin.END:
                self._queues.pop(event.request_id, None)

    @property
    def _turn(self) -> int:
        return id(self._serving.device or self)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RequestError("the engine is closed", who=f"engine {self.name!r}", fix="open the model again")

    def _refuse_within_step(self) -> None:
        """Refuse a user's code that runs within a step what would wait for that very step, for ever."""
        if self._turn in _TURNS.held:
            raise RequestError(
                "called from within a step, by a logits processor or a plugin",
                who=f"engine {self.name!r}",
                fix="call it between two events",
            )

    def _pause(self) -> None:
        """Let others run where nothing can be stepped: every request waits for something that others hold."""
        if self._queue.admission.active == 0:
            time.sleep(_PAUSE_S)

    def _next_event(self, queue: deque[Event]) -> Event:
        while not queue:
            self._refuse_within_step()
            with self._lock:
                if not queue:  # another thread may have stepped meanwhile
                    self._advance()
        return queue.popleft()

    def _abandon(self, request_id: int) -> None:
        if request_id in self._queues:
            self._queues[request_id] = None
            self.loop.cancel(request_id)

    # -- strategies and receipts ------------------------------------------------------------------

    @property
    def _is_promised(self) -> bool:
        return self.profile.level is not ExactnessLevel.UNVERIFIED or self._allow_unverified

    def _check_rows_are_cheap(self, strategy: str) -> None:
        """Refuse a drafter with weights where rows cost so much that asking it is a loss: measured, not guessed."""
        cost = self.profile.decode.cost(_FEW_ROWS) or 1.0
        items = [self._resolve(name).item for name in chain_names(strategy)] if strategy != OFF else []
        if cost > _DEAR and any(item.options.get("artifact_kind") for item in items):
            raise CapabilityError(
                f"{_FEW_ROWS} rows cost {cost:.2f} single rows here, so that {strategy!r} would slow most texts down",
                who=f"engine {self.name!r}",
                got=cost,
                expected=f"at most {_DEAR}",
                fix="name the strategy to use it all the same",
            )

    def _check_level(self, strategy: str) -> None:
        if strategy != OFF and not self._is_promised:
            raise CapabilityError(
                f"strategy {strategy!r} cannot be promised to be lossless on this target",
                who=f"engine {self.name!r}",
                got=self.profile.level.value,
                expected="level bitwise or padded",
                fix="see `power doctor`; decode with --spec off, or set allow_unverified = true",
            )

    def _open_strategy(self, session: TargetSession, costs: CostModel, name: str) -> OpenDraft:
        self._check_level(name)
        resolved = [self._resolve(each) for each in chain_names(name)]
        for each in resolved:
            self._check_needs(each)
        members: dict[str, Drafter] = {each.item.name: BacklogDrafter(each.drafter) for each in resolved}
        drafter = ChainDrafter(members, costs) if len(members) > 1 else members[resolved[0].item.name]
        needs = drafter.requirements()
        self._owners[name] = ", ".join(dict.fromkeys(each.item.owner for each in resolved))
        self._artifacts[name] = [artifact_record(each.artifact) for each in resolved if each.artifact is not None]
        try:
            opened = drafter.open(self.model, session)
        except PowerError:
            raise
        except (Exception, SystemExit) as exc:  # plugin code may raise anything, and must not end the process
            raise DrafterError(
                f"opening it raised {type(exc).__name__}: {exc}",
                who=f"strategy {name!r}",
                got=exc,
                fix="report it to the plugin's author, or decode with --spec off",
            ) from exc
        return OpenDraft(
            name,
            opened,
            needs,
            owner=self._owners[name],
        )

    def _check_needs(self, strategy: ResolvedStrategy) -> None:
        item, needs = strategy.item, strategy.drafter.requirements()
        unread = sorted(set(needs.hidden_layers) - self._hidden_layers)
        if unread:
            raise CapabilityError(
                f"strategy {item.name!r} reads block outputs that this session was not opened with: "
                + ", ".join(map(str, unread)),
                who=f"engine {self.name!r}",
                got=sorted(self._hidden_layers),
                plugin=item.plugin,
                fix=f"open the model with --spec {item.name}, alone or in a chain",
            )
        missing = needs.capabilities - self.session.capabilities
        if missing:
            raise CapabilityError(
                f"strategy {item.name!r} needs {', '.join(sorted(missing))}, which this target does not have",
                who=f"engine {self.name!r}",
                got=sorted(self.session.capabilities),
                plugin=item.plugin,
                fix="choose another strategy or another target backend",
            )

    def _receipt(self, sequence: RunningSequence, result: Result) -> Mapping[str, JSON]:
        clock = sequence.clock
        return build_receipt(
            target=self.model.identity,
            strategy=sequence.strategy,
            drafter_owner=self._owners.get(sequence.strategy),
            artifacts=self._artifacts.get(sequence.strategy, ()),
            profile=self.profile,
            request=sequence.request.with_(draft_max=sequence.draft_max),
            seed=sequence.seed,
            token_ids=result.token_ids,
            text=result.text,
            finish_reason=result.finish_reason,
            usage=result.usage,
            logprobs=result.logprobs,
            counts=result.counts,
            timings=clock.timings(),
            environment=self.model.facts(),
            host=self.host,
            policy=self._policy_record(sequence),
        )

    def _policy_record(self, sequence: RunningSequence) -> PolicyRecord | None:
        if sequence.strategy == OFF:
            return None
        costs = CostsRecord(**self.loop.costs.curve.to_json())
        return PolicyRecord(self.loop.policy.name, sequence.width.summary(), costs)


def _number(request_id: int) -> int:
    if not isinstance(request_id, int):
        raise RequestError(
            f"request_id is {request_id!r:.80}", who="request", got=request_id, expected="what submit() returned"
        )
    return request_id
