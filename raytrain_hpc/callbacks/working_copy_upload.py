"""Upload of the files that the callbacks of a rank have written, if the run directory is in an object store."""

from __future__ import annotations

from raytrain_hpc.callbacks.callback import Callback
from raytrain_hpc.storage.working_copy import WorkingCopy


class WorkingCopyUpload(Callback):
    """Upload of the files below `context.run_dir` when a checkpoint is saved and when a generation ends.

    Optional: a store that does not answer costs files of callbacks, not the run.
    """

    priority = 1000  # closed after the callbacks that write files
    optional = True

    def __init__(self, working_copy: WorkingCopy) -> None:
        self._working_copy = working_copy

    def post_checkpoint_saved(self) -> None:
        """Upload what has changed."""
        self._working_copy.upload()

    def close(self) -> None:
        """Upload the rest."""
        self._working_copy.upload()
