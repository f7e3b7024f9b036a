"""Record what a piece of code allocates and frees, to the byte, on CPU and on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain

from hybridremat.graph.costs.cpu_recorder import CpuRecorder
from hybridremat.graph.costs.recorder import Mark, MemoryRecorder, Recording


def recorder_for(device: str, *, interruptible: bool = False) -> MemoryRecorder:
    """The memory recorder of a kind of device; ``interruptible``: see ``CpuRecorder``."""
    if device != "cuda":
        return CpuRecorder(interruptible=interruptible)
    from hybridremat.graph.costs.cuda_recorder import CudaRecorder

    return CudaRecorder()


def record(device: str, run: Callable[[Mark], None]) -> Recording:
    """Run a function, which may set marks, and return its recording.

    Raises
    ------
    ProfilerActiveError
        If a profiler is running, on CPU.
    """
    recorder = recorder_for(device)
    try:
        recorder.start()
        run(recorder.mark)
    except BaseException:
        recorder.give_up()
        raise
    recording = recorder.stop()
    assert recording is not None, "a recording that is not interruptible was given up"
    return recording


def peaks_of(prepared: Iterable[Callable[[], Callable[[], object]]], device: str) -> list[tuple[int, int]]:
    """For each call, (peak bytes while it ran, bytes alive when it returned), its result still held.

    Each element makes its inputs and returns the call to be measured, so that the inputs of one call
    are all that is alive at any time. The next element is asked for when the call before it has run. Without
    any, nothing is recorded, so that a running profiler is no hindrance.
    """
    every = iter(prepared)
    first = next(every, None)
    if first is None:
        return []

    def run(mark: Mark) -> None:
        for prepare in chain((first,), every):
            call = prepare()
            mark("call")
            result = call()
            mark("")
            del result, call

    segments = record(device, run).segments
    return [segment.above_start for segment in segments if segment.name == "call"]
