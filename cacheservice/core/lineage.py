"""Knows which cached chunk follows which, within one namespace.

A chunk names its parent by key; the parent may be cached or not, and may come and go. Links exist only between chunks
that are in the eviction policy, and only from a smaller to a larger number, so that wrong input can't make a cycle.
Called by the store whenever a chunk enters or leaves its policy.
"""

from __future__ import annotations

from cacheservice.core.eviction import Evictable


class Lineage:
    """Parents and children of one namespace's cached chunks; chunks whose parent is not cached wait as orphans."""

    def __init__(self) -> None:
        self._orphans: dict[bytes, Evictable] = {}

    def enter(self, chunk: Evictable, parent_key: bytes | None, parent: Evictable | None) -> None:
        """Link a chunk that is now cached; `parent` is the cached chunk of `parent_key`, None when it is not
        cached.
        """
        if parent is not None and parent.number >= chunk.number:
            parent_key = None
        if parent_key is not None:
            self._add(chunk, parent_key, parent)
        child = self._orphans.pop(chunk.key, None)
        while child is not None:
            following = child.next_sibling
            child.next_sibling = child.preceding_sibling = None
            if child.number > chunk.number:
                self._add(child, chunk.key, chunk)
            child = following

    def leave(self, chunk: Evictable, parent_key: bytes | None) -> None:
        """Unlink a chunk that is cached no more; its children become orphans."""
        preceding, following = chunk.preceding_sibling, chunk.next_sibling
        if following is not None:
            following.preceding_sibling = preceding
        if preceding is not None:
            preceding.next_sibling = following
        elif chunk.parent is not None:
            chunk.parent.first_child = following
        elif parent_key is not None and self._orphans.get(parent_key) is chunk:
            if following is None:
                del self._orphans[parent_key]
            else:
                self._orphans[parent_key] = following
        chunk.parent = chunk.preceding_sibling = chunk.next_sibling = None
        child = chunk.first_child
        if child is not None:
            self._orphans[chunk.key] = child
            chunk.first_child = None
            while child is not None:
                child.parent = None
                child = child.next_sibling

    def check_invariants(self) -> None:
        """Raise AssertionError when an orphan has a parent or a broken link."""
        for first in self._orphans.values():
            preceding: Evictable | None = None
            child: Evictable | None = first
            while child is not None:
                assert child.parent is None, "an orphan has a parent"
                assert child.preceding_sibling is preceding, "broken link between orphans"
                preceding, child = child, child.next_sibling

    def _add(self, chunk: Evictable, parent_key: bytes, parent: Evictable | None) -> None:
        first = self._orphans.get(parent_key) if parent is None else parent.first_child
        chunk.next_sibling, chunk.preceding_sibling = first, None
        if first is not None:
            first.preceding_sibling = chunk
        if parent is None:
            self._orphans[parent_key] = chunk
        else:
            parent.first_child = chunk
            chunk.parent = parent
