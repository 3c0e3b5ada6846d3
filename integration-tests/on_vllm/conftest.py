import os
from importlib.util import find_spec

if find_spec("vllm") is None and not os.environ.get("REQUIRE_VLLM"):
    collect_ignore_glob = ["test_*.py"]  # The session `vllm` installs it.
else:  # Before vLLM is imported, and for the processes that it starts.
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
