"""Continuous batching over a runner: a request may enter at any time, and leaves as soon as it ends."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from hone.engine.params import DIVERGED, check_params, check_prompt, check_stops, check_support, check_text
from hone.engine.requests import NO_LINE, NO_TOP_LOGPROBS, Record, Request, RequestOutput
from hone.engine.runner import LaunchResult, Runner, Ticket
from hone.engine.schedule import ActiveRequest, Prefill, Scheduler
from hone.engine.stop_strings import Decode, StopFinder
from hone.errors import HoneError
from hone.types import Stop

Emit = Callable[[RequestOutput], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How busy the engine is, and what it has computed."""

    running: int  # requests that have a row
    waiting: int
    free_blocks: int
    written: int  # tokens
    computed: int  # prompt tokens
    saved: int  # prompt tokens that were found in memory


@dataclass(slots=True, eq=False)
class _Watch:
    """A request that must be examined after every token, because it streams or has stop strings."""

    active: ActiveRequest
    finder: StopFinder | None
    reported: int = 0


class Engine:
    """Writes the completions of submitted requests. `step` makes the next launches and returns new outputs.

    At most `runner.lag` launches stay in flight. The oldest is read first, so the order is the same in every run.
    Tokens of a request that has already ended are dropped. decode: token ids to text, for stop strings.
    """

    def __init__(self, runner: Runner, *, vocab_size: int, decode: Decode | None = None) -> None:
        self.runner, self.vocab_size, self.decode = runner, vocab_size, decode
        self.adapters: set[str | None] = {None}  # those that the runner is known to have
        self.adapter: str | None = None  # the one that the runner computes with
        self.written = 0
        self.runner.use(None)
        self._abandon()  # rows of the runner may still write for an earlier engine

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self.schedule.owner or self.in_flight)

    @property
    def counts(self) -> Counts:
        """How busy it is, and what it has computed since the start or the last failure.

        Only the thread that calls `step` may ask: the blocks of requests that ended are released first.
        """
        schedule = self.schedule
        return Counts(
            running=schedule.running,
            waiting=len(schedule.queues),
            free_blocks=schedule.pool.free,
            written=self.written,
            computed=schedule.computed,
            saved=schedule.saved,
        )

    def submit(self, requests: Sequence[Request], *, checked: bool = False) -> None:
        """Queue the requests, those of one prompt as a group. HoneError if one cannot be taken: then none is.

        checked: the caller has checked the prompts already.
        """
        seen: set[int] = set()
        for request in requests:
            if request.id in seen or request.id in self.schedule.owner:
                raise HoneError(f"request {request.id} is in the engine already: give each its own id")
            seen.add(request.id)
        self._check(requests, prompts=not checked)
        self.schedule.add(requests)

    def cancel(self, ids: Iterable[int]) -> list[int]:
        """Drop these requests. Returns the ids of those that had not ended."""
        here = [number for number in dict.fromkeys(ids) if number in self.schedule.owner]
        requests = [active for number in here if (active := self.schedule.cancel(number)) is not None]
        self._close(requests)
        if requests:
            self.runner.stop([active.row for active in requests])
        return here

    def step(self) -> list[RequestOutput]:
        """Launch the next prompts and the next token of each row, read launches that are due, and return the outputs.

        HoneError if the model's weights have diverged. After any failure the engine is empty and can be used again.
        """
        outputs: list[RequestOutput] = []
        self.run_step(outputs.append)
        return outputs

    def run_step(self, emit: Emit) -> None:
        """As `step`, but each output is given to `emit` as soon as it is made. `emit` must not call the engine.

        That is faster: the output is still in the processor's cache, and the next one can reuse its memory.
        """
        try:
            before = self.launched
            self._prefill(emit)
            self._decode(emit)
            if self.launched == before and self.in_flight:
                self._read(emit)
            elif self.launched == before and self.schedule.owner:
                raise RuntimeError(
                    "no request can go on, though some have not ended: a fault in the engine or its runner"
                )
        except BaseException:
            self._abandon()
            raise

    def _check(self, requests: Sequence[Request], *, prompts: bool) -> None:
        context, blocks = self.schedule.capacity, self.runner.num_blocks
        settings = {id(request.params): request.params for request in requests}
        for params in settings.values():
            check_params(params, self.vocab_size)
            check_stops(params, self.runner.most_stops)
            check_support(params, records=self.runner.records_support)
            check_text(params, reads_text=self.decode is not None)
        different = {id(request.prompt): request for request in requests} if prompts else {}
        for request in different.values():
            check_prompt(f"request {request.id}", request.prompt, context=context, vocab_size=self.vocab_size)
        sizes = {(len(request.prompt), id(request.params)): request for request in reversed(requests)}
        for request in sizes.values():
            if not 0 < len(request.prompt) < context:
                check_prompt(f"request {request.id}", request.prompt, context=context, vocab_size=self.vocab_size)
            if (needed := self.schedule.blocks_for(request)) > blocks:
                raise HoneError(
                    f"request {request.id} needs {needed} blocks of memory for its prompt and max_tokens, there are "
                    f"{blocks}: shorten it, lower max_tokens or give the sampler more memory"
                )
        for request in requests:
            if not 0 <= (stream := request.id if request.random_id is None else request.random_id) < 2**64:
                raise HoneError(f"request {request.id} draws random numbers {stream}: number it from 0 to 2**64 - 1")
        for adapter in {request.adapter for request in requests} - self.adapters:
            self.runner.use(adapter)  # an unknown name is refused now, not when its turn comes
            self.runner.use(self.adapter)
            self.adapters.add(adapter)

    def _prefill(self, emit: Emit) -> None:
        """Launch prompts several times: while the device computes one launch, the next one is planned."""
        self.schedule.turn()
        for _ in range(self.runner.prefill_launches):
            launch = self.schedule.prefill()
            if not launch.parts:
                return
            self._read_prompts(launch, emit)

    def _read_prompts(self, launch: Prefill, emit: Emit) -> None:
        if self.adapter != self.schedule.queues.adapter:
            self.adapter = self.schedule.queues.adapter
            self.runner.use(self.adapter)
        ticket = self.runner.prefill(launch.parts)
        for active in launch.begin:  # while the device computes
            self._open(active)
        self._add_launch(ticket, emit)

    def _decode(self, emit: Emit) -> None:
        moves, rows = self.schedule.decode()
        if not rows:
            return
        if moves:
            self.runner.move(moves)
            for a, b in moves:
                self.line_of[b], self.line_of[a] = self.line_of[a], NO_LINE
        self._add_launch(self.runner.decode(rows), emit)

    def _add_launch(self, ticket: Ticket, emit: Emit) -> None:
        """Count a launch that has begun, and read the oldest ones if more than `lag` are in flight."""
        self.launched += 1
        self.schedule.launches += 1
        self.in_flight.append((ticket, self.line_of.copy()))
        while len(self.in_flight) > self.runner.lag:
            self._read(emit)

    def _read(self, emit: Emit) -> None:
        ticket, line_of = self.in_flight.popleft()
        written = ticket.read()
        lines = line_of[written.row]  # of the requests that had the rows at the launch
        wanted = self.record.is_open[lines]
        if not wanted.all():
            lines, written = lines[wanted], _select(written, wanted)
        if not math.isfinite(written.logp.sum()):
            raise HoneError(DIVERGED)
        self.record.add(lines, written)
        self.written += len(lines)
        if self.watches:
            self._watch(lines, written, emit)
        if written.ended.any():
            ended = zip(lines[written.ended].tolist(), written.token[written.ended].tolist(), strict=True)
            self._finish([(self.active[line], token) for line, token in ended if line in self.active], emit)
        self.record.recycle(self.launched - len(self.in_flight))

    def _watch(self, lines: NDArray[np.int64], written: LaunchResult, emit: Emit) -> None:
        """Look for stop strings, and emit the tokens of streams."""
        for line, token, ended in zip(lines.tolist(), written.token.tolist(), written.ended.tolist(), strict=True):
            watch = self.watches.get(line)
            if watch is None:
                continue
            finder, active, count = watch.finder, watch.active, self.record.count(line)
            if finder is not None and token not in active.request.params.stop_ids and finder.push(token):
                if not ended:
                    self.runner.stop([active.row])
                self._finish([(active, token)], emit, found=True)
            elif not ended and active.request.stream:
                safe = count if finder is None else finder.safe
                if safe >= watch.reported + active.request.every:
                    emit(self._output(active, watch.reported, safe))
                    watch.reported = safe

    def _finish(self, ended: Sequence[tuple[ActiveRequest, int]], emit: Emit, *, found: bool = False) -> None:
        """Emit the last output of each request, given with its last token. found: a stop string ended it."""
        for active, last in ended:
            watch, count = self.watches.get(active.line), self.record.count(active.line)
            stopped, text = last in active.request.params.stop_ids, ""
            if watch and watch.finder:
                text = watch.finder.text() if found else watch.finder.close()
            stop = Stop.STRING if found else Stop.TOKEN if stopped else Stop.LENGTH
            emit(self._output(active, watch.reported if watch else 0, count, stop=stop, text=text))
            if active.request.keep and self.runner.keeps_written:
                # the last token was drawn but never read: its keys and values are not in memory
                self.schedule.keep(active, self.record.read(active.line, 0, count - 1)[0])
        requests = [active for active, _ in ended]
        self.schedule.release(*requests)
        self._close(requests)

    def _output(
        self, active: ActiveRequest, first: int, last: int, *, stop: Stop | None = None, text: str = ""
    ) -> RequestOutput:
        tokens, logp, raw = self.record.read(active.line, first, last)
        k = active.request.params.top_logprobs
        top = self.record.most_probable(active.line, first, last, k) if k else NO_TOP_LOGPROBS
        output = RequestOutput(id=active.request.id, tokens=tokens, logp=logp, raw=raw, top=top, stop=stop, text=text)
        if active.request.params.support_recorded:
            output.support_size, output.support = self.record.support_of(active.line, first, last)
        return output

    def _open(self, active: ActiveRequest) -> None:
        """Give a request that begins to write a line of the record."""
        request = active.request
        top, support = request.params.top_logprobs > 0, request.params.support_recorded
        line = active.line = self.record.open(active.limit, top=top, support=support)
        self.active[line], self.line_of[active.row] = active, line
        if request.params.stop and self.decode is not None:
            self.watches[line] = _Watch(active, StopFinder(request.params.stop, self.decode))
        elif request.stream:
            self.watches[line] = _Watch(active, None)

    def _close(self, requests: Sequence[ActiveRequest]) -> None:
        """Forget requests that write no more."""
        lines = [active.line for active in requests]
        self.line_of[[active.row for active in requests]] = NO_LINE
        for line in lines:
            del self.active[line]
            self.watches.pop(line, None)
        self.record.close(lines, self.launched)

    def _abandon(self) -> None:
        """Stop all rows and forget everything, since nothing in memory can be trusted after a failure."""
        try:
            self.runner.stop(list(range(self.runner.max_rows)))
        finally:
            self._clear()

    def _clear(self) -> None:
        rows = self.runner.max_rows
        self.schedule = Scheduler(self.runner)
        self.record = Record(rows)
        self.line_of = np.full(rows, NO_LINE)  # by row
        self.active: dict[int, ActiveRequest] = {}  # by line
        self.watches: dict[int, _Watch] = {}
        self.in_flight: deque[tuple[Ticket, NDArray[np.int64]]] = deque()
        self.launched = 0


def _select(written: LaunchResult, chosen: NDArray[np.bool_]) -> LaunchResult:
    """The chosen entries."""
    top = written.top_token is not None and written.top_logp is not None
    return LaunchResult(
        row=written.row[chosen],
        token=written.token[chosen],
        logp=written.logp[chosen],
        raw=written.raw[chosen],
        ended=written.ended[chosen],
        top_token=written.top_token[chosen] if top else None,  # pyright: ignore[reportOptionalSubscript]
        top_logp=written.top_logp[chosen] if top else None,  # pyright: ignore[reportOptionalSubscript]
        support=None if written.support is None else list(compress(written.support, chosen.tolist())),
    )
