"""Continuous batching over a runner: requests go in at any time, and each leaves when it ends; nobody waits."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from hone.engine.params import DIVERGED, check_params, check_prompt, check_stops, check_support, check_text
from hone.engine.requests import NO_TOPS, NOBODY, News, Record, Request
from hone.engine.runner import LaunchResult, Runner, Ticket
from hone.engine.schedule import ActiveRequest, Prefill, Scheduler
from hone.engine.stop_strings import Decode, StopFinder
from hone.errors import HoneError
from hone.types import Stop

Tell = Callable[[News], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How busy the engine is, and what it has done."""

    running: int  # requests that have a row
    waiting: int
    free_blocks: int
    written: int  # tokens
    computed: int  # prompt tokens
    saved: int  # prompt tokens that were in memory already


@dataclass(slots=True, eq=False)
class _Watch:
    """A request that is looked at after every token: it streams, or has stop strings."""

    place: ActiveRequest
    finder: StopFinder | None
    reported: int = 0


class Engine:
    """Writes completions of the requests submitted. `step` launches what can be, and gives the news.

    After a launch has begun, at most `runner.lag` stay in flight; the oldest is read first, so every run has the same
    order. Tokens of a request that already ended are dropped.
    decode: token ids to text, for stop strings.
    """

    def __init__(self, runner: Runner, *, vocab_size: int, decode: Decode | None = None) -> None:
        self.runner, self.vocab_size, self.decode = runner, vocab_size, decode
        self.known: set[str | None] = {None}  # adapters the runner has
        self.using: str | None = None  # the adapter that the runner computes with
        self.written = 0
        self.runner.use(None)
        self._abandon()  # the runner may come from an engine that was left in the middle

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self.schedule.owner or self.flight)

    @property
    def counts(self) -> Counts:
        """How busy it is, and what it has done since the start or the last failure. For the thread that steps: blocks
        are counted, and those of requests that ended released for it."""
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
        """Take the requests, those of one prompt as a group; HoneError with the reason if one cannot be taken, and
        then none is. checked: the model can read every prompt, as is known."""
        seen: set[int] = set()
        for request in requests:
            if request.id in seen or request.id in self.schedule.owner:
                raise HoneError(f"request {request.id} is in the engine already: give each its own id")
            seen.add(request.id)
        self._check(requests, prompts=not checked)
        self.schedule.add(requests)

    def cancel(self, ids: Iterable[int]) -> list[int]:
        """No more news of these; gives those that had not ended."""
        here = [number for number in dict.fromkeys(ids) if number in self.schedule.owner]
        places = [place for number in here if (place := self.schedule.cancel(number)) is not None]
        self._close(places)
        if places:
            self.runner.stop([place.row for place in places])
        return here

    def step(self) -> list[News]:
        """Launch the prompts and the token that are next, read what is due, and give the news.

        HoneError when the model's weights have diverged. After any failure the engine is empty, and can be used.
        """
        news: list[News] = []
        self.go_on(news.append)
        return news

    def go_on(self, tell: Tell) -> None:
        """As `step`, but `tell` gets each news as soon as it is made, and must leave the engine alone.

        The news is still in the processor's cache then, and the next one can have its memory.
        """
        try:
            before = self.launched
            self._prefill(tell)
            self._decode(tell)
            if self.launched == before and self.flight:
                self._read(tell)
            elif self.launched == before and self.schedule.owner:
                raise RuntimeError("requests are left and none can go on: a fault in the engine or its runner")
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
            if not 0 <= (noise := request.id if request.noise is None else request.noise) < 2**64:
                raise HoneError(f"request {request.id} draws random numbers {noise}: number it from 0 to 2**64 - 1")
        for adapter in {request.adapter for request in requests} - self.known:
            self.runner.use(adapter)  # a name that is not there is said now, not when its turn comes
            self.runner.use(self.using)
            self.known.add(adapter)

    def _prefill(self, tell: Tell) -> None:
        """Several launches: while the first is computed, the places of the next are found."""
        self.schedule.turn()
        for _ in range(self.runner.prefill_launches):
            launch = self.schedule.prefill()
            if not launch.parts:
                return
            self._read_prompts(launch, tell)

    def _read_prompts(self, launch: Prefill, tell: Tell) -> None:
        if self.using != self.schedule.queues.adapter:
            self.using = self.schedule.queues.adapter
            self.runner.use(self.using)
        ticket = self.runner.prefill(launch.parts)
        for place in launch.begin:  # while it is computed
            self._open(place)
        self._fly(ticket, tell)

    def _decode(self, tell: Tell) -> None:
        moves, rows = self.schedule.decode()
        if not rows:
            return
        if moves:
            self.runner.move(moves)
            for a, b in moves:
                self.line_of[b], self.line_of[a] = self.line_of[a], NOBODY
        self._fly(self.runner.decode(rows), tell)

    def _fly(self, ticket: Ticket, tell: Tell) -> None:
        """A launch is on its way; the ones that it pushes out are read."""
        self.launched += 1
        self.schedule.launches += 1
        self.flight.append((ticket, self.line_of.copy()))
        while len(self.flight) > self.runner.lag:
            self._read(tell)

    def _read(self, tell: Tell) -> None:
        ticket, line_of = self.flight.popleft()
        written = ticket.read()
        lines = line_of[written.row]  # whose row it was at the launch
        wanted = self.record.is_open[lines]
        if not wanted.all():
            lines, written = lines[wanted], _picked(written, wanted)
        if not math.isfinite(written.logp.sum()):
            raise HoneError(DIVERGED)
        self.record.add(lines, written)
        self.written += len(lines)
        if self.watches:
            self._watch(lines, written, tell)
        if written.ended.any():
            ended = zip(lines[written.ended].tolist(), written.token[written.ended].tolist(), strict=True)
            self._end([(self.places[line], token) for line, token in ended if line in self.places], tell)
        self.record.recycle(self.launched - len(self.flight))

    def _watch(self, lines: NDArray[np.int64], written: LaunchResult, tell: Tell) -> None:
        """Requests that stream or have stop strings, a token further."""
        for line, token, ended in zip(lines.tolist(), written.token.tolist(), written.ended.tolist(), strict=True):
            watch = self.watches.get(line)
            if watch is None:
                continue
            finder, place, count = watch.finder, watch.place, self.record.count(line)
            if finder is not None and token not in place.request.params.stop_ids and finder.push(token):
                if not ended:
                    self.runner.stop([place.row])
                self._end([(place, token)], tell, found=True)
            elif not ended and place.request.stream:
                safe = count if finder is None else finder.safe
                if safe >= watch.reported + place.request.every:
                    tell(self._news(place, watch.reported, safe))
                    watch.reported = safe

    def _end(self, ended: Sequence[tuple[ActiveRequest, int]], tell: Tell, *, found: bool = False) -> None:
        """The last news of requests, each with its last token; `found` is a stop string."""
        for place, last in ended:
            watch, count = self.watches.get(place.slot), self.record.count(place.slot)
            stopped, text = last in place.request.params.stop_ids, ""
            if watch and watch.finder:
                text = watch.finder.text() if found else watch.finder.close()
            stop = Stop.STRING if found else Stop.TOKEN if stopped else Stop.LENGTH
            tell(self._news(place, watch.reported if watch else 0, count, stop=stop, text=text))
            if place.request.keep and self.runner.keeps_written:
                # the last token was drawn and never read: its keys and values are not in memory
                self.schedule.keep(place, self.record.since(place.slot, 0, count - 1)[0])
        places = [place for place, _ in ended]
        self.schedule.release(*places)
        self._close(places)

    def _news(self, place: ActiveRequest, first: int, last: int, *, stop: Stop | None = None, text: str = "") -> News:
        tokens, logp, raw = self.record.since(place.slot, first, last)
        k = place.request.params.top_logprobs
        top = self.record.most_probable(place.slot, first, last, k) if k else NO_TOPS
        news = News(id=place.request.id, tokens=tokens, logp=logp, raw=raw, top=top, stop=stop, text=text)
        if place.request.params.support_recorded:
            news.support_size, news.support = self.record.could_draw(place.slot, first, last)
        return news

    def _open(self, place: ActiveRequest) -> None:
        """It begins to write."""
        request = place.request
        top, support = request.params.top_logprobs > 0, request.params.support_recorded
        line = place.slot = self.record.open(place.limit, top=top, support=support)
        self.places[line], self.line_of[place.row] = place, line
        if request.params.stop and self.decode is not None:
            self.watches[line] = _Watch(place, StopFinder(request.params.stop, self.decode))
        elif request.stream:
            self.watches[line] = _Watch(place, None)

    def _close(self, places: Sequence[ActiveRequest]) -> None:
        """Nothing more is heard of them."""
        lines = [place.slot for place in places]
        self.line_of[[place.row for place in places]] = NOBODY
        for line in lines:
            del self.places[line]
            self.watches.pop(line, None)
        self.record.close(lines, self.launched)

    def _abandon(self) -> None:
        """After a failure: nobody writes, and nothing in memory is trusted."""
        try:
            self.runner.stop(list(range(self.runner.max_rows)))
        finally:
            self._clear()

    def _clear(self) -> None:
        rows = self.runner.max_rows
        self.schedule = Scheduler(self.runner)
        self.record = Record(rows)
        self.line_of = np.full(rows, NOBODY)  # by row
        self.places: dict[int, ActiveRequest] = {}  # by line
        self.watches: dict[int, _Watch] = {}
        self.flight: deque[tuple[Ticket, NDArray[np.int64]]] = deque()
        self.launched = 0


def _picked(written: LaunchResult, chosen: NDArray[np.bool_]) -> LaunchResult:
    """Some of the entries."""
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
