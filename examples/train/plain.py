"""Safe reading of checkpoints: no code that a file names is executed.

torch.distributed.checkpoint reads ``.metadata``, and all values in ``.distcp`` files except tensors, with
Python's unpickler. That unpickler calls any function that a file names.
"""

from __future__ import annotations

import pickle
import re
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from train.config import CheckpointError

__all__ = ["PlainPlanner", "PlainReader"]

_KINDS = {
    "Metadata",
    "TensorStorageMetadata",
    "TensorProperties",
    "_MEM_FORMAT_ENCODING",
    "ChunkStorageMetadata",
    "BytesStorageMetadata",
    "MetadataIndex",
    "StorageMeta",
}
_NAMES = {
    *(("torch.distributed.checkpoint.metadata", name) for name in _KINDS),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    # Module names of the path classes in each version of Python.
    *((module, f"{kind}Path") for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")),
}
_REMEDY = "Take a checkpoint that this job wrote; nothing of this one was run"


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or (module, name) in _NAMES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


class PlainReader(FileSystemReader):
    """Reads ``.metadata`` as sizes, dtypes and places of tensors, and only from the files of its folder.

    Args:
        folder: Folder of a checkpoint.
        files: Names of the files in the folder that may be read.

    Raises:
        CheckpointError: The metadata contain any other object, or name another file.
    """

    def __init__(self, folder: Path, files: list[str]) -> None:
        super().__init__(folder)
        path, found = folder / ".metadata", None
        try:
            with path.open("rb") as file:
                found = _Unpickler(file).load()
            got = "something else"
            if isinstance(found, Metadata):
                named = {each.relative_path for each in found.storage_data.values()}
                outside = sorted(str(x) for x in named if x not in files or Path(x).name != x)
                got = f"tensors in {outside}" if outside else ""
        except Exception as error:  # The bytes are not trusted.
            got = f"{type(error).__name__}: {error}"
        CheckpointError.unless(not got, f"{path} to have only sizes and places of tensors", got, _REMEDY)
        self._metadata: Any = found

    def read_metadata(self) -> Metadata:  # type: ignore[override]  # Per-rank files are not supported: no checkpoint has one.
        """Return the metadata that the constructor has read."""
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata  # type: ignore[no-any-return]


class PlainPlanner(DefaultLoadPlanner):
    """Reads other values than tensors (an optimizer's options) as numbers, strings and lists."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """Put a value into the state."""
        name = read_item.dest_index.fqn
        try:
            found = torch.load(value, weights_only=True)
        except Exception as error:
            # torch's own text advises to disable this check.
            named = re.search(r"GLOBAL ([\w.]+)", str(error))
            got = f"what names {named[1]}" if named else type(error).__name__
            raise CheckpointError.of(f"{name} to be data", got, _REMEDY) from None
        set_element(self.original_state_dict, self.mappings[name], found)
