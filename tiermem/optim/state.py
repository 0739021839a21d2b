"""Optimizer state that is loaded when somebody looks at it, and checks of what is given back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tiermem.errors import StateError
from tiermem.types import Field
from tiermem.zero.param import ShardedParam

Loader = Callable[[], Any]


class LazyState(Mapping[str, Any]):
    """The state of one parameter: ``step``, ``exp_avg``, ``exp_avg_sq`` and, for 16-bit
    parameters, ``master`` (fp32). A value is read from its tier at each access, as it is then, into a
    tensor of the caller's; pickling (``torch.save``) reads all of them, one parameter after another.
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


MOMENT_KEYS = {"exp_avg": Field.EXP_AVG, "exp_avg_sq": Field.EXP_AVG_SQ}


def check_state(param: ShardedParam, saved: Mapping[str, Any]) -> None:
    """Raises `StateError` if ``saved`` is not a state of ``param``."""
    missing = [key for key in ("step", *MOMENT_KEYS) if key not in saved]
    if missing:
        raise StateError(f"the loaded state of {param.name!r} lacks {', '.join(missing)}")
    for key in (*MOMENT_KEYS, "master"):
        if key in saved and tuple(saved[key].shape) != tuple(param.shape):
            raise StateError(
                f"{key} of {param.name!r} has shape {tuple(saved[key].shape)}, the parameter has "
                f"{tuple(param.shape)}"
            )
