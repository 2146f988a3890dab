"""Layer 5: pipeline parallelism. Schedules are data; what runs, prices and draws them reads the same actions."""

from dist_train.pipeline.orders import SCHEDULES, Action, Kind
from dist_train.pipeline.schedule import Message, Schedule
from dist_train.pipeline.timeline import Costs, Deadlock, Sends, Timeline, ideal_bubble, simulate

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Deadlock",
    "Kind",
    "Message",
    "Schedule",
    "Sends",
    "Timeline",
    "ideal_bubble",
    "simulate",
]
