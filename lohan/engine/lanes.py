"""The lanes of a run: in-order queues with their threads, and the caller's thread for compute."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol
from zlib import crc32

from lohan.device.base import CpuDevice, Device, Event
from lohan.errors import LohanError
from lohan.schedule.actions import Action, Schedule
from lohan.util.trace import Span, Trace

# -- The queues of lanes ---------------------------------------------------------------------------
#
# Each queue holds the actions of one lane in order, with their states.


class Job:
    """An action in the queue of its lane. `done` is set when the action has finished."""

    __slots__ = ("action", "done", "number", "scalars", "waits")

    def __init__(self, number: int, action: Action, waits: list[Job], scalars: Any) -> None:
        self.number, self.action, self.waits, self.scalars = number, action, waits, scalars
        self.done = threading.Event()


class Queue:
    """A first-in first-out queue that can be emptied and joined."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._busy = False
        self._closed = False
        self._change = threading.Condition()

    def put(self, item: Any) -> None:
        with self._change:
            self._items.append(item)
            self._change.notify_all()

    def take(self) -> Any:
        with self._change:
            self._change.wait_for(lambda: self._items or self._closed)
            if not self._items:
                return None
            self._busy = True
            return self._items.popleft()

    def finished(self) -> None:
        with self._change:
            self._busy = False
            self._change.notify_all()

    def drop(self) -> None:
        with self._change:
            # Submitted I/O is in flight and must be completed, so it stays in the queue.
            self._items = deque(item for item in self._items if isinstance(item, tuple))

    def join(self, timeout_s: float) -> None:
        with self._change:
            if not self._change.wait_for(lambda: not self._items and not self._busy, timeout_s):
                raise LohanError(f"a lane was still busy after {timeout_s:.0f} s")

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._items.clear()
            self._change.notify_all()


# -- Times of device work on the host's clock ------------------------------------------------------


class ComputeStart(NamedTuple):
    """The start of a compute action: the caller's time, and the device's stamp."""

    at_s: float
    stamp: Event | None


class DeviceClock:
    """A converter of time stamps of a device to the clock of the host.

    The clock of a device starts at an arbitrary time. Its first stamp is assumed to be from the
    time at which the host reads it. If work would then have begun before it was launched, or ended
    in the future, the offset is corrected.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._anchor: Event | None = None
        self._anchor_s = 0.0

    def at(self, stamp: Event, *, not_before_s: float) -> float:
        now_s = time.perf_counter()
        if self._anchor is None:
            self._anchor, self._anchor_s = stamp, now_s
        found_s = self._anchor_s + self._device.elapsed_s(self._anchor, stamp)
        possible_s = min(max(found_s, not_before_s), now_s)
        # Later stamps are relative to this one, because long durations lose precision.
        self._anchor, self._anchor_s = stamp, possible_s
        return possible_s


# -- Threads and events: in-order queues, and the caller's own thread as the compute lane ----------
#
#     ssd        two threads: one submits in order, one completes in order, so that several reads
#                and writes are in flight while both sides keep the order of the schedule
#     optimizer  one thread for updates or, with `updates_on_caller`, the caller's own
#     compute    the thread that runs the model: it announces what it begins and ends
#     h2d        one thread for copies to a device with its own memory
#     d2h        one thread for copies from such a device
#     net        one thread for collectives, if there are several ranks
#
# The lanes run concurrently, and each action waits only for the actions that it names. With
# `overlap=False`, the same actions run on the caller's thread, one after the other, in the order of
# the schedule.
#
# Note [compute that is launched and not yet done] A device with its own memory executes its stream
# while the caller continues. A compute action is done when the device has executed it; a separate
# thread waits for its event. The caller is therefore ahead of the device only until the next block
# has to wait, and other lanes rely on completed work, not on launched work.
#
# Note [updates on the caller's thread] If the model computes on the CPU, an optimizer thread would
# take cores away from running matrix products, and every OpenMP barrier would wait for the slower
# threads. Instead, the caller runs ready updates between two blocks and while it waits, with all
# cores.
#
# Note [an error on any lane] The first error is kept, with its action and the ten actions before
# it. Every wait then raises it, queued actions are dropped, and `reset` completes those in flight.
# Nothing is committed after an error.


# An error is raised if no lane finishes anything for this long while the caller waits.
STALL_S = 600.0
HISTORY_ACTIONS = 10
LINK = ("h2d", "d2h")


class Runner(Protocol):
    """The implementation of the actions of a schedule.

    The ssd lane submits an action without blocking on I/O, and completes it by waiting for it. On
    the other lanes, `run` returns when the action is done. `scalars` belongs to the schedule of
    the action.
    """

    def submit(self, action: Action) -> Any: ...
    def complete(self, action: Action, handle: Any) -> None: ...
    def run(self, action: Action, scalars: Any) -> None: ...


class Progress:
    """The actions that have finished, and the first error of any lane."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.changed = threading.Condition()  # notified when an action has finished or failed
        self.finished = 0  # actions
        self.error: BaseException | None = None
        self._history: deque[Action] = deque(maxlen=HISTORY_ACTIONS)

    def finish(self, job: Job, start_s: float, stop_s: float | None = None) -> None:
        """Record that a job has ended at `stop_s` (by default, at the time of the call)."""
        stop_s = time.perf_counter() if stop_s is None else stop_s
        self._trace.add(Span(job.action.lane, job.action.name, start_s, stop_s))
        self._history.append(job.action)
        self.finished += 1
        job.waits = []  # Otherwise, every job would keep all earlier jobs alive.
        with self.changed:
            job.done.set()
            self.changed.notify_all()

    def fail(self, action: Action, error: BaseException) -> None:
        if self.error is None:
            before = " ".join(action.token() for action in self._history) or "nothing"
            error.add_note(
                f"lane {action.lane}, action {action.token()}; finished before it: {before}"
            )
            self.error = error
        with self.changed:
            self.changed.notify_all()

    def raise_if_failed(self) -> None:
        error = self.error
        if error is not None:
            raise error

    def clear(self) -> None:
        self._history.clear()
        self.error = None


class LaneThreads:
    """The threads of the lanes except compute, and their queues."""

    def __init__(self, runner: Runner, device: Device, progress: Progress) -> None:
        self._runner, self._device, self._progress = runner, device, progress
        self._queues: dict[str, Queue] = {}
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._cancelled_from: int | None = None  # number of the first job that must not begin
        # the cancelled actions that lanes have taken from their queues
        self._cancelled: list[Action] = []
        self._clock, self._computed_s = DeviceClock(device), 0.0

    def start(self, *, updates: bool, net: bool) -> None:
        """Start the threads, unless they run; `updates` states whether the optimizer has one."""
        if self._threads:
            return
        bodies: dict[str, Callable[[Any], None]] = {"ssd": self._submit}
        if updates:
            bodies["optimizer"] = self._run
        if self._device.has_own_memory:
            moving = (*LINK, "net") if net else LINK
            bodies |= {lane: self._run for lane in moving} | {"compute": self.finish_compute}
        bodies["done"] = self._complete  # It is last, because the other lanes are joined before it.
        for lane in bodies:
            self._queues[lane] = Queue()
        for lane, body in bodies.items():
            thread = threading.Thread(
                target=self._loop, args=(lane, body), name=f"lohan-{lane}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def put(self, lane: str, item: Any) -> None:
        self._queues[lane].put(item)

    def cancel_from(self, number: int) -> None:
        """Let no job with this number or a higher one begin, until `join`."""
        self._cancelled_from = number

    def join(self, timeout_s: float) -> list[Action]:
        """Wait until all queues are empty, and return the actions cancelled since `cancel_from`."""
        for queue in self._queues.values():
            queue.join(timeout_s)
        self._cancelled_from = None
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    def drop(self) -> None:
        """Drop all queued jobs except submitted I/O."""
        for queue in self._queues.values():
            queue.drop()

    def close(self, timeout_s: float) -> None:
        self._closed = True
        for queue in self._queues.values():
            queue.close()
        for thread in self._threads:
            thread.join(timeout_s)

    def _loop(self, lane: str, body: Callable[[Any], None]) -> None:
        queue, entered = self._queues[lane], False
        while (item := queue.take()) is not None:
            job = item[0] if isinstance(item, tuple) else item
            try:
                if not entered:  # Enter lazily, so that a failure is attributed to an action.
                    self._device.enter(lane)
                    entered = True
                body(item)
            except BaseException as error:
                self._progress.fail(job.action, error)
                self.drop()
            finally:
                queue.finished()

    def _ready(self, job: Job) -> bool:
        """Wait for the actions that a job depends on, and return whether the job can run.

        This may take any time, because the caller determines when compute runs. A dropped job
        counts as done, so that later jobs need not wait for it.
        """
        for other in job.waits:
            while not (self._dropped(job) or self._closed or other.done.wait(0.2)):
                pass
        if self._dropped(job) or self._closed:
            self._cancelled.append(job.action)
            job.done.set()
            return False
        return True

    def _dropped(self, job: Job) -> bool:
        limit = self._cancelled_from
        return self._progress.error is not None or (limit is not None and job.number >= limit)

    def _submit(self, job: Job) -> None:
        if self._ready(job):
            start_s = time.perf_counter()
            self.put("done", (job, self._runner.submit(job.action), start_s))

    def _complete(self, item: tuple[Job, Any, float]) -> None:
        job, handle, start_s = item
        if self._progress.error is not None and not handle:
            # After an error, only actions with I/O in flight are completed. All others are dropped:
            # a commit must not run after a failed write.
            return
        self._runner.complete(job.action, handle)
        self._progress.finish(job, start_s)

    def _run(self, job: Job) -> None:
        if self._ready(job):
            start_s = time.perf_counter()
            self._runner.run(job.action, job.scalars)
            self._progress.finish(job, start_s)

    def finish_compute(self, item: tuple[Job, Event, ComputeStart, Event | None]) -> None:
        """Record when a compute action has finished, by the device's clock.

        Without a device clock, the action is assumed to begin when the previous one ended.
        """
        job, event, begun, ended = item
        event.synchronize()
        if begun.stamp is not None and ended is not None:
            start_s = self._clock.at(begun.stamp, not_before_s=begun.at_s)
            self._progress.finish(job, start_s, self._clock.at(ended, not_before_s=start_s))
            return
        start_s, self._computed_s = max(begun.at_s, self._computed_s), time.perf_counter()
        self._progress.finish(job, start_s)


class Lanes:
    """The lanes of a run, driven by the caller's thread, which is the compute lane."""

    def __init__(
        self,
        runner: Runner,
        *,
        overlap: bool,
        trace: Trace,
        updates_on_caller: bool = False,
        device: Device | None = None,
        net: bool = False,
        stall_s: float = STALL_S,
    ) -> None:
        self._device = device or CpuDevice()
        # A checksum of all collectives so far, in their order, which is the same on all ranks.
        self.collectives_checksum = 0
        self._runner, self._overlap, self._net, self.stall_s = runner, overlap, net, stall_s
        self._progress = Progress(trace)
        self._threads = LaneThreads(runner, self._device, self._progress)
        # The queued updates that the caller runs; None if they run on another thread or in order.
        self._caller_jobs: deque[Job] | None = deque() if updates_on_caller and overlap else None
        self._latest: dict[str, Job] = {}
        self._compute: deque[Job] = deque()
        # without overlap: all actions in the order of the schedule
        self._in_order: deque[Job] = deque()
        self._enqueued = 0
        self._current: Job | None = None
        self._begun = ComputeStart(0.0, None)

    # -- the caller's side ------------------------------------------------------------------------

    def enqueue(self, schedule: Schedule, scalars: Any = None) -> None:
        """Append the actions of a schedule to the queues of their lanes."""
        self._progress.raise_if_failed()
        if self._overlap:
            self._threads.start(updates=self._caller_jobs is None, net=self._net)
        for action in schedule:
            candidates = (self._latest.get(name) for name in action.waits)
            waits = [other for other in candidates if other and not other.done.is_set()]
            self._enqueued += 1
            if action.lane == "net":
                self.collectives_checksum = crc32(action.name.encode(), self.collectives_checksum)
            job = Job(self._enqueued, action, waits, scalars)
            self._latest[action.name] = job
            if action.lane == "compute":
                self._compute.append(job)
            if not self._overlap:
                self._in_order.append(job)
            elif action.lane == "optimizer" and self._caller_jobs is not None:
                self._caller_jobs.append(job)
            elif action.lane != "compute":
                self._threads.put(action.lane, job)

    def expected(self) -> str | None:
        """Return the name of the next action of the compute lane, or None if there is none."""
        return self._compute[0].action.name if self._compute else None

    def begin(self, name: str) -> Action:
        """Begin the next compute action of the caller, and return it when it can run."""
        job = self._compute.popleft()
        assert job.action.name == name, (job.action.name, name)
        self._run_in_order_until(job)
        while self._update_if_ready():
            pass
        self._await(job.waits, job.action)
        self._current, self._begun = job, ComputeStart(time.perf_counter(), self._device.stamp())
        return job.action

    @property
    def computing(self) -> bool:
        """True while a compute action is running."""
        return self._current is not None

    def end(self) -> None:
        job = self._current
        assert job is not None
        self._current = None
        if not self._device.has_own_memory:
            # Lanes use the same memory. A GPU with unified memory may still be computing.
            self._device.mark().synchronize()
            self._progress.finish(job, self._begun.at_s)
            return
        ended = self._device.stamp()
        item = job, self._device.mark(), self._begun, ended
        if self._overlap:
            self._threads.put("compute", item)
        else:
            self._threads.finish_compute(item)

    def wait_for(self, *names: str) -> None:
        """Wait until the latest actions with these names are done."""
        jobs = [job for name in names if (job := self._latest.get(name))]
        if not self._overlap:
            for job in jobs:
                self._run_in_order_until(job)
        self._await(jobs, None)

    def drain(self) -> None:
        """Run all queued actions except compute actions, which are skipped, and wait for them."""
        self._requeue_current()
        self._finish_launched()
        while self._compute:
            job = self._compute.popleft()
            self._run_in_order_until(job)
            self._await(job.waits, job.action)
            job.waits = []
            job.done.set()
        self._run_in_order_until(None)
        self._await(list(self._latest.values()), None)
        self._latest.clear()

    def cancel_queued(self) -> list[Action]:
        """Cancel queued actions from the next or unfinished compute action on, and return them.

        All actions before that compute action are completed. They never wait for a cancelled
        action, because no action waits for a later one. Of the actions after it, only reads, and
        updates and writes of the previous step, can have begun, because all others wait for the
        compute action. Those that have begun are completed and not returned. Neither are
        actions of the caller's thread.
        """
        self._progress.raise_if_failed()
        self._requeue_current()
        self._finish_launched()
        first = self._compute[0].number if self._compute else self._enqueued + 1
        self._threads.cancel_from(first)
        # Lanes that wait for a cancelled action must not wait longer.
        for job in self._compute:
            job.done.set()
        self._compute.clear()
        if self._caller_jobs is not None:
            self._caller_jobs = deque(job for job in self._caller_jobs if job.number < first)
            self._await(list(self._caller_jobs), None)
        cancelled = self._threads.join(self.stall_s)
        self._progress.raise_if_failed()
        self._latest.clear()
        return cancelled

    def _requeue_current(self) -> None:
        """Put an action that was begun and interrupted back to the front of its queue."""
        if self._current is not None:
            self._compute.appendleft(self._current)
            self._current = None

    def _finish_launched(self) -> None:
        """Wait for the launched compute if compute actions are about to be skipped.

        Compute actions finish in order. An action that waits for a skipped compute action therefore
        assumes that all compute before it has finished, such as an earlier reader of its slot.
        """
        if self._compute:
            self._device.mark().synchronize()

    def reset(self) -> None:
        """Drop queued actions, complete those in flight, and clear the error."""
        if self._progress.error is None:
            self._progress.error = LohanError("the step was aborted")
        self._threads.drop()
        self._threads.join(self.stall_s)
        with suppress(LohanError, RuntimeError):  # An aborted block may have launched work.
            self._device.mark().synchronize()
        self._compute.clear()
        self._in_order.clear()
        if self._caller_jobs is not None:
            self._caller_jobs.clear()
        self._latest.clear()
        self._current = None
        self._progress.clear()

    def close(self) -> None:
        self._threads.close(self.stall_s)

    # -- waiting ----------------------------------------------------------------------------------

    def _await(self, jobs: list[Job], action: Action | None) -> None:
        """Wait for jobs, and run updates that become ready meanwhile.

        `action` is the action that needs the jobs, for messages.
        """
        for job in jobs:
            seen, since = self._progress.finished, time.monotonic()
            while not job.done.is_set():
                self._progress.raise_if_failed()
                # If updates have their own thread, only the end of the job needs to wake this one.
                if self._caller_jobs is None:
                    job.done.wait(0.2)
                    self._progress.raise_if_failed()
                elif not self._update_if_ready():
                    with self._progress.changed:
                        if not job.done.is_set() and self._next_update() is None:
                            self._progress.changed.wait(0.2)
                if seen != self._progress.finished:
                    seen, since = self._progress.finished, time.monotonic()
                elif time.monotonic() - since > self.stall_s:
                    self._fail(
                        job.action,
                        LohanError(
                            f"nothing has finished for {self.stall_s:.0f} s while "
                            f"{action.name if action else 'the step'} waits for {job.action.name}; "
                            "the drive or a lane hangs: check the drive, then resume"
                        ),
                    )
        self._progress.raise_if_failed()

    def _next_update(self) -> Job | None:
        """Return the first update in the caller's queue if it can run, otherwise None."""
        head = self._caller_jobs[0] if self._caller_jobs else None
        return head if head and all(other.done.is_set() for other in head.waits) else None

    def _update_if_ready(self) -> bool:
        job = self._next_update()
        if job is None or self._caller_jobs is None:
            return False
        self._caller_jobs.popleft()
        self._run(job)
        return True

    def _fail(self, action: Action, error: BaseException) -> None:
        self._progress.fail(action, error)
        self._threads.drop()

    # -- execution without overlap -----------------------------------------------------------------

    def _run_in_order_until(self, stop: Job | None) -> None:
        """Run queued actions on this thread up to `stop`.

        The compute action `stop` itself is not run; any other action is.
        """
        while self._in_order and not (stop is not None and stop.done.is_set()):
            job = self._in_order[0]
            if job.action.lane == "compute":
                if job is stop:
                    self._in_order.popleft()
                    return
                if not job.done.is_set():
                    break
                self._in_order.popleft()
                continue
            self._in_order.popleft()
            self._run(job)

    def _run(self, job: Job) -> None:
        start_s = time.perf_counter()
        try:
            if job.action.lane == "ssd":
                self._runner.complete(job.action, self._runner.submit(job.action))
            else:
                self._runner.run(job.action, job.scalars)
        except BaseException as error:
            self._fail(job.action, error)
            raise
        self._progress.finish(job, start_s)
