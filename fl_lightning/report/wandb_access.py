"""How W&B is reached: its settings, whether there is a key, whether anybody answers."""

from __future__ import annotations

import netrc
import os
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from fl_lightning.files import expanded

SETTINGS: dict[str, Any] = {
    "silent": True,
    "console": "off",
    "init_timeout": 30.0,
    "finish_timeout": 120.0,
    "finish_timeout_raises": True,
    "x_transaction_log_flush_interval": 1.0,  # W&B's own 15 s would lose as much to a kill
}
REACHED_WITHIN = 5.0  # seconds


def settings(**more: Any) -> Any:
    """Settings of this W&B; one that an older version does not know is left out."""
    import wandb

    known = wandb.Settings.model_fields
    return wandb.Settings(**{name: value for name, value in {**SETTINGS, **more}.items() if name in known})


def has_open_run() -> bool:
    """Whether a run is open in this process already, a notebook's say: W&B would give it in place of a new one."""
    import wandb

    return getattr(wandb.setup(), "most_recent_active_run", wandb.run) is not None


def has_key(base: Any) -> bool:
    """Whether W&B would find a key without asking: in the environment, its settings, or the user's netrc file.

    Args:
        base: W&B's settings, as ``wandb.setup`` has read them.
    """
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE") or base.api_key:
        return True
    named = os.environ.get("NETRC")
    paths = [expanded(name) for name in ([named] if named else ["~/.netrc", "~/_netrc"])]
    for path in paths:
        try:
            logins = netrc.netrc(path)
        except (OSError, netrc.NetrcParseError):
            continue
        found = (logins.authenticators(machine) for machine in _machines(base.base_url))
        if any(login is not None and login[2] for login in found):
            return True
    return False


def _machines(base_url: str) -> list[str]:
    """What W&B's server is called in a netrc file: host and port, and those of the server that it stands before."""
    urls = [base_url]
    try:
        from wandb.sdk.lib.urls import forge_upstream_url

        urls.append(forge_upstream_url(base_url))
    except ImportError:  # an older W&B knows no such servers
        pass
    return [urllib.parse.urlsplit(url).netloc for url in urls]


def is_reachable(base_url: str, timeout: float = REACHED_WITHIN) -> bool:
    """Whether anything answers there, through a proxy where one is set; asks once."""
    try:
        urllib.request.urlopen(base_url, timeout=timeout).close()
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
    return True
