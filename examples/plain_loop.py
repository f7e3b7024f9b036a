"""A loop of one's own under a memory limit: gradients accumulated over micro-batches, checkpoints on disk.

python examples/plain_loop.py [FOLDER [STEPS]]      run it twice: it goes on where it was
"""

import sys
from pathlib import Path

import torch
from decoder import Decoder

import hybridremat

MICRO_BATCHES = 4


def texts(step: int, part: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(MICRO_BATCHES * step + part)
    return torch.randint(256, (4, 32), generator=made)


def save(path: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    # names and tensors are those of the plain model: a checkpoint does not know of the plan
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**state, "step": step, "random": torch.get_rng_state()}, path)


def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])  # dropout goes on as it would have
    return state["step"]


def main(folder: str = "output", steps: int = 4) -> None:
    torch.manual_seed(0)
    path = Path(folder) / "last.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    model = Decoder().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # one plan for all micro-batches; without cost_model, kernels are timed
    hybridremat.wrap(model, [texts(0, 0)], memory_limit="60%", cost_model="flops")
    first = load(path, model, optimizer) if path.exists() else 0
    for step in range(first, first + steps):
        for part in range(MICRO_BATCHES):
            loss = model(texts(step, part)) / MICRO_BATCHES
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        save(path, step + 1, model, optimizer)
        print(f"step {step}: loss {MICRO_BATCHES * loss.item():.4f}")
    plan = hybridremat.get_plan(model)
    print(f"a micro-batch takes {plan.predicted_peak:,} of {plan.memory_limit:,} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:]))
