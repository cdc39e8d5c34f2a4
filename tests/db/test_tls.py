"""TLS to PostgreSQL: each policy as libpq is told it, and a server that really is asked for its certificate."""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
import ssl
import threading
from pathlib import Path

import psycopg
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from queen.db import tls
from queen.db.database import conninfo
from queen.settings import Settings, SettingsError


def certificate() -> tuple[str, str]:
    """A self-signed certificate for 127.0.0.1 and its key, in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return made.public_bytes(serialization.Encoding.PEM).decode(), private.decode()


PEM, KEY = certificate()


@pytest.mark.parametrize(
    ("environ", "mode", "root", "label", "warns"),
    [
        ({}, "disable", None, "plaintext", False),
        ({"PG_SSL_ROOT_CERT": PEM}, "disable", None, "plaintext", True),
        ({"PG_USE_SSL": "1"}, "verify-full", "system", "webpki-roots", False),
        ({"PG_USE_SSL": "1", "PG_SSL_REJECT_UNAUTHORIZED": "0"}, "require", None, "accept-any", True),
        ({"PG_USE_SSL": "1", "PG_SSL_ROOT_CERT": PEM}, "verify-full", "/proc/self/fd/", "supplied-ca", False),
        (
            {"PG_USE_SSL": "1", "PG_SSL_ROOT_CERT": PEM, "PG_SSL_REJECT_UNAUTHORIZED": "0"},
            "verify-full",
            "/proc/self/fd/",
            "supplied-ca",
            True,
        ),
    ],
)
def test_each_policy_is_what_libpq_is_told(
    environ: dict[str, str], mode: str, root: str | None, label: str, warns: bool
) -> None:
    settings = Settings.read(environ)
    told = psycopg.conninfo.conninfo_to_dict(conninfo(settings))
    assert told["sslmode"] == mode
    assert str(told.get("sslrootcert")).startswith(str(root))
    assert tls.label(settings) == label
    assert (tls.warning(settings) is not None) == warns


@pytest.mark.parametrize("text", ["/etc/ssl/ca.pem", PEM[:-40], PEM + PEM.replace("MII", "???")])
def test_a_ca_that_is_none_refuses_to_boot(text: str) -> None:
    with pytest.raises(SettingsError, match=r"^PG_SSL_ROOT_CERT: "):
        Settings.read({"PG_SSL_ROOT_CERT": text})


class Server(threading.Thread):
    """Speaks PostgreSQL as far as its handshake of TLS, and notes how that ended."""

    def __init__(self, directory: Path) -> None:
        super().__init__(daemon=True)
        (directory / "pem").write_text(PEM + KEY)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(directory / "pem")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = str(self._listener.getsockname()[1])
        self.startup = b""

    def run(self) -> None:
        client, _ = self._listener.accept()
        with client:
            client.recv(8)
            client.sendall(b"S")
            try:
                with self._context.wrap_socket(client, server_side=True) as encrypted:
                    self.startup = encrypted.recv(1024)
            except OSError:
                pass


@pytest.mark.parametrize(
    ("pem", "trusted"),
    [(PEM, True), (PEM.replace("\n", "\\n"), True), (certificate()[0], False)],
    ids=["same", "one line", "another"],
)
def test_only_the_supplied_ca_is_trusted(tmp_path: Path, pem: str, trusted: bool) -> None:
    server = Server(tmp_path)
    server.start()
    environ = {"PG_HOST": "127.0.0.1", "PG_PORT": server.port, "PG_USE_SSL": "1", "PG_SSL_ROOT_CERT": pem}
    with pytest.raises(psycopg.OperationalError) as raised:
        psycopg.connect(conninfo(Settings.read(environ)))
    server.join(10)
    assert (b"postgres" in server.startup) == trusted
    assert ("certificate verify failed" in str(raised.value)) != trusted


def test_the_ca_is_read_from_memory() -> None:
    path = tls.parameters(Settings.read({"PG_USE_SSL": "1", "PG_SSL_ROOT_CERT": PEM}))["sslrootcert"]
    assert Path(path).read_text() == PEM
    assert os.readlink(path).startswith("/memfd:")
