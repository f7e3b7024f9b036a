"""For trying these scripts without a GPU: accelerate shards on GPUs alone, and takes DDP on the CPU."""

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType


def shard_on_cpu() -> None:
    """Let accelerate take the path that it takes on GPUs; nothing changes where there are some."""
    if not torch.cuda.is_available():
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
