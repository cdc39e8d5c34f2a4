"""Mutual TLS between brokers, opt-in: both ends show a certificate of the one authority."""

from __future__ import annotations

import ssl

from gevent.ssl import SSLContext

from queen.settings import Settings, SettingsError


class Tls:
    """The contexts of both directions. Raises `SettingsError` naming a file that can't be used."""

    def __init__(self, settings: Settings) -> None:
        self.server = _context(ssl.PROTOCOL_TLS_SERVER, settings)
        self.client = _context(ssl.PROTOCOL_TLS_CLIENT, settings)  # checks the name of the host dialled


def _context(protocol: int, settings: Settings) -> SSLContext:
    context = SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(settings.mesh_tls_ca)
    except (OSError, ValueError) as error:
        raise SettingsError(f'QUEEN_MESH_TLS_CA="{settings.mesh_tls_ca}" can\'t be used: {error}') from None
    try:
        # A key with a passphrase would be asked for on the terminal.
        context.load_cert_chain(settings.mesh_tls_cert, settings.mesh_tls_key, password=_no_passphrase)
    except (OSError, ValueError) as error:
        raise SettingsError(
            f'QUEEN_MESH_TLS_CERT="{settings.mesh_tls_cert}" with '
            f'QUEEN_MESH_TLS_KEY="{settings.mesh_tls_key}" can\'t be used: {error}'
        ) from None
    return context


def _no_passphrase() -> str:
    raise ValueError("the key is encrypted; give one without a passphrase")
