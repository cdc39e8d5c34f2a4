"""Mutual TLS: brokers with certificates of one authority talk, anybody else doesn't."""

from __future__ import annotations

import datetime
import ipaddress
import statistics
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from queen.db.embedded import free_port
from queen.mesh.tls import Tls
from queen.settings import Settings, SettingsError
from tests.broker import wait_until
from tests.conftest import Brokers
from tests.mesh.cluster import LONG, cluster, latencies, stats

PEM = serialization.Encoding.PEM


class Authority:
    """A certificate authority of the test's own."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        self._certificate = self._builder(self._name, self._key).add_extension(constraints, critical=True)
        self.ca = directory / f"{name}-ca.pem"
        self.ca.write_bytes(self._certificate.sign(self._key, hashes.SHA256()).public_bytes(PEM))

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )

    def files(self, name: str, address: str = "127.0.0.1", passphrase: bytes = b"") -> dict[str, str]:
        """The variables of a broker whose certificate is for an address."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        certificate = self._builder(subject, key).add_extension(names, critical=False).sign(self._key, hashes.SHA256())
        cipher = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
        cert, private = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        cert.write_bytes(certificate.public_bytes(PEM))
        private.write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, cipher))
        return {
            "QUEEN_MESH_TLS_CERT": str(cert),
            "QUEEN_MESH_TLS_KEY": str(private),
            "QUEEN_MESH_TLS_CA": str(self.ca),
        }


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "brokers")


def test_brokers_of_one_authority_talk_and_strangers_do_not(
    brokers: Brokers, authority: Authority, tmp_path: Path
) -> None:
    env = {"POP_WAIT_MAX_INTERVAL_MS": "5000", "QUEEN_SYNC_SECRET": "s3cr3t", **authority.files("broker")}
    here, there = cluster(brokers, 2, env)
    assert statistics.median(latencies(here, there, "orders", 10)) < 0.5
    port = stats(here)["port"]
    other = Authority(tmp_path, "others")
    refused = stats(here)["handshake_failures"]
    for extra in ({}, other.files("stranger"), {**other.files("half"), "QUEEN_MESH_TLS_CA": str(authority.ca)}):
        plain = {"QUEEN_SYNC_SECRET": "s3cr3t", "QUEEN_MESH_PORT": str(free_port())}
        stranger = brokers({**plain, "QUEEN_MESH_PEERS": f"127.0.0.1:{port}", **extra})
        wait_until(lambda refused=refused: stats(here)["handshake_failures"] > refused, LONG, "refused")  # type: ignore[misc]
        assert stats(here)["servers_alive"] == 1
        stranger.kill()
        refused = stats(here)["handshake_failures"]


def test_the_certificate_must_name_the_host_that_was_dialled(brokers: Brokers, authority: Authority) -> None:
    ports = [free_port(), free_port()]
    envs = [authority.files("right"), authority.files("wrong", "192.0.2.1")]
    right, wrong = (
        brokers(
            {
                **envs[at],
                "QUEEN_MESH_PORT": str(ports[at]),
                "QUEEN_MESH_PEERS": f"127.0.0.1:{ports[1 - at]}",
            }
        )
        for at in range(2)
    )
    wait_until(lambda: stats(wrong)["peers"][0]["connected"], LONG, "the one that is named right is dialled")
    wait_until(lambda: stats(wrong)["handshake_failures"] >= 2, LONG, "the other is not")
    assert not stats(right)["peers"][0]["connected"]
    assert stats(wrong)["servers_alive"] == 0


@pytest.mark.parametrize("broken", ["QUEEN_MESH_TLS_CERT", "QUEEN_MESH_TLS_KEY", "QUEEN_MESH_TLS_CA"])
@pytest.mark.parametrize("how", ["missing", "garbage"])
def test_a_file_that_cannot_be_used_is_named(authority: Authority, tmp_path: Path, broken: str, how: str) -> None:
    files = authority.files("broker")
    files[broken] = str(tmp_path / "other")
    if how == "garbage":
        (tmp_path / "other").write_text("garbage")
    with pytest.raises(SettingsError, match=f'{broken}="{tmp_path}/other"'):
        Tls(Settings.read(files))


def test_a_key_with_a_passphrase_is_refused_and_not_asked_for(authority: Authority) -> None:
    files = authority.files("broker", passphrase=b"secret")
    with pytest.raises(SettingsError, match="without a passphrase"):
        Tls(Settings.read(files))


def test_a_broker_with_unusable_files_does_not_boot(brokers: Brokers, authority: Authority) -> None:
    broker = brokers({**authority.files("broker"), "QUEEN_MESH_TLS_CA": "/nowhere"}, wait=False)
    wait_until(lambda: not broker.running, LONG, "it stops")
    assert 'FATAL: QUEEN_MESH_TLS_CA="/nowhere" can\'t be used' in broker.log()
