"""Pages of the KV cache: allocation, reference counts, and reuse by prefix (PagedAttention, Kwon et
al. 2023, arXiv:2309.06180).

Position t of a sequence is in slot `pages[t // page_size] * page_size + t % page_size`. A page is

    held      reference count >= 1: one count a sequence (or group) whose table lists it
    cached    count 0, but a prefix key names its content: served again, or taken back,
              least recently used first
    blank     count 0 and no key

A full prompt page is named by a chain of 128-bit blake2b digests: key_j = H(key_{j-1}, tokens of
page j), with key_{-1} = H(salt). The salt names the behaviour policy (version, digest, formats):
K/V of other weights never match.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b


class OutOfPages(RuntimeError):
    """An error that the scheduler's reservations prevent: too few pages are free."""


class PagePool:
    """A page allocator with reference counts and a prefix cache. turn_caching: also name pages of
    drawn tokens."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        prefix_caching: bool = True,
        turn_caching: bool = False,
    ) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(
                f"num_pages and page_size must be at least 1, got {num_pages} and {page_size}"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self._caching = prefix_caching
        self.turn_caching = turn_caching
        self.peak_used = 0
        self.hits = 0
        self._refcount = [0] * num_pages
        self._blank = list(reversed(range(num_pages)))  # a stack
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    def refcount(self, page: int) -> int:
        return self._refcount[page]

    def allocate(self, n: int) -> list[int]:
        """Take n pages with count 1 and undefined content. OutOfPages, before any is taken."""
        if n > self.num_free:
            raise OutOfPages(f"{n} pages wanted, {self.num_free} of {self.num_pages} free")
        pages = []
        for _ in range(n):
            if self._blank:
                page = self._blank.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                self._forget(page)
            self._refcount[page] = 1
            pages.append(page)
        self.peak_used = max(self.peak_used, self.num_used)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            if self._refcount[page] == 0:
                assert page in self._cached, f"page {page} is blank: nothing to share"
                del self._cached[page]
            self._refcount[page] += 1
        self.peak_used = max(self.peak_used, self.num_used)

    def free(self, pages: Sequence[int]) -> None:
        """Decrement the count of each page. Later pages are evicted first: a prefix outlives its
        suffix."""
        for page in reversed(pages):
            assert self._refcount[page] > 0, f"page {page} freed twice"
            self._refcount[page] -= 1
            if self._refcount[page]:
                continue
            if page in self._key_of:
                self._cached[page] = None
            else:
                self._blank.append(page)

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """Return the pages of the longest known run of `keys`, not yet held: call `reuse` next."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def reuse(self, pages: Sequence[int]) -> None:
        self.share(pages)
        self.hits += len(pages)

    def publish(self, pages: Sequence[int], keys: Sequence[bytes]) -> None:
        """Name held pages with complete K/V. The first page of a key stays."""
        for page, key in zip(pages, keys, strict=True):
            assert self._refcount[page] > 0, f"page {page} is not held"
            if not self._caching or key in self._page_of or page in self._key_of:
                continue
            self._page_of[key] = page
            self._key_of[page] = key

    def clear_prefixes(self) -> None:
        """Forget every key: cached pages become blank."""
        self._blank.extend(reversed(self._cached))
        self._cached.clear()
        self._page_of.clear()
        self._key_of.clear()

    def _forget(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]


def page_keys(token_ids: Sequence[int], page_size: int, salt: bytes) -> list[bytes]:
    """Return a 16-byte key for each full page."""
    key = blake2b(salt, digest_size=16).digest()
    tokens, bytes_per_page = array("q", token_ids).tobytes(), 8 * page_size
    keys = []
    for start in range(0, len(tokens) - bytes_per_page + 1, bytes_per_page):
        key = blake2b(key + tokens[start : start + bytes_per_page], digest_size=16).digest()
        keys.append(key)
    return keys
