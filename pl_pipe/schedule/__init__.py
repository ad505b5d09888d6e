"""What each rank does, in order: schedules as data. partition -> *schedule* -> simulate, runtime."""

from pl_pipe.schedule.actions import (
    Action,
    Kind,
    format_program,
    format_programs,
    parse_action,
    parse_program,
    parse_programs,
)
from pl_pipe.schedule.grid import render
from pl_pipe.schedule.orders import ORDERS, Order
from pl_pipe.schedule.programs import FLUSHING, SCHEDULES, Programs, Update, build_programs, least_accumulate, warmups
from pl_pipe.schedule.validation import ScheduleReport, validate
from pl_pipe.schedule.versions import BackwardVersion, RankVersions, Reading, reading_of, weight_versions

__all__ = [
    "FLUSHING",
    "ORDERS",
    "SCHEDULES",
    "Action",
    "BackwardVersion",
    "Kind",
    "Order",
    "Programs",
    "RankVersions",
    "Reading",
    "ScheduleReport",
    "Update",
    "build_programs",
    "format_program",
    "format_programs",
    "least_accumulate",
    "parse_action",
    "parse_program",
    "parse_programs",
    "reading_of",
    "render",
    "validate",
    "warmups",
    "weight_versions",
]
