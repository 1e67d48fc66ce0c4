"""stepgraph: compiles the per-step attention metadata of an LLM engine into one replayable step.

    import stepgraph as sg
    from stepgraph import stages

    groups = [sg.Group("attn", block_size=16, max_blocks=128)]
    graph = sg.trace(stages.full_step(max_reqs=256), groups)
    step = sg.compile(graph, capacity={"B": 256, "T": 8192})

Importing it loads NumPy and nothing heavier; Numba is imported at the first compilation that is not
in the cache yet.
"""

from stepgraph._version import __version__
from stepgraph.block_tables import BlockTables
from stepgraph.pipeline.compiled import Compiled, compile
from stepgraph.pipeline.custom_call import Kernel
from stepgraph.pipeline.errors import (
    BindError,
    BlockTableError,
    CaptureError,
    CompileError,
    StepGraphError,
    TraceError,
)
from stepgraph.pipeline.executable import Executable, Outputs
from stepgraph.pipeline.groups import Group
from stepgraph.pipeline.ir import Graph
from stepgraph.pipeline.ops import (
    compact,
    cumsum,
    custom_call,
    gather,
    maximum,
    minimum,
    reduce_max,
    reduce_min,
    reduce_sum,
    scatter,
    segment_ids,
    select,
)
from stepgraph.pipeline.oracle import evaluate
from stepgraph.pipeline.trace import Step, stage, trace
from stepgraph.pipeline.value import Value

__all__ = [
    "BindError",
    "BlockTableError",
    "BlockTables",
    "CaptureError",
    "CompileError",
    "Compiled",
    "Executable",
    "Graph",
    "Group",
    "Kernel",
    "Outputs",
    "Step",
    "StepGraphError",
    "TraceError",
    "Value",
    "__version__",
    "compact",
    "compile",
    "cumsum",
    "custom_call",
    "evaluate",
    "gather",
    "maximum",
    "minimum",
    "reduce_max",
    "reduce_min",
    "reduce_sum",
    "scatter",
    "segment_ids",
    "select",
    "stage",
    "trace",
]
