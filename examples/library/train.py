"""A training script of one's own, with its own model, data and loop, on DeepSpeed.

Alone:   torchrun --nproc-per-node=2 examples/library/train.py       (or: deepspeed examples/library/train.py)
In two:  crosscloud-trainer local examples/library/job.yaml          (the same file; in clusters: kubectl apply)

The two lines that make the difference are marked; the third mark deals out the data.
"""

import argparse
import pathlib
import sysconfig
import tempfile

import deepspeed
import torch
import torch.distributed as dist

from crosscloud_trainer import join

CONFIG = {
    "train_micro_batch_size_per_gpu": 64,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
    "steps_per_print": 1000,
}
CONTEXT = 16


class Bytes(torch.nn.Module):
    """Guesses the next byte of Python code from the CONTEXT bytes before it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(256, width)
        self.hidden = torch.nn.Linear(CONTEXT * width, 256)
        self.norm = torch.nn.LayerNorm(256)
        self.head = torch.nn.Linear(256, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.gelu(self.norm(self.hidden(self.embed(text[:, :-1]).flatten(1))))
        return torch.nn.functional.cross_entropy(self.head(hidden).float(), text[:, -1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--losses", help="file for this process's loss of each micro-batch, in full precision")
    parser.add_argument("--model", help="folder for the trained model of each replica, whose number is put behind it")
    parser.add_argument("--local_rank", help="which the `deepspeed` launcher gives")
    args = parser.parse_args()

    sync = join()  # <-- 1: this process's place in a job, if there is one
    deepspeed.init_distributed(verbose=False)
    torch.manual_seed(1)  # the same first weights in every replica
    model = Bytes()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer = sync.wrap(optimizer)  # <-- 2: from here on as without a job
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=dict(CONFIG))

    code = (pathlib.Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()
    text = torch.frombuffer(bytearray(code), dtype=torch.uint8).long()
    draw = torch.Generator().manual_seed(1000 + sync.rank)  # <-- every process of the job takes data of its own
    losses = []
    sync.steps(args.steps)  # for the progress bar only
    for _ in range(args.steps * CONFIG["gradient_accumulation_steps"]):
        starts = torch.randint(len(text) - CONTEXT - 1, (CONFIG["train_micro_batch_size_per_gpu"],), generator=draw)
        batch = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()])
        sync.tokens(len(batch))
        loss = engine(batch.to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())

    sync.finish()  # the last window's round: from here on the weights are those of all replicas
    if dist.get_rank() == 0:
        folder = pathlib.Path(f"{args.model}-{sync.replica}" if args.model else tempfile.mkdtemp())
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(engine.module.state_dict(), folder / "model.pt")
        sync.store(folder)  # the job's result; alone, nothing
    if args.losses:
        pathlib.Path(f"{args.losses}-{sync.rank}").write_text(" ".join(loss.hex() for loss in losses))
    if sync.rank == 0:
        print(f"loss {sum(losses[:10]) / 10:.3f} -> {sum(losses[-10:]) / 10:.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
