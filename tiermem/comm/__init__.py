"""Collectives of ZeRO on torch.distributed: exchanges of tagged messages, each counting its bytes,
with failures that name their cause within seconds."""

from tiermem.comm.communicator import Communicator, open_communicator, single
from tiermem.comm.exchange import Exchange
from tiermem.comm.meeting import refuse_to_open
from tiermem.comm.messages import MAX_INDEX, Kind, Message
from tiermem.comm.stats import CommStats, Traffic

__all__ = [
    "MAX_INDEX",
    "CommStats",
    "Communicator",
    "Exchange",
    "Kind",
    "Message",
    "Traffic",
    "open_communicator",
    "refuse_to_open",
    "single",
]
