"""The page pool against hand-worked cases and, in a random walk, against a model that counts
holds."""

from __future__ import annotations

from hashlib import blake2b
from struct import pack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowroll.kv.pages import OutOfPages, PagePool, page_keys


def test_allocate_share_free_by_hand():
    pool = PagePool(4, 16)
    assert pool.allocate(3) == [0, 1, 2]
    pool.share([1])
    assert [pool.refcount(p) for p in range(4)] == [1, 2, 1, 0]
    pool.free([0, 1])
    assert (pool.num_free, pool.num_used, pool.refcount(1)) == (2, 2, 1)
    with pytest.raises(OutOfPages, match="3 pages wanted, 2 of 4 free"):
        pool.allocate(3)
    assert pool.num_free == 2  # a refused call took nothing
    pool.free([1, 2])
    assert (pool.num_free, pool.peak_used) == (4, 3)
    with pytest.raises(AssertionError, match="page 2 freed twice"):
        pool.free([2])
    with pytest.raises(AssertionError, match="blank"):
        pool.share([2])


@pytest.mark.parametrize("sizes", [(0, 16), (4, 0), (-1, 16)])
def test_a_pool_has_a_page_and_a_page_has_a_slot(sizes):
    with pytest.raises(ValueError, match=f"at least 1, got {sizes[0]} and {sizes[1]}"):
        PagePool(*sizes)
    assert PagePool(1, 1).allocate(1) == [0]


def test_keys_chain_over_salt_and_all_earlier_tokens():
    root = blake2b(b"v1", digest_size=16).digest()
    first = blake2b(root + pack("<2q", 7, 8), digest_size=16).digest()
    second = blake2b(first + pack("<2q", 9, 10), digest_size=16).digest()
    assert page_keys([7, 8, 9, 10, 11], 2, b"v1") == [first, second]
    assert page_keys([7], 2, b"v1") == []
    other_start = page_keys([6, 8, 9, 10], 2, b"v1")
    other_salt = page_keys([7, 8, 9, 10], 2, b"v2")
    assert not {first, second} & {*other_start, *other_salt}


def test_prefix_pages_are_served_until_the_memory_is_needed_least_recent_first():
    pool = PagePool(4, 2)
    keys_a, keys_b = page_keys([1, 2, 3, 4], 2, b"s"), page_keys([5, 6], 2, b"s")
    pages_a, pages_b = pool.allocate(2), pool.allocate(1)
    pool.publish(pages_a, keys_a)
    pool.publish(pages_b, keys_b)
    pool.free(pages_a)
    pool.free(pages_b)
    assert pool.num_free == 4
    assert pool.match(keys_a + keys_b) == pages_a + pages_b
    pool.reuse(pool.match(keys_a[:1]))  # page 0 is held again, so it cannot be taken
    assert pool.hits == 1 and pool.refcount(0) == 1
    assert pool.allocate(1) == [3]  # blank before cached
    assert pool.allocate(1) == [1]  # the older of the cached ones; the prefix outlived its suffix
    assert pool.match(keys_a) == [0] and pool.match(keys_b) == [2]
    assert pool.allocate(1) == [2]
    assert pool.match(keys_b) == []
    with pytest.raises(OutOfPages):
        pool.allocate(1)


def test_first_publisher_of_a_key_is_served_and_clear_forgets():
    pool = PagePool(3, 2)
    keys = page_keys([1, 2], 2, b"s")
    first, second = pool.allocate(1), pool.allocate(1)
    pool.publish(first, keys)
    pool.publish(second, keys)
    assert pool.match(keys) == first
    pool.free(first)
    pool.clear_prefixes()
    assert pool.match(keys) == [] and pool.num_free == 2 and pool.refcount(second[0]) == 1
    pool.free(second)
    assert sorted(pool.allocate(3)) == [0, 1, 2]


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["allocate", "share", "free", "publish", "reuse", "clear"]),
            st.integers(0, 5),
        ),
        max_size=60,
    )
)
def test_random_walk_keeps_exact_counts(steps):
    pool = PagePool(6, 1)
    holds: list[int] = []  # one entry a hold
    for i, (verb, x) in enumerate(steps):
        if verb == "allocate":
            if x > pool.num_free:
                with pytest.raises(OutOfPages):
                    pool.allocate(x)
            else:
                pages = pool.allocate(x)
                assert not set(pages) & set(holds) and len(set(pages)) == x
                holds += pages
        elif verb == "clear":
            pool.clear_prefixes()
        elif verb == "reuse":
            found = pool.match([bytes([x])])
            pool.reuse(found)
            holds += found
        elif holds:
            page = holds[x % len(holds)]
            if verb == "share":
                pool.share([page])
                holds.append(page)
            elif verb == "free":
                pool.free([page])
                holds.remove(page)
            else:
                pool.publish([page], [bytes([i % 6])])
        assert [pool.refcount(p) for p in range(6)] == [holds.count(p) for p in range(6)]
        assert pool.num_free == 6 - len(set(holds)) == 6 - pool.num_used


def test_without_prefix_caching_no_page_is_found_again() -> None:
    pool = PagePool(4, 2, prefix_caching=False)
    pages = pool.allocate(2)
    keys = page_keys([1, 2, 3, 4], 2, b"")
    pool.publish(pages, keys)
    assert pool.match(keys) == []
    pool.free(pages)
    assert pool.num_free == 4 and pool.match(keys) == []
