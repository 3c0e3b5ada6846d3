"""How the processes of an engine find this package: vLLM runs `register` in each of them."""

BACKEND = "raycrew"
"""What `WeightTransferConfig(backend=...)` calls it."""

_MODULE = "raycrew.tensor_transport.integrations.vllm._worker"


def register() -> None:
    """Make the back end known to vLLM in this process; more often than once does nothing.

    It is the entry point `raycrew` of the group `vllm.general_plugins`. Where `VLLM_PLUGINS` lists the
    plugins to load, `raycrew` has to be among them.
    """
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(BACKEND, _MODULE, "RaycrewWeightTransferEngine")
    except ValueError as error:
        if "already registered" not in str(error):
            raise
