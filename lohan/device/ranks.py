"""The ranks of a run and how they talk: collectives, barriers, heartbeats."""

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

from lohan.errors import ConfigError, LohanError, RankError
from lohan.model.layout import RankInfo, ranks_of

# -- Calls that all ranks of a process group make together -----------------------------------------
#
# By the names that this torch has for them.
#
# They are done when they return: tensors of an accelerator too.


def distributed() -> Any:
    """torch.distributed, which a process that is alone does not import."""
    import torch.distributed

    if not torch.distributed.is_available():
        raise ConfigError("this build of torch has no torch.distributed; several ranks need it")
    return torch.distributed


def all_gather_into(whole: torch.Tensor, shard: torch.Tensor, group: Any) -> None:
    """Every rank's shard, one after the other; `shard` may be this rank's part of `whole`."""
    found = getattr(distributed(), "all_gather_single", None)
    found = found or distributed().all_gather_into_tensor
    found(whole, shard, group=group)
    _synchronize(whole)


def reduce_scatter_rows(rows: torch.Tensor, group: Any) -> torch.Tensor:
    """Row r of every rank's `rows`, added up, for rank r. In the order of the ranks on the CPU: the
    same bits in whatever order they come. Accelerators have an order of their own."""
    if rows.device.type == "cpu":
        heard = torch.empty_like(rows)
        distributed().all_to_all_single(heard.view(-1), rows.view(-1), group=group)
        total = heard[0]
        for row in heard[1:]:
            total += row
        return total
    total = torch.empty_like(rows[0])
    found = getattr(distributed(), "reduce_scatter_single", None)
    found = found or distributed().reduce_scatter_tensor
    found(total, rows.view(-1), group=group)
    _synchronize(total)
    return total


def _synchronize(tensor: torch.Tensor) -> None:
    """What was enqueued on the lane's stream is done."""
    if tensor.device.type != "cpu":
        torch.accelerator.current_stream(tensor.device).synchronize()


# -- A heartbeat of every rank, for those that vanish without closing their connections ------------
#
# A process that ends closes its connections, and the others know at once. A machine that loses
# power or its network does not. So every rank increments its heartbeat in the rendezvous store, and
# looks at those of the others. Patience is counted in own beats: ranks that were all stopped and go
# on together miss nothing.


BEAT_S = 2.0
SILENT = 12  # own beats in which another did not beat once
DIGITS = 20  # more than a count of beats ever has


class Heartbeat:
    """A thread from its making until `stop`. A rank that has fallen silent ends this process: the
    calls that wait for it cannot be called back."""

    def __init__(self, ranks: RankInfo, host: str, port: int, run: str) -> None:
        import torch.distributed

        self._ranks, self._run = ranks, run
        self._rendezvous: Any = torch.distributed.TCPStore(
            host, port, is_master=False, timeout=timedelta(seconds=BEAT_S * SILENT)
        )
        self._done = threading.Event()
        self._missed_beats = MissedBeats(ranks.world)
        self._beat(0)
        self._heard = 0  # the last own beat after which it has heard of all
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
                found = self._rendezvous.multi_get(keys)
            except RuntimeError:  # the rendezvous store itself does not answer: see `_guard`
                continue
            try:
                counts = [count_of(value) for value in found]
            except ValueError as error:
                self._end(f"the rendezvous store holds {error}; another program writes to it")
                return
            self._heard = number
            silent = [rank for rank in self._missed_beats.count(counts) if rank != self._ranks.rank]
            if silent and not self._done.is_set():
                self._end_for(silent)

    def _guard(self) -> None:
        """Counts beats in which the rendezvous store did not answer. A call to it that fails may
        take a minute to say so: torch looks up the names in its C++ stack first."""
        heard = missed = 0
        while not self._done.wait(BEAT_S):
            heard, missed = self._heard, missed + 1 if self._heard == heard else 0
            if missed >= SILENT and not self._ranks.first:
                self._end_for([0])

    def _end_for(self, silent: list[int]) -> None:
        names = ", ".join(f"rank {rank}" for rank in silent)
        self._end(f"{names} gave no sign of life for {BEAT_S * SILENT:.0f} s")

    def _end(self, why: str) -> None:
        sys.stderr.write(
            f"lohan: {why}, so rank {self._ranks.rank} stops too; all steps that were committed "
            "are safe: resume the run with all its ranks\n"
        )
        sys.stderr.flush()
        os._exit(2)


def count_of(value: bytes) -> int:
    """The beat that a rank has written; ValueError if no rank has."""
    text = bytes(value[:DIGITS])
    if len(value) >= DIGITS or not text.isdigit():
        raise ValueError(f"{text!r} where a rank's heartbeat should be")
    return int(text)


class MissedBeats:
    """Who has not counted on for how many looks."""

    def __init__(self, world: int) -> None:
        self._counts, self._same = [-1] * world, [0] * world

    def count(self, counts: list[int]) -> list[int]:
        """The ranks that are silent."""
        for rank, count in enumerate(counts):
            self._same[rank] = 0 if count != self._counts[rank] else self._same[rank] + 1
            self._counts[rank] = count
        return [rank for rank, looks in enumerate(self._same) if looks >= SILENT]


# -- The ranks of a run and how they talk: torch.distributed behind a few calls --------------------
#
# Three groups of the same ranks, since each has its own thread and calls of a group must come in
# the same order everywhere:
#
#     talk     the caller: small facts as JSON, the resident group, shards of weights for an export
#     net      the net lane: weights gathered and gradients summed, in the order of the schedule
#     commit   the ssd lane, or the caller while lanes are idle: all have prepared a commit
#
# A process that is alone has a group of one, and torch.distributed is not imported.
#
# Note [an error on one rank] Ranks wait for each other, so none can go on without the others: the
# first error of a step ends the run on all of them. A rank that fails ends its process; the system
# closes its connections, and the calls of the others fail at once. What that does not reach (a
# machine without power) the heartbeat finds out. The stores are whole at every instant, so nothing
# is put in order before the end.


PATIENCE = timedelta(days=2)  # for a rank that is alive: it may be loading or exporting
BLOCK = 2048  # bytes that small facts take; larger ones go a second time
WORD = 8  # bytes of a length
LAST_WORDS_S = 10.0  # a process that gave up and does not end by itself is ended
LOOK_S = 2.0  # for the processes of ranks that may be gone
BACKLOG = 1024  # ranks that connect at once

Found = TypeVar("Found")


@dataclass(frozen=True)
class Peer:
    """A rank's process."""

    host: str
    pid: int


class ProcessGroup:
    """The ranks of a run. By itself it is that of one process alone, whose collectives are
    identities; `join` gives that of several."""

    ranks = RankInfo()
    local_size = 1  # ranks on this machine, this one included
    is_local_first = True  # no rank on this machine comes before it
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

    # -- talk: the caller's thread ----------------------------------------------------------------

    def all_gather_object(self, value: Any) -> list[Any]:
        """The value of every rank, in their order; plain JSON."""
        return [value]

    def all_gather(self, shard: torch.Tensor) -> torch.Tensor:
        """The shards of all ranks one after the other, in host memory."""
        return shard

    def any_rank(self, mine: bool) -> bool:
        """Whether it is so on some rank."""
        return any(self.all_gather_object(bool(mine)))

    def least(self, *numbers: int | None) -> list[Any]:
        """Of every number the least that a rank has; None where they have none."""
        said = zip(*self.all_gather_object(numbers), strict=True)
        return [None if None in own else min(own) for own in said]

    def broadcast_made(self, make: Callable[[], Found]) -> Found:
        """What the first rank makes, on all of them; plain JSON. Its error is raised on all."""
        made, error = None, None
        if self.ranks.first:
            try:
                made = make()
            except LohanError as problem:
                error = problem
        said = self.all_gather_object([made, str(error) if error is not None else None])[0]
        if error is not None:
            raise error
        if said[1] is not None:
            raise RankError(said[1], told=True)
        result: Found = said[0]
        return result

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Around work that every rank does: where it fails on one, all of them stop, and the one
        says why."""
        try:
            yield
        except LohanError:
            self.all_gather_object(True)
            raise
        if any(failed := self.all_gather_object(False)):
            raise RankError(f"rank {failed.index(True)} could not go on", told=True)

    def reduce_scatter_host(self, rows: torch.Tensor) -> torch.Tensor:
        """As `reduce_scatter`, in host memory, by the caller."""
        return rows[0]

    def send_to_first(self, shard: torch.Tensor) -> None:
        """To rank 0, which calls `receive`."""

    def receive(self, shard: torch.Tensor, rank: int) -> None:
        """Into `shard`, what a rank sends."""

    def open_net(self, torch_device: torch.device) -> None:
        """For tensors where compute is. All ranks call it."""

    # -- net: the net lane's thread ---------------------------------------------------------------

    def all_gather_into(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        """Every rank's shard in its place in `whole`, of which `shard` is this rank's part. They
        are there when it returns."""

    def reduce_scatter(self, rows: torch.Tensor) -> torch.Tensor:
        """Row r of every rank's `rows`, added up, for rank r."""
        return rows[0]

    # -- commit: the ssd lane, or the caller ------------------------------------------------------

    def barrier(self) -> None:
        """Returns when all ranks have come here."""

    # -- the end ----------------------------------------------------------------------------------

    def abort(self) -> None:
        """This rank has failed: its process ends soon, whatever still waits in it."""

    def close(self) -> None:
        """The run is over on all ranks."""


ALONE = ProcessGroup()


class SeveralRanks(ProcessGroup):
    """Use `join`. `peers` has the process of every rank."""

    def __init__(
        self, ranks: RankInfo, talk: Any, commit: Any, heartbeat: Heartbeat, *, ours: bool = True
    ) -> None:
        self.ranks, self._talk, self._commit, self._heartbeat = ranks, talk, commit, heartbeat
        self._ours = ours  # torch's default group goes with it
        self._net: Any = None
        self.peers: tuple[Peer, ...] = ()
        here = Peer(socket.gethostname(), os.getpid())
        self.peers = tuple(Peer(*found) for found in self.all_gather_object([here.host, here.pid]))
        hosts = [peer.host for peer in self.peers]
        self.local_size = hosts.count(here.host)
        self.is_local_first = hosts.index(here.host) == self.rank

    def all_gather_object(self, value: Any) -> list[Any]:
        data = json.dumps(value).encode()
        small = _framed(data[: BLOCK - WORD], len(data), BLOCK)
        heard = self.all_gather(small).view(self.world, BLOCK)
        lengths = [int(row[:WORD].view(torch.int64)) for row in heard]
        longest = max(lengths)
        if longest > BLOCK - WORD:
            heard = self.all_gather(_framed(data, len(data), longest + WORD)).view(self.world, -1)
        pairs = zip(heard, lengths, strict=True)
        return [json.loads(bytes(row[WORD : WORD + n].numpy())) for row, n in pairs]

    def all_gather(self, shard: torch.Tensor) -> torch.Tensor:
        own = shard.contiguous().view(torch.uint8)
        gathered = own.new_empty(self.world * own.numel())
        with self._lost_rank():
            all_gather_into(gathered, own, self._talk)
        return gathered.view(shard.dtype)

    def reduce_scatter_host(self, rows: torch.Tensor) -> torch.Tensor:
        with self._lost_rank():
            return reduce_scatter_rows(rows, self._talk)

    def send_to_first(self, shard: torch.Tensor) -> None:
        with self._lost_rank():
            distributed().send(shard, dst=0, group=self._talk)

    def receive(self, shard: torch.Tensor, rank: int) -> None:
        with self._lost_rank():
            distributed().recv(shard, src=rank, group=self._talk)

    def open_net(self, torch_device: torch.device) -> None:
        if self._net is None:
            with self._lost_rank():
                backend = "gloo"
                if torch_device.type != "cpu":
                    backend = distributed().get_default_backend_for_device(torch_device)
                self._net = distributed().new_group(backend=backend, timeout=PATIENCE)

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
        """A call that fails has lost a rank: which one, as far as can be seen."""
        try:
            yield
        except RuntimeError as error:
            gone = self._gone()
            who = ", ".join(f"rank {rank} (process {self.peers[rank].pid})" for rank in gone)
            text = str(error)
            cause = "" if gone else f" ({text.splitlines()[0][:200]})" if text else ""
            raise RankError(
                f"{who or 'another rank'} is gone{cause}, so rank {self.rank} stops too; all steps "
                "that were committed are safe: resume the run with all its ranks"
            ) from None

    def _gone(self) -> list[int]:
        """Ranks of this machine whose process has ended."""
        end, here = time.monotonic() + LOOK_S, self.peers[self.rank].host if self.peers else ""
        while self.peers:
            gone = [r for r, p in enumerate(self.peers) if p.host == here and not alive(p.pid)]
            if gone or time.monotonic() > end:
                return gone
            time.sleep(0.05)
        return []

    def abort(self) -> None:
        """The process ends soon, whatever still waits for others in it."""
        if not self.aborted:
            self.aborted = True
            threading.Thread(target=_end_late, name="lohan-end", daemon=True).start()

    def close(self) -> None:
        if not self.aborted:
            self.all_gather_object(None)
            self._heartbeat.stop()
            if self._ours:
                distributed().destroy_process_group()


def join(env: Mapping[str, str] | None = None) -> ProcessGroup:
    """The process group that torchrun, or another launcher, has put this process into;
    that of one process if it is alone."""
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
    here = env.get("LOCAL_WORLD_SIZE") == str(ranks.world)  # no machine but this one
    if here:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    ours = not distributed().is_initialized()  # a library may have made the default group
    try:
        if ours:
            rendezvous = local_rendezvous(ranks, env) if here else None
            distributed().init_process_group(
                "gloo", store=rendezvous, rank=ranks.rank, world_size=ranks.world,
                timeout=PATIENCE,
            )  # fmt: skip
        talk = distributed().new_group(backend="gloo", timeout=PATIENCE)
        commit = distributed().new_group(backend="gloo", timeout=PATIENCE)
        heartbeat = Heartbeat(ranks, env["MASTER_ADDR"], int(env["MASTER_PORT"]), run_of(env))
    except (RuntimeError, OSError, ValueError) as error:
        raise RankError(
            f"rank {ranks.rank} of {ranks.world} cannot reach the others at {env['MASTER_ADDR']}:"
            f"{env['MASTER_PORT']} ({str(error).splitlines()[0]}); check that all were started"
        ) from None
    return SeveralRanks(ranks, talk, commit, heartbeat, ours=ours)


@contextmanager
def run_ranks() -> Iterator[ProcessGroup]:
    """Around a whole run. If it fails here, this process ends, and the others notice."""
    group = join(os.environ)
    try:
        yield group
    except BaseException:
        group.abort()
        raise
    group.close()


def in_turn(group: ProcessGroup, act: Callable[[bool], Found]) -> Found:
    """The first rank, then the first of every other machine, then the rest; each is told whether it
    is the first on its machine. So files are made once, and found by the others."""
    here, found = group.is_local_first, list[Found]()
    for turn in (group.ranks.first, here and not group.ranks.first, not here):
        with group.all_or_none():
            if turn:
                found.append(act(here))
    return found[0]


def local_rendezvous(ranks: RankInfo, env: Mapping[str, str]) -> Any:
    """The TCPStore of ranks that are all on this machine, on a loopback address: by itself torch
    listens on all interfaces, and any host that reaches it can write to it. None if it is not ours
    to make: another address, or a store that torchrun itself serves."""
    host, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if not ip_address(address[0]).is_loopback:
        return None
    options = {"timeout": PATIENCE, "wait_for_workers": False, "is_master": ranks.first}
    if not ranks.first:
        return distributed().TCPStore(address[0], port, ranks.world, **options)
    listening = _listening(family, address)
    try:
        options["master_listen_fd"] = listening
        return distributed().TCPStore(address[0], port, ranks.world, **options)
    except RuntimeError:  # torch 2.6: its faster server takes no socket
        with suppress(OSError):
            os.close(listening)
        options["master_listen_fd"] = _listening(family, address)
        return distributed().TCPStore(address[0], port, ranks.world, use_libuv=False, **options)


def _listening(family: int, address: Any) -> int:
    """A descriptor, which the TCPStore closes."""
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
    """Tells this start of the ranks from others that use the same rendezvous store."""
    parts = (env.get("TORCHELASTIC_RUN_ID", "run"), env.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return "-".join(parts)


def alive(pid: int) -> bool:
    """Whether a process of this machine runs; one that has ended and is not yet waited for does
    not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _framed(data: bytes, length: int, size: int) -> torch.Tensor:
    framed = torch.zeros(size, dtype=torch.uint8)
    framed[:WORD] = torch.tensor([length], dtype=torch.int64).view(torch.uint8)
    if data:
        framed[WORD : WORD + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return framed


def _end_late() -> None:
    time.sleep(LAST_WORDS_S)
    os._exit(2)
