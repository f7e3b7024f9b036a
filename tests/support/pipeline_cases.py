"""What each rank of a pipeline does in tests; see processes.py. Results are plain JSON types."""

from __future__ import annotations

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed import pipelining

import hybridremat
from support.quick_planning import quick_planning
from support.training import allocated_peak

HOW = {"cost_model": "flops", "workers": 1}
MICROBATCHES = 8
SCHEDULES = {
    "1f1b": pipelining.Schedule1F1B,
    "gpipe": pipelining.ScheduleGPipe,
    "interleaved1f1b": pipelining.ScheduleInterleaved1F1B,
}


class Tower(nn.Module):
    """A small language model; its loss is outside."""

    def __init__(self, depth: int = 4, width: int = 32, words: int = 100) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 4 * width, batch_first=True, norm_first=True, dropout=0.1)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, words)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_of(logits, target):
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def tower(depth: int = 4, width: int = 32) -> Tower:
    torch.manual_seed(0)
    return Tower(depth, width)


def batch(size: int, length: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randint(0, 100, (size, length)), torch.randint(0, 100, (size, length))


def planned(schedule: str, memory, model=None, **more) -> hybridremat.PipelinePlan:
    tokens, target = batch(4)
    model = tower() if model is None else model
    return hybridremat.pipeline_plan(
        model,
        (tokens,),
        stages=2,
        microbatches=MICROBATCHES,
        schedule=schedule,
        device_memory=memory,
        loss_fn=loss_of,
        target=target,
        **(HOW | more),
    )


class Trainer:
    """A rank's stages of a pipeline, wrapped or plain, and its optimizer."""

    def __init__(self, plan, model, rank: int, *, wrap: bool) -> None:
        tokens, self.target = batch(4 * MICROBATCHES)
        pipe = pipelining.pipeline(model, (tokens[:4],), split_spec=plan.split_spec)
        self.tokens, self.rank = tokens, rank
        self.modules, stages, self.peaks = [], [], []
        for stage in plan.stages_of(rank):
            module = pipe.get_stage_module(stage.index)
            if wrap:
                how = plan.wrap_kwargs(stage.index)
                hybridremat.wrap(module, plan.args(stage.index), progress=False, **how)
                self.peaks.append(hybridremat.get_plan(module).needed)
            self.modules.append(module)
            stages.append(pipe.build_stage(stage.index, torch.device("cpu")))
        kind = SCHEDULES[plan.schedule]
        several = plan.stages_per_device > 1
        self.schedule = kind(stages if several else stages[0], MICROBATCHES, loss_fn=loss_of)
        parameters = [each for module in self.modules for each in module.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=False)
        self.resident = sum(each.numel() * each.element_size() for each in parameters)
        given = [self.tokens] * (rank == 0) + [self.target] * (rank == distributed.get_world_size() - 1)
        self.resident += sum(each.numel() * each.element_size() for each in given)

    def step(self) -> list[np.ndarray]:
        """Losses, gradients and parameters of a step, copied where no recorder of tensors sees it."""
        losses: list = []
        given = (self.tokens,) if self.rank == 0 else ()
        last = self.rank == distributed.get_world_size() - 1
        more = {"target": self.target, "losses": losses} if last else {}
        self.schedule.step(*given, **more)
        every = [each for module in self.modules for each in module.parameters()]
        seen = [*losses, *(each.grad for each in every if each.grad is not None)]
        copies = [each.detach().numpy().copy() for each in seen]
        del seen, losses
        self.optimizer.step()
        self.optimizer.zero_grad()
        return copies + [each.detach().numpy().copy() for each in every]


def trained(plan, rank: int, *, wrap: bool) -> tuple[list[np.ndarray], int, Trainer]:
    """What three steps came to, and the most bytes, all that stays from step to step among them."""
    trainer = Trainer(plan, tower(), rank, wrap=wrap)
    torch.manual_seed(7)
    seen: list[np.ndarray] = []

    def run() -> None:
        for _ in range(3):
            seen.extend(trainer.step())

    peak = allocated_peak(run)
    return seen, trainer.resident + peak, trainer


MEMORY = {"1f1b": "1450KiB", "gpipe": "3MiB", "interleaved1f1b": "2900KiB"}


def one_by_one(rank: int) -> dict:
    return compared("1f1b", rank)


def gpipe(rank: int) -> dict:
    return compared("gpipe", rank)


def interleaved(rank: int) -> dict:
    return compared("interleaved1f1b", rank)


def refused(rank: int) -> dict:
    """What each rank hears where nothing fits."""
    try:
        planned("1f1b", "100KiB", tower(depth=2, width=8))
    except hybridremat.InfeasibleLimitError as error:
        return {"text": str(error), "least": error.least, "limit": error.limit}
    return {}


def compared(schedule: str, rank: int) -> dict:
    """A pipeline under a limit that makes it recompute, against the same without plans; planned quickly."""
    with quick_planning():
        plan = planned(schedule, MEMORY[schedule])
        plain, plain_peak, _ = trained(plan, rank, wrap=False)
        ours, peak, trainer = trained(plan, rank, wrap=True)
    mine = plan.stages_of(rank)
    same = [np.array_equal(a, b) for a, b in zip(plain, ours, strict=True)]
    return {
        "different": [number for number, equal in enumerate(same) if not equal],
        "compared": len(plain),
        "peak": peak,
        "plain peak": plain_peak,
        "predicted": sum(each.predicted_peak for each in mine),
        "limit": sum(each.device_memory for each in mine),
        "needed": trainer.peaks,
        "limits": [each.memory_limit for each in mine],
        "extra": sum(each.extra_time for each in mine),
        "text": str(plan),
    }
