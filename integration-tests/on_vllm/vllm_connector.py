"""A connector of vLLM that keeps keys and values in a folder; imported by vLLM alone."""

import shutil
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class FolderConnector(ExampleConnector):
    def reset_cache(self):
        for path in Path(self._storage_path).iterdir():
            shutil.rmtree(path)
        return True
