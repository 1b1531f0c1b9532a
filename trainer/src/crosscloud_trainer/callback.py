"""The `Trainer` of transformers, with DeepSpeed, in a job: one callback.

    trainer = Trainer(model=..., args=TrainingArguments(..., deepspeed="ds.json"), train_dataset=...)
    trainer.add_callback(SyncCallback(trainer))
    trainer.train()

Outside a job it does nothing. The DeepSpeed configuration leaves "optimizer" out, so that the Trainer makes it.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from crosscloud_trainer import join
from crosscloud_trainer.contract import ExitCode
from crosscloud_trainer.failures import Failure


class SyncCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Wraps the optimizer that `trainer` will make, gives each replica its part of the training data, and ends the last
    window when training ends. Add it before `trainer.train()`.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.sync = join()
        self._trainer = trainer
        self._wrapped: torch.optim.Optimizer | None = None
        if not self.sync.joined:
            return
        self._make, trainer.create_optimizer = trainer.create_optimizer, self._create_optimizer
        if trainer.train_dataset is not None and hasattr(trainer.train_dataset, "__len__"):
            trainer.train_dataset = part_of(trainer.train_dataset, self.sync.replica, self.sync.replicas)

    def _create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """The Trainer asks more than once, and keeps the first answer."""
        made = self._make(*args, **kwargs)
        if made is not self._wrapped:
            self._wrapped = self._trainer.optimizer = self.sync.wrap(made)
        return self._wrapped

    def on_train_begin(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Raises Failure where DeepSpeed has made an optimizer of its own: nothing would be exchanged."""
        if self.sync.joined and self._wrapped is None:
            message = (
                'the DeepSpeed configuration has "optimizer"; leave it out, and set learning_rate and optim instead'
            )
            raise Failure(ExitCode.INVALID_INPUT, message)
        self.sync.steps(state.max_steps)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.sync.finish()


def part_of(samples: Any, replica: int, replicas: int) -> Any:
    """Every `replicas`-th sample, equally many in each replica so that all of them take as many steps."""
    places = range(replica, len(samples) - len(samples) % replicas, replicas)
    if hasattr(samples, "select"):  # of the datasets library: the Trainer looks at its columns
        return samples.select(places)
    return torch.utils.data.Subset(samples, list(places))
