"""Validation by a process of its own, from checkpoints, while training goes on."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from typing import Any

import ray

from raytrain.errors import RaytrainError
from raytrain.orchestrate.cluster import Placement
from raytrain.run.checkpoint import Checkpoint
from raytrain.run.evaluate import Scores
from raytrain.run.rows import ValidationRow
from raytrain.session import Session
from raytrain.train import Job, build_job_model, score_checkpoint, validation_row


@ray.remote(num_cpus=0, max_restarts=3, max_task_retries=3)
class Validator:
    """Scores checkpoints one after another. Restarted, and its work repeated, when it dies.

    Args:
        job: the run.
        threads: CPU threads to compute and decode with.
    """

    def __init__(self, job: Job, threads: int) -> None:
        import torch  # noqa: PLC0415 (in the actor only: the driver needn't wait for it)

        torch.set_num_threads(threads)
        self._job = job
        self._threads = threads
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = build_job_model(job).to(self._device)

    def score(self, checkpoint: Checkpoint) -> Scores:
        """The scores of a checkpoint on all validation images."""
        return score_checkpoint(self._job, checkpoint, self._model, self._device, self._threads)


@dataclass(frozen=True)
class _Pending:
    checkpoint: Checkpoint
    score: Any


class Validations:
    """The validations under way, in the order of their steps. Lives in the driver.

    A checkpoint on disk stays marked as due until its row is written, so one that a crash cut off
    is done by the next command.

    Args:
        session: told of each result, in order.
        placement: whether the validating process gets a GPU, and how many workers share the cores
            of its machine with it.
    """

    def __init__(self, session: Session, placement: Placement) -> None:
        self._session = session
        self._pending: deque[_Pending] = deque()
        options = {"num_gpus": 1 if placement.validator_gpu else 0}
        threads = max(1, (os.cpu_count() or 1) // (placement.workers_a_node + 1))
        self._validator = Validator.options(**options).remote(session.job, threads)  # type: ignore[attr-defined]

    def add(self, checkpoint: Checkpoint) -> None:
        """Validate a checkpoint after those added before."""
        self._pending.append(_Pending(checkpoint, self._validator.score.remote(checkpoint)))

    def take_ready(self, wait: bool = False) -> None:
        """Hand over the results that are there, in order; with ``wait``, all of them."""
        while self._pending:
            first = self._pending[0]
            if not wait and not ray.wait([first.score], timeout=0)[0]:
                return
            self._session.validation(self._row(first))
            self._pending.popleft()

    def close(self) -> None:
        ray.kill(self._validator)

    def _row(self, pending: _Pending) -> ValidationRow:
        checkpoint = pending.checkpoint
        try:
            score = ray.get(pending.score)
        except ray.exceptions.RayTaskError as error:
            raise RaytrainError(f"validation: {last_line(error.cause or error)}") from error
        except ray.exceptions.RayActorError as error:
            raise RaytrainError(
                f"the validating process died again and again, at last on {checkpoint.path}; "
                "is there memory enough? --set validation.where=inline does without it"
            ) from error
        outside = self._session.job.recipe.validation.clock == "outside"
        seconds = checkpoint.seconds if outside else self._session.seconds()
        return validation_row(score, checkpoint.step, checkpoint.epoch, seconds)


def last_line(error: BaseException) -> str:
    """The last line of an error's text, which in a remote error's is the cause itself."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no message"
