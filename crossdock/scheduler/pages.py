"""Who holds which KV page, and which full pages are kept for their prefix.

Knows page numbers and digests of tokens, not what lies in a page.
"""

import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b


def root_digest(namespace: str) -> bytes:
    """The parent of first pages. `namespace` names all that KV depends on beside tokens."""
    return blake2b(namespace.encode(), digest_size=16).digest()


def extend_digests(
    digests: list[bytes], tokens: Sequence[int], page_size: int, root: bytes
) -> None:
    """Append the digests of the full pages of `tokens` that `digests` lacks.

    A page's digest covers all tokens before it (through its parent's digest) and is the same on
    every machine.
    """
    pack = struct.Struct(f"<{page_size}q").pack
    parent = digests[-1] if digests else root
    for end in range((len(digests) + 1) * page_size, len(tokens) + 1, page_size):
        parent = blake2b(parent + pack(*tokens[end - page_size : end]), digest_size=16).digest()
        digests.append(parent)


class PagePool:
    """Pages with reference counts; full pages may be published under a digest and shared.

    A page is in one of three states: used (referenced), cached (published, unreferenced, evicted
    least recently used first), free. Pages are only ever written by the one who allocated them:
    published pages are full, and a shared page is published.
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._refs = [0] * num_pages
        self._digest_of: list[bytes | None] = [None] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """Pages that `allocate` can give: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    def allocate(self, count: int) -> tuple[int, ...]:
        """`count` pages with one reference each; the caller has looked at `available`."""
        return tuple(self._take() for _ in range(count))

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            digest = self._digest_of[page]
            assert digest is not None
            del self._page_of[digest]
            self._digest_of[page] = None
        self._refs[page] = 1
        return page

    def match(self, digests: Iterable[bytes]) -> tuple[int, ...]:
        """The pages of the longest published prefix. Takes no reference."""
        pages = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return tuple(pages)

    def count_cached(self, pages: Sequence[int]) -> int:
        """How many of `pages` nobody uses: sharing them makes `available` smaller."""
        return sum(1 for page in pages if self._refs[page] == 0)

    def share(self, pages: Sequence[int]) -> None:
        """One more reference to each of some matched pages."""
        for page in pages:
            if self._refs[page] == 0:
                del self._cached[page]
            self._refs[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One reference less to each page of a sequence, given in its order.

        The last pages become evictable first: a prefix is worth more than what follows it.
        """
        for page in reversed(pages):
            self._refs[page] -= 1
            if self._refs[page] == 0:
                if self._digest_of[page] is None:
                    self._free.append(page)
                else:
                    self._cached[page] = None

    def withdraw(self, digests: Iterable[bytes]) -> None:
        """Let nobody find their pages any more."""
        for digest in digests:
            page = self._page_of.pop(digest, None)
            if page is None:
                continue
            self._digest_of[page] = None
            if self._refs[page] == 0:
                del self._cached[page]
                self._free.append(page)

    def publish(self, page: int, digest: bytes) -> None:
        """Let others find a full page. The first page of a digest stays; its twins stay private."""
        if digest not in self._page_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest
