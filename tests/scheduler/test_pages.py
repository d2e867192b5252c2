import random
from hashlib import blake2b

from crossdock.scheduler import PagePool, extend_digests, root_digest


def chain(tokens, page_size=4, namespace=""):
    digests = []
    extend_digests(digests, tokens, page_size, root_digest(namespace))
    return digests


def test_digests_cover_the_whole_prefix_and_the_namespace():
    tokens = [random.randrange(50000) for _ in range(23)]
    digests = chain(tokens)
    assert len(digests) == 5
    for changed in range(20):
        other = list(tokens)
        other[changed] += 1
        same = [a == b for a, b in zip(digests, chain(other), strict=True)]
        assert same == [page < changed // 4 for page in range(5)]
    assert not set(digests) & set(chain(tokens, namespace="bfloat16"))


def test_digests_grow_as_if_made_at_once_and_are_stable():
    tokens = list(range(100, 130))
    grown = []
    for end in range(len(tokens) + 1):
        extend_digests(grown, tokens[:end], 4, root_digest("n"))
        assert len(grown) == end // 4
    assert grown == chain(tokens, namespace="n")
    # Machines must agree: tokens as little-endian int64 behind the parent's digest.
    root = blake2b(b"n", digest_size=16).digest()
    page = b"".join(token.to_bytes(8, "little") for token in tokens[:4])
    assert grown[0] == blake2b(root + page, digest_size=16).digest()


def test_released_prefix_is_found_again_and_evicted_from_its_end():
    pool = PagePool(4)
    digests = chain(range(12))
    pages = pool.allocate(3)
    for page, digest in zip(pages, digests, strict=True):
        pool.publish(page, digest)
    pool.release(pages)
    assert (pool.num_free, pool.num_cached, pool.num_used) == (1, 3, 0)
    assert pool.match(digests) == pages
    pool.allocate(2)  # the free one and the last of the chain
    assert pool.match(digests) == pages[:2]


def test_least_recently_used_goes_first_and_used_pages_never():
    pool = PagePool(3)
    kept = []
    for name in "abc":
        (page,) = pool.allocate(1)
        pool.publish(page, name.encode())
        kept.append(page)
    a, b, c = kept
    pool.release([a])
    pool.release([b])
    pool.share([a])
    pool.release([a])  # now b is the oldest
    assert pool.available == 2
    assert pool.allocate(1) == (b,)
    assert pool.allocate(1) == (a,)
    assert pool.available == 0
    assert pool.match([b"c"]) == (c,)
    assert pool.match([b"a"]) == ()


def test_twins_stay_private():
    pool = PagePool(2)
    first, second = pool.allocate(2)
    pool.publish(first, b"x")
    pool.publish(second, b"x")
    assert pool.match([b"x"]) == (first,)
    pool.release([second])
    assert (pool.num_free, pool.num_cached, pool.num_used) == (1, 0, 1)


def test_random_use_keeps_the_books():
    rng = random.Random(5)
    pool = PagePool(12)
    held: list[tuple[int, ...]] = []
    names = iter(range(10**6))
    for _ in range(3000):
        action = rng.random()
        if action < 0.4 and pool.available:
            pages = pool.allocate(rng.randint(1, pool.available))
            assert len(set(pages)) == len(pages)
            assert not set(pages) & {p for h in held for p in h}
            held.append(pages)
            for page in pages:
                if rng.random() < 0.5:
                    pool.publish(page, str(next(names)).encode())
        elif action < 0.5:
            pages = pool.match([str(rng.randrange(max(1, next(names)))).encode()])
            pool.share(pages)
            held.append(pages)
        elif held:
            pool.release(held.pop(rng.randrange(len(held))))
        used = {p for h in held for p in h}
        assert pool.num_used == len(used)
        assert pool.num_free + pool.num_cached == pool.available == 12 - len(used)
