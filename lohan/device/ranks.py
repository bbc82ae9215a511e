"""The ranks of a run and their communication: collectives, barriers and heartbeats."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from typing import Any, TypeVar

import torch

from lohan import _core
from lohan.device.accelerator import current_stream, identity, record_event
from lohan.device.out_of_memory import is_out_of_memory
from lohan.errors import BudgetError, ConfigError, LohanError, RankError
from lohan.model.layout import RankInfo, ranks_of

# -- Collectives, by the names that this version of torch has for them -----------------------------
#
# The calls have completed when they return, also for tensors on an accelerator.


def distributed() -> Any:
    """Return torch.distributed, which is imported only in runs with several ranks."""
    import torch.distributed

    if not torch.distributed.is_available():
        raise ConfigError("this build of torch has no torch.distributed; several ranks need it")
    return torch.distributed


def all_gather_into(whole: torch.Tensor, shard: torch.Tensor, group: Any) -> None:
    """Gather the shards of all ranks into `whole`, in the order of ranks.

    `shard` may be a view of this rank's part of `whole`.
    """
    gather = getattr(distributed(), "all_gather_single", None)
    gather = gather or distributed().all_gather_into_tensor
    gather(whole, shard, group=group)
    _synchronize(whole)


def reduce_scatter_rows(rows: torch.Tensor, group: Any) -> torch.Tensor:
    """Sum `rows` over all ranks, and return to rank r row r of the sum.

    On the CPU, rows are added in the order of ranks, so the bits do not depend on the order of
    arrival. Accelerators have their own order.
    """
    if rows.device.type == "cpu":
        received = torch.empty_like(rows)
        distributed().all_to_all_single(received.view(-1), rows.view(-1), group=group)
        total = received[0]
        for row in received[1:]:
            total += row
        return total
    total = torch.empty_like(rows[0])
    reduce_scatter = getattr(distributed(), "reduce_scatter_single", None)
    reduce_scatter = reduce_scatter or distributed().reduce_scatter_tensor
    reduce_scatter(total, rows.view(-1), group=group)
    _synchronize(total)
    return total


def _synchronize(tensor: torch.Tensor) -> None:
    """Sleep until the work on the calling thread's stream is done."""
    if tensor.device.type != "cpu":
        record_event(current_stream(tensor.device)).synchronize()


# -- Heartbeats, which detect ranks that vanish without closing their connections ------------------
#
# A process that ends closes its connections, and the others notice at once. A machine that loses
# power or its network does not. Therefore every rank increments its heartbeat in the rendezvous
# store and reads those of the others. Missed heartbeats are counted in this rank's own beats, so
# ranks that were all suspended and resume together miss nothing.


BEAT_S = 2.0
# A rank counts as lost if its beat has not changed during this many beats of this rank.
LOST_AFTER_BEATS = 12
BEAT_DIGITS = 20  # digits of a beat number; enough for any run


def update_threads(local_ranks: int) -> int:
    """Return the number of threads for updates of one of `local_ranks` ranks on this machine.

    It is the rank's share of the cores, and at most what a rank alone would use.
    """
    return max(1, min(_core.threads(), len(os.sched_getaffinity(0)) // local_ranks))


class Heartbeat:
    """The heartbeat of this rank, which runs in threads until `stop`.

    If another rank's heartbeat stops, this process exits, because calls that wait for that rank
    cannot be cancelled.
    """

    def __init__(self, ranks: RankInfo, host: str, port: int, run: str) -> None:
        import torch.distributed

        self._ranks, self._run = ranks, run
        self._rendezvous: Any = torch.distributed.TCPStore(
            host, port, is_master=False, timeout=timedelta(seconds=BEAT_S * LOST_AFTER_BEATS)
        )
        self._done = threading.Event()
        self._missed_beats = MissedBeats(ranks.world)
        self._beat(0)
        self._answered_beat = 0  # number of the last own beat at which the store answered
        for run_on in (self._live, self._guard):
            threading.Thread(target=run_on, name="lohan-heartbeat", daemon=True).start()

    def stop(self) -> None:
        self._done.set()

    def _beat(self, number: int) -> None:
        self._rendezvous.set(self._key(self._ranks.rank), str(number))

    def _key(self, rank: int) -> str:
        return f"lohan/{self._run}/{rank}"

    def _live(self) -> None:
        number = 0
        while not self._done.wait(BEAT_S):
            number += 1
            try:
                self._beat(number)
                keys = [self._key(rank) for rank in range(self._ranks.world)]
                beats = self._rendezvous.multi_get(keys)
            except RuntimeError:  # `_guard` handles a store that does not answer
                continue
            try:
                counts = [count_of(value) for value in beats]
            except ValueError as error:
                self._end(f"the rendezvous store holds {error}; another program writes to it")
                return
            self._answered_beat = number
            silent = [rank for rank in self._missed_beats.count(counts) if rank != self._ranks.rank]
            if silent and not self._done.is_set():
                self._end_for(silent)

    def _guard(self) -> None:
        """Count the beats in which the rendezvous store did not answer.

        A failing call to the store may take a minute to return, because torch first resolves the
        symbols of its C++ stack trace.
        """
        last_answered = missed = 0
        while not self._done.wait(BEAT_S):
            last_answered, missed = (
                self._answered_beat,
                missed + 1 if self._answered_beat == last_answered else 0,
            )
            if missed >= LOST_AFTER_BEATS and not self._ranks.first:
                self._end_for([0])

    def _end_for(self, silent: list[int]) -> None:
        names = ", ".join(f"rank {rank}" for rank in silent)
        self._end(f"{names} gave no sign of life for {BEAT_S * LOST_AFTER_BEATS:.0f} s")

    def _end(self, why: str) -> None:
        sys.stderr.write(
            f"lohan: {why}, so rank {self._ranks.rank} stops too; all steps that were committed "
            "are safe: resume the run with all its ranks\n"
        )
        sys.stderr.flush()
        os._exit(2)


def count_of(value: bytes) -> int:
    """Return the beat that a rank has written; raise ValueError if it is not a number."""
    text = bytes(value[:BEAT_DIGITS])
    if len(value) >= BEAT_DIGITS or not text.isdigit():
        raise ValueError(f"{text!r} where a rank's heartbeat should be")
    return int(text)


class MissedBeats:
    """The number of consecutive checks in which each rank's beat has not changed."""

    def __init__(self, world: int) -> None:
        self._counts, self._same = [-1] * world, [0] * world

    def count(self, counts: list[int]) -> list[int]:
        """Record the current beats of all ranks, and return the ranks that count as lost."""
        for rank, count in enumerate(counts):
            self._same[rank] = 0 if count != self._counts[rank] else self._same[rank] + 1
            self._counts[rank] = count
        return [rank for rank, looks in enumerate(self._same) if looks >= LOST_AFTER_BEATS]


# -- Process groups: torch.distributed behind a few calls ------------------------------------------
#
# There are three groups of the same ranks. Each is used by its own thread, and the calls of a group
# must have the same order on all ranks.
#
#     caller   the caller: small values as JSON, the resident group, shards of weights for an export
#     net      the net lane: gathered weights and summed gradients, in the order of the schedule
#     commit   the ssd lane, or the caller while lanes are idle: the barrier of a commit
#
# A process without peers has a group of one, and torch.distributed is not imported.
#
# Note [an error on one rank] Ranks wait for each other, so none continues without the others. The
# first error of a step ends the run on all of them. A rank that fails ends its process. The system
# closes its connections, and the calls of the other ranks fail at once. Heartbeats detect what this
# does not cover, such as a machine without power. The stores always contain a complete, consistent
# step, so nothing is cleaned up before the end.


START_TIMEOUT = timedelta(minutes=10)  # time for all ranks to start and connect
MEETING_POLL_S = 0.1
# The timeout of a collective. It is long, because a rank that is alive may be loading or exporting.
COLLECTIVE_TIMEOUT = timedelta(days=2)
FIRST_MESSAGE_BYTES = 2048  # bytes of a first message; longer values need a second one
LENGTH_BYTES = 8  # bytes of the length field
ABORT_S = 10.0  # A process that aborts and does not exit within this time is ended.
LOST_RANK_SEARCH_S = 2.0  # time to look for the processes of lost ranks
BACKLOG = 1024  # connections that may be pending at once

Found = TypeVar("Found")


@dataclass(frozen=True)
class Peer:
    """The process of a rank."""

    host: str
    pid: int


class ProcessGroup:
    """The ranks of a run.

    This class is the group of a single process, whose collectives are identities. With several
    ranks, `join` returns a SeveralRanks.
    """

    ranks = RankInfo()
    local_size = 1  # number of ranks on this machine, including this one
    is_local_first = True  # whether this is the lowest rank on its machine
    aborted = False

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def world(self) -> int:
        return self.ranks.world

    @property
    def several(self) -> bool:
        return self.ranks.several

    # -- caller: the caller's thread ---------------------------------------------------------------

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the JSON values of all ranks, in the order of ranks."""
        return [value]

    def all_gather(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the shards of all ranks in order, in host memory."""
        return shard

    def any_rank(self, value: bool) -> bool:
        """Return whether `value` is true on any rank."""
        return any(self.all_gather_object(bool(value)))

    def least(self, *numbers: int | None) -> list[Any]:
        """Return the element-wise minimum over ranks, or None if any rank has None."""
        columns = zip(*self.all_gather_object(numbers), strict=True)
        return [None if None in values else min(values) for values in columns]

    def broadcast_made(self, make: Callable[[], Found]) -> Found:
        """Call `make` on the first rank and return its result, a JSON value, on all ranks.

        If it raises a LohanError, all ranks raise an error.
        """
        value, error = None, None
        if self.ranks.first:
            try:
                value = make()
            except LohanError as problem:
                error = problem
        first = self.all_gather_object([value, str(error) if error is not None else None])[0]
        if error is not None:
            raise error
        if first[1] is not None:
            raise RankError(first[1], reported=True)
        result: Found = first[0]
        return result

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Raise an error on every rank if the `with` body raises a LohanError on any rank.

        All ranks enter the context. The failed rank raises its own error, the others RankError.
        """
        try:
            yield
        except LohanError:
            self.all_gather_object(True)
            raise
        if any(failed := self.all_gather_object(False)):
            raise RankError(f"rank {failed.index(True)} failed", reported=True)

    def reduce_scatter_host(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what `reduce_scatter` returns, for rows in host memory, on the caller's thread."""
        return rows[0]

    def send_to_first(self, shard: torch.Tensor) -> None:
        """Send `shard` to rank 0, which calls `receive`."""

    def receive(self, shard: torch.Tensor, rank: int) -> None:
        """Receive into `shard` the tensor that a rank sends."""

    def open_net(self, torch_device: torch.device) -> None:
        """Open the net group for tensors on the compute device. All ranks call it."""

    # -- net: the net lane's thread ---------------------------------------------------------------

    def all_gather_into(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        """Gather the shards of all ranks into `whole`; `shard` is the shard of this rank.

        The shards have arrived when the call returns.
        """

    def reduce_scatter(self, rows: torch.Tensor) -> torch.Tensor:
        """Sum `rows` over all ranks, and return to rank r row r of the sum."""
        return rows[0]

    # -- commit: the ssd lane, or the caller ------------------------------------------------------

    def barrier(self) -> None:
        """Wait until all ranks have called this."""

    # -- Shutdown ----------------------------------------------------------------------------------

    def abort(self) -> None:
        """Ensure that this process ends soon after an error, even if a thread of it waits."""

    def close(self) -> None:
        """Leave the group when the run has ended on all ranks."""


ALONE = ProcessGroup()


class SeveralRanks(ProcessGroup):
    """The group of several ranks, created by `join`.

    `peers` contains the host name and the process ID of every rank, in the order of the ranks.
    """

    def __init__(
        self,
        ranks: RankInfo,
        caller_group: Any,
        commit: Any,
        heartbeat: Heartbeat,
        *,
        owns_default: bool = True,
    ) -> None:
        self.ranks, self._caller_group, self._commit, self._heartbeat = (
            ranks,
            caller_group,
            commit,
            heartbeat,
        )
        self._owns_default = owns_default  # whether `close` also destroys torch's default group
        self._net: Any = None
        self.peers: tuple[Peer, ...] = ()
        own_peer = Peer(socket.gethostname(), os.getpid())
        self.peers = tuple(
            Peer(*fields) for fields in self.all_gather_object([own_peer.host, own_peer.pid])
        )
        hosts = [peer.host for peer in self.peers]
        self.local_size = hosts.count(own_peer.host)
        _core.set_threads(update_threads(self.local_size))
        self.is_local_first = hosts.index(own_peer.host) == self.rank

    def all_gather_object(self, value: Any) -> list[Any]:
        data = json.dumps(value).encode()
        small = _framed(data[: FIRST_MESSAGE_BYTES - LENGTH_BYTES], len(data), FIRST_MESSAGE_BYTES)
        gathered = self.all_gather(small).view(self.world, FIRST_MESSAGE_BYTES)
        lengths = [int(row[:LENGTH_BYTES].view(torch.int64)) for row in gathered]
        longest = max(lengths)
        if longest > FIRST_MESSAGE_BYTES - LENGTH_BYTES:
            gathered = self.all_gather(_framed(data, len(data), longest + LENGTH_BYTES)).view(
                self.world, -1
            )
        pairs = zip(gathered, lengths, strict=True)
        return [json.loads(bytes(row[LENGTH_BYTES : LENGTH_BYTES + n].numpy())) for row, n in pairs]

    def all_gather(self, shard: torch.Tensor) -> torch.Tensor:
        contiguous = shard.contiguous().view(torch.uint8)
        gathered = contiguous.new_empty(self.world * contiguous.numel())
        with self._lost_rank():
            all_gather_into(gathered, contiguous, self._caller_group)
        return gathered.view(shard.dtype)

    def reduce_scatter_host(self, rows: torch.Tensor) -> torch.Tensor:
        with self._lost_rank():
            return reduce_scatter_rows(rows, self._caller_group)

    def send_to_first(self, shard: torch.Tensor) -> None:
        with self._lost_rank():
            distributed().send(shard, dst=0, group=self._caller_group)

    def receive(self, shard: torch.Tensor, rank: int) -> None:
        with self._lost_rank():
            distributed().recv(shard, src=rank, group=self._caller_group)

    def open_net(self, torch_device: torch.device) -> None:
        """Connect the ranks on this device.

        The first collective creates the communicator, which takes device memory. It runs here, so
        that measurements of free memory include the communicator.
        """
        if self._net is not None:
            return
        self._check_devices(torch_device)
        backend = "gloo"
        if torch_device.type != "cpu":
            backend = distributed().get_default_backend_for_device(torch_device)
        try:
            with self._lost_rank():
                self._net = distributed().new_group(backend=backend, timeout=COLLECTIVE_TIMEOUT)
                every = torch.zeros(self.world, dtype=torch.uint8, device=torch_device)
                all_gather_into(every, every[self.rank : self.rank + 1], self._net)
        except RuntimeError as error:
            raise BudgetError(
                f"{torch_device}: no memory to connect {self.world} ranks "
                f"({str(error).splitlines()[0]}); stop other programs that use the device"
            ) from error

    def _check_devices(self, torch_device: torch.device) -> None:
        """Raise ConfigError if ranks share a device, which NCCL cannot connect."""
        place = [socket.gethostname(), identity(torch_device)]
        every = self.all_gather_object(place)
        for rank, other in enumerate(every[: self.rank]):
            if other == place and place[1]:
                raise ConfigError(
                    f"rank {rank} and rank {self.rank} would share {torch_device} of {place[0]}; "
                    "every rank needs a device of its own: start fewer ranks, or make another "
                    "device visible to each"
                )

    def all_gather_into(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        with self._lost_rank():
            all_gather_into(whole.view(torch.uint8), shard.view(torch.uint8), self._net)

    def reduce_scatter(self, rows: torch.Tensor) -> torch.Tensor:
        with self._lost_rank():
            return reduce_scatter_rows(rows, self._net)

    def barrier(self) -> None:
        word = torch.ones(1, dtype=torch.int64)
        with self._lost_rank():
            distributed().all_reduce(word, group=self._commit)

    @contextmanager
    def _lost_rank(self) -> Iterator[None]:
        """Turn a failed call into a RankError that names the lost rank if known."""
        try:
            yield
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            ended_ranks = self._ended_ranks()
            who = ", ".join(f"rank {rank} (process {self.peers[rank].pid})" for rank in ended_ranks)
            text = str(error)
            cause = "" if ended_ranks else f" ({text.splitlines()[0][:200]})" if text else ""
            raise RankError(
                f"{who or 'another rank'} is gone{cause}, so rank {self.rank} stops too; all steps "
                "that were committed are safe: resume the run with all its ranks"
            ) from None

    def _ended_ranks(self) -> list[int]:
        """Return the ranks on this machine whose process has ended."""
        end, host = (
            time.monotonic() + LOST_RANK_SEARCH_S,
            self.peers[self.rank].host if self.peers else "",
        )
        while self.peers:
            ended_ranks = [
                r for r, p in enumerate(self.peers) if p.host == host and not alive(p.pid)
            ]
            if ended_ranks or time.monotonic() > end:
                return ended_ranks
            time.sleep(0.05)
        return []

    def abort(self) -> None:
        """End the process after ABORT_S, even if something in it is still waiting."""
        if not self.aborted:
            self.aborted = True
            threading.Thread(target=_end_late, name="lohan-end", daemon=True).start()

    def close(self) -> None:
        if not self.aborted:
            self.all_gather_object(None)
            self._heartbeat.stop()
            if self._owns_default:
                distributed().destroy_process_group()


def join(env: Mapping[str, str] | None = None) -> ProcessGroup:
    """Return the process group to which torchrun or another launcher has assigned this process.

    A process without peers gets the group of one process.
    """
    env = os.environ if env is None else env
    ranks = ranks_of(env)
    if not ranks.several:
        return ALONE
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {ranks.world}, but {' and '.join(missing)} are not set; start the "
            "ranks with `torchrun` or `lohan train --gpus`"
        )
    one_machine = env.get("LOCAL_WORLD_SIZE") == str(ranks.world)  # all ranks are on this machine
    if one_machine:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    address = f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}"
    # A library may have created the default group.
    creates_default = not distributed().is_initialized()
    try:
        rendezvous = None
        if creates_default:
            rendezvous = local_rendezvous(ranks, env) if one_machine else None
            rendezvous = rendezvous or _environment_rendezvous(ranks)
            _meet(rendezvous, ranks, run_of(env), address)
            rendezvous.set_timeout(COLLECTIVE_TIMEOUT)
        # Start the heartbeat before the groups are created, because it ends this process if a rank
        # dies during their creation.
        heartbeat = Heartbeat(ranks, env["MASTER_ADDR"], int(env["MASTER_PORT"]), run_of(env))
        if creates_default:
            distributed().init_process_group(
                "gloo",
                store=rendezvous,
                rank=ranks.rank,
                world_size=ranks.world,
                timeout=COLLECTIVE_TIMEOUT,
            )
        caller_group = distributed().new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        commit = distributed().new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
    except (RuntimeError, OSError, ValueError) as error:
        raise RankError(
            f"rank {ranks.rank} of {ranks.world} cannot reach the others at {address} "
            f"({str(error).splitlines()[0]}); check that all ranks were "
            "started, and read the output of rank 0"
        ) from None
    return SeveralRanks(ranks, caller_group, commit, heartbeat, owns_default=creates_default)


def _environment_rendezvous(ranks: RankInfo) -> Any:
    """Return the store that torch finds through the environment, as init_process_group does."""
    rendezvous = distributed().rendezvous("env://", ranks.rank, ranks.world, timeout=START_TIMEOUT)
    return next(rendezvous)[0]


def _meet(rendezvous: Any, ranks: RankInfo, run: str, address: str) -> None:
    """Wait until every rank has reached the rendezvous store, at most for START_TIMEOUT.

    `run` distinguishes this launch from others, and `address` is for messages.
    """
    keys = [f"lohan/{run}/met/{rank}" for rank in range(ranks.world)]
    rendezvous.set(keys[ranks.rank], "here")
    end_s = time.monotonic() + START_TIMEOUT.total_seconds()
    while not rendezvous.check(keys):
        if time.monotonic() > end_s:
            absent = [str(rank) for rank, key in enumerate(keys) if not rendezvous.check([key])]
            raise RankError(
                f"rank {ranks.rank} of {ranks.world} has waited "
                f"{START_TIMEOUT.total_seconds():,.0f} s at {address} for rank "
                f"{', '.join(absent)}; read the output of the missing ranks, then start all of "
                "them again"
            )
        time.sleep(MEETING_POLL_S)


@contextmanager
def run_ranks() -> Iterator[ProcessGroup]:
    """Join the ranks, and yield their process group for the duration of a run.

    If the run fails on this rank, this process ends, and the other ranks notice.
    """
    group = join(os.environ)
    try:
        yield group
    except BaseException:
        group.abort()
        raise
    group.close()


def in_turn(group: ProcessGroup, act: Callable[[bool], Found]) -> Found:
    """Call `act` on every rank, and return its result.

    The first rank calls it first, then the first rank of every other machine, then all others. The
    argument of `act` is whether the calling rank is the first on its machine. If `act` creates
    files, each machine creates them once, and the other ranks find them.
    """
    is_first, results = group.is_local_first, list[Found]()
    for turn in (group.ranks.first, is_first and not group.ranks.first, not is_first):
        with group.all_or_none():
            if turn:
                results.append(act(is_first))
    return results[0]


def local_rendezvous(ranks: RankInfo, env: Mapping[str, str]) -> Any:
    """Return a TCPStore on MASTER_ADDR if that is a loopback address, otherwise None.

    By default torch listens on all interfaces, and any host that reaches it can write to the store.
    The result is also None if torchrun serves the store.
    """
    host, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if not ip_address(address[0]).is_loopback:
        return None
    options = {"timeout": START_TIMEOUT, "wait_for_workers": False, "is_master": ranks.first}
    if not ranks.first:
        return distributed().TCPStore(address[0], port, ranks.world, **options)
    listening = _listening(family, address)
    try:
        options["master_listen_fd"] = listening
        return distributed().TCPStore(address[0], port, ranks.world, **options)
    except RuntimeError:  # the libuv server of torch 2.6 does not accept a socket
        with suppress(OSError):
            os.close(listening)
        options["master_listen_fd"] = _listening(family, address)
        return distributed().TCPStore(address[0], port, ranks.world, use_libuv=False, **options)


def _listening(family: int, address: Any) -> int:
    """Return the descriptor of a listening socket, which the TCPStore closes."""
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening.detach()


def run_of(env: Mapping[str, str]) -> str:
    """Return a name that distinguishes this launch from others with the same rendezvous store."""
    parts = (env.get("TORCHELASTIC_RUN_ID", "run"), env.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return "-".join(parts)


def alive(pid: int) -> bool:
    """Return whether a process of this machine is running.

    A process that has ended but has not been waited for does not count.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _framed(data: bytes, length: int, size: int) -> torch.Tensor:
    framed = torch.zeros(size, dtype=torch.uint8)
    framed[:LENGTH_BYTES] = torch.tensor([length], dtype=torch.int64).view(torch.uint8)
    if data:
        framed[LENGTH_BYTES : LENGTH_BYTES + len(data)] = torch.frombuffer(
            bytearray(data), dtype=torch.uint8
        )
    return framed


def _end_late() -> None:
    time.sleep(ABORT_S)
    os._exit(2)
