"""PyTorch's own pipeline orders, and a simulator of events for them that shares nothing with the product."""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush
from types import SimpleNamespace

from torch.distributed.pipelining import schedules


def torch_orders(schedule: str, devices: int, microbatches: int, per_device: int) -> list[list[tuple]]:
    """(kind, stage, microbatch) of each device, in PyTorch's order.

    The n-th forward or backward of a stage is microbatch n: the order that ``Schedule1F1B`` prints counts
    forwards of its last rank from 1, which what it runs does not.
    """
    if schedule == "interleaved1f1b":
        own = schedules.ScheduleInterleaved1F1B.__new__(schedules.ScheduleInterleaved1F1B)
        vars(own).update(
            n_local_stages=per_device,
            pp_group_size=devices,
            _n_microbatches=microbatches,
            microbatches_per_round=microbatches // max(1, microbatches // devices),
        )
        found = {rank: own._calculate_single_rank_operations(rank) for rank in range(devices)}
    else:
        kind = {"1f1b": schedules.Schedule1F1B, "gpipe": schedules.ScheduleGPipe}[schedule]
        found = kind._get_pipeline_order(SimpleNamespace(_num_stages=devices, _n_microbatches=microbatches))
    names = {schedules.FORWARD: "forward", schedules.FULL_BACKWARD: "backward"}
    orders = []
    for rank in range(devices):
        counts: Counter = Counter()
        order = []
        for action in found[rank]:
            if action is None or action.computation_type not in names:
                continue
            key = names[action.computation_type], action.stage_index
            order.append((*key, counts[key]))
            counts[key] += 1
        orders.append(order)
    return orders


def most_waiting(orders: list[list[tuple]], stages: int) -> tuple[int, ...]:
    """Most forwards of each stage that wait for their backward."""
    most = Counter()
    for order in orders:
        now = Counter()
        for kind, stage, _ in order:
            now[stage] += {"forward": 1, "backward": -1}[kind]
            most[stage] = max(most[stage], now[stage])
    return tuple(most[stage] for stage in range(stages))


def event_time(orders: list[list[tuple]], times: list[tuple[int, int, int]]) -> int:
    """When the last event ends; ``times``: forward, backward and sending of each stage.

    A queue of events: the end of an action, and the arrival of what it has sent.
    """
    last = len(times) - 1
    arrived = {("forward", 0, m) for order in orders for kind, stage, m in order if stage == 0}
    arrived |= {("backward", last, m) for order in orders for kind, stage, m in order if stage == last}
    place, idle, events, now = [0] * len(orders), [True] * len(orders), [], 0
    while True:
        for device, order in enumerate(orders):
            if idle[device] and place[device] < len(order) and order[place[device]] in arrived:
                kind, stage, _ = order[place[device]]
                heappush(events, (now + times[stage][kind == "backward"], 0, device, order[place[device]]))
                idle[device] = False
        if not events:
            assert [*map(len, orders)] == place, "the orders wait for each other"
            return now
        now, what, device, (kind, stage, m) = heappop(events)
        if what == 1:
            arrived.add((kind, stage, m))
            continue
        idle[device], place[device] = True, place[device] + 1
        if kind == "forward" and stage < last:
            heappush(events, (now + times[stage][2], 1, -1, ("forward", stage + 1, m)))
        if kind == "backward" and stage > 0:
            heappush(events, (now + times[stage - 1][2], 1, -1, ("backward", stage - 1, m)))
