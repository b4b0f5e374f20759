"""Checks of the services that a run uses: hub, W&B, MLflow, reward servers and judges.

Keys are used, but never printed. No request is sent that costs money.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raypo.checks.model_checks import models_of
from raypo.config import AnyConfig, JudgeSection, OnlineConfig
from raypo.config.sources import path_of
from raypo.custom.in_subprocess import call_in_subprocess
from raypo.data.rows import is_data_set
from raypo.doctor.result import Check, Result, fault, ok, skipped, warning
from raypo.inputs import values_at
from raypo.models.model_files import cached_folder, looks_like_hub_id

ANSWER_S = 4.0
"""Timeout of a request, in seconds."""
CLIENT_LIMIT_S = 20.0
"""Time limit of a subprocess that imports the client of a service, and waits for its answer."""


def service_checks(config: AnyConfig) -> list[Check]:
    """Return the checks of the services that a config names."""
    checks = []
    models = [path for _, path in models_of(config) if _is_hub_id(path)]
    has_data = any(_hub_data(config))
    if models or has_data:
        checks.append(Check("Hugging Face hub", partial(hub, models, has_data=has_data)))
    if config.logging.wandb is not None:
        is_online = config.logging.wandb.mode == "online"
        checks.append(
            _in_process("Weights & Biases", wandb)
            if is_online
            else Check("Weights & Biases", lambda: skipped("logging.wandb.mode is offline"))
        )
    if config.logging.mlflow is not None:
        uri = config.logging.mlflow.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        checks.append(
            _in_process("MLflow", mlflow, uri)
            if uri.startswith("http")
            else Check(
                "MLflow",
                lambda: skipped("MLflow writes to local files; there is no server to check"),
            )
        )
    if isinstance(config, OnlineConfig):
        for url in config.reward.url or ():
            checks.append(Check(f"reward server {url}", partial(reward_server, url)))
        if (judge := config.reward.judge) is not None:
            for url in judge.url or ():
                checks.append(Check(f"judge {url}", partial(judge_server, url, judge)))
    return checks


def _in_process(name: str, function: Callable[..., Result], *args: Any) -> Check:
    what = f"the client of {name}"
    call = partial(call_in_subprocess, function, *args, limit_s=CLIENT_LIMIT_S, what=what)
    limit_s = CLIENT_LIMIT_S + 5.0  # the subprocess hits its own, shorter limit first
    return Check(name, call, limit_s)


def _is_hub_id(path: str) -> bool:
    return looks_like_hub_id(path) and not Path(path).exists()


def _hub_data(config: AnyConfig) -> Iterator[str]:
    for key in config.paths:
        if not key.startswith(("model.", "reward.")):
            for source in values_at(config, key):
                if is_data_set(source) and _is_hub_id(path_of(source)):
                    yield path_of(source)


def hub(models: list[str], *, has_data: bool = False) -> Result:
    """Check the token of the Hugging Face hub, and the access to models.

    What the hub refuses is only a warning if it is in the local cache.

    Args:
        models: Hub ids of models.
        has_data: Whether the run reads data sets of the hub.
    """
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
    )

    api, user = HfApi(), "no token, so only public repositories"
    refused: dict[str, str] = {}
    if constants.HF_HUB_OFFLINE:
        return skipped("HF_HUB_OFFLINE is set: files are read from the local cache")
    try:
        if get_token() is not None:
            user = f"logged in as {api.whoami()['name']}"
        for model in models:
            try:
                api.auth_check(model)
            except (GatedRepoError, RepositoryNotFoundError) as error:
                # GatedRepoError is a RepositoryNotFoundError.
                is_gated = isinstance(error, GatedRepoError)
                refused[model] = "gated" if is_gated else "not found"
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            needs_hub = has_data or not all(map(cached_folder, models))
            return (fault if needs_hub or not models else warning)(
                f"{api.endpoint} refuses the token (status {status})",
                "Even public files are refused with a wrong token.",
                "Log in again (hf auth login), correct HF_TOKEN, or unset it.",
            )
        return _hub_unreachable(api.endpoint, f"status {status}")
    except Exception as error:  # of httpx or its successor, by the version of huggingface_hub
        return _hub_unreachable(api.endpoint, type(error).__name__)
    if refused:
        absent = [model for model in refused if cached_folder(model) is None]
        model = next(iter(absent or refused))
        meaning = "The model cannot be downloaded" + (
            "." if absent else ", but it is in the cache."
        )
        return (fault if absent else warning)(
            f"{model}: {refused[model]}; {user}",
            meaning,
            f"Correct its id, accept its terms at {api.endpoint}/{model}, or log in (hf auth "
            "login) as a user who may read it.",
        )
    return ok(f"{api.endpoint}: {user}")


def _hub_unreachable(endpoint: str, reason: str) -> Result:
    return warning(
        f"{endpoint} does not answer ({reason})",
        "Models and data sets that are not in the local cache cannot be loaded.",
        "Download them on a machine with access, or set HF_ENDPOINT to a mirror. With everything "
        "in the cache, HF_HUB_OFFLINE=1 skips these requests.",
    )


def wandb() -> Result:
    """Check the W&B API key that `wandb.init` would use."""
    if find_spec("wandb") is None:
        return skipped("the package wandb is not installed")
    import wandb as client

    remedy = "Run `wandb login`, correct WANDB_API_KEY, or set logging.wandb.mode to offline."
    try:
        is_known = client.login(verify=True, timeout=int(ANSWER_S))
    except Exception as error:  # wandb's own classes, and those of its HTTP client
        reason = str(error).strip().splitlines()[0]
        return fault(f"the login failed: {reason}", "The run would fail at startup.", remedy)
    if not is_known:
        return skipped("WANDB_MODE switches wandb off")
    return ok("the key is accepted")


def mlflow(uri: str) -> Result:
    """Request the experiments of an MLflow server.

    Args:
        uri: URL of the server.
    """
    if find_spec("mlflow") is None:
        return skipped("the package mlflow is not installed")
    os.environ |= {
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": str(int(ANSWER_S)),
    }
    from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

    try:
        MlflowClient(uri).search_experiments(max_results=1)
    except Exception as error:
        return fault(
            f"{uri}: {str(error).splitlines()[0]}",
            "The run would fail at startup.",
            "Start the server, correct logging.mlflow.tracking_uri, or set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD.",
        )
    return ok(f"{uri} answers")


def reward_server(url: str) -> Result:
    """Check that something answers at a URL. Nothing is scored.

    Args:
        url: One of `reward.url`.
    """
    status, reason, _ = _get(url)
    if status is None:
        return _unreachable(url, reason)
    if _is_error(status):
        return _unreachable(url, f"status {status}")
    return ok(f"it answers (status {status}); `raypo try-reward --servers` scores three rows")


def judge_server(url: str, judge: JudgeSection) -> Result:
    """Request the list of a judge's models with the configured key. This costs nothing.

    Args:
        url: One of `reward.judge.url`.
        judge: Section of the config.
    """
    status, reason, body = _get(f"{url.rstrip('/')}/models", os.environ.get(judge.api_key_variable))
    if status is None:
        return _unreachable(url, reason)
    if status in (401, 403):
        is_set = "is refused" if judge.api_key_variable in os.environ else "is not set"
        return fault(
            f"status {status}: {judge.api_key_variable} {is_set}",
            "No response would get a score.",
            f"Set {judge.api_key_variable} (reward.judge.api_key_variable) to a key that the "
            "server accepts, on every node.",
        )
    if _is_error(status):
        return _unreachable(url, f"status {status}")
    entries = body.get("data") if isinstance(body, dict) else None
    models = [entry.get("id") for entry in entries or () if isinstance(entry, dict)]
    if models and judge.model not in models:
        return warning(
            f"it serves {', '.join(map(str, models[:5]))}, not {judge.model}",
            "The server may refuse the judge's requests.",
            "Set reward.judge.model to one of its models.",
        )
    return ok(f"it answers (status {status})" + (f" and serves {judge.model}" if models else ""))


def _get(url: str, token: str | None = None) -> tuple[int | None, str, Any]:
    """Send a GET request. Return (status, "", JSON or None), or (None, reason, None) without a
    response."""
    import httpx

    from raypo.rewards.remote import THIS_MACHINE

    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with httpx.Client(timeout=ANSWER_S, mounts=THIS_MACHINE, headers=headers) as client:
            response = client.get(url)
    except httpx.TimeoutException:
        return None, f"no answer in {ANSWER_S:g} s", None
    except httpx.HTTPError as error:
        return None, f"{type(error).__name__}: {error}", None
    try:
        return response.status_code, "", response.json()
    except ValueError:
        return response.status_code, "", None


def _is_error(status: int) -> bool:
    return status >= 500 and status != 501  # not implemented: it answers to other requests


def _unreachable(url: str, reason: str) -> Result:
    return fault(
        f"{url}: {reason}",
        "Responses could not be scored.",
        "Start the server, or correct its URL. It must be reachable from every node.",
    )
