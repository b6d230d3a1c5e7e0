"""The user's dataset in Ray's object store: serialized once per run, whatever the number of generations and workers."""

from __future__ import annotations

from dataclasses import replace

import ray

from raytrain_hpc.data.samples.sample_dataset import SampleDataset
from raytrain_hpc.runtime.worker_spec import CustomModel, DatasetReference, WorkerSpec


class DatasetStore:
    """Owner of the stored dataset of a run."""

    def __init__(self) -> None:
        self._reference: DatasetReference | None = None

    def store_dataset(self, spec: WorkerSpec) -> WorkerSpec:
        """Return the spec with a reference in place of the user's dataset, which the first call puts into the store."""
        if not isinstance(spec.custom, CustomModel) or not isinstance(spec.custom.dataset, SampleDataset):
            return spec
        if self._reference is None:
            self._reference = DatasetReference(ray.put(spec.custom.dataset))
        return replace(spec, custom=replace(spec.custom, dataset=self._reference))
