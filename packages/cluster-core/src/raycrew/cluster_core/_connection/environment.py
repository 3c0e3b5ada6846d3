"""Which environment variables travel to workers, which never do, and how secrets are kept apart."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache

from raycrew.cluster_core._devices import KEEP_FLAGS, VISIBILITY_VARIABLES

_ALLOWED = (
    # Communication and devices.
    *("NCCL_*", "RCCL_*", "HCCL_*", "GLOO_*", "UCX_*", "NIXL_*", "FI_*", "NVSHMEM_*", "TP_SOCKET_IFNAME"),
    *(
        "CUDA_*",
        "CUDNN_*",
        "CUBLAS_*",
        "NVTE_*",
        "HIP_*",
        "HSA_*",
        "ROCM_*",
        "MIOPEN_*",
        "ASCEND_*",
        "NEURON_*",
    ),
    # Frameworks.
    *("TORCH_*", "PYTORCH_*", "TORCHINDUCTOR_*", "TORCHDYNAMO_*", "TRITON_*", "XLA_*", "JAX_*", "MEGATRON_*"),
    *("VLLM_*", "SGLANG_*", "FLASHINFER_*", "HF_*", "TRANSFORMERS_*", "DATASETS_*", "TOKENIZERS_*"),
    *("WANDB_*", "MLFLOW_*", "TENSORBOARD_*", "SWANLAB_*", "RAYCREW_*", "NEMO_RL_*", "NRL_*"),
    # Processes.
    *("OMP_*", "MKL_*", "KMP_*", "OPENBLAS_*", "THP_*", "MALLOC_*", "LANG", "LC_*", "TZ"),
    *(
        "PYTHONUNBUFFERED",
        "PYTHONFAULTHANDLER",
        "PYTHONHASHSEED",
        "PYTHONWARNINGS",
        "PYTHONDONTWRITEBYTECODE",
    ),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
_LAUNCHERS = (
    *("SLURM_*", "SLURMD_*", "SBATCH_*", "SRUN_*", "PMI_*", "PMI2_*", "PMIX_*", "PRTE_*", "OMPI_*", "MPI_*"),
    *("I_MPI_*", "MV2_COMM_WORLD_*", "PALS_*", "TORCHELASTIC_*"),
)
_SECRET_WORDS = frozenset(
    (
        *(
            "TOKEN",
            "SECRET",
            "SECRETS",
            "PASSWORD",
            "PASSWD",
            "PWD",
            "PASSPHRASE",
            "PASS",
            "PAT",
            "JWT",
            "BEARER",
        ),
        *("CREDENTIAL", "CREDENTIALS", "CREDS", "AUTH", "KEY", "KEYS", "APIKEY", "COOKIE", "DSN", "WEBHOOK"),
    )
)
_NOT_SECRET = ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "PWD", "OLDPWD")
_SECRET_WORD = re.compile(  # Words that are written together, as in SECRETKEY or GITHUBTOKEN.
    r".*(?:TOKEN|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|CREDENTIALS?)"
    r"|.*(?:API|ACCESS|SECRET|PRIVATE|AUTH|ACCOUNT|SIGNING|ENCRYPTION|SSH)KEYS?"
)
_PLURAL = re.compile(r".*TOKENS")  # Secrets, unless it is a number: how many of them.
_CREDENTIALS = re.compile(r"[?&;](?:[\w.-]*[_.-])?(?:token|key|secret|password|sig|signature)=", re.I)
_ALTERED = re.compile(r"\$[\w{]|[\ud800-\udfff]", re.ASCII)  # The latter is how Python has what is no UTF-8.
_PROXY = re.compile(r".*_PROXY", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class EnvironmentPolicy:
    """What of an environment a worker gets. Patterns are shell patterns, matched with case.

    A runtime environment can be read in the dashboard and the state API, so a name is forwarded only if
    `allow` matches and neither a secret, nor a launcher's variable, nor Ray's own, nor a device mask is meant
    by it. Names and values that `allow` matches and that hold credentials go the way of secrets instead, and
    so do values that a runtime environment can't carry: Ray puts other variables' values in place of `$NAME`
    and `${NAME}`, and workers don't start with what is no UTF-8.

    Attributes:
        allow: Names that may be forwarded.
        launcher: Names that a launcher gave to the driver's process and that mean nothing in a worker.
        not_secret: Names that look like secrets and are none.
        keep_device_flags: Whether `RAY_EXPERIMENTAL_NOSET_*` flags are forwarded, the exception among Ray's.
    """

    allow: tuple[str, ...] = _ALLOWED
    launcher: tuple[str, ...] = _LAUNCHERS
    not_secret: tuple[str, ...] = _NOT_SECRET
    keep_device_flags: bool = True

    def forwarded(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The part of `environ` that may go into a runtime environment."""
        return {
            name: value
            for name, value in sorted(environ.items())
            if self._is_forwarded(name) and not (_holds_credentials(name, value) or _ALTERED.search(value))
        }

    def confidential(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The part of `environ` that is allowed and goes the way of secrets.

        It holds credentials, or is handed on by Ray as something else.
        """
        return {
            name: value
            for name, value in sorted(environ.items())
            if _matches(name, self.allow)
            and self._foreign(name) is None
            and (self.is_secret(name) or _holds_credentials(name, value) or _ALTERED.search(value))
        }

    def scrubbed(self, environ: Mapping[str, str]) -> list[str]:
        """Names that a worker removes from its inherited environment before it sets its own and imports."""
        return sorted(name for name in environ if _matches(name, self.launcher))

    def is_secret(self, name: str) -> bool:
        """Whether a name looks like a secret's: one of its words is TOKEN, KEY, PASSWORD or the like."""
        if _matches(name, self.not_secret):
            return False
        words = re.split(r"[^A-Z0-9]+", name.upper())
        return any(word in _SECRET_WORDS or _SECRET_WORD.fullmatch(word) for word in words)

    def allowing(self, *patterns: str) -> "EnvironmentPolicy":
        """This policy with more names allowed.

        Raises:
            TypeError: A pattern is not a string.
            ValueError: A plain name (not a pattern) would never be forwarded; the error says why.
        """
        for name in patterns:
            if not isinstance(name, str) or not name:
                raise TypeError(f"forward_env holds names and patterns, not {name!r}")
            reason = self._refusal(name)
            if reason and not set("*?[") & set(name):
                raise ValueError(f"{name} can't be forwarded: {reason}")
        return replace(self, allow=(*self.allow, *patterns))

    def _is_forwarded(self, name: str) -> bool:
        if name in KEEP_FLAGS:
            return self.keep_device_flags
        return _matches(name, self.allow) and self._refusal(name) is None

    def _refusal(self, name: str) -> str | None:
        if self.is_secret(name):
            return "it looks like a secret, and a runtime environment can be read by all; pass it in secrets="
        return self._foreign(name)

    def _foreign(self, name: str) -> str | None:
        """Why a name means nothing in a worker."""
        if _matches(name, self.launcher):
            return "it belongs to the launcher of the driver's process"
        if name in VISIBILITY_VARIABLES:
            return "it masks devices, which is up to Ray for each worker"
        if name.startswith("RAY_") and name not in KEEP_FLAGS:
            return "it is Ray's own"
        return None


def _holds_credentials(name: str, value: str) -> bool:
    if _PLURAL.fullmatch(name.upper()) and not value.strip().isdecimal():
        return True
    return (
        bool(_CREDENTIALS.search(value))
        or (bool(_PROXY.fullmatch(name)) and "@" in value)
        or any(map(_may_hold_password, value.split()))
    )


def _may_hold_password(word: str) -> bool:
    """Whatever stands between a colon and an @, with or without a scheme, a user, or a slash in it."""
    _, colon, rest = word.partition(":")
    return bool(colon) and "@" in rest[:-1]


@lru_cache(4096)  # asked of the same environment again and again
def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


DEFAULT_POLICY = EnvironmentPolicy()


class Secrets(Mapping[str, str]):
    """Secrets by name, for those who deliver them; what is printed of it are the names alone."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> str:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Secrets({', '.join(self._values) or 'none'})"


def collect_secrets(
    secrets: Iterable[str] | Mapping[str, str], environ: Mapping[str, str] | None = None
) -> Secrets:
    """Look names up in the environment; a mapping brings its own values.

    Raises:
        ValueError: A name has no value in the environment.
        TypeError: `secrets` is one string, or a name or value is not a string.
    """
    if isinstance(secrets, str):
        raise TypeError(f"secrets is a sequence of names, as in ({secrets!r},)")
    environ = os.environ if environ is None else environ
    given = dict(secrets) if isinstance(secrets, Mapping) else {name: environ.get(name) for name in secrets}
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise ValueError(f"secrets {missing} are not set in this environment")
    if not all(isinstance(part, str) for pair in given.items() for part in pair):
        raise TypeError("names and values of secrets are strings")
    return Secrets({name: value for name, value in given.items() if value is not None})
