"""Run one gateway process until it is told to stop."""

from __future__ import annotations

import logging
import socket
from contextlib import ExitStack
from typing import Any

import uvloop

from engine.errors import ConfigError
from services import logs
from services.gateway.app import create_admin_app, create_public_app
from services.gateway.cluster import DiscoveryError
from services.gateway.config import GatewayConfig
from services.gateway.gateway import Gateway
from services.gateway.http_protocol import BoundedHeads
from services.gateway.tenants.keys import KeyFileError
from services.gateway.text.chat_template import TemplateError
from services.gateway.text.tokenizer import TokenizerError
from services.gateway.tls import ReloadingCertificate
from services.lifecycle import Listener, bind, parse_address, serve

logger = logging.getLogger(__name__)


def run(config: GatewayConfig) -> int:
    """Returns the exit status."""
    logs.configure("gateway", config.log_level)
    with ExitStack() as stack:
        try:
            public = stack.enter_context(bind(config.listen, reuse_port=config.reuse_port))
            admin = stack.enter_context(bind(config.admin_listen))
            return uvloop.run(_main(config, public, admin))
        except OSError as error:
            logger.error("%s", error.strerror or error)
        except (ConfigError, TokenizerError, TemplateError, KeyFileError, DiscoveryError) as error:
            logger.error("%s", error)
    return 1


def public_options(config: GatewayConfig) -> dict[str, Any]:
    """Of the public listener. Raises ConfigError for a certificate that cannot be used."""
    options: dict[str, Any] = {"http": BoundedHeads}
    if config.tls_cert is not None and config.tls_key is not None:
        try:
            certificate = ReloadingCertificate(config.tls_cert, config.tls_key)
        except OSError as error:
            raise ConfigError(f"tls-cert {config.tls_cert}, tls-key {config.tls_key}: {error}") from error
        options["ssl_context_factory"] = lambda _config, _default: certificate.listening_context()
    return options


async def _main(config: GatewayConfig, public: socket.socket, admin: socket.socket) -> int:
    gateway = await Gateway.create(config)
    gateway.start()
    logger.info("gateway listens on %s:%d", *public.getsockname()[:2])
    host, port = parse_address(config.listen)
    admin_host, admin_port = parse_address(config.admin_listen)
    try:
        return await serve(
            [
                (Listener(create_public_app(gateway), host, port, **public_options(config)), public),
                (Listener(create_admin_app(gateway), admin_host, admin_port), admin),
            ],
            on_drain=gateway.drain,
            is_idle=gateway.is_idle,
            drain_s=config.drain_s,
            on_leave=gateway.leave,
            leave_s=config.leave_s,
        )
    finally:
        await gateway.close()
