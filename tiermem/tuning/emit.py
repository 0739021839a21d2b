"""A profile as configuration: ours, and the block that DeepSpeed reads."""

from __future__ import annotations

from typing import Any

from tiermem.tuning.profile import Profile


def tiermem_fragment(profile: Profile) -> dict[str, Any]:
    """Keys of `tiermem.TierConfig`; ``params`` and ``optimizer`` are the user's to add."""
    fragment: dict[str, Any] = {"paths": [each.path for each in profile.paths]}
    if len(profile.paths) > 1:
        fragment["path_weights"] = [round(weight, 6) for weight in profile.weights]
    return fragment | {"io": profile.settings.fields()}


def deepspeed_fragment(profile: Profile) -> dict[str, Any]:
    """The block ``aio``. DeepSpeed has one depth for both directions, so the deeper one serves. Its
    threads each have a queue of that depth; one was measured here. ``thread_count`` is what versions
    before 2025 call ``intra_op_parallelism``: each version reads its own and passes over the other.
    """
    settings = profile.settings
    return {
        "aio": {
            "block_size": settings.chunk_bytes,
            "queue_depth": max(settings.read_depth, settings.write_depth),
            "intra_op_parallelism": 1,
            "thread_count": 1,
            "single_submit": False,
            "overlap_events": True,
            "use_gds": False,
        }
    }


FRAGMENTS = {"tiermem": tiermem_fragment, "deepspeed": deepspeed_fragment}
