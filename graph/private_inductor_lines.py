"""Which lines of the code that Inductor generates say something of memory, by the names of their classes.

``private_inductor_code`` reads those that say all of it. The tables here are of the others, with the reason
why; a class that stands in none of the three is an error, since nothing is known of its memory. Complete for
torch 2.11 to 2.15 (``tests/test_generated_lines.py`` goes through the classes of the one that is installed).
"""

from __future__ import annotations

from typing import Final

NEUTRAL: Final = {
    "AssertAlignmentLine": "looks at an address",
    "AssertDivByZeroLine": "looks at a number",
    "AssertSizeStrideLine": "looks at sizes and strides",
    "CommentLine": "is a comment",
    "DynamicScalarLine": "reads a number out of a tensor that has lines of its own",
    "EnterCudaMemPoolContextLine": "says from which pool buffers come, which take the same bytes there",
    "EnterCudaStreamContextLine": "says on which stream kernels run",
    "EnterDeviceContextManagerLine": "says on which device kernels run",
    "EnterDeviceContextManagerWithStreamInfoLine": "says on which device and streams kernels run",
    "EnterKernelProfileScopeLine": "opens a scope of C++ in which a kernel is timed; its buffers have lines",
    "ExitCudaMemPoolContextLine": "ends what the line that enters it began",
    "ExitCudaStreamContextLine": "ends what the line that enters it began",
    "ExitDeviceContextManagerLine": "ends what the line that enters it began",
    "ExitDeviceContextManagerWithStreamInfoLine": "ends what the line that enters it began",
    "ExitKernelProfileScopeLine": "ends what the line that enters it began",
    "GroupedAssertSizeStrideLine": "looks at sizes and strides",
    "KernelCallLine": "runs a generated kernel; what it needs beside its arguments has lines of its own",
    "KernelDefinitionLine": "is the source of a kernel",
    "NullLine": "stands where a line of a removed buffer was",
    "SymbolicCallArgLine": "computes a number",
    "UnbackedSymbolDefsLine": "computes a number",
}
"""Lines that allocate and free nothing, and run no kernel of a library."""

HIDING: Final = {
    "AllocFromPoolLine": "takes a buffer out of one that holds several",
    "ConditionalLine": "runs one of several graphs",
    "DeallocFromPoolLine": "gives a part of a buffer back that holds several",
    "DualWrapperCodeLine": "is code in C++ for a graph inside the graph",
    "EnterSubgraphLine": "runs a graph inside the graph",
    "ExitSubgraphLine": "ends a graph inside the graph",
    "SwitchLine": "runs one of several graphs",
}
"""Lines whose memory their successors do not say."""

ABSTRACT: Final = {"WrapperLine", "MemoryPlanningLine", "PoolMemoryPlanningLine"}
"""Bases of lines, of which there are no lines."""
