"""Whether news of every worker has reached every other one. groups -> *Connectivity* -> group former."""

from collections.abc import Iterable


class Connectivity:
    """Union-find over workers: those that averaged together, directly or through others, are one component."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}

    def merge(self, workers: Iterable[int]) -> None:
        roots = [self._root(worker) for worker in workers]
        for root in roots[1:]:
            self._parents[self._root(root)] = self._root(roots[0])

    def connects(self, workers: Iterable[int]) -> bool:
        """Whether these are all in one component; none and one are."""
        return len({self._root(worker) for worker in workers}) <= 1

    def connects_with(self, group: Iterable[int], workers: Iterable[int]) -> bool:
        """Whether they would be, if this group were merged too."""
        joined = {self._root(worker) for worker in group}
        return len({-1 if (root := self._root(worker)) in joined else root for worker in workers}) <= 1

    def forget(self) -> None:
        self._parents.clear()

    def _root(self, worker: int) -> int:
        parents = self._parents
        root = worker
        while (parent := parents.get(root, root)) != root:
            root = parent
        while (parent := parents.get(worker, worker)) != root:  # the next look takes one step
            parents[worker], worker = root, parent
        return root
