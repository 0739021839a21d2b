"""Optimizer state that is loaded when somebody looks at it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Loader = Callable[[], Any]


class LazyState(Mapping[str, Any]):
    """The state of one parameter, under torch's own keys (of AdamW ``step``, ``exp_avg``,
    ``exp_avg_sq``) and, for 16-bit parameters, ``master`` (fp32). A value is read from its tier at each
    access, as it is then, into a tensor of the caller's; pickling (``torch.save``) reads all of them,
    one parameter after another.
    """

    __slots__ = ("_loaders",)

    def __init__(self, loaders: Mapping[str, Loader]) -> None:
        self._loaders = dict(loaders)

    def __getitem__(self, key: str) -> Any:
        return self._loaders[key]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaders)

    def __len__(self) -> int:
        return len(self._loaders)

    def __repr__(self) -> str:
        return f"LazyState({', '.join(self._loaders)})"

    def __reduce__(self) -> tuple[Any, ...]:
        # An OrderedDict, filled item by item: what torch.load(weights_only=True) accepts.
        return (OrderedDict, (), None, None, iter(self.items()))

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return dict(self.items())


class LazyStates(Mapping[Any, LazyState]):
    """What ``optimizer.state`` and ``state_dict()["state"]`` are: a `LazyState` per parameter that
    has been updated."""

    __slots__ = ("_find", "_keys")

    def __init__(self, keys: Callable[[], list[Any]], find: Callable[[Any], LazyState | None]) -> None:
        self._keys = keys
        self._find = find

    def __getitem__(self, key: Any) -> LazyState:
        state = self._find(key)
        if state is None:
            raise KeyError(key)
        return state

    def __iter__(self) -> Iterator[Any]:
        return iter([key for key in self._keys() if self._find(key) is not None])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __reduce__(self) -> tuple[Any, ...]:
        return (OrderedDict, (), None, None, iter(self.items()))

    def __deepcopy__(self, memo: Any) -> dict[Any, Any]:
        return {key: dict(value.items()) for key, value in self.items()}
