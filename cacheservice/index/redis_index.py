"""The index in Redis: one MGET a lookup, Lua for every write, a deadline and a circuit breaker on every call.

Invariants: a lookup holds its caller no longer than its time-out, and not at all while the breaker is open; nothing
that Redis says is believed before it is bounds-checked, and then it is a hint; a write happens only while the node
table names our epoch; an entry never outlives its TTL, so `heartbeat` asks for it again in time.

Lookups and writes have separate connections: a batch of announcements never delays a lookup. The format is in
docs/decisions/0005-redis-format.md; connecting is `pool.py`'s, words for failures are `trouble.py`'s.

Called by the agent: `lookup` and `nodes` from many threads, the rest from its announcer thread.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from cacheservice.core.keys import DIGEST_BYTES, ChunkKey, NamespaceDigest
from cacheservice.errors import IndexUnavailable
from cacheservice.index import trouble
from cacheservice.index.breaker import CircuitBreaker
from cacheservice.index.entry import pack_entry, parse_entries
from cacheservice.index.location import RedisLocation
from cacheservice.index.node_record import MAX_NODES, pack_node, parse_node
from cacheservice.index.pool import ConnectionPool
from cacheservice.index.port import (
    Announcement,
    Holder,
    IndexHealth,
    IndexReason,
    IndexStatus,
    Node,
)
from cacheservice.index.scripts import ANNOUNCE, HEARTBEAT, JOIN, LEAVE, Script
from cacheservice.index.trouble import RedisTrouble
from cacheservice.index.wire import Connection, Deadline, ErrorReply, connect, pack

KEYS_PER_CALL = 1024
"""Keys of one MGET: 256 KB of values at most while chunks have a few holders, and under 1 ms of Redis's one thread."""
ANNOUNCEMENTS_PER_CALL = 1000
LOOKUP_CONNECTIONS = 8
NODES_AGE_S = 1.0
NODES_RETRY_AGE_S = 0.2
"""An entry of a node that the table does not know makes a lookup read the table again when it is older than this."""
NODES_MARGIN = 16
"""Node numbers asked for beyond the highest known, so that new nodes seldom cost a second round trip."""
CPU_TIER = 1
PROBE_EVERY_S = 10.0
"""How often an agent that renews its lease finds out whether it could write, too. One SET then."""

NO_HOLDERS: tuple[Holder, ...] = ()

T = TypeVar("T")


class _Identity(NamedTuple):
    """Who joined, or tried to."""

    name: str
    address: str
    epoch: int
    record: bytes

    @property
    def epoch_bytes(self) -> bytes:
        return self.epoch.to_bytes(4, "little")


class _NodeTable(NamedTuple):
    """The live nodes as of `read_at`, with the records they were parsed from."""

    nodes: Mapping[int, Node]
    records: Mapping[int, bytes]
    read_at: float


class _Decoded(NamedTuple):
    """One value: who holds the chunk, and how many of its entries count for nothing."""

    holders: tuple[Holder, ...]
    malformed: int
    stale: int


class RedisIndex:
    """`Index` over one Redis server. Thread-safe; owns its connections."""

    def __init__(
        self,
        location: RedisLocation,
        *,
        key_prefix: str,
        timeout_s: float = 0.02,
        write_timeout_s: float = 1.0,
        entry_ttl_s: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connects on first use. `timeout_s` bounds lookups, `write_timeout_s` connecting and all other calls. `clock`
        (s, monotonic) paces breaker, node table and renewal; socket deadlines are always real time."""
        self._location = location
        self._prefix = key_prefix
        self._prefix_bytes = key_prefix.encode()
        self._timeout_s = timeout_s
        self._write_timeout_s = write_timeout_s
        self._entry_ttl_s = entry_ttl_s
        self._clock = clock
        self._breaker = CircuitBreaker(clock=clock)
        self._lookups = self._build_pool(LOOKUP_CONNECTIONS)
        self._writes = self._build_pool(1)

        # Under _lock: who we are, what we last heard, counts. Never held across I/O.
        self._lock = threading.Lock()
        self._identity: _Identity | None = None
        self._number = 0
        self._sentinel: bytes | None = None
        self._run_id: str | None = None
        self._has_failed_to_join = False
        self._must_announce_again = False
        self._renew_at = 0.0
        self._probe_at = float("-inf")
        self._lookup_trouble: RedisTrouble | None = None
        self._write_trouble: RedisTrouble | None = None
        self._was_reached = False
        self._counts = dict.fromkeys(
            (
                "lookups",
                "lookup_errors",
                "malformed_entries",
                "stale_entries",
                "announcements",
                "reannouncements",
            ),
            0,
        )
        self._table = _NodeTable(MappingProxyType({}), {}, float("-inf"))
        self._table_lock = threading.Lock()
        self._highest_number = 0

    # Writers

    def join(self, *, name: str, address: str, epoch: int) -> int:
        """See `Index.join`. ConfigError for a name or address that can't be stored."""
        identity = _Identity(
            name, address, epoch, pack_node(epoch=epoch, name=name, address=address)
        )
        with self._lock:
            is_restart = self._identity is None or self._identity.epoch != epoch
            self._identity = identity
        return self._join(identity, Deadline(self._write_timeout_s), may_replace=is_restart)

    def heartbeat(self) -> bool:
        """See `Index.heartbeat`. Joins when an earlier `join` failed."""
        identity = self._joined(needs_number=False)
        deadline = Deadline(self._write_timeout_s)
        with self._lock:
            number, had_trouble = self._number, self._write_trouble is not None
        if not number:
            self._join(identity, deadline, may_replace=True)
            return self._take_reannouncement()

        def renew(connection: Connection, deadline: Deadline) -> tuple[list[Any], str]:
            answer = self._run(
                connection,
                HEARTBEAT,
                (),
                deadline,
                self._prefix,
                number,
                identity.record,
                secrets.token_hex(8),
            )
            return _list_of(answer, 2), self._run_id_of(connection, deadline)

        (state, sentinel), run_id = self._write(renew, deadline)
        if state == 0:
            self._note_server(sentinel, run_id)
            if had_trouble or self._clock() >= self._probe_at:
                self._probe_writes(deadline)
        else:
            # Expired, or fenced by another incarnation: back in under this epoch, maybe with another number.
            with self._lock:
                self._must_announce_again = True
            self._join(identity, deadline, may_replace=False)
        if not self._breaker.is_closed or self._lookup_trouble is not None:
            self._probe_lookups()
        return self._take_reannouncement()

    def leave(self) -> None:
        """See `Index.leave`. Does nothing when not joined."""
        with self._lock:
            identity, number = self._identity, self._number
            self._identity, self._number = None, 0
        if identity is None or not number:
            return

        def leave(connection: Connection, deadline: Deadline) -> None:
            self._run(connection, LEAVE, (), deadline, self._prefix, number, identity.epoch_bytes)

        self._write(leave, Deadline(self._write_timeout_s))

    def announce(self, announcements: Sequence[Announcement]) -> None:
        """See `Index.announce`. Longer batches go in several calls, each with a time-out of its own; of several
        announcements for one chunk the last counts."""
        identity = self._joined(needs_number=True)
        with self._lock:
            number = self._number
        last = {(a.namespace, a.chunk): a.bitmap for a in announcements}
        pending = list(last.items())
        # Withdrawals first and apart: they free memory, and a full server refuses what comes with an announcement.
        pending.sort(key=lambda item: item[1] != 0)
        num_withdrawn = sum(not bitmap for _, bitmap in pending)
        for batch in (*_batches(pending[:num_withdrawn]), *_batches(pending[num_withdrawn:])):
            self._announce_batch(identity, number, batch)

    # Readers

    def lookup(
        self, namespace: NamespaceDigest, chunks: Sequence[ChunkKey]
    ) -> list[tuple[Holder, ...]]:
        """See `Index.lookup`."""
        if not chunks:
            return []
        tag = self._prefix_bytes + b"{" + namespace[:8].hex().encode() + b"}:"
        commands = b"".join(
            _pack_mget(tag, chunks[at : at + KEYS_PER_CALL])
            for at in range(0, len(chunks), KEYS_PER_CALL)
        )
        deadline = Deadline(self._timeout_s)
        values = self._read_values(commands, len(chunks), deadline)
        if values.count(None) == len(values):
            self._count(lookups=1)
            return [NO_HOLDERS] * len(values)
        return self._holders_of(values, deadline)

    def nodes(self) -> Mapping[int, Node]:
        """See `Index.nodes`. One MGET, shared by all callers of a second."""
        return self._node_table(Deadline(self._timeout_s), max_age_s=NODES_AGE_S).nodes

    # Observers

    def status(self) -> IndexStatus:
        """See `Index.status`: trouble of writes first, since it includes all that the node does for others.

        One lookup that was late is no trouble while the next may be in time: a status that flaps says nothing. When
        Redis is gone, the breaker opens or, without lookups, the heartbeat fails.
        """
        of_lookups = self._lookup_trouble
        if of_lookups is not None and of_lookups.is_late and self._breaker.is_closed:
            of_lookups = None
        found = self._write_trouble or of_lookups
        if found is not None:
            return IndexStatus(found.health, str(found), found.reason)
        if not self._was_reached:
            # Without a reason: nothing is wrong as far as is known.
            return IndexStatus(
                IndexHealth.UNREACHABLE, f"Redis at {self._location.label} has not been asked yet"
            )
        return IndexStatus(IndexHealth.READY)

    def is_alone(self) -> bool:
        """See `Index.is_alone`: any agent may join at any time."""
        return False

    def counters(self) -> Mapping[str, int]:
        """See `Index.counters`."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """See `Index.close`."""
        self._lookups.close()
        self._writes.close()

    # Joining

    def _join(self, identity: _Identity, deadline: Deadline, *, may_replace: bool) -> int:
        def join(connection: Connection, deadline: Deadline) -> tuple[list[Any], str]:
            answer = self._run(
                connection,
                JOIN,
                (),
                deadline,
                self._prefix,
                identity.name,
                self._number,
                identity.record,
                int(may_replace and bool(identity.address)),
                secrets.token_hex(8),
            )
            return _list_of(answer, 2), self._run_id_of(connection, deadline)

        try:
            (number, text), run_id = self._write(join, deadline)
            if not 1 <= number <= MAX_NODES:
                raise self._no_number(identity, text)
        except RedisTrouble as error:
            with self._lock:
                self._has_failed_to_join = True
                self._write_trouble = error
            raise
        self._note_server(text, run_id)
        with self._lock:
            if self._number != number or self._has_failed_to_join:
                self._must_announce_again |= self._number != 0 or self._has_failed_to_join
                self._renew_at = self._next_renewal()
            self._has_failed_to_join = False
            self._number = number
            self._highest_number = max(self._highest_number, number)
        return int(number)

    def _no_number(self, identity: _Identity, text: bytes) -> RedisTrouble:
        if text == b"namesakes":
            said = f"too many live agents are called {identity.name!r}: give each node its own name (--node)"
        else:
            said = f"all {MAX_NODES} node numbers are taken: names are freed a day after their agent went"
        return RedisTrouble(
            IndexHealth.REFUSING,
            IndexReason.REFUSED,
            f"Redis at {self._location.label} has no node number for us: {said}",
        )

    def _joined(self, *, needs_number: bool) -> _Identity:
        with self._lock:
            if self._identity is not None and (self._number or not needs_number):
                return self._identity
        raise IndexUnavailable(
            "this agent has not joined the index yet: the next heartbeat tries again"
        )

    def _note_server(self, sentinel: bytes, run_id: str) -> None:
        with self._lock:
            is_other = (self._sentinel is not None and sentinel != self._sentinel) or (
                bool(run_id) and self._run_id is not None and run_id != self._run_id
            )
            self._must_announce_again |= is_other
            self._sentinel = sentinel
            self._run_id = run_id or self._run_id

    def _take_reannouncement(self) -> bool:
        with self._lock:
            is_due = self._must_announce_again or self._clock() >= self._renew_at
            if is_due:
                self._must_announce_again = False
                self._renew_at = self._next_renewal()
                self._counts["reannouncements"] += 1
            return is_due

    def _next_renewal(self) -> float:
        # Spread, so that agents which were started together don't announce together; half the TTL is left to do it.
        return self._clock() + self._entry_ttl_s * random.uniform(0.35, 0.5)

    def _run_id_of(self, connection: Connection, deadline: Deadline) -> str:
        """The server's run id, asked once a connection (it can't change on it); empty where there is none."""
        if connection.run_id is None:
            text = connection.call(pack("INFO", "server"), deadline)
            lines = text.splitlines() if isinstance(text, bytes) else []
            fields = dict(line.partition(b":")[::2] for line in lines)
            connection.run_id = fields.get(b"run_id", b"").decode(errors="replace")
        return connection.run_id

    # Announcing

    def _announce_batch(
        self,
        identity: _Identity,
        number: int,
        batch: Sequence[tuple[tuple[NamespaceDigest, ChunkKey], int]],
    ) -> None:
        prefix, epoch = self._prefix_bytes, identity.epoch
        keys = [b"%b{%b}:%b" % (prefix, ns[:8].hex().encode(), chunk) for (ns, chunk), _ in batch]
        packed: dict[int, bytes] = {0: b""}
        for _, bitmap in batch:
            if bitmap not in packed:
                packed[bitmap] = pack_entry(Holder(number, CPU_TIER, epoch, bitmap))
        own = number.to_bytes(2, "little") + bytes([CPU_TIER])
        ttl_s = max(1, round(self._entry_ttl_s))

        def announce(connection: Connection, deadline: Deadline) -> list[Any]:
            answer = self._run(
                connection, ANNOUNCE, keys, deadline,
                prefix, number, identity.epoch_bytes, ttl_s, own, *[packed[bitmap] for _, bitmap in batch],
            )  # fmt: skip
            return _list_of(answer, 2)

        state, dropped = self._write(announce, Deadline(self._write_timeout_s))
        if state:
            why = (
                "names another incarnation of us"
                if state == 2
                else "has lost us (its entry expired)"
            )
            raise IndexUnavailable(
                f"nothing was announced: the node table at {self._location.label} {why} for number {number}; the next "
                "heartbeat joins again and then everything is announced"
            )
        self._count(announcements=len(batch), stale_entries=dropped)

    # Looking up

    def _read_values(self, commands: bytes, num_keys: int, deadline: Deadline) -> list[Any]:
        num_replies = -(-num_keys // KEYS_PER_CALL)

        def read(connection: Connection, deadline: Deadline) -> list[Any]:
            replies = connection.call_many(commands, num_replies, deadline)
            values: list[Any] = []
            for at, reply in enumerate(replies):
                values += _list_of(reply, min(KEYS_PER_CALL, num_keys - at * KEYS_PER_CALL))
            return values

        return self._read(read, deadline)

    def _holders_of(
        self, values: Sequence[bytes | None], deadline: Deadline
    ) -> list[tuple[Holder, ...]]:
        table = self._node_table(deadline, max_age_s=NODES_AGE_S)
        decoded, is_unknown = self._decode(values, table.nodes)
        if is_unknown and self._clock() - table.read_at > NODES_RETRY_AGE_S:
            # Maybe of a node that joined since; at most five times a second for entries of the dead.
            table = self._node_table(deadline, max_age_s=NODES_RETRY_AGE_S)
            decoded, _ = self._decode(values, table.nodes)
        malformed = stale = 0
        if any(found.malformed or found.stale for found in decoded.values()):
            malformed = sum(decoded[value].malformed for value in values)
            stale = sum(decoded[value].stale for value in values)
        self._count(lookups=1, malformed_entries=malformed, stale_entries=stale)
        holders = {value: found.holders for value, found in decoded.items()}
        return list(map(holders.__getitem__, values))

    def _decode(
        self, values: Sequence[bytes | None], nodes: Mapping[int, Node]
    ) -> tuple[dict[bytes | None, _Decoded], bool]:
        """Each distinct value, decoded: chunks of one prompt mostly share it. And whether any names an unknown node."""
        own = self._number
        decoded: dict[bytes | None, _Decoded] = {}
        is_unknown = False
        for value in set(values):
            if value is None:
                decoded[value] = _Decoded(NO_HOLDERS, 0, 0)
                continue
            parsed = parse_entries(value)
            live = []
            stale = 0
            for holder in parsed.holders:
                node = nodes.get(holder.node)
                if holder.node == own:
                    continue
                if node is None or node.epoch != holder.epoch:
                    stale += 1
                    is_unknown = True
                else:
                    live.append(holder)
            decoded[value] = _Decoded(tuple(live), parsed.malformed, stale)
        return decoded, is_unknown

    def _node_table(self, deadline: Deadline, *, max_age_s: float) -> _NodeTable:
        table = self._table
        if self._clock() - table.read_at <= max_age_s:
            return table
        try:
            is_ours = self._table_lock.acquire(timeout=deadline.remaining_s())
        except TimeoutError:
            is_ours = False
        if not is_ours:
            raise trouble.timed_out(self._location, deadline.span_s, "give the node table")
        try:
            table = self._table
            if self._clock() - table.read_at <= max_age_s:
                return table
            self._table = self._read_table(table, deadline)
            return self._table
        finally:
            self._table_lock.release()

    def _read_table(self, old: _NodeTable, deadline: Deadline) -> _NodeTable:
        read_at = self._clock()
        asked = min(MAX_NODES, self._highest_number + NODES_MARGIN)
        top, *records = self._read(self._reading(["top", *_node_keys(1, asked)]), deadline)
        highest = _bounded_int(top, self._highest_number)
        if highest > asked:
            records += self._read(self._reading(_node_keys(asked + 1, highest)), deadline)
        self._highest_number = highest
        found = {n: record for n, record in enumerate(records, 1) if record is not None}
        nodes: dict[int, Node] = {}
        malformed = 0
        for number, record in found.items():
            if old.records.get(number) == record and number in old.nodes:
                nodes[number] = old.nodes[number]
                continue
            node = parse_node(number, record)
            if node is None:
                malformed += 1
            else:
                nodes[number] = node
        self._count(malformed_entries=malformed)
        return _NodeTable(MappingProxyType(nodes), found, read_at)

    def _reading(self, suffixes: Sequence[str]) -> Callable[[Connection, Deadline], list[Any]]:
        commands = b"".join(
            pack("MGET", *[self._prefix + suffix for suffix in suffixes[at : at + KEYS_PER_CALL]])
            for at in range(0, len(suffixes), KEYS_PER_CALL)
        )

        def read(connection: Connection, deadline: Deadline) -> list[Any]:
            replies = connection.call_many(commands, -(-len(suffixes) // KEYS_PER_CALL), deadline)
            values = [value for reply in replies for value in _list_of(reply)]
            return _list_of(values, len(suffixes))

        return read

    def _probe_writes(self, deadline: Deadline) -> None:
        """Write something: renewing a lease needs no memory and so works on a full server, which this finds out. Also
        for an agent that has nothing to announce, so that a server which others filled is told before it matters."""
        self._probe_at = self._clock() + PROBE_EVERY_S
        probe = pack("SET", f"{self._prefix}probe", "1", "PX", 1)
        try:
            self._write(lambda connection, left: connection.call(probe, left), deadline)
        except IndexUnavailable:
            pass  # status says so; the lease was renewed

    def _probe_lookups(self) -> None:
        """One cheap read on the lookups' side, so that status heals without lookups."""
        try:
            self._read(self._reading(["sentinel"]), Deadline(self._timeout_s))
        except IndexUnavailable:
            pass  # status says so already

    # Calls

    def _read(self, exchange: Callable[[Connection, Deadline], T], deadline: Deadline) -> T:
        """Run `exchange` on a lookup connection, through the breaker; RedisTrouble."""
        if not self._breaker.permits():
            self._count(lookup_errors=1)
            last = self._lookup_trouble
            raise RedisTrouble(
                last.health if last else IndexHealth.UNREACHABLE,
                last.reason if last else IndexReason.UNREACHABLE,
                f"Redis at {self._location.label} is left alone for a moment after failures in a row; the last: {last}",
            )
        try:
            answer = self._exchange(self._lookups, exchange, deadline)
        except RedisTrouble as error:
            self._breaker.failed()
            self._lookup_trouble = error
            self._count(lookup_errors=1)
            raise
        self._breaker.succeeded()
        self._lookup_trouble = None
        self._was_reached = True
        return answer

    def _write(self, exchange: Callable[[Connection, Deadline], T], deadline: Deadline) -> T:
        """Run `exchange` on the write connection; RedisTrouble."""
        try:
            answer = self._exchange(self._writes, exchange, deadline)
        except RedisTrouble as error:
            self._write_trouble = error
            raise
        self._write_trouble = None
        self._was_reached = True
        return answer

    def _exchange(
        self,
        pool: ConnectionPool,
        exchange: Callable[[Connection, Deadline], T],
        deadline: Deadline,
    ) -> T:
        while True:
            connection = pool.take(deadline)
            is_fresh = connection.num_calls == 0
            try:
                answer = exchange(connection, deadline)
            except ErrorReply as error:
                pool.give_back(connection)
                raise trouble.refused(connection.location, str(error), self._prefix) from error
            except RedisTrouble as error:
                # An older connection breaks when the server is restarted: once more on a new one. All that we send can
                # be repeated.
                pool.discard(connection, and_idle=error.lost_connection)
                if error.lost_connection and not is_fresh:
                    continue
                raise
            except BaseException:
                pool.discard(connection)
                raise
            pool.give_back(connection)
            return answer

    def _run(
        self,
        connection: Connection,
        script: Script,
        keys: Sequence[bytes],
        deadline: Deadline,
        *arguments: bytes | str | int,
    ) -> Any:
        command = pack("EVALSHA", script.sha, len(keys), *keys, *arguments)
        try:
            return connection.call(command, deadline)
        except ErrorReply as error:
            if not str(error).startswith("NOSCRIPT"):
                raise
        # A restart or SCRIPT FLUSH forgot it.
        connection.call(pack("SCRIPT", "LOAD", script.source), deadline)
        return connection.call(command, deadline)

    def _build_pool(self, max_connections: int) -> ConnectionPool:
        return ConnectionPool(
            lambda deadline: connect(self._location, self._prefix, deadline),
            max_connections=max_connections,
            # Shorter than a writer waits, so that the writer learns why there is no connection.
            connect_timeout_s=0.8 * self._write_timeout_s,
            on_late=lambda deadline: trouble.timed_out(
                self._location, deadline.span_s, "accept a connection"
            ),
        )

    def _count(self, **counts: int) -> None:
        with self._lock:
            for name, number in counts.items():
                self._counts[name] += number


def _batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for at in range(0, len(items), ANNOUNCEMENTS_PER_CALL):
        yield items[at : at + ANNOUNCEMENTS_PER_CALL]


def _pack_mget(tag: bytes, chunks: Sequence[ChunkKey]) -> bytes:
    """MGET of `tag` + each chunk key. One join, since all keys are equally long: half the time of a generic packer."""
    if set(map(len, chunks)) != {DIGEST_BYTES}:
        raise ValueError(f"a chunk key has {DIGEST_BYTES} bytes")
    before_key = b"\r\n$%d\r\n%b" % (len(tag) + DIGEST_BYTES, tag)
    return b"*%d\r\n$4\r\nMGET%b%b\r\n" % (len(chunks) + 1, before_key, before_key.join(chunks))


def _node_keys(first: int, last: int) -> list[str]:
    return [f"node:{number}" for number in range(first, last + 1)]


def _bounded_int(text: Any, default: int) -> int:
    if isinstance(text, bytes) and text.isdigit() and len(text) < 6:
        return min(int(text), MAX_NODES)
    return default


def _list_of(reply: Any, length: int | None = None) -> list[Any]:
    """The reply as a list of that length; something else answers on that port when it is none."""
    if not isinstance(reply, list) or (length is not None and len(reply) != length):
        raise ErrorReply(f"ERR unexpected reply of type {type(reply).__name__}")
    return reply
