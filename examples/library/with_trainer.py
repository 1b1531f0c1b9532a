"""The Trainer of transformers with DeepSpeed; in a job, one line more (needs: pip install accelerate).

Alone:   torchrun --nproc-per-node=2 examples/library/with_trainer.py
In two:  as examples/library/job.yaml, with this file
What a job needs beyond that is marked.
"""

import argparse
import pathlib
import sysconfig
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from crosscloud_trainer.callback import SyncCallback

DEEPSPEED = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2},
}
CONTEXT = 64


class Bytes(torch.utils.data.Dataset):
    """Pieces of a Python file."""

    def __init__(self) -> None:
        code = (pathlib.Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()
        self.pieces = torch.frombuffer(bytearray(code[: len(code) // CONTEXT * CONTEXT]), dtype=torch.uint8).view(
            -1, CONTEXT
        )

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[place].long(), "labels": self.pieces[place].long()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--losses", help="file for the losses that the Trainer logs, in full precision")
    options = parser.parse_args()
    torch.manual_seed(1)  # the same first weights in every replica
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    args = TrainingArguments(
        output_dir=f"{tempfile.gettempdir()}/trainer-output",
        max_steps=options.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        deepspeed=DEEPSPEED,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=LlamaForCausalLM(config), args=args, train_dataset=Bytes())
    callback = SyncCallback(trainer)  # <-- 1
    trainer.add_callback(callback)  # <-- 2
    trainer.train()
    model = f"{args.output_dir}/replica-{callback.sync.replica}"
    trainer.save_model(model)
    callback.sync.store(model)  # <-- the job's result; alone, nothing
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if options.losses:
        pathlib.Path(f"{options.losses}-{callback.sync.rank}").write_text(" ".join(loss.hex() for loss in losses))
    if trainer.is_world_process_zero():
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}", flush=True)


if __name__ == "__main__":
    main()
